"""The batch plan as a pure function: each property once, the same order every time, bounded windows."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_engine.batches import Batch, BatchSize, PlannedProperty, plan_batches, remaining

PROPERTIES = st.lists(
    st.tuples(st.text(min_size=1, max_size=6), st.integers(0, 10_000), st.integers(0, 14)),
    unique_by=(lambda row: row[0], lambda row: row[1]),
    max_size=60,
).map(lambda rows: [PlannedProperty(*row) for row in rows])
SIZES = st.fixed_dictionaries(
    {
        "size": st.builds(
            BatchSize,
            properties=st.integers(1, 9),
            cost=st.integers(1, 30),
            image=st.integers(1, 3),
            text=st.integers(0, 4),
            tried=st.lists(st.integers(1, 40), max_size=2).map(tuple),
        ),
        "window": st.integers(1, 40),
    }
)


def many(count: int) -> list[PlannedProperty]:
    return [PlannedProperty(f"p-{n}", n, 1 + n * 7 % 13) for n in range(count)]


def flat(plan: list[Batch]) -> list[PlannedProperty]:
    return [planned for batch in plan for planned in batch]


@given(PROPERTIES, SIZES)
@settings(deadline=None, max_examples=50)
def test_every_property_stands_in_exactly_one_batch(properties, sizes):
    """Guards: none twice, none skipped, and no empty batch."""
    plan = plan_batches(properties, **sizes)
    assert Counter(flat(plan)) == Counter(properties)
    assert all(plan)


@given(PROPERTIES, SIZES, st.randoms())
@settings(deadline=None, max_examples=50)
def test_the_order_of_the_input_changes_nothing(properties, sizes, random):
    """Guards: the plan is a function of the set of properties, however the catalogue hands them over."""
    shuffled = list(properties)
    random.shuffle(shuffled)
    assert plan_batches(shuffled, **sizes) == plan_batches(properties, **sizes)


@given(PROPERTIES, SIZES)
@settings(deadline=None, max_examples=50)
def test_batches_keep_to_their_bounds(properties, sizes):
    """Guards: the bound on memory, padding included; only a property that is alone may cost more."""
    size = sizes["size"]
    for batch in plan_batches(properties, **sizes):
        assert len(batch) <= size.properties
        padded = len(batch) * (size.text + size.image * max(one.images for one in batch))
        assert len(batch) == 1 or padded <= max((size.cost, *size.tried))


def test_other_sizes_are_tried_early_and_on_a_half_at_most():
    """Guards: a size is measured on a few batches behind the first one, and a small partition tries none."""
    size = BatchSize(99, 20, tried=(40, 60))
    alike = [PlannedProperty(f"p-{n}", n, 10) for n in range(60)]
    lengths = [len(batch) for batch in plan_batches(alike, size=size)]
    assert lengths[:6] == [2, 4, 6, 4, 6, 2]
    assert set(lengths[5:]) == {2}
    assert {len(batch) for batch in plan_batches(alike[:30], size=size)} == {2}


@given(PROPERTIES, SIZES)
@settings(deadline=None, max_examples=50)
def test_a_merge_by_ordinal_holds_one_window_at_most(properties, sizes):
    """Guards: windows are consecutive by ordinal and are planned one after another."""
    planned = flat(plan_batches(properties, **sizes))
    ordered = sorted(properties, key=lambda one: one.ordinal)
    for start in range(0, len(ordered), sizes["window"]):
        window = slice(start, start + sizes["window"])
        assert set(planned[window]) == set(ordered[window])


@given(PROPERTIES, SIZES, st.sets(st.integers(0, 59)))
@settings(deadline=None, max_examples=50)
def test_what_remains_keeps_the_order_and_never_mixes_batches(properties, sizes, done_positions):
    """Guards: a resumed partition runs the same batches, less what is committed."""
    plan = plan_batches(properties, **sizes)
    done = {flat(plan)[n].property_id for n in done_positions if n < len(properties)}
    left = remaining(plan, done)
    assert flat(left) == [planned for planned in flat(plan) if planned.property_id not in done]
    whole = [{planned.property_id for planned in batch} for batch in plan]
    homes = [
        next(n for n, ids in enumerate(whole) if ids >= {planned.property_id for planned in batch})
        for batch in left
    ]
    assert homes == sorted(set(homes))


def test_the_plan_is_the_same_in_another_process():
    """Guards: no hash randomisation: a restart plans the same batches."""
    program = (
        "from vlm_engine.batches import *\n"
        "print(plan_batches([PlannedProperty(f'p-{n}', n, 1 + n * 7 % 13) for n in range(50)],"
        " size=BatchSize(8, 999), window=20))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {repr(plan_batches(many(50), size=BatchSize(8, 999), window=20))}


def test_the_plan_does_not_change_from_release_to_release():
    """Guards: a partition begun before an upgrade goes on with the same batches."""
    plan = plan_batches(many(12), size=BatchSize(4, 99), window=8)
    assert [[planned.ordinal for planned in batch] for batch in plan] == [
        [1, 3, 5, 7],
        [0, 2, 4, 6],
        [8, 10, 9, 11],
    ]


def test_neighbours_in_the_catalogue_do_not_stay_neighbours():
    """Guards: a plan is shuffled."""
    alike = [PlannedProperty(f"p-{n}", n, 9) for n in range(200)]
    plan = flat(plan_batches(alike, size=BatchSize(8, 99)))
    neighbours = sum(abs(a.ordinal - b.ordinal) == 1 for a, b in itertools.pairwise(plan))
    assert neighbours < 20


def test_batches_hold_properties_of_similar_length():
    """Guards: little of a batch is padding: under 5% here, where an unsorted plan wastes over a quarter."""
    plan = plan_batches(many(1024), size=BatchSize(16, 999))
    padded = sum(max(planned.images for planned in batch) * len(batch) for batch in plan)
    assert sum(planned.images for planned in flat(plan)) / padded > 0.95
    lengths = [batch[0].images for batch in plan]
    assert lengths != sorted(lengths)


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("properties", {"size": BatchSize(0, 1)}),
        ("window", {"window": 0}),
        ("cost", {"size": BatchSize(1, 0)}),
    ],
)
def test_impossible_sizes_are_refused(named, wrong):
    """Guards: a wrong setting is named, not looped over."""
    with pytest.raises(ValueError, match=named):
        plan_batches(many(3), **{"size": BatchSize(2, 9)} | wrong)


@pytest.mark.parametrize("twin", [PlannedProperty("p-0", 9, 1), PlannedProperty("p-9", 0, 1)])
def test_twins_are_refused(twin):
    """Guards: a doubled id or ordinal never reaches the model."""
    with pytest.raises(ValueError, match="twice"):
        plan_batches([*many(3), twin], size=BatchSize(2, 9))

"""The fastest size of batches: what is measured, what a later partition makes of it, and what stays fixed."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from vlm_durable.state.database import open_state
from vlm_engine.batches import (
    BATCH_SECONDS,
    BEGUN,
    FIRST_IMAGES,
    BatchMeter,
    BatchSize,
    Measured,
    MeasuredSizes,
    PlannedProperty,
    choose,
    first_size,
    plan_batches,
)
from vlm_engine.protocol import ImageTokens

FIRST = BatchSize(9999, 64)


@pytest.mark.parametrize(
    ("measured", "cost", "tried"),
    [
        pytest.param({}, 64, (), id="nothing is known"),
        pytest.param({64: (1.0, 4)}, 64, (128, 256), id="one is known"),
        pytest.param({64: (1.0, 6)}, 64, (128, 202), id="four times takes too long"),
        pytest.param({64: (1.0, 1), 128: (1.5, 2), 256: (2.0, 3)}, 256, (512, 1024), id="larger is faster"),
        pytest.param({64: (1.0, 1), 128: (1.5, 2), 256: (1.52, 3)}, 128, (), id="half is as fast"),
        pytest.param({64: (1.0, 4), 128: (1.5, 8), 256: (2.0, 16)}, 256, (304,), id="twice takes too long"),
        pytest.param(
            {64: (1.0, 9), 128: (2.0, 10), 256: (3.0, 21)}, 128, (243,), id="what took too long is known"
        ),
        pytest.param({64: (0.5, 80), 128: (0.5, 160)}, 16, (), id="all take too long"),
        pytest.param({64: (1.0, 1, False)}, 32, (), id="nothing is held"),
        pytest.param({64: (1.0, 1), 128: (2.0, 1, False)}, 64, (121,), id="twice is not held"),
        pytest.param({64: (1.0, 1), 128: (0.0, 0, False)}, 64, (), id="twice was begun and never finished"),
        pytest.param({64: (1.0, 1), 70: (2.0, 1, False)}, 64, (), id="hardly more is not held"),
    ],
)
def test_a_partition_takes_what_was_fastest(measured, cost, tried):
    """The smallest size as fast as any that fits 20 s and the memory; larger ones are tried."""
    size = choose(FIRST, {one: Measured(*of) for one, of in measured.items()})
    assert (size.cost, size.tried) == (cost, tried)


def run(seconds_of, partitions, images=10, count=2000, held=10**9):
    """Sizes that partitions of such properties choose, and how long batches take, one after the other."""
    known: dict[int, Measured] = {}
    sizes = []
    for _ in range(partitions):
        size = choose(FIRST, known)
        sizes.append(size.cost)
        meter = BatchMeter(size)
        split = None
        for batch in plan_batches([PlannedProperty(f"{n}", n, images) for n in range(count)], size=size):
            split = min(held, split or held) if len(batch) > held else split
            meter.count([one.images for one in batch], seconds_of(sum(one.images for one in batch)))
        known |= meter.measured(split)
    return sizes


@pytest.mark.parametrize("fixed", [0.1, 1.0, 8.0])
def test_the_default_reaches_the_best_hand_set_size(fixed):
    """After a few partitions the rate is 95% of the best of all sizes whose batches take 20 s at most."""

    def seconds(images):
        return fixed + images * 0.01

    best = max(n / seconds(n) for n in range(10, 100_000, 10) if seconds(n) <= BATCH_SECONDS)
    chosen = run(seconds, 6)[-1]
    assert chosen / seconds(chosen) >= 0.95 * min(best, 1 / 0.01)
    assert seconds(chosen) <= BATCH_SECONDS


def test_slow_hardware_comes_down_at_once():
    """Batches that take minutes are found out by the first partition, and no later one has them."""
    sizes = run(lambda images: images * 1.0, 4)
    assert all(size // 10 * 10 <= BATCH_SECONDS for size in sizes[1:])


def test_what_memory_does_not_hold_is_not_chosen():
    """A size whose batches were split is left, and not tried again."""
    sizes = run(lambda images: 1 + images * 0.001, 5, held=20)
    assert max(sizes) <= 200


def test_first_batch_and_fragments_are_not_measured():
    """What is compiled at the first batch, and the last few properties of a window, make no rate."""
    meter = BatchMeter(BatchSize(99, 100))
    meter.count([10] * 10, 60.0)
    for _ in range(3):
        meter.count([10] * 10, 1.0)
        meter.count([10] * 2, 1.0)
    assert meter.measured(None) == {100: Measured(100.0, 1.0)}


def test_a_machine_that_slept_once_says_nothing_of_a_size():
    """One batch that took an hour leaves its size as fast and as short as the others say."""
    meter = BatchMeter(BatchSize(99, 100, tried=(200,)))
    meter.count([10] * 10, 1.0)
    for seconds in (1.0, 3600.0):
        assert not meter.has_tried
        meter.count([10] * 10, seconds)
        meter.count([10] * 20, seconds)
    assert meter.has_tried
    assert meter.measured(None) == {100: Measured(100.0, 1.0), 200: Measured(200.0, 1.0)}


def test_what_images_cost_is_counted():
    """With tokens known, short properties count their prompts: a batch of them has fewer images."""
    known = ImageTokens(each=80, text=800, images=10, fitting=10, pixels=1, context=None, options={})
    size = first_size(256, known)
    plan = {
        images: plan_batches([PlannedProperty(f"{n}", n, images) for n in range(500)], size=size)
        for images in (1, 10)
    }
    assert len(plan[10][0]) * 10 == pytest.approx(FIRST_IMAGES, abs=10)
    assert len(plan[1][0]) < 0.3 * FIRST_IMAGES


def test_sizes_are_remembered_for_each_device_and_model(tmp_path):
    """The newest measurement of a size counts; another device's or model's is never taken."""
    state = open_state(tmp_path / ".state")
    measured = MeasuredSizes(state, "a", "m")
    assert measured.read() == {}
    measured.write({64: Measured(1.0, 2.0), 128: Measured(3.0, 4.0, held=False)})
    measured.write({64: Measured(5.0, 6.0)})
    MeasuredSizes(state, "b", "m").write({64: Measured(9.0, 9.0)})
    assert measured.read() == {
        64: Measured(5.0, 6.0),
        128: Measured(3.0, 4.0, held=False),
    }
    assert MeasuredSizes(state, "a", "other").read() == {}
    measured.write({64: None, 128: BEGUN})
    assert measured.read() == {128: BEGUN}


def test_the_memory_of_sizes_never_fails_a_run(tmp_path, caplog):
    """What the database refuses, even where it answers, is logged and measured again."""
    state = open_state(tmp_path / ".state")
    measured = MeasuredSizes(state, "a", "m")
    measured.write({64: Measured(1.0, 2.0)})
    measured.write({64: Measured(float("nan"), 2.0)})  # SQLite takes it for NULL: IntegrityError
    assert measured.read() == {64: Measured(1.0, 2.0)}
    state.beat(lambda connection: connection.execute(sa.text("DROP TABLE batch_sizes")))
    assert measured.read() == {}
    assert "measured again" in caplog.text and "measured anew" in caplog.text

"""New partitions run by themselves: each once, none that is under way, no more at a time than allowed."""

from __future__ import annotations

import dagster as dg
import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from sensors.dagster_internals.events import DagsterFacts
from sensors.new_ranges import NewRanges

KEYS = tuple(f"{start:09d}-{start:09d}" for start in range(4))


@dg.asset(partitions_def=dg.StaticPartitionsDefinition(KEYS))
def upstream() -> int:
    return 1


@pytest.fixture
def instance():
    with dg.DagsterInstance.local_temp() as instance:
        yield instance


def new_ranges(**changed) -> NewRanges:
    given = {
        "assets": ("upstream",),
        "keys": KEYS,
        "close": lambda now: None,
        "untouched": lambda keys: keys,
        "heaviest_first": lambda keys: sorted(keys, reverse=True),
        "paused": lambda: False,
        "cap": 3,
    }
    return NewRanges(**{**given, **changed})


def test_partitions_that_never_ran_are_launched_heaviest_first(instance):
    """What was materialized, or has work on disk, is no new partition."""
    dg.materialize([upstream], partition_key=KEYS[3], instance=instance)
    keys, _ = new_ranges(untouched=lambda keys: [key for key in keys if key != KEYS[0]]).tick(
        DagsterFacts(instance), 0.0
    )
    assert keys == [KEYS[2], KEYS[1]]


def test_no_more_run_at_a_time_than_allowed(instance):
    """The cap counts what is queued or running."""
    assert new_ranges(cap=2).tick(DagsterFacts(instance), 0.0)[0] == [KEYS[3], KEYS[2]]
    run = instance.create_run_for_job(
        dg.Definitions(assets=[upstream]).resolve_implicit_global_asset_job_def(),
        tags={"vlm-assets/launched-by": "new_ranges", "dagster/partition": KEYS[3]},
        status=dg.DagsterRunStatus.STARTED,
    )
    assert run.status is dg.DagsterRunStatus.STARTED
    assert new_ranges(cap=2).tick(DagsterFacts(instance), 0.0)[0] == [KEYS[2]], (
        "and none that is under way already"
    )
    assert new_ranges(cap=1).tick(DagsterFacts(instance), 0.0)[0] == []


def test_a_failed_partition_is_the_retry_schedules(instance):
    """A partition that was tried is not new: it would be launched without back-off otherwise."""

    @dg.asset(name="upstream", partitions_def=dg.StaticPartitionsDefinition(KEYS))
    def failing() -> int:
        raise RuntimeError

    dg.materialize([failing], partition_key=KEYS[3], instance=instance, raise_on_error=False)
    assert KEYS[3] not in new_ranges(cap=9).tick(DagsterFacts(instance), 0.0)[0]


def test_nothing_is_launched_while_paused_or_when_the_tail_was_closed(instance):
    """The definitions that a closed tail needs are loaded at the next tick."""
    assert new_ranges(paused=lambda: True).tick(DagsterFacts(instance), 0.0) == (
        [],
        "Paused: nothing is started.",
    )
    assert new_ranges(close=lambda now: "closed").tick(DagsterFacts(instance), 0.0) == ([], "closed")


def test_what_a_person_cancelled_is_not_new():
    """It was never materialized and has nothing on disk, but a launch would undo the cancel."""
    dagster = DagsterInMemory(SimulatedClock())
    dagster.change(dagster.launch(KEYS[3], ["upstream"]), dg.DagsterRunStatus.CANCELED)
    assert new_ranges(cap=9).tick(dagster, 0.0)[0] == [KEYS[2], KEYS[1], KEYS[0]]


def test_one_whose_run_was_deleted_is_new_again():
    """Nothing else would launch it: for the retry schedule it was never tried."""
    dagster, sensor = DagsterInMemory(SimulatedClock()), new_ranges(cap=9)
    run_id = dagster.launch(KEYS[3], ["upstream"], dg.DagsterRunStatus.QUEUED)
    assert KEYS[3] not in sensor.tick(dagster, 0.0)[0]
    dagster.delete_run(run_id)
    assert KEYS[3] in sensor.tick(dagster, 0.0)[0]

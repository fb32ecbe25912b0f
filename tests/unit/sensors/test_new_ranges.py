"""New partitions run by themselves: each once, none that is under way, no more at a time than allowed."""

from __future__ import annotations

import dagster as dg
import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from sensors.dagster_internals.runs import LAUNCHED_BY
from sensors.new_ranges import NEW, NewRanges

KEYS = "abcd"
OURS = {LAUNCHED_BY: NEW}
S = dg.DagsterRunStatus


def new_ranges(**changed) -> NewRanges:
    given = {
        "assets": ("upstream",),
        "keys": tuple(KEYS),
        "close": lambda now: None,
        "untouched": lambda keys: keys,
        "heaviest_first": lambda keys: sorted(keys, reverse=True),
        "paused": lambda: False,
        "cap": 3,
    }
    return NewRanges(**{**given, **changed})


def runs(dagster, key, status, **tags):
    """A run of a partition that is, or ends, so."""
    run_id = dagster.launch(key, ["upstream"], **tags)
    dagster.change(run_id, status)
    return run_id


@pytest.mark.parametrize(
    ("before", "changed", "launched"),
    [
        pytest.param(lambda dagster: None, {}, "dcb", id="the heaviest first"),
        pytest.param(lambda dagster: None, {"untouched": lambda keys: keys[:3]}, "cba", id="work on disk"),
        pytest.param(lambda dagster: dagster.materialize("upstream", "d"), {}, "cba", id="materialized"),
        pytest.param(lambda dagster: runs(dagster, "d", S.FAILURE), {}, "cba", id="it failed: to be retried"),
        pytest.param(lambda dagster: runs(dagster, "d", S.CANCELED), {}, "cba", id="a person cancelled it"),
        pytest.param(lambda dagster: runs(dagster, "d", S.QUEUED), {}, "cba", id="queued by another"),
        pytest.param(lambda dagster: dagster.launch("d", ["beside"], S.QUEUED), {}, "cba", id="beside it"),
        pytest.param(lambda dagster: dagster.awaited.add("d"), {}, "cba", id="a backfill will launch it"),
        pytest.param(
            lambda dagster: runs(dagster, "d", S.STARTED, **OURS), {"cap": 2}, "c", id="room for one"
        ),
        pytest.param(lambda dagster: runs(dagster, "d", S.STARTED, **OURS), {"cap": 1}, "", id="no room"),
        pytest.param(lambda dagster: None, {"paused": lambda: True}, "", id="paused"),
        pytest.param(lambda dagster: None, {"close": lambda now: "closed"}, "", id="the tail was closed"),
    ],
)
def test_what_never_ran_is_launched(before, changed, launched):
    """What was tried is the retry schedule's; a cancel stands; a closed tail needs the next definitions."""
    dagster = DagsterInMemory(SimulatedClock())
    before(dagster)
    keys, sentence = new_ranges(**changed).tick(dagster, 0.0)
    assert "".join(keys) == launched
    if not launched:
        assert sentence in ("Paused: nothing is started.", "closed", "1 new partition is queued or running.")


def test_one_whose_run_was_deleted_is_new_again():
    """Nothing else would launch it: for the retry schedule it was never tried."""
    dagster, sensor = DagsterInMemory(SimulatedClock()), new_ranges(cap=9)
    run_id = runs(dagster, "d", S.QUEUED)
    assert "d" not in sensor.tick(dagster, 0.0)[0]
    dagster.delete_run(run_id)
    assert "d" in sensor.tick(dagster, 0.0)[0]

"""Every sensor's tick is noted when its decision came to an end, and only then."""

from dataclasses import dataclass

import dagster as dg
import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable.state.database import ControlState


@pytest.fixture
def ticks(tmp_path):
    return Ticks(ControlState(tmp_path))


def tick(decide, ticks):
    """One tick of a sensor with this decision: what it gave, and the cursor that it left."""
    sensor = build_sensor(
        "looks", decide, interval_seconds=30, description="", ticks=ticks, clock=lambda: 7.0
    )
    with dg.DagsterInstance.ephemeral() as instance, dg.build_sensor_context(instance, cursor="c") as context:
        return sensor(context), context.cursor


def test_a_tick_that_fails_is_not_noted(ticks):
    """A sensor that fails each time counts as silent."""

    def decide(at):
        raise ValueError("the catalogue does not read")

    with pytest.raises(ValueError, match="catalogue"):
        tick(decide, ticks)
    assert ticks.last() == {}


def test_a_decision_gets_facts_time_and_cursor_and_its_word_reaches_dagster(ticks):
    """What it says is the sensor's page, what it leaves is the next tick's cursor, and the tick is noted."""

    def decide(at):
        assert at.dagster.runs_in(list(dg.DagsterRunStatus)) == []
        return Decided(f"at {at.now} after {at.cursor}", "d")

    skipped, cursor = tick(decide, ticks)
    assert (skipped.skip_message, cursor) == ("at 7.0 after c", "d")
    assert [one.at for one in ticks.last().values()] == [7.0]
    request = dg.RunRequest(run_key="k")
    assert tick(lambda at: Decided("", requests=[request]), ticks) == ([request], "c"), (
        "a cursor that is not moved"
    )


@dataclass(frozen=True)
class Seen:
    """What a sensor remembers."""

    files: int = 0


@pytest.mark.parametrize("cursor", [None, "not json", "[]", '{"of": "another version"}'])
def test_a_cursor_that_does_not_read_is_none(cursor):
    """After an update, or a cursor that a person edited, a sensor begins anew and does not fail for ever."""
    assert Situation(DagsterInMemory(SimulatedClock()), 0.0, cursor).cursor_as(Seen) == Seen()
    assert Situation(DagsterInMemory(SimulatedClock()), 0.0, '{"files": 3}').cursor_as(Seen) == Seen(3)

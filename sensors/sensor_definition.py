"""A sensor of Dagster around a decision: the decision gets Dagster's facts and the time as arguments.

What lives here: the thin wrapper that all sensors share, and when a tick is noted. What does not: any
decision. A simulation calls the decisions themselves, with facts and a clock of its own.
"""

# No postponed annotations here: Dagster reads a sensor's parameters from its real ones.

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import dagster as dg

from sensors.dagster_internals.events import DagsterFacts
from sensors.ticks import Ticks

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Situation:
    """What a decision gets. now: unix seconds. cursor: what the tick before left."""

    dagster: DagsterFacts
    now: float
    cursor: str | None = None

    def remembered(self, kind: type[Kept]) -> Kept:
        """The cursor as the dataclass that it was; an empty one where there is none, or another version's."""
        try:
            return kind(**json.loads(self.cursor or "{}"))
        except (ValueError, TypeError):
            return kind()


@dataclass(frozen=True)
class Decided:
    """What a decision gives. said: a sentence for the sensor's page. cursor: for the next tick, if it moves.

    requests: runs to launch. events: told without a run. logged: further sentences for the tick's log, which
    is opened only for them: Dagster keeps a file for each tick that has one, and removes none.
    """

    said: str
    cursor: str | None = None
    requests: Sequence[dg.RunRequest] = ()
    events: Sequence[dg.AssetMaterialization] = ()
    logged: Sequence[str] = ()


def build_sensor(
    name: str,
    decide: Callable[[Situation], Decided],
    *,
    interval_seconds: int,
    description: str,
    ticks: Ticks,
    noted: Callable[[OSError | None, float], None] = lambda error, now: None,
    clock: Callable[[], float] = time.time,
    **target: Any,
) -> dg.SensorDefinition:
    """The sensor. ticks: where it notes that it ticked. target: what ``dg.sensor`` is told of its runs.

    A tick that raises is not noted, so that a sensor that fails each time counts as silent. noted: is told
    whether a tick could be noted, and the time.
    """

    def tick(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason | dg.SensorResult:
        decided = decide(Situation(DagsterFacts(context.instance), clock(), context.cursor))
        for sentence in decided.logged:
            context.log.info(sentence)
        error = ticks.note(name, clock(), interval_seconds=interval_seconds, log=lambda: context.log)
        noted(error, clock())
        if decided.events:
            return dg.SensorResult(asset_events=list(decided.events), cursor=decided.cursor)
        if decided.cursor is not None:
            context.update_cursor(decided.cursor)
        return list(decided.requests) or dg.SkipReason(decided.said)

    tick.__name__ = name
    return dg.sensor(
        name=name,
        minimum_interval_seconds=interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=description,
        **target,
    )(tick)

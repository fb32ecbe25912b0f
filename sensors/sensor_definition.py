"""A Dagster sensor around a decision: the decision gets Dagster's facts and the time as arguments.

A simulation calls the decisions directly, with its own facts and clock.
"""

# No postponed annotations here: Dagster reads a sensor's parameters from its real ones.

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import dagster as dg

from sensors.dagster_internals.events import DagsterFacts
from sensors.ticks import Ticks

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Situation:
    """The arguments of a decision. now: unix seconds. cursor: as the tick before left it."""

    dagster: DagsterFacts
    now: float
    cursor: str | None = None

    def cursor_as(self, kind: type[Kept]) -> Kept:
        """The cursor as a dataclass; an empty one if there is no cursor, or if another version wrote it."""
        try:
            return kind(**json.loads(self.cursor or "{}"))
        except (ValueError, TypeError):
            return kind()


@dataclass(frozen=True)
class Decided:
    """What a sensor decided. sentence: for the sensor's page. cursor: for the next tick; None: as it was.

    requests: runs to launch. events: reported without a run. logged: more sentences, for the tick's log. The
    log is opened only for them, because Dagster keeps the file of each log and removes none.
    """

    sentence: str
    cursor: str | None = None
    requests: Sequence[dg.RunRequest] = ()
    events: Sequence[dg.AssetMaterialization] = ()
    logged: Sequence[str] = ()


_AGAIN_SECONDS, _LONGEST_SECONDS = 300.0, 6 * 3600.0


def ask_until_done(at: Situation, key: str, why: str) -> Decided:
    """Ask for a run under this key, and once more after one that ended without doing it, later each time."""
    for attempt in count():
        run_key = f"{key} {attempt}" if attempt else key
        run = at.dagster.runs_with_key([run_key]).get(run_key)
        if run is None:
            return Decided(why, requests=[dg.RunRequest(run_key=run_key, tags={"vlm-assets/why": why})])
        if not run.finished:
            return Decided("A run for it is under way.")
        wait = min(_AGAIN_SECONDS * 2.0**attempt, _LONGEST_SECONDS)
        if at.now < (run.ended_at or run.created_at) + wait:
            return Decided(f"Run {run.run_id[:8]} for it has ended without it. It is asked for again later.")
    raise AssertionError


def build_sensor(
    name: str,
    decide: Callable[[Situation], Decided],
    *,
    interval_seconds: int,
    description: str,
    ticks: Ticks,
    after_note: Callable[[OSError | None, float], None] = lambda error, now: None,
    clock: Callable[[], float] = time.time,
    **target: Any,
) -> dg.SensorDefinition:
    """The sensor. ticks: where it notes that it ticked, and its names in Dagster. target: further
    arguments of ``dg.sensor``.

    A tick that raises is not noted, so that a sensor that fails each time counts as silent. after_note: gets
    the error if the tick could not be noted, else None; and the time.
    """

    def tick(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason | dg.SensorResult:
        ticks.name_home()
        decided = decide(Situation(DagsterFacts(context.instance, ticks.names), clock(), context.cursor))
        for sentence in decided.logged:
            context.log.info(sentence)
        error = ticks.note(name, clock(), interval_seconds=interval_seconds, log=lambda: context.log)
        after_note(error, clock())
        if decided.events:
            return dg.SensorResult(asset_events=list(decided.events), cursor=decided.cursor)
        if decided.cursor is not None:
            context.update_cursor(decided.cursor)
        return list(decided.requests) or dg.SkipReason(decided.sentence)

    tick.__name__ = name
    return dg.sensor(
        name=ticks.names.name(name),
        minimum_interval_seconds=interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=description,
        **target,
    )(tick)

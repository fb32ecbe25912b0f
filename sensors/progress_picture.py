"""When the picture of the dataset's progress is drawn anew: while something works, and once it came to rest.

What lives here: the decision, from what was last drawn. A pause is honoured and shown: once everything stands
still the picture is drawn once more, and again when the pause is lifted. What does not: how it is seen that
something moved, and the drawing. A schedule would not do: Dagster starts its run at each tick, whatever its
run key.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import dagster as dg

from sensors.picture_runs import forget_old_pictures
from sensors.ticks import note_tick

NAME = "progress_picture"
INTERVAL_SECONDS = 60
DRAW_SECONDS = 600.0
"""Between two pictures while something works: the event log keeps each of them."""


@dataclass(frozen=True)
class Drawn:
    """moved: what the last picture showed; seen: what the last tick saw; at: when it was drawn (unix).

    pause: the sentence of the pause that it showed; empty where it showed none.
    """

    moved: str = ""
    seen: str = ""
    at: float = 0.0
    pause: str = ""

    @classmethod
    def from_cursor(cls, cursor: str | None) -> "Drawn":
        """What the last tick wrote; nothing where there is none, or it is of another version."""
        try:
            return cls(**json.loads(cursor)) if cursor else cls()
        except (ValueError, TypeError):
            return cls()

    def is_due(self, moved: str, *, works: bool, now: float, pause: str = "") -> bool:
        """Whether to draw. works: whether anything works now, so that the picture is old in any case."""
        if pause != self.pause and not (pause and works):
            return True
        if moved == self.moved and not works:
            return False
        # At rest since the last tick: what came last is shown without waiting for ten minutes to pass.
        settled = not works and moved == self.seen
        return settled or now - self.at >= DRAW_SECONDS


def build_progress_picture_sensor(
    target: dg.AssetsDefinition,
    *,
    moved: Callable[[], str],
    works: Callable[[], bool],
    paused: Callable[[], str | None],
    ticks: Path,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. target: the asset that draws. moved: changes whenever the picture would; empty: no picture.

    paused: the sentence of a pause, None where there is none. ticks: where each sensor notes that it ticked.
    """

    @dg.sensor(
        name=NAME,
        target=target,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Draws the picture of all partitions anew: every ten minutes while something works, and once it"
            " has come to rest, in a pause too. Of runs older than a day one a day is kept. A tick opens no"
            " partition."
        ),
    )
    def progress_picture(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        now = clock()
        result = look(context.cursor, now)
        forget_old_pictures(context.instance, NAME, now=now)
        note_tick(ticks, NAME, now, interval_seconds=INTERVAL_SECONDS, log=lambda: context.log)
        return result

    def look(kept: str | None, now: float) -> dg.SensorResult:
        drawn, there, pause = Drawn.from_cursor(kept), moved(), paused() or ""
        if not there:
            return dg.SensorResult(skip_reason="Nothing was ever started.")
        if drawn.is_due(there, works=works(), now=now, pause=pause):
            # A tick that is killed before its cursor is kept asks again with the same key: one run.
            request = dg.RunRequest(run_key=f"{there} after {drawn.at:.0f}")
            cursor = json.dumps(asdict(Drawn(there, there, now, pause)))
            return dg.SensorResult(run_requests=[request], cursor=cursor)
        cursor = json.dumps(asdict(replace(drawn, seen=there)))
        why = f"Nothing is started: {pause}." if pause else "Nothing has moved, or the picture is young."
        return dg.SensorResult(skip_reason=why, cursor=cursor)

    return progress_picture

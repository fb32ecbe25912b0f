"""When the progress picture is drawn anew: while something works, and once it has come to rest.

The sensor draws it in its own tick and reports it without a run, so that the Runs page lists real work only.
How it is drawn is in ``vlm_assets/automation/dataset_progress.py``.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import dagster as dg

from sensors.ticks import note_tick

NAME = "progress_picture"
INTERVAL_SECONDS = 60
DRAW_SECONDS = 1800.0
"""Between two pictures while something works: the event log keeps each of them, 50 KB on SQLite."""


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
        # At rest since the last tick: the end is shown at once.
        settled = not works and moved == self.seen
        return settled or now - self.at >= DRAW_SECONDS


def build_progress_picture_sensor(
    target: dg.AssetsDefinition,
    *,
    draw: Callable[[], dg.AssetMaterialization],
    moved: Callable[[], str],
    works: Callable[[], bool],
    paused: Callable[[], str | None],
    ticks: Path,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. target: the asset that has the picture. draw: makes its materialization.

    moved: changes whenever the picture would; empty: no picture. paused: the sentence of a pause, None if
    there is none. ticks: where each sensor notes that it ticked.
    """

    @dg.sensor(
        name=NAME,
        target=target,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Draws the picture of all partitions anew, without a run: every half hour while something works,"
            " and once everything is at rest or paused. A tick that draws nothing opens no partition."
        ),
    )
    def progress_picture(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        now = clock()
        result = look(context.cursor, now)
        note_tick(ticks, NAME, now, interval_seconds=INTERVAL_SECONDS, log=lambda: context.log)
        return result

    def look(kept: str | None, now: float) -> dg.SensorResult:
        drawn, there, pause = Drawn.from_cursor(kept), moved(), paused() or ""
        if not there:
            return dg.SensorResult(skip_reason="Nothing was ever started.")
        if drawn.is_due(there, works=works(), now=now, pause=pause):
            cursor = json.dumps(asdict(Drawn(there, there, now, pause)))
            return dg.SensorResult(asset_events=[draw()], cursor=cursor)
        cursor = json.dumps(asdict(replace(drawn, seen=there)))
        why = f"Nothing is started: {pause}." if pause else "Nothing has moved, or the picture is young."
        return dg.SensorResult(skip_reason=why, cursor=cursor)

    return progress_picture

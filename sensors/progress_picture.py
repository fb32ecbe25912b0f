"""When the progress picture is drawn anew: while something works, and once it has come to rest.

The sensor draws it in its own tick and reports it without a run, so that the Runs page lists real work only.
How it is drawn is in ``vlm_assets/automation/dataset_progress.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import dagster as dg

from sensors.sensor_definition import Decided, Look, build_sensor
from sensors.ticks import Ticks

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
    def from_cursor(cls, cursor: str | None) -> Drawn:
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
    ticks: Ticks,
) -> dg.SensorDefinition:
    """The sensor. target: the asset that has the picture. draw: makes its materialization.

    moved: changes whenever the picture would; empty: no picture. paused: the sentence of a pause, None if
    there is none. ticks: where each sensor notes that it ticked.
    """

    def decide(look: Look) -> Decided:
        drawn, there, pause = Drawn.from_cursor(look.cursor), moved(), paused() or ""
        if not there:
            return Decided("Nothing was ever started.")
        if drawn.is_due(there, works=works(), now=look.now, pause=pause):
            return Decided(
                "Drawn.", json.dumps(asdict(Drawn(there, there, look.now, pause))), events=[draw()]
            )
        why = f"Nothing is started: {pause}." if pause else "Nothing has moved, or the picture is young."
        return Decided(why, json.dumps(asdict(replace(drawn, seen=there))))

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Draws the picture of all partitions anew, without a run: every half hour while something works,"
            " and once everything is at rest or paused. A tick that draws nothing opens no partition."
        ),
        ticks=ticks,
        target=target,
    )

"""The sensor of the property catalogue: it compares its two copies and alerts of every repair.

The catalogue's own modules repair a damaged copy: the function is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import dagster as dg

from resources.alerts.alert import DAY_SECONDS, Alert
from resources.alerts.outbox import Outbox
from sensors.sensor_definition import Decided, build_sensor
from sensors.ticks import Ticks

NAME = "catalog_watch"
INTERVAL_SECONDS = 60
COMPARE_SECONDS = 3600.0
"""The time between two comparisons of the copies, which read both. Every reader verifies its rows too."""

_KIND = "catalog_damaged"
_PUT_BACK, _LOST = "property_catalog/put_back", "property_catalog/lost"


@dataclass
class CatalogWatch:
    """Checks the catalogue. compare: repairs a damaged copy, or raises an error that says what to do.

    last_put_back: when the catalogue was last repaired (unix seconds), a title and a sentence about it.
    errors: what ``compare`` raises. outbox: where alerts are posted.
    """

    compare: Callable[[], None]
    last_put_back: Callable[[], tuple[float, str, str] | None]
    errors: type[Exception]
    outbox: Outbox
    _compared_at: float = field(default=float("-inf"), init=False)

    def check(self, now: float) -> str:
        """One tick, at this unix second. Returns a sentence about the catalogue."""
        # Nobody knows how long ago it was if the clock was put back.
        if abs(now - self._compared_at) >= COMPARE_SECONDS:
            try:
                self.compare()
            except (self.errors, OSError) as error:
                # The next tick compares again: a person is expected to repair it.
                self._post(_LOST, "The catalogue cannot be read", str(error), str(error), now, lasts=None)
                return str(error)
            self._compared_at = now
            if _LOST in self.outbox.open_subjects():
                sentence = "The catalogue and its second copy read whole."
                self.outbox.note_recovery(_LOST, sentence=sentence, at=now)
        repair = self.last_put_back()
        if repair is None or now - repair[0] >= DAY_SECONDS:
            return "The catalogue and its second copy are alike."
        repaired_at, title, sentence = repair
        step = f"{sentence} Look at the disk's health, and at what else may be an older copy."
        self._post(_PUT_BACK, title, f"{repaired_at}", step, now, lasts=DAY_SECONDS)
        return sentence

    def _post(
        self, subject: str, title: str, occurrence: str, step: str, now: float, *, lasts: float | None
    ) -> None:
        self.outbox.post(
            Alert(
                kind=_KIND,
                subject=subject,
                occurrence=occurrence,
                severity="error",
                title=title,
                next_step=step,
                at=now,
                lasts=lasts,
            )
        )


def build_catalog_watch_sensor(watch: CatalogWatch, *, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor. ticks: where each sensor notes that it ticked."""
    return build_sensor(
        NAME,
        lambda situation: Decided(watch.check(situation.now)),
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Compares the property catalogue with its second copy every hour, puts the damaged one right, and"
            " tells of every repair. It starts nothing."
        ),
        ticks=ticks,
    )

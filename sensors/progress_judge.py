"""The judge of progress: what stands still, and what is slower than its peers. Readings in, verdict out.

It judges workers on properties (``worker_health.py``) and the steps of a training
(``vlm_training/rank_watch.py``) alike. It has no clock and reads no file.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

SLOW_SHARE, SLOW_SECONDS = 0.3, 600.0
"""Whoever is slower than the median of its peers by this share, for this long, is named."""

_Name = TypeVar("_Name", str, int)


@dataclass(frozen=True)
class Reading:
    """What is known of one worker, or of the steps of one training.

    moved: when it last moved, in monotonic seconds. is_paced: whether it commits or steps again and again.
    learned_seconds: the longest time between two of its last commits or steps; 0 before one is known.
    """

    moved: float
    is_paced: bool
    learned_seconds: float = 0.0


@dataclass(frozen=True)
class ProgressLimits:
    """How long work may stand still, in seconds.

    Paced work may take ``learned_times`` its own learned time, at least ``least`` and at most ``most``.
    Before a time is known it may take ``most``. All other work may take ``loading``: to prepare, to load a
    model, to publish a file.
    """

    least: float = 30.0
    most: float = 600.0
    loading: float = 1800.0
    learned_times: float = 2.0

    def allowed_seconds(self, reading: Reading) -> float:
        """Seconds until the next sign of progress must have come."""
        if not reading.is_paced:
            return self.loading
        if not reading.learned_seconds:
            return self.most
        return min(max(self.learned_times * reading.learned_seconds, self.least), self.most)


@dataclass(frozen=True)
class Standstill:
    """The verdict that work stands still. seconds: for how long; allowed_seconds: how long it may."""

    seconds: float
    allowed_seconds: float


def standstill(
    reading: Reading, limits: ProgressLimits, *, now: float, watched_since: float = 0.0
) -> Standstill | None:
    """The verdict if the work stands still for longer than it may, else None.

    watched_since: time before it does not count, because nobody watched (monotonic seconds).
    """
    seconds = now - max(reading.moved, watched_since)
    allowed_seconds = limits.allowed_seconds(reading)
    return Standstill(seconds, allowed_seconds) if seconds > allowed_seconds else None


def slow_among(rates: Mapping[_Name, float]) -> dict[_Name, float]:
    """Those whose rate is far below the median of the others', each with that median."""
    slow: dict[_Name, float] = {}
    for name, rate in rates.items():
        others = [other for peer, other in rates.items() if peer != name]
        if others and rate < (1.0 - SLOW_SHARE) * statistics.median(others):
            slow[name] = statistics.median(others)
    return slow


def slow_since(
    before: Mapping[_Name, float], slow: Collection[_Name], *, now: float, watched_since: float = 0.0
) -> dict[_Name, float]:
    """Since when each of ``slow`` has been slow without a break. before: the answer a moment ago."""
    since = {name: before.get(name, now) for name in slow}
    return {name: at if at >= watched_since else now for name, at in since.items()}

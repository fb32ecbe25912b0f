"""The one rate: rows per second of wall time.

The data set's rate, that of a run and that of a worker are the same measure of other stretches of work, and
so is that of a training, whose rows are steps.
Starting processes, loading models and waiting between runs count where the stretches include them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

GAP_SECONDS = 900.0
"""A longer time in which nobody works ends a stretch of work: a night's pause is no slow night."""

WINDOW_SECONDS = 24 * 3600.0
"""Work of the last day at most: devices that were added since count fully tomorrow."""


@dataclass(frozen=True)
class Stretch:
    """Rows of one partition that one device made in one stretch of time.

    first, last: when its first and its last batch were done, in seconds.
    """

    device: str
    first: float
    last: float
    rows: int


@dataclass(frozen=True)
class Rate:
    """Rows committed in the latest stretch of work. seconds: of wall time. by_device: rows of each device."""

    rows: float = 0.0
    seconds: float = 0.0
    by_device: Mapping[str, float] = field(default_factory=dict)

    @property
    def per_second(self) -> float | None:
        """Rows a second on all devices together; None before anything was committed."""
        return self.rows / self.seconds if self.rows and self.seconds else None

    def of_device(self, device: str) -> float | None:
        """Rows a second of one device; None if it committed nothing in this time."""
        rows = self.by_device.get(device)
        return rows / self.seconds if rows and self.seconds else None

    def seconds_left(self, partitions: Iterable[float]) -> float | None:
        """Seconds that the rows left of these partitions take; None if the rate is unknown.

        One device works on a partition: where fewer are left than devices, some stand still.
        """
        rate, unfinished = self.per_second, [rows for rows in partitions if rows > 0]
        if not unfinished:
            return 0.0
        if rate is None:
            return None
        return max(sum(unfinished), max(unfinished) * len(self.by_device)) / rate


def rate_of(stretches: Iterable[Stretch]) -> Rate:
    """The rate of the latest work: back to a gap, and a day at most."""
    work = sorted(stretches, key=lambda stretch: stretch.last, reverse=True)
    if not work:
        return Rate()
    end = start = work[0].last
    for stretch in work:
        if stretch.last < start - GAP_SECONDS:
            break
        start = min(start, stretch.first)
    start = max(start, end - WINDOW_SECONDS)
    by_device: dict[str, float] = {}
    for stretch in work:
        # Rows of before the start do not count; they are spread evenly over the time of their stretch.
        whole = max(stretch.last - stretch.first, 1e-9)
        counted_rows = stretch.rows * (
            1.0 if stretch.first >= start else max(0.0, stretch.last - start) / whole
        )
        if counted_rows:
            by_device[stretch.device] = by_device.get(stretch.device, 0.0) + counted_rows
    return Rate(sum(by_device.values()), end - start, by_device)

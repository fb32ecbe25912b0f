"""How fast the data set is described, and how long the rest takes: the one rate and the one time left.

The rate is rows committed per second of wall time. Starting processes, loading models and waiting between
runs count as time. The terminal, ``status``, the picture and its page show this rate.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from resources.state.workers import Worker, Workers
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.assets.published_rows import PublishedRows, read_published_rows
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.resource_settings import control_state
from vlm_assets.settings import Settings

GAP_SECONDS = 900.0
"""A longer time in which nobody works ends a stretch of work: a night's pause is no slow night."""

WINDOW_SECONDS = 24 * 3600.0
"""Work of the last day at most: devices that were added since count fully tomorrow."""


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

    def seconds_left(self, rows: float) -> float | None:
        """Seconds that so many rows take; None if the rate is unknown."""
        rate = self.per_second
        return 0.0 if rows <= 0 else None if rate is None else rows / rate


@dataclass(frozen=True)
class _Work:
    """Rows of one device that were committed from ``start`` to ``end`` (unix seconds)."""

    device: str
    start: float
    end: float
    rows: float

    def rows_since(self, start: float) -> float:
        """Its rows after a moment, spread evenly over its time."""
        if self.start >= start:
            return self.rows
        return self.rows * (self.end - start) / (self.end - self.start) if self.end > start else 0.0


def read_rate(settings: Settings, catalog: Catalog) -> tuple[Rate, dict[str, int]]:
    """The rate, and the rows of each partition that are done, as ``status`` says them and without its rest.

    Raises OSError.
    """
    asset = settings.descriptions
    sizes = {one.key: len(one) for one in catalog.ranges}
    working = [one for one in Workers(control_state(settings)).living() if one.asset == asset.name]
    published = read_published_rows(asset, sizes)
    done = {key: committed_rows(asset, key) for key in asset.journal_keys() if key in sizes}
    # All rows committed and not published: a check keeps them back.
    done = {key: rows for key, rows in done.items() if rows < sizes[key]}
    done |= {key: rows.ok + sum(rows.failed.values()) for key, rows in published.items()}
    done |= {one.partition: one.committed for one in working}
    return measure(published.values(), working, time.time()), done


def measure(published: Collection[PublishedRows], working: Iterable[Worker], now: float) -> Rate:
    """The rate of the latest stretch of work. working: the processes that describe now."""
    work = [_Work(one.device, one.first, one.last, one.rows) for rows in published for one in rows.stretches]
    work += [
        _Work(one.device or "", one.started_at, max(now, one.started_at), one.committed - one.restored)
        for one in working
    ]
    # The start of the process that published it, without rows: its start-up is part of the time.
    work += [
        _Work("", rows.began, max(one.last for one in rows.stretches), 0.0)
        for rows in published
        if rows.began is not None and rows.stretches
    ]
    if not work:
        return Rate()
    work.sort(key=lambda one: one.end, reverse=True)
    end = start = work[0].end
    for one in work:
        if one.end < start - GAP_SECONDS:
            break
        start = min(start, one.start)
    start = max(start, end - WINDOW_SECONDS)
    by_device: dict[str, float] = {}
    for one in work:
        rows_there = one.rows_since(start) if one.end >= start else 0.0
        if rows_there:
            by_device[one.device] = by_device.get(one.device, 0.0) + rows_there
    return Rate(sum(by_device.values()), end - start, by_device)

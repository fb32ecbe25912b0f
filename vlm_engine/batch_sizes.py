"""Which size of batches is fastest on a device: measured by partitions as they run, and remembered.

This module chooses the size that a new partition begins with, measures its batches, and keeps the table of
measurements. batch_plan.py cuts the batches. There are no probes: a partition tries the next larger sizes
with a few of its own batches. The table may be lost; sizes are then measured anew. A partition's own size
stands in its journal. A resume uses it, except on another kind of device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import Final

import sqlalchemy as sa

from vlm_durable.state.database import ControlState
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.tables import batch_sizes as _table
from vlm_durable.wording import counted
from vlm_engine.batch_plan import TRIED_BATCHES, BatchSize
from vlm_engine.ladder import Described
from vlm_engine.protocol import ImageTokens

BATCH_SECONDS: Final = 20.0
"""A batch takes no longer, by estimate: a kill loses it, and the rows that wait for their commit."""

AS_FAST: Final = 0.97
"""Sizes with this share of the best rate count as the fastest. The smallest is taken: a kill loses less."""

FIRST_IMAGES: Final = 256
"""Images of a batch before any measurement, and for a server, which makes batches of its own."""

_FULL: Final = 0.8
"""Batches with less than this share of their size, such as the last of a window, are not measured."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """Measurements of one size.

    rate: cost a second. seconds: of the longest batch but one. held: whether memory held the batches.
    """

    rate: float
    seconds: float
    held: bool = True


BEGUN: Final = Measured(0.0, 0.0, held=False)
"""In the table while a size is tried. Where it stays there, that size may have killed the process."""


def first_size(properties: int, tokens: ImageTokens | None) -> BatchSize:
    """The size before any measurement. tokens: the cost of images, where the engine knows it."""
    if tokens is None:
        return BatchSize(properties, FIRST_IMAGES)
    # The cost of FIRST_IMAGES in properties with as many images as fit, prompts included.
    cost = FIRST_IMAGES * tokens.each + FIRST_IMAGES * tokens.text // max(1, tokens.fitting)
    return BatchSize(properties, cost, tokens.each, tokens.text)


def choose(first: BatchSize, measured: Mapping[int, Measured]) -> BatchSize:
    """The size for a new partition: the smallest that is about as fast as any that fits, and sizes to try.

    A size fits if the device's memory holds it and it takes BATCH_SECONDS at most. While the largest is the
    fastest, larger sizes are tried, up to four times as large and to what takes BATCH_SECONDS by estimate.
    None is tried while a size is BEGUN: it may have killed its process, and a slightly smaller one would too.
    """
    if not measured:
        return first
    fitting = {
        cost: measurement
        for cost, measurement in measured.items()
        if measurement.held and measurement.seconds <= BATCH_SECONDS
    }
    if not fitting:
        smallest = min(measured)
        share = BATCH_SECONDS / measured[smallest].seconds if measured[smallest].held else 1.0
        return replace(first, cost=max(1, int(smallest * min(0.5, share))))
    best = max(measurement.rate for measurement in fitting.values())
    cost = min(cost for cost, measurement in fitting.items() if measurement.rate >= AS_FAST * best)
    largest = max(fitting)
    if cost < largest or BEGUN in measured.values():
        return replace(first, cost=cost)
    # A little less than a size that would take BATCH_SECONDS, or that was too large.
    too_large = [measured_cost for measured_cost in measured if measured_cost > largest]
    most = int(0.95 * min(_cost_of(BATCH_SECONDS, fitting), *too_large, math.inf))
    larger = {min(factor * largest, most) for factor in (2, 4)}
    return replace(first, cost=cost, tried=tuple(sorted(size for size in larger if size > 1.1 * largest)))


def _cost_of(seconds: float, fitting: Mapping[int, Measured]) -> float:
    """The cost of a batch that takes so long: along the line through the two largest sizes, or from zero."""
    *smaller, largest = sorted(fitting)
    other = smaller[-1] if smaller else 0
    difference = fitting[largest].seconds - (fitting[other].seconds if smaller else 0.0)
    slope = (largest - other) / difference if difference > 0 else 0.0
    return largest + (seconds - fitting[largest].seconds) * slope


@dataclass
class BatchMeter:
    """Measures a partition's batches, except a process's first, which also pays for what is made once."""

    size: BatchSize
    _seconds: dict[int, list[float]] = field(default_factory=dict)
    _rates: dict[int, list[float]] = field(default_factory=dict)
    _properties: dict[int, int] = field(default_factory=dict)
    _began: bool = False

    def count(self, images: Sequence[int], seconds: float) -> None:
        """Count a batch. images: of each of its properties."""
        cost = self.size.cost_of(max(images, default=0), len(images))
        size = min((size for size in (self.size.cost, *self.size.tried) if cost <= size), default=None)
        if self._began and size is not None and cost >= _FULL * size and seconds > 0:
            self._seconds.setdefault(size, []).append(seconds)
            self._rates.setdefault(size, []).append(cost / seconds)
            self._properties[size] = max(len(images), self._properties.get(size, 0))
        self._began = True

    @property
    def has_tried(self) -> bool:
        """Whether each size to try is measured."""
        return all(len(self._rates.get(cost, ())) >= TRIED_BATCHES for cost in self.size.tried)

    def measured(self, largest_batch: int | None) -> dict[int, Measured]:
        """The measurements of each size. largest_batch: properties that memory held, if it did not hold all.

        One slow batch of a size decides nothing: the machine may have slept.
        """
        return {
            cost: Measured(
                median_high(rates),
                sorted(self._seconds[cost])[-2],
                largest_batch is None or self._properties[cost] <= largest_batch,
            )
            for cost, rates in self._rates.items()
            if len(rates) >= TRIED_BATCHES
        }


def remembered(state: ControlState, device: str, meaning: str) -> dict[int, Measured]:
    """The measurements on such devices with this model, by cost; none where they cannot be read."""
    columns = (_table.c.cost, _table.c.rate, _table.c.seconds, _table.c.held)
    query = sa.select(*columns).where(_table.c.device == device, _table.c.meaning == meaning)
    try:
        rows = state.read_beats(lambda connection: connection.execute(query).all())
    except (ControlStateError, sa.exc.SQLAlchemyError) as error:
        _log.warning("Which batches are fastest is measured anew: %s", error)
        return {}
    return {cost: Measured(rate, seconds, held) for cost, rate, seconds, held in rows}


def remember(state: ControlState, device: str, meaning: str, measured: Mapping[int, Measured | None]) -> None:
    """Keep measurements; the newest of a size counts, and None forgets it. Never fails a run."""
    rows = [
        {"device": device, "meaning": meaning, "cost": cost, **vars(measurement)}
        for cost, measurement in measured.items()
        if measurement is not None
    ]

    def write(connection: sa.Connection) -> None:
        is_this_kind = (_table.c.device == device, _table.c.meaning == meaning)
        connection.execute(_table.delete().where(*is_this_kind, _table.c.cost.in_(list(measured))))
        if rows:
            connection.execute(_table.insert(), rows)

    if not measured:
        return
    try:
        state.beat(write)
    except (ControlStateError, sa.exc.SQLAlchemyError) as error:
        _log.warning("Which batches are fastest is measured again by the next partition: %s", error)


def long_batch(described: Sequence[Described], seconds: float) -> str | None:
    """A warning where a batch took longer than BATCH_SECONDS; None where it did not, or cannot be cut."""
    if seconds <= BATCH_SECONDS or len(described) == 1:
        return None
    images = sum(row.images_seen for row in described)
    fitting = max(1, int(images * BATCH_SECONDS / seconds))
    return (
        f"A batch of {counted(len(described), 'properties')} with {counted(images, 'images')} took"
        f" {seconds:.0f} s, and a kill loses"
        f" the batch under way. For batches of {BATCH_SECONDS:.0f} s set VLM_ASSETS_BATCH_IMAGES={fitting};"
        " what is committed stays."
    )

"""Which size of batches is fastest on a device: measured by partitions as they run, and remembered.

What lives here: the size that a new partition begins with, what its batches say of it, and the table of what
was measured. What does not: cutting the batches (batch_plan.py). Nothing is probed: a partition tries the
next larger sizes with a few of its own batches. What is remembered may be lost; it is then measured anew. A
partition's own size stands in its journal. A resume uses it, but for one on another kind of device.
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
"""A batch takes no longer, by estimate: it is lost by a kill, beside what waits for its commit."""

AS_FAST: Final = 0.97
"""Of the best rate: the smaller one of two sizes is taken, of which a kill loses less."""

FIRST_IMAGES: Final = 256
"""Images of a batch where nothing is known, and of a server, which makes batches of its own."""

_FULL: Final = 0.8
"""Of its size: a smaller batch, such as the last of a window, says nothing of it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """How batches of one size did. rate: cost a second. seconds: of the longest but one. held: by memory."""

    rate: float
    seconds: float
    held: bool = True


BEGUN: Final = Measured(0.0, 0.0, held=False)
"""Of a size from before it is tried until it is measured. Where it stays, that size may kill the process."""


def first_size(properties: int, known: ImageTokens | None) -> BatchSize:
    """The size where nothing was measured. known: what images cost, where the engine knows."""
    if known is None:
        return BatchSize(properties, FIRST_IMAGES)
    # An image of many, and its share of the prompt: by tokens a batch of short properties has fewer images.
    cost = FIRST_IMAGES * known.each + FIRST_IMAGES * known.text // max(1, known.fitting)
    return BatchSize(properties, cost, known.each, known.text)


def choose(first: BatchSize, measured: Mapping[int, Measured]) -> BatchSize:
    """The size for a new partition: the smallest about as fast as any that fits, and what it is to try.

    What fits is held by the device's memory and takes BATCH_SECONDS at most. While the largest is the
    fastest, larger sizes are tried, up to four times of it and to what takes BATCH_SECONDS by estimate; none
    beside one that was BEGUN, for it may have killed its process, and one a little smaller would too.
    """
    if not measured:
        return first  # How long a larger one would take is not known yet.
    fitting = {cost: one for cost, one in measured.items() if one.held and one.seconds <= BATCH_SECONDS}
    if not fitting:
        smallest = min(measured)
        share = BATCH_SECONDS / measured[smallest].seconds if measured[smallest].held else 1.0
        return replace(first, cost=max(1, int(smallest * min(0.5, share))))
    best = max(one.rate for one in fitting.values())
    cost = min(cost for cost, one in fitting.items() if one.rate >= AS_FAST * best)
    largest = max(fitting)
    if cost < largest or BEGUN in measured.values():
        return replace(first, cost=cost)
    # A little less than what would take BATCH_SECONDS, or was too large.
    most = int(
        0.95 * min(_cost_of(BATCH_SECONDS, fitting), *(one for one in measured if one > largest), math.inf)
    )
    tried = {min(times * largest, most) for times in (2, 4)}
    return replace(first, cost=cost, tried=tuple(sorted(one for one in tried if one > 1.1 * largest)))


def _cost_of(seconds: float, fitting: Mapping[int, Measured]) -> float:
    """The cost of a batch that takes so long: along the line through the two largest sizes, or from zero."""
    *smaller, largest = sorted(fitting)
    began = smaller[-1] if smaller else 0
    spent = fitting[largest].seconds - (fitting[began].seconds if smaller else 0.0)
    slope = (largest - began) / spent if spent > 0 else 0.0
    return largest + (seconds - fitting[largest].seconds) * slope


@dataclass
class BatchMeter:
    """Measures a partition's batches, but for a process's first, which pays for what is made once."""

    size: BatchSize
    _seconds: dict[int, list[float]] = field(default_factory=dict)
    _rates: dict[int, list[float]] = field(default_factory=dict)
    _properties: dict[int, int] = field(default_factory=dict)
    _began: bool = False

    def take(self, images: Sequence[int], seconds: float) -> None:
        """Count a batch of properties with so many images."""
        cost = self.size.of(max(images, default=0), len(images))
        of = min((one for one in (self.size.cost, *self.size.tried) if cost <= one), default=None)
        if self._began and of is not None and cost >= _FULL * of and seconds > 0:
            self._seconds.setdefault(of, []).append(seconds)
            self._rates.setdefault(of, []).append(cost / seconds)
            self._properties[of] = max(len(images), self._properties.get(of, 0))
        self._began = True

    @property
    def has_tried(self) -> bool:
        """Whether each size to try is measured by now."""
        return all(len(self._rates.get(cost, ())) >= TRIED_BATCHES for cost in self.size.tried)

    def measured(self, largest_batch: int | None) -> dict[int, Measured]:
        """What is known of each size. largest_batch: properties that memory held, if it did not hold all.

        One batch of a size may have taken any time, on a machine that slept: it decides nothing.
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
    """What was measured on such devices with this model, by cost; nothing where it cannot be read."""
    columns = (_table.c.cost, _table.c.rate, _table.c.seconds, _table.c.held)
    of_both = sa.select(*columns).where(_table.c.device == device, _table.c.meaning == meaning)
    try:
        rows = state.read_beats(lambda connection: connection.execute(of_both).all())
    except (ControlStateError, sa.exc.SQLAlchemyError) as error:
        _log.warning("Which batches are fastest is measured anew: %s", error)
        return {}
    return {cost: Measured(rate, seconds, held) for cost, rate, seconds, held in rows}


def remember(state: ControlState, device: str, meaning: str, measured: Mapping[int, Measured | None]) -> None:
    """Keep what was measured; the newest of a size counts, and None forgets it. Never fails a run."""
    rows = [
        {"device": device, "meaning": meaning, "cost": cost, **vars(one)}
        for cost, one in measured.items()
        if one is not None
    ]

    def write(connection: sa.Connection) -> None:
        of_both = (_table.c.device == device, _table.c.meaning == meaning)
        connection.execute(_table.delete().where(*of_both, _table.c.cost.in_(list(measured))))
        if rows:
            connection.execute(_table.insert(), rows)

    if not measured:
        return
    try:
        state.beat(write)
    except (ControlStateError, sa.exc.SQLAlchemyError) as error:
        _log.warning("Which batches are fastest is measured again by the next partition: %s", error)


def long_batch(described: Sequence[Described], seconds: float) -> str | None:
    """What to set where a batch took longer than BATCH_SECONDS; None where it did not, or cannot be cut."""
    if seconds <= BATCH_SECONDS or len(described) == 1:
        return None
    images = sum(one.images_seen for one in described)
    fitting = max(1, int(images * BATCH_SECONDS / seconds))
    return (
        f"A batch of {counted(len(described), 'properties')} with {counted(images, 'images')} took"
        f" {seconds:.0f} s, and a kill loses"
        f" the batch under way. For batches of {BATCH_SECONDS:.0f} s set VLM_ASSETS_BATCH_IMAGES={fitting};"
        " what is committed stays."
    )

"""Batches: which properties the model sees together, in which order, and how many of them are fastest.

The plan is a pure function of the properties and the batches' size. It is the same before and after an
interruption, in any process and on any Python: its order comes from SHA-256, not from a random generator, and
it does not depend on the order of its input. The caller knows which properties are done.

The fastest size on a device is measured by the batches of the work itself, and remembered. There are no
probes: work that begins tries the next larger sizes with a few of its own batches. The table of measurements
may be lost; sizes are then measured anew. The caller keeps the size that its work began with, and a resume
uses that, except on another kind of device.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median_high
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from vlm_durable.state.database import ControlState
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.tables import batch_sizes as _table
from vlm_durable.wording import counted
from vlm_engine.protocol import Engine, ImageTokens, SplittingEngine, image_tokens_of

if TYPE_CHECKING:
    from vlm_engine.images.images import PropertyJob

DEFAULT_WINDOW = 1024

_SHUFFLE = 0
"""Another number changes the order of every plan, and the batches of partitions under way."""

TRIED_BATCHES = 2
"""Batches of each size that is tried: the rate of a size is the median of their rates."""


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
class PlannedProperty:
    """One property in the plan, as the catalogue has it."""

    property_id: str
    ordinal: int
    images: int
    """Number of images that the model will see: the property's length."""


Batch = tuple[PlannedProperty, ...]


@dataclass(frozen=True)
class BatchSize:
    """How large batches are. It decides the plan, so a partition keeps the one that it began with.

    properties: of a batch, at most. cost: of a batch, at most, where each property counts as much as the
    longest of the batch, to which its prompt is padded. image, text: the costs of an image and of a prompt
    without images: 1 and 0 count images, otherwise they are tokens. tried: other costs, each for a few
    batches at the beginning, so that a later partition knows whether that size is faster.
    """

    properties: int
    cost: int
    image: int = 1
    text: int = 0
    tried: tuple[int, ...] = ()

    def cost_of(self, images: int, properties: int = 1) -> int:
        """The cost of so many properties, where the longest has so many images."""
        return properties * (self.text + images * self.image)

    def sentence(self) -> str:
        """For people."""
        unit = "images" if self.text == 0 and self.image == 1 else "tokens of images and prompts"
        tried = f"; tried: {', '.join(f'{cost:,}' for cost in self.tried)}" if self.tried else ""
        return f"{self.cost:,} {unit}, {counted(self.properties, 'properties')}, at most{tried}"


def plan_batches(
    properties: Sequence[PlannedProperty], *, size: BatchSize, window: int = DEFAULT_WINDOW
) -> list[Batch]:
    """Divide properties into batches; each property stands in exactly one.

    The properties, by ordinal, are cut into consecutive windows of ``window``. No batch reaches over a
    window's edge, so a caller that sorts the results by ordinal never holds more than one window. Inside a
    window they are shuffled, then grouped by number of images, so that little of a batch is padding; the
    batches are shuffled again, so that long ones are spread over the window.

    A batch keeps to ``size``, but a property that costs more makes a batch alone. Sizes to try get the
    longest properties of the first window, from its second batch on, if these are half of the window at most.

    Raises:
        ValueError: a size is not positive, or a property id or an ordinal stands twice.
    """
    _refuse_impossible(properties, size, window)
    ordered = sorted(properties, key=lambda planned: planned.ordinal)
    plan: list[Batch] = []
    for start in range(0, len(ordered), window):
        members = sorted(
            ordered[start : start + window],
            key=lambda planned: (planned.images, _shuffle_key("property", planned)),
        )
        tried = [] if start else _tried(members, size)
        members = members[: len(members) - sum(map(len, tried))]
        batches = sorted(_cut(members, size, size.cost), key=lambda batch: _shuffle_key("batch", batch[0]))
        plan += [*batches[:1], *tried, *batches[1:]]
    return plan


def remaining(plan: Sequence[Batch], done_ids: Collection[str]) -> list[Batch]:
    """The plan less the properties in ``done_ids``: same order, no batch mixed with another, none empty."""
    done = frozenset(done_ids)
    batches = (tuple(planned for planned in batch if planned.property_id not in done) for batch in plan)
    return [batch for batch in batches if batch]


def _tried(members: Sequence[PlannedProperty], size: BatchSize) -> list[Batch]:
    """Batches of the sizes to try, made of the last members; none where these would be over a half."""
    batches: list[Batch] = []
    remaining_members = len(members)
    for cost in size.tried * TRIED_BATCHES:
        batch = next(_cut(members[:remaining_members][::-1], size, cost), ())
        remaining_members -= len(batch)
        batches.append(batch)
    return batches if 2 * remaining_members >= len(members) else []


def _cut(members: Sequence[PlannedProperty], size: BatchSize, cost: int) -> Iterator[Batch]:
    batch: list[PlannedProperty] = []
    longest = 0
    for planned in members:
        longest = max(longest, planned.images)
        if batch and (len(batch) == size.properties or size.cost_of(longest, len(batch) + 1) > cost):
            yield tuple(batch)
            batch, longest = [], planned.images
        batch.append(planned)
    if batch:
        yield tuple(batch)


def _shuffle_key(purpose: str, planned: PlannedProperty) -> bytes:
    # The ordinal is unique, so no two keys are equal, and the order of the input decides nothing.
    text = f"{_SHUFFLE}/{purpose}/{planned.ordinal}/{planned.property_id}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _refuse_impossible(properties: Sequence[PlannedProperty], size: BatchSize, window: int) -> None:
    for name, value in (("properties", size.properties), ("cost", size.cost), ("window", window)):
        if value < 1:
            raise ValueError(f"{name} is {value}; a batch plan needs 1 or more.")
    if len({planned.property_id for planned in properties}) != len(properties):
        raise ValueError(
            "A property id stands twice among the properties to plan; the catalogue forbids that."
        )
    if len({planned.ordinal for planned in properties}) != len(properties):
        raise ValueError("An ordinal stands twice among the properties to plan; the catalogue forbids that.")


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


@dataclass(frozen=True)
class MeasuredSizes:
    """The table of measurements on devices of a name, for one meaning of answers: model, prompt, schema."""

    state: ControlState
    device: str
    meaning: str

    def read(self) -> dict[int, Measured]:
        """The measurements by cost; none where they cannot be read."""
        columns = (_table.c.cost, _table.c.rate, _table.c.seconds, _table.c.held)
        query = sa.select(*columns).where(*self._are_these)
        try:
            rows = self.state.read_beats(lambda connection: connection.execute(query).all())
        except (ControlStateError, sa.exc.SQLAlchemyError) as error:
            _log.warning("Which batches are fastest is measured anew: %s", error)
            return {}
        return {cost: Measured(rate, seconds, held) for cost, rate, seconds, held in rows}

    def write(self, measured: Mapping[int, Measured | None]) -> None:
        """Keep measurements; the newest of a size counts, and None forgets it. Never fails a run."""
        key = {"device": self.device, "meaning": self.meaning}
        rows = [
            {**key, "cost": cost, **vars(measurement)}
            for cost, measurement in measured.items()
            if measurement is not None
        ]

        def write(connection: sa.Connection) -> None:
            connection.execute(_table.delete().where(*self._are_these, _table.c.cost.in_(list(measured))))
            if rows:
                connection.execute(_table.insert(), rows)

        if not measured:
            return
        try:
            self.state.beat(write)
        except (ControlStateError, sa.exc.SQLAlchemyError) as error:
            _log.warning("Which batches are fastest is measured again by the next partition: %s", error)

    @property
    def _are_these(self) -> tuple[sa.ColumnElement[bool], ...]:
        return (_table.c.device == self.device, _table.c.meaning == self.meaning)


class BatchSizes:
    """The size of one work's batches: chosen at its begin, measured by it, and remembered for later work.

    properties, images: of a batch, at most. measured: the table by which the fastest size is chosen instead
    of ``images``; None: the size stays as given, and nothing is remembered.
    """

    def __init__(
        self, properties: int, images: int = FIRST_IMAGES, measured: MeasuredSizes | None = None
    ) -> None:
        self.size = BatchSize(properties, images)
        self._measured = measured
        self._meter = BatchMeter(self.size)
        self._engine: Engine | None = None
        self._tries = False

    def begin(self, engine: Engine, kept: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
        """Choose the size for this engine; returns JSON values that a resume of this work passes as ``kept``.

        It is the size that the work began with on such a device, else the fastest known. Only work that
        begins tries other sizes: one of them may have killed its process.
        """
        if (measured := self._measured) is None:
            return kept
        if kept is not None and kept.get("device") == measured.device:
            begun = {name: value for name, value in kept.items() if name != "device"}
            self.size = BatchSize(**{**begun, "tried": ()})
        else:
            self.size = first_size(self.size.properties, image_tokens_of(engine))
            if engine.batches_at_once == 1:  # else the engine makes its own batches
                self.size = choose(self.size, measured.read())
                if kept is not None:
                    self.size = replace(self.size, tried=())
                measured.write(dict.fromkeys(self.size.tried, BEGUN))
            kept = {**asdict(self.size), "device": measured.device}
        self._engine, self._meter, self._tries = engine, BatchMeter(self.size), bool(self.size.tried)
        return kept

    def plan(
        self, jobs: Sequence[PropertyJob], to_do: Collection[str] | None = None, *, max_images: int
    ) -> list[list[PropertyJob]]:
        """The batches of all these properties, less those that are not to do. max_images: of a property."""
        planned = [
            PlannedProperty(job.property_id, job.ordinal, min(len(job.image_uris), max_images))
            for job in jobs
        ]
        done = () if to_do is None else {job.property_id for job in jobs} - frozenset(to_do)
        by_ordinal = {job.ordinal: job for job in jobs}
        return [
            [by_ordinal[job.ordinal] for job in batch]
            for batch in remaining(plan_batches(planned, size=self.size), done)
        ]

    def count(self, images: Sequence[int], seconds: float) -> None:
        """Measure a batch. images: of each of its properties."""
        self._meter.count(images, seconds)
        if self._tries and self._meter.has_tried:  # A kill from now on says nothing of these sizes.
            self.remember()
            self._tries = False

    def remember(self) -> None:
        """Keep the rates that this work measured, for later work."""
        if self._measured is None or (engine := self._engine) is None or engine.batches_at_once != 1:
            return
        held = engine.largest_batch if isinstance(engine, SplittingEngine) else None
        self._measured.write({**dict.fromkeys(self.size.tried), **self._meter.measured(held)})


def long_batch(images: Sequence[int], seconds: float) -> str | None:
    """A warning where a batch took longer than BATCH_SECONDS; None where it did not, or cannot be cut.

    images: of each of its properties.
    """
    if seconds <= BATCH_SECONDS or len(images) == 1:
        return None
    fitting = max(1, int(sum(images) * BATCH_SECONDS / seconds))
    return (
        f"A batch of {counted(len(images), 'properties')} with {counted(sum(images), 'images')} took"
        f" {seconds:.0f} s, and a kill loses"
        f" the batch under way. For batches of {BATCH_SECONDS:.0f} s set VLM_ASSETS_BATCH_IMAGES={fitting};"
        " what is committed stays."
    )

"""The batch plan: which properties the model sees together, and in which order.

The plan is a pure function of the properties and the batches' size. It is the same before and after an
interruption, in any process and on any Python: its order comes from SHA-256, not from a random generator, and
it does not depend on the order of its input. batch_sizes.py says which size is fastest; the journal knows
which properties are committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from vlm_durable.wording import counted

DEFAULT_WINDOW = 1024

_SHUFFLE = 0
"""Another number changes the order of every plan, and the batches of partitions under way."""

TRIED_BATCHES = 2
"""Batches of each size that is tried: the rate of a size is the median of their rates."""


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

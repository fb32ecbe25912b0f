"""The batch plan: which properties the model sees together, and in which order.

What lives here: a pure function of the properties, a seed and the settings. What does not: loading the
images, running a batch, and knowing what is committed (the journal does). The plan is the same before and
after an interruption, in any process and on any Python: its order comes from SHA-256, not from a random
generator, and it does not depend on the order in which the properties are handed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class PlannedProperty:
    """What the plan needs to know of one property, all of it from the catalogue."""

    property_id: str
    ordinal: int
    images: int
    """Number of images that the model will be shown: the property's length."""


Batch = tuple[PlannedProperty, ...]


def plan_batches(
    properties: Sequence[PlannedProperty],
    *,
    seed: int,
    batch_size: int,
    images_per_batch: int | None = None,
    window: int = DEFAULT_WINDOW,
) -> list[Batch]:
    """Divide properties into batches; each property stands in exactly one.

    The properties, by ordinal, are cut into consecutive windows of ``window``; no batch reaches over a
    window's edge, so that whoever puts the results back in order of ordinal never holds more than one window.
    Inside a window they are shuffled, then grouped by number of images, so that little of a batch is
    padding; the batches are shuffled again, so that long ones are spread over the window.

    A batch holds at most ``batch_size`` properties and, where ``images_per_batch`` is given, at most so many
    images, except that a property with more images than that makes a batch alone.

    Raises:
        ValueError: a size is not positive, or a property id or an ordinal stands twice.
    """
    _refuse_impossible(properties, batch_size=batch_size, images_per_batch=images_per_batch, window=window)
    ordered = sorted(properties, key=lambda planned: planned.ordinal)
    plan: list[Batch] = []
    for start in range(0, len(ordered), window):
        members = sorted(
            ordered[start : start + window],
            key=lambda planned: (planned.images, _shuffle_key(seed, "property", planned)),
        )
        batches = _cut(members, batch_size, images_per_batch)
        plan.extend(sorted(batches, key=lambda batch: _shuffle_key(seed, "batch", batch[0])))
    return plan


def remaining(plan: Sequence[Batch], done_ids: Collection[str]) -> list[Batch]:
    """The plan less the properties in ``done_ids``: same order, no batch mixed with another, none empty."""
    done = frozenset(done_ids)
    left = (tuple(planned for planned in batch if planned.property_id not in done) for batch in plan)
    return [batch for batch in left if batch]


def _cut(
    members: Sequence[PlannedProperty], batch_size: int, images_per_batch: int | None
) -> Iterator[Batch]:
    batch: list[PlannedProperty] = []
    images = 0
    for planned in members:
        too_many_images = images_per_batch is not None and images + planned.images > images_per_batch
        if batch and (len(batch) == batch_size or too_many_images):
            yield tuple(batch)
            batch, images = [], 0
        batch.append(planned)
        images += planned.images
    if batch:
        yield tuple(batch)


def _shuffle_key(seed: int, what: str, planned: PlannedProperty) -> bytes:
    # The ordinal is unique, so no two keys are alike and no tie is left to the order of the input.
    text = f"{seed}/{what}/{planned.ordinal}/{planned.property_id}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _refuse_impossible(
    properties: Sequence[PlannedProperty], *, batch_size: int, images_per_batch: int | None, window: int
) -> None:
    sizes = {"batch_size": batch_size, "images_per_batch": images_per_batch, "window": window}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; a batch plan needs 1 or more.")
    if len({planned.property_id for planned in properties}) != len(properties):
        raise ValueError(
            "A property id stands twice among the properties to plan; the catalogue forbids that."
        )
    if len({planned.ordinal for planned in properties}) != len(properties):
        raise ValueError("An ordinal stands twice among the properties to plan; the catalogue forbids that.")

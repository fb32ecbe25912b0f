"""Which batches pay on a device: the same properties described in batches of several sizes.

What lives here: how many properties that takes, the rate of each size, and the choice. What does not: the
trial of one size (``trial.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from resources.devices.resource import GpuResource
from resources.engine.models.vision_language_model import VisionLanguageModel
from vlm_assets.assets.property_descriptions import BATCH_SECONDS
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.trial import Trial, run_trial, sample
from vlm_assets.settings import Settings

_BATCHES: Final = 4
"""Of the largest size; the first one of each size is not counted: it pays for what is made once."""

_LOOKED_AT: Final = 200
"""Properties whose images are counted to know how many a batch takes."""

_AS_FAST: Final = 0.97
"""Of the best rate: the smaller one of two batches, of which a kill loses less."""


class TooFewPropertiesError(ValueError):
    """The catalogue has too few properties for a rate in batches of that size."""


@dataclass(frozen=True)
class BatchTrial:
    """How one size did, from its second batch on. images: described together, at most."""

    images: int
    trial: Trial

    @property
    def seconds(self) -> float:
        """From the end of the first batch to that of the last."""
        return self.trial.batches[-1].out_at - self.trial.batches[0].out_at

    @property
    def properties_per_second(self) -> float:
        """In the steady state."""
        return sum(one.properties for one in self.trial.batches[1:]) / self.seconds

    @property
    def images_per_second(self) -> float:
        """In the steady state."""
        return sum(one.images for one in self.trial.batches[1:]) / self.seconds

    @property
    def longest(self) -> float:
        """Seconds of the longest batch: what a kill may lose."""
        return max(one.seconds for one in self.trial.batches[1:])

    @property
    def held(self) -> bool:
        """Whether the device's memory held its batches."""
        return self.trial.held is None


def try_batches(
    settings: Settings,
    catalog: Catalog,
    gpu: GpuResource,
    model: VisionLanguageModel,
    *,
    sizes: Sequence[int],
) -> Iterator[BatchTrial]:
    """Describe the same properties in batches of so many images, one size after the other, smallest first.

    Larger sizes are left out once the device's memory held one no more. Raises TooFewPropertiesError, and
    what ``run_trial`` raises.
    """
    counts = [len(uris) for uris in sample(catalog, _LOOKED_AT)["image_uris"].to_pylist()]
    mean = sum(min(count, settings.max_images) for count in counts) / len(counts)
    limit = math.ceil(_BATCHES * max(sizes) / max(mean, 1.0))
    for size in sorted(set(sizes)):
        # As many properties as have so many images: what fills a device are images.
        changed = settings.model_copy(update={"batch_size": size, "batch_images": size})
        tried = BatchTrial(size, run_trial(changed, catalog, gpu, model, limit=limit))
        if len(tried.trial.batches) < 2:
            raise TooFewPropertiesError(
                f"{len(tried.trial.described)} properties are one batch of {size} images, and no rate."
                f" Try fewer images, or a catalogue of more than these {catalog.rows} properties."
            )
        yield tried
        if not tried.held:
            return


def choose(tried: Sequence[BatchTrial]) -> BatchTrial | None:
    """The smallest size that is about as fast as any that fits and of which a kill loses little enough.

    None where all are too large, for the device's memory or for that.
    """
    fitting = [one for one in tried if one.held and one.longest <= BATCH_SECONDS]
    best = max((one.properties_per_second for one in fitting), default=0.0)
    return next((one for one in fitting if one.properties_per_second >= _AS_FAST * best), None)

"""What each property range is expected to cost, in images that are not described yet; the heaviest first.

What lives here: the cost of a range, and the order that follows from it. What does not: seconds (what was
measured says those: ``status.py``), and whether a partition may run. The slowest last wave sets the time of a
backfill, so the ranges with the most work go first. An embedding costs next to nothing beside its
description and is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from resources.publishing.errors import RecordDamagedError
from resources.publishing.published import PublishedPartitions
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.catalog.catalog import Catalog, CatalogError
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.settings import Settings

_ROWS_TOGETHER = 65_536

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpectedCost:
    """What the ranges of a catalogue cost, in images shown to the model.

    whole: of each range by key, committed or not, each property's images up to ``max_images``. limit: no
    range can cost more.
    """

    settings: Settings = field(repr=False)
    whole: Mapping[str, int] = field(repr=False)
    limit: int

    @classmethod
    def of(cls, settings: Settings, catalog: Catalog) -> ExpectedCost:
        """The costs of a catalogue's ranges, counted once a catalogue. Raises CatalogUnreadableError."""
        longest = max(map(len, catalog.ranges), default=0)
        return cls(settings, _whole(settings, catalog), longest * settings.max_images)

    def left(self, key: str, *, anew: bool = False) -> int:
        """Images of the properties of a range that are not committed: 0 where it is published.

        anew: what is published is computed again, so it counts for nothing.

        What is committed is known by its number of rows, so their images are taken as average ones. Raises
        KeyError for a range that the catalogue does not have.
        """
        committed = committed_rows(self.settings.descriptions, key)
        if not committed and not anew and _is_published(self.settings, key):
            return 0
        return self.left_after(key, committed)

    def left_after(self, key: str, rows: int) -> int:
        """Images of a range that are left once so many of its rows are done. Raises KeyError as ``left``."""
        return round(self.whole[key] * (1.0 - rows / len(PropertyRange.from_key(key))))

    def heaviest_first(self, keys: Collection[str]) -> list[str]:
        """Known keys in the order in which they should run; where nothing is left, by the whole range."""
        known = sorted(key for key in keys if key in self.whole)
        return sorted(known, key=lambda key: (-self.left(key), -self.whole[key]))

    def priority(self, key: str, *, anew: bool = False) -> int:
        """The order as a whole number, never above 0: what a person ranks 1 or more goes before all of it.

        anew: see ``left``. Raises KeyError for a range that the catalogue does not have.
        """
        left = self.left(key, anew=anew)
        # Published ones come after all others: a backfill over stale ones still has the heaviest first.
        return left - self.limit if left else self.whole[key] - 2 * self.limit


def heaviest_first(settings: Settings) -> Callable[[Collection[str]], list[str]]:
    """A function that orders partition keys by the catalogue as it stands when it is called.

    It never raises: where the catalogue cannot be read the order is plain, and that is logged. Keys that the
    catalogue does not have come last.
    """

    def order(keys: Collection[str]) -> list[str]:
        plain = sorted(keys)
        try:
            first = ExpectedCost.of(settings, Catalog.open(settings.home)).heaviest_first(plain)
        except (CatalogError, OSError) as error:
            _log.warning("Partitions are taken in plain order, not heaviest first: %s", error)
            return plain
        known = frozenset(first)
        return [*first, *(key for key in plain if key not in known)]

    return order


def _is_published(settings: Settings, key: str) -> bool:
    try:
        return PublishedPartitions(settings.descriptions).record(key) is not None
    except RecordDamagedError:
        return False


_counted: dict[str, Mapping[str, int]] = {}
"""The last count of this process. Counting a catalogue of a million properties takes most of a second."""


def _whole(settings: Settings, catalog: Catalog) -> Mapping[str, int]:
    asked = f"{catalog.path} {catalog.catalog_id} {catalog.header.sequence} {settings.max_images}"
    if asked not in _counted:
        counted = _images_of_ranges(catalog, settings.max_images)
        _counted.clear()
        _counted[asked] = counted
    return _counted[asked]


def _images_of_ranges(catalog: Catalog, max_images: int) -> dict[str, int]:
    if not catalog.ranges:
        return {}
    shown = np.minimum(catalog.image_counts(), max_images)[: catalog.ranges[-1].stop]
    sums = np.add.reduceat(shown, [one.start for one in catalog.ranges])
    return {one.key: int(images) for one, images in zip(catalog.ranges, sums, strict=True)}

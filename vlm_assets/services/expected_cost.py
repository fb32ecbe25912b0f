"""What is left of each property range, and how fast it goes: the one order, the one rate, the one time left.

A range's cost is its images that are not described yet. The heaviest goes first: the slowest last wave sets
the time of a backfill. An embedding costs next to nothing beside its description and is not counted. The rate
is of rows committed (``vlm_durable/state/rate.py``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.assets.published_rows import PublishedRows, read_published_rows
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog, CatalogError
from vlm_catalog.ranges import PropertyRange
from vlm_durable.files.layout import AssetFolders
from vlm_durable.state.rate import Rate, Stretch, rate_of
from vlm_durable.state.workers import Phase, Worker, Workers
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError

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
    def from_catalog(cls, settings: Settings, catalog: Catalog) -> ExpectedCost:
        """The costs of a catalogue's ranges, counted once a catalogue. Raises CatalogUnreadableError."""
        longest = max(map(len, catalog.ranges), default=0)
        return cls(settings, _whole(settings, catalog), longest * settings.max_images)

    def left(self, key: str, *, anew: bool = False) -> int:
        """Images of the properties of a range that are not committed: 0 where it is published.

        Of several question sets, of that with the most left: those of one model look at the images together.
        anew: what is published is computed again, so it counts for nothing.

        What is committed is known by its number of rows, so their images are taken as average ones. Raises
        KeyError for a range that the catalogue does not have.
        """
        return max(self._left_of(asked.asset, key, anew=anew) for asked in question_sets(self.settings))

    def _left_of(self, asset: AssetFolders, key: str, *, anew: bool) -> int:
        committed = committed_rows(asset, key)
        if not committed and not anew:
            with contextlib.suppress(RecordDamagedError):
                if PublishedPartitions(asset).record(key) is not None:
                    return 0
        return self.left_after(key, committed)

    def left_after(self, key: str, rows: int) -> int:
        """Images of a range that are left once so many of its rows are done. Raises KeyError as ``left``."""
        return round(self.whole[key] * (1.0 - rows / len(PropertyRange.from_key(key))))

    def heaviest_first(self, keys: Collection[str]) -> list[str]:
        """Known keys, the heaviest range first. What is done of a range counts in ``priority`` alone."""
        return sorted((key for key in keys if key in self.whole), key=lambda key: (-self.whole[key], key))

    def priority(self, key: str, *, anew: bool = False) -> int:
        """A run's place in the queue, by what is left: a whole number, never above 0.

        What a person ranks 1 or more goes before all of it. anew: see ``left``. Raises KeyError for a range
        that the catalogue does not have.
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
            first = ExpectedCost.from_catalog(settings, Catalog.open(settings.home)).heaviest_first(plain)
        except (CatalogError, OSError) as error:
            _log.warning("Partitions are taken in plain order, not heaviest first: %s", error)
            return plain
        of_catalog = frozenset(first)
        return [*first, *(key for key in plain if key not in of_catalog)]

    return order


_counted: dict[str, Mapping[str, int]] = {}
"""The last count of this process. Counting a catalogue of a million properties takes most of a second."""


def _whole(settings: Settings, catalog: Catalog) -> Mapping[str, int]:
    question = f"{catalog.path} {catalog.catalog_id} {catalog.header.sequence} {settings.max_images}"
    if question not in _counted:
        images_by_key = _images_of_ranges(catalog, settings.max_images)
        _counted.clear()
        _counted[question] = images_by_key
    return _counted[question]


def _images_of_ranges(catalog: Catalog, max_images: int) -> dict[str, int]:
    if not catalog.ranges:
        return {}
    shown = np.minimum(catalog.image_counts(), max_images)[: catalog.ranges[-1].stop]
    sums = np.add.reduceat(shown, [range_.start for range_ in catalog.ranges])
    return {range_.key: int(images) for range_, images in zip(catalog.ranges, sums, strict=True)}


@dataclass(frozen=True)
class SetProgress:
    """How far one question set is. done: rows of each partition by key, those that are not asked too.

    share: of the published properties, those that were asked. Only they take a device's time.
    """

    rate: Rate
    done: Mapping[str, int]
    share: float = 1.0

    def seconds_left(self, sizes: Mapping[str, int]) -> float | None:
        """Seconds until partitions of these sizes, by key, are done; None if the rate is unknown."""
        left = (size - self.done.get(key, 0) for key, size in sizes.items())
        return self.rate.seconds_left(self.share * rows for rows in left)


def read_progress(
    settings: Settings, catalog: Catalog, anew: Mapping[str, Collection[str]] = MappingProxyType({})
) -> dict[str, SetProgress]:
    """The progress of each question set, by its asset, as in ``status``, without its rest. Raises OSError.

    anew: for each asset, partitions whose published rows are computed again, so that they count for nothing.
    """
    sizes = {range_.key: len(range_) for range_ in catalog.ranges}
    workers = Workers(control_state(settings)).living()
    return {
        asked.asset.name: _read_progress(asked.asset, sizes, workers, anew.get(asked.asset.name, ()))
        for asked in question_sets(settings)
    }


def _read_progress(
    asset: AssetFolders, sizes: Mapping[str, int], workers: Iterable[Worker], anew: Collection[str]
) -> SetProgress:
    working = [worker for worker in workers if worker.asset == asset.name]
    published = read_published_rows(asset, sizes)
    done = {key: committed_rows(asset, key) for key in asset.journal_keys() if key in sizes}
    # All rows committed and not published: a check keeps them back.
    done = {key: rows for key, rows in done.items() if rows < sizes[key]}
    done |= {key: rows.asked + rows.not_asked for key, rows in published.items() if key not in anew}
    done |= {worker.partition: worker.committed for worker in working}
    rows_of = published.values()
    return SetProgress(measure(rows_of, working, time.time()), done, share_asked(rows_of))


def share_asked(published: Collection[PublishedRows]) -> float:
    """The share of the published properties that was asked; 1 where none is published."""
    left_out = sum(rows.not_asked for rows in published)
    asked = sum(rows.asked for rows in published)
    return asked / (asked + left_out) if left_out else 1.0


def measure(published: Collection[PublishedRows], working: Iterable[Worker], now: float) -> Rate:
    """The rate of the latest stretch of work. working: the processes that describe now, waiting ones too."""
    work = [stretch for rows in published for stretch in rows.stretches]
    work += [worker.stretch(now) for worker in working if worker.phase is not Phase.WAITING]
    # The start of the process that published it, without rows: its start-up is part of the time.
    work += [
        Stretch("", rows.began, max(stretch.last for stretch in rows.stretches), 0)
        for rows in published
        if rows.began is not None and rows.stretches
    ]
    return rate_of(work)

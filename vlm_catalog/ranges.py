"""Property ranges: how the ordinals of the catalogue are cut into partitions, and their keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vlm_durable.files.layout import AssetFolders, Home
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror

CATALOG, DESCRIPTIONS, EMBEDDINGS = "property_catalog", "property_descriptions", "property_embeddings"
"""The last two are the assets with a file for each range, beside those of question sets. All other code takes
their names from here, or from the settings."""

SET_PREFIX: Final = "property_"
"""The asset of a question set is named by it and the set's name."""

ORDINAL_LIMIT = 1_000_000_000
"""Ordinals have nine digits at most, so that keys sort as text the way their ranges sort as numbers."""

_KEY = re.compile(r"([0-9]{9})-([0-9]{9})")


class InvalidRangeError(ValueError):
    """Not a range of ordinals, or not a range's key."""


@dataclass(frozen=True, order=True)
class PropertyRange:
    """Consecutive ordinals ``[start, stop)``, at least one; ``0 <= start < stop <= 1_000_000_000``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= ORDINAL_LIMIT:
            raise InvalidRangeError(
                f"[{self.start}, {self.stop}) is not a range of ordinals: it needs "
                f"0 <= start < stop <= {ORDINAL_LIMIT}"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, ordinal: object) -> bool:
        return isinstance(ordinal, int) and self.start <= ordinal < self.stop

    def __str__(self) -> str:
        return self.key

    @property
    def key(self) -> str:
        """The partition key, first and last ordinal inclusive: ``[0, 1000)`` is ``000000000-000000999``."""
        return f"{self.start:09d}-{self.stop - 1:09d}"

    @classmethod
    def from_key(cls, key: str) -> PropertyRange:
        """The range that a partition key names. Raises InvalidRangeError where the text is no such key."""
        match = _KEY.fullmatch(key)
        if match is None or int(match[2]) < int(match[1]):
            raise InvalidRangeError(
                f"{key!r} is not a key of a property range: one reads like 000000000-000000999"
            )
        return cls(int(match[1]), int(match[2]) + 1)


def range_assets(home: Home, store: Mirror = NO_MIRROR) -> tuple[AssetFolders, ...]:
    """Every asset with a file for each range: descriptions, embeddings, then question sets.

    The sets are those of which the home or the store has something, whether settings name them or not.
    Raises OSError, StoreError.
    """
    sets = _sets_among(home.asset_names()) | stored_sets(home, store)
    return tuple(map(home.asset, (DESCRIPTIONS, EMBEDDINGS, *sorted(sets))))


def stored_sets(home: Home, store: Mirror) -> set[str]:
    """The assets of question sets of which the store has a published file or a journal, open or closed.

    Raises StoreError.
    """
    begins = home.asset(SET_PREFIX)
    beginnings = [str(path.relative_to(home.root)) for path in (begins.published, begins.journals)]
    folders = (folder for beginning in beginnings for folder in store.folders(beginning))
    # Some stores list a folder of which every object was deleted.
    filled = (folder for folder in folders if any(True for _ in store.names(f"{folder}/")))
    return _sets_among(folder.rpartition("/")[2] for folder in filled)


def _sets_among(assets: Iterable[str]) -> set[str]:
    return {name for name in assets if name.startswith(SET_PREFIX)} - {CATALOG, DESCRIPTIONS, EMBEDDINGS}


def cut_around(start: int, stop: int, size: int, fixed: Sequence[PropertyRange]) -> tuple[PropertyRange, ...]:
    """Cut ``[start, stop)`` as ``cut_ranges`` does, with these ranges, in order, among the others."""
    cut: list[PropertyRange] = []
    for fixed_range in fixed:
        cut += [*cut_ranges(start, fixed_range.start, size), fixed_range]
        start = fixed_range.stop
    return (*cut, *cut_ranges(start, stop, size))


def cut_ranges(start: int, stop: int, size: int) -> tuple[PropertyRange, ...]:
    """Cut ``[start, stop)`` into ranges of ``size``; the last one ends at ``stop``. No range where empty."""
    if size < 1:
        raise InvalidRangeError(f"a range of {size} properties cannot be: the range size is 1 or more")
    return tuple(PropertyRange(first, min(first + size, stop)) for first in range(start, stop, size))

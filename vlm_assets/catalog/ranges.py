"""Property ranges: how the ordinals of the catalogue are cut into partitions, and their keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster import StaticPartitionsDefinition

DESCRIPTIONS, EMBEDDINGS = "property_descriptions", "property_embeddings"
"""The assets with a file for each range. All other code takes their names from here, or from the settings."""

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


def partitions_definition(ranges: Sequence[PropertyRange]) -> StaticPartitionsDefinition:
    """One static partition a range, in the order given."""
    # The ingest and the decode workers use ranges too, and need not wait a second for Dagster's import.
    from dagster import StaticPartitionsDefinition

    return StaticPartitionsDefinition([property_range.key for property_range in ranges])

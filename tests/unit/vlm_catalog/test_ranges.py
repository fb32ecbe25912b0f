"""Property ranges and their keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_catalog.ranges import (
    ORDINAL_LIMIT,
    InvalidRangeError,
    PropertyRange,
    cut_ranges,
)

RANGES = st.tuples(st.integers(0, ORDINAL_LIMIT - 1), st.integers(1, ORDINAL_LIMIT)).map(
    lambda pair: PropertyRange(pair[0], min(pair[0] + pair[1], ORDINAL_LIMIT))
)


def test_key_is_inclusive_and_padded() -> None:
    """The key that everything on disk is named by."""
    assert PropertyRange(0, 1000).key == "000000000-000000999"
    assert PropertyRange(240, 241).key == "000000240-000000240"


@given(RANGES)
def test_key_names_its_range(one: PropertyRange) -> None:
    """A key leads back to its range, whatever the range."""
    assert PropertyRange.from_key(one.key) == one


@given(st.lists(RANGES))
def test_keys_sort_as_their_ranges_start(ranges: list[PropertyRange]) -> None:
    """Sorting files by name puts the ranges in order."""
    assert [one.key for one in sorted(ranges)] == sorted(one.key for one in ranges)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "0-9",
        "000000000-00000999",
        "000000010-000000009",
        "000000000-000000999.parquet",
        "\u0660" * 9 + "-" + "\u0669" * 9,
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    """A file's name that only looks like a key is not taken for one."""
    with pytest.raises(InvalidRangeError, match="000000000-000000999"):
        PropertyRange.from_key(key)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (6, 5), (0, ORDINAL_LIMIT + 1)])
def test_impossible_ranges_are_refused(start: int, stop: int) -> None:
    """An empty range or one beyond nine digits would make keys that do not sort."""
    with pytest.raises(InvalidRangeError):
        PropertyRange(start, stop)


@given(st.integers(0, 10_000), st.integers(0, 500), st.integers(1, 700))
def test_cutting_covers_everything_once(start: int, count: int, size: int) -> None:
    """No ordinal is left out of the ranges, none is in two, and only the last range may be short."""
    ranges = cut_ranges(start, start + count, size)
    assert [ordinal for one in ranges for ordinal in range(one.start, one.stop)] == list(
        range(start, start + count)
    )
    assert all(len(one) == size for one in ranges[:-1])


def test_a_range_size_below_one_is_refused() -> None:
    """A size of 0 would cut nothing."""
    with pytest.raises(InvalidRangeError):
        cut_ranges(0, 5, 0)

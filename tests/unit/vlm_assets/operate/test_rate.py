"""The one rate: rows committed per second of wall time, start-up included."""

from __future__ import annotations

import pytest

from vlm_assets.assets.published_rows import PublishedRows, Stretch
from vlm_assets.operate.rate import GAP_SECONDS, Rate, measure


def rows_of(device: str, first: float, last: float, rows: int, began: float | None = None) -> PublishedRows:
    return PublishedRows(rows, {}, (Stretch(device, first, last, rows),), began)


def test_start_up_and_waiting_between_runs_are_part_of_the_rate() -> None:
    """Two partitions of 50 rows, each described in 10 s, are not 5 a second if they took 100 s."""
    rate = measure([rows_of("a", 40, 50, 50, began=0), rows_of("a", 90, 100, 50, began=55)], [], now=500)
    assert rate.per_second == pytest.approx(1.0)
    assert rate.seconds_left(30) == pytest.approx(30)


def test_devices_side_by_side_share_the_wall_time() -> None:
    """The rate of all is the sum of the devices' rates."""
    rate = measure([rows_of("a", 0, 100, 100), rows_of("b", 0, 100, 50)], [], now=100)
    assert (rate.of_device("a"), rate.of_device("b"), rate.of_device("c")) == (1.0, 0.5, None)
    assert rate.per_second == 1.5


def test_a_night_without_work_does_not_count() -> None:
    """A pause ends a stretch of work: the rate is that of the latest one."""
    night = GAP_SECONDS + 1
    rate = measure([rows_of("a", 0, 100, 1), rows_of("a", 100 + night, 200 + night, 100)], [], now=0)
    assert rate.per_second == pytest.approx(1.0)


def test_nothing_committed_has_no_rate() -> None:
    """No figure is invented before the first row."""
    assert measure([], [], now=0) == Rate()
    assert Rate().per_second is None
    assert Rate().seconds_left(5) is None
    assert Rate().seconds_left(0) == 0.0

"""What ranges cost in images, and the order that follows: the heaviest first."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from vlm_assets.assets.published_rows import PublishedRows
from vlm_assets.config.settings import Settings
from vlm_assets.services import expected_cost
from vlm_assets.services.backfill import Backfill
from vlm_assets.services.expected_cost import (
    ExpectedCost,
    SetProgress,
    heaviest_first,
    measure,
    read_progress,
    share_asked,
)
from vlm_assets.services.status import read_status
from vlm_assets.webserver.api import DagsterApi
from vlm_catalog.catalog import Catalog, catalog_path
from vlm_catalog.catalog_copies import backup_paths
from vlm_durable.state.database import open_state
from vlm_durable.state.rate import GAP_SECONDS, Stretch
from vlm_durable.state.workers import Phase, Workers

LIGHT, HEAVY, MIDDLE, LAST = (f"{start:09d}-{start + 1:09d}" for start in (0, 2, 4, 6))


def cost_of(settings: Settings) -> ExpectedCost:
    return ExpectedCost.from_catalog(settings, Catalog.open(settings.home))


def test_cost_is_images_shown_of_what_is_not_committed(uneven: Settings, commit) -> None:
    """A property costs its images up to max_images; committed rows cost nothing more."""
    cost = cost_of(uneven)
    assert cost.whole == {LIGHT: 2, HEAVY: 15, MIDDLE: 4, LAST: 5}
    assert [cost.left(key) for key in cost.whole] == [2, 15, 4, 5]
    commit(uneven, HEAVY, 1)
    assert cost.left(HEAVY) == 8
    commit(uneven, HEAVY, 2)
    assert cost.left(HEAVY) == 0
    assert cost_of(uneven.model_copy(update={"max_images": 20})).whole[HEAVY] == 23


def test_the_queue_is_ordered_by_what_is_left(uneven: Settings, commit) -> None:
    """The heaviest range goes first; an interrupted one stands where the rest of it belongs."""
    cost = cost_of(uneven)
    assert cost.heaviest_first([LIGHT, MIDDLE, HEAVY, LAST]) == [HEAVY, LAST, MIDDLE, LIGHT]
    assert sorted(cost.whole, key=cost.priority, reverse=True) == [HEAVY, LAST, MIDDLE, LIGHT]
    commit(uneven, LAST, 1)
    assert cost.priority(HEAVY) > cost.priority(MIDDLE) > cost.priority(LAST) == cost.priority(LIGHT)


def test_priority_is_never_above_what_a_person_asks_for(uneven: Settings, commit) -> None:
    """Priorities are below 1; ranges with nothing left come last, heaviest first."""
    commit(uneven, HEAVY, 2)
    commit(uneven, LIGHT, 2)
    cost = cost_of(uneven)
    ranked = sorted(cost.whole, key=cost.priority, reverse=True)
    assert ranked == [LAST, MIDDLE, HEAVY, LIGHT]
    assert max(map(cost.priority, ranked)) < 1


def test_images_are_counted_once_a_catalogue(uneven: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process counts them once, however often it asks; for another setting they are counted anew."""
    counted = cost_of(uneven).whole
    monkeypatch.setattr(expected_cost, "_images_of_ranges", lambda *_: {"counted": 1})
    assert cost_of(uneven).whole == counted
    assert cost_of(uneven.model_copy(update={"max_images": 1})).whole == {"counted": 1}


def test_an_unreadable_catalogue_gives_plain_order_and_says_so(uneven, caplog) -> None:
    """Ordering never stops a retry: without a catalogue the keys come in plain order, and that is logged."""
    order = heaviest_first(uneven)
    assert order([LIGHT, HEAVY, "unknown"]) == [HEAVY, LIGHT, "unknown"]
    for path in (catalog_path(uneven.home), backup_paths(uneven.home)[0]):
        path.write_bytes(b"not parquet")
    with caplog.at_level(logging.WARNING):
        assert order([MIDDLE, LIGHT]) == [LIGHT, MIDDLE]
    assert "plain order" in caplog.text


def rows_of(
    device: str, first: float, last: float, rows: int, began: float | None = None, not_asked: int = 0
) -> PublishedRows:
    return PublishedRows(rows, {}, (Stretch(device, first, last, rows),), began, not_asked)


def test_a_run_that_waits_for_a_device_is_no_work(tmp_path: Path) -> None:
    """It may wait for hours behind a training: the rate is that of the work before."""
    with Workers(open_state(tmp_path)).begin(run_id="r", asset="a", partition="k", expected=9) as beat:
        beat.enter(Phase.WAITING)
        waiting = replace(beat.worker, started_at=120.0)
    assert measure([rows_of("a", 0, 100, 100)], [waiting], now=9_999).per_second == 1.0


NIGHT = GAP_SECONDS + 1
RATES = {
    # Published partitions, rows a second of all devices, and the seconds that rows in partitions then take.
    "start-up and waiting between runs count: 100 rows, described in 20 s, took 100 s": (
        [rows_of("a", 40, 50, 50, began=0), rows_of("a", 90, 100, 50, began=55)],
        1.0,
        {(10, 20): 30},
    ),
    "two devices: the last partition goes at the rate of one": (
        [rows_of("a", 0, 100, 100), rows_of("b", 0, 100, 100)],
        2.0,
        {(50,): 50, (50, 50, 0): 50, (50, 50, 50, 50): 100},
    ),
    "a night without work ends a stretch of work: the rate is that of the latest": (
        [rows_of("a", 0, 100, 1), rows_of("a", 100 + NIGHT, 200 + NIGHT, 100)],
        1.0,
        {},
    ),
    "no figure is invented before the first row": ([], None, {(5,): None, (0,): 0.0}),
}


@pytest.mark.parametrize(("published", "per_second", "times"), RATES.values(), ids=RATES)
def test_the_rate_is_that_of_wall_time(published, per_second, times) -> None:
    """The time left is that of the rows left at the rate of the devices that work on them."""
    rate = measure(published, [], now=500)
    assert rate.per_second == pytest.approx(per_second)
    assert {rows: rate.seconds_left(rows) for rows in times} == pytest.approx(times)


def test_devices_side_by_side_share_the_wall_time() -> None:
    """The rate of all is the sum of the devices' rates."""
    rate = measure([rows_of("a", 0, 100, 100), rows_of("b", 0, 100, 50)], [], now=100)
    assert (rate.of_device("a"), rate.of_device("b"), rate.of_device("c")) == (1.0, 0.5, None)
    assert rate.per_second == 1.5


def test_a_property_that_is_not_asked_takes_no_time() -> None:
    """Of a set with a condition, the time left is that of the share that will be asked."""
    published = [rows_of("a", 0, 20, 5, not_asked=95), rows_of("a", 20, 40, 5, not_asked=95)]
    progress = SetProgress(measure(published, [], now=40), {"1": 100, "2": 100}, share_asked(published))
    assert progress.seconds_left({"1": 100, "2": 100, "3": 100, "4": 100}) == pytest.approx(40.0)
    assert share_asked([]) == 1.0


def test_the_line_of_a_run_that_makes_partitions_anew_counts_what_it_made(empty) -> None:
    """Rows that are computed again are left to do until their partition is published anew."""
    first, second, _ = empty.keys
    for key in (first, second):
        empty.describe(key)
    api, dagster = (
        DagsterApi("http://127.0.0.1:9", empty.settings.dagster_home),
        DagsterInMemory(SimulatedClock()),
    )
    work = Backfill(api, dagster, empty.settings, empty.keys)
    assert work.progress().properties == 6
    work.lacking = {key: {"property_descriptions"} for key in (first, second)}
    assert work.progress().properties == 0
    for asset in work.assets:
        dagster.materialize(asset, second)
    assert work.progress().properties == 3


def test_the_line_of_a_run_says_what_status_says(empty, commit, refuse) -> None:
    """Rate and rows that are done agree: of what is published, under way, and kept back by a check."""
    first, second, third = empty.keys
    empty.describe(first)
    commit(empty.settings, second, 1)
    commit(empty.settings, third, 3)
    refuse(empty.settings, third)
    progress = read_progress(empty.settings, empty.catalog)["property_descriptions"]
    found = read_status(empty.settings.model_copy(update={"devices": "cpu:2"}), empty.catalog)
    api = DagsterApi("http://127.0.0.1:9", empty.settings.dagster_home)
    now = Backfill(api, DagsterInMemory(SimulatedClock()), empty.settings, [first, second]).progress()
    assert progress.rate.per_second == now.rate == found.properties_per_second
    assert (now.properties, now.seconds_left) == (4, pytest.approx(2 / now.rate))
    described = [one for one in found.partitions if one.asset == "property_descriptions"]
    assert {one.key: one.usable_rows for one in described} == {first: 3, second: 1, third: 0}
    assert {one.key: progress.done.get(one.key, 0) for one in described} == {first: 3, second: 1, third: 0}

"""The look after the catalogue: damage is put right within the hour and told once, whoever put it right."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.alerts.alert import DAY_SECONDS
from resources.alerts.outbox import Outbox
from sensors.catalog_watch import COMPARE_SECONDS, CatalogWatch
from tests.support.damage import damage_rows
from tests.support.listings import list_properties
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_copies import backup_paths, catalog_path, check_copies, last_put_back
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def home(tmp_path: Path) -> Path:
    ingest(list_properties(tmp_path, 20), tmp_path / "home", range_size=5)
    return tmp_path / "home"


def watch_of(home: Path) -> CatalogWatch:
    return CatalogWatch(
        compare=lambda: check_copies(home),
        last_put_back=lambda: last_put_back(home),
        errors=CatalogError,
        outbox=Outbox(open_state(home / ".state")),
    )


def test_bit_rot_is_put_right_within_the_hour_and_told_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to read the rows: the comparison finds and repairs the damage; one alert stands a day."""
    clock = Clock(1_000_000.0)
    monkeypatch.setattr("vlm_catalog.catalog_copies.time.time", clock)
    watch = watch_of(home)
    assert "alike" in watch.check(clock.now)
    damage_rows(catalog_path(home))
    clock.now += 60.0
    assert "alike" in watch.check(clock.now), "not every tick reads both files"
    clock.now += COMPARE_SECONDS
    assert "put back from its second copy" in watch.check(clock.now)
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes()
    for _ in range(3):
        clock.now += 60.0
        watch.check(clock.now)
    (alert,) = watch.outbox.open_subjects().values()
    assert alert.title == "The catalogue was damaged and was put back"
    assert ".quarantine" in alert.next_step
    assert alert.lasts == DAY_SECONDS, "the alerts sensor closes it"
    clock.now += DAY_SECONDS
    assert "alike" in watch.check(clock.now)


def test_bit_rot_is_put_right_after_the_clock_was_put_back(home: Path) -> None:
    """The last comparison lies ahead: the next is not a month later."""
    watch = watch_of(home)
    watch.check(1_000_000_000.0)
    damage_rows(catalog_path(home))
    watch.check(1_000_000_000.0 - 30 * DAY_SECONDS)
    assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes()


def test_what_a_reader_put_back_is_told_too(home: Path) -> None:
    """A run, a command or a page may meet the damage first."""
    damage_rows(catalog_path(home))
    Catalog.open(home).verify()
    clock = Clock(last_put_back(home)[0] + 5.0)
    watch_of(home).check(clock.now)
    (alert,) = watch_of(home).outbox.open_subjects().values()
    assert alert.title == "The catalogue was damaged and was put back"


def test_a_catalogue_that_nobody_can_put_back_is_told_until_a_person_did(home: Path) -> None:
    """With both copies damaged the alert says what to do, and closes when the catalogue reads again."""
    whole = catalog_path(home).read_bytes()
    damage_rows(catalog_path(home))
    backup_paths(home)[0].write_bytes(b"lost")
    clock = Clock(1_000_000.0)
    watch = watch_of(home)
    assert "cannot be read" in watch.check(clock.now)
    (alert,) = watch.outbox.open_subjects().values()
    assert alert.title == "The catalogue cannot be read"
    assert "Bring it back" in alert.next_step
    catalog_path(home).write_bytes(whole)
    clock.now += 60.0
    watch.check(clock.now)
    assert not watch.outbox.open_subjects()
    assert backup_paths(home)[0].read_bytes() == whole

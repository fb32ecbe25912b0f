"""What the sensors over the catalogue are handed: ``sensors/catalog_watch.py``, ``sensors/new_ranges.py``."""

from __future__ import annotations

from collections.abc import Collection

import dagster as dg

from resources.alerts.outbox import Outbox
from resources.state.pause import pause_of
from sensors.catalog_watch import CatalogWatch, build_catalog_watch_sensor
from sensors.new_ranges import NewRanges, build_new_ranges_sensor
from sensors.ticks import Ticks
from vlm_assets.automation.retries import ASSETS
from vlm_assets.catalog.catalog import Catalog, CatalogMissingError
from vlm_assets.catalog.catalog_copies import backup_paths, catalog_path, check_copies, last_put_back
from vlm_assets.catalog.catalog_file import CatalogError
from vlm_assets.catalog.ingest import IngestBusyError, close_tail
from vlm_assets.operate.dagster_server.api import reload_running
from vlm_assets.operate.expected_cost import heaviest_first
from vlm_assets.resource_settings import control_state
from vlm_assets.settings import Settings


def build_catalog_sensor(settings: Settings) -> dg.SensorDefinition:
    """The sensor over the catalogue of this home; without a catalogue it has nothing to do."""
    home, state = settings.home, control_state(settings)

    def compare() -> None:
        if catalog_path(home).exists() or backup_paths(home)[0].exists():
            check_copies(home)

    watch = CatalogWatch(
        compare=compare,
        last_put_back=lambda: last_put_back(home),
        errors=CatalogError,
        outbox=Outbox(state),
    )
    return build_catalog_watch_sensor(watch, ticks=Ticks(state))


def build_new_ranges(settings: Settings, partitions: dg.PartitionsDefinition[str]) -> dg.SensorDefinition:
    """The sensor over the catalogue of this home."""
    new_ranges = NewRanges(
        assets=ASSETS,
        keys=tuple(partitions.get_partition_keys()),
        close=lambda now: close_old_tail(settings, now=now),
        untouched=lambda keys: _untouched(settings, keys),
        heaviest_first=heaviest_first(settings),
        paused=lambda: pause_of(control_state(settings)) is not None,
        cap=settings.retry_runs,
    )
    return build_new_ranges_sensor(new_ranges, ticks=Ticks(control_state(settings)))


def close_old_tail(settings: Settings, *, now: float) -> str | None:
    """Make a partition of the tail if its first property has waited long enough; a sentence, or None.

    now: unix seconds. Raises CatalogError, OSError.
    """
    try:
        tail = Catalog.open(settings.home).header.tail
        if tail is None or now - tail.since < settings.run_new_ranges_after_hours * 3600.0:
            return None
        closed = close_tail(settings.home)
    except (CatalogMissingError, IngestBusyError):
        return None
    if closed is None:
        return None
    waited = (
        f"The last {len(closed)} properties have waited long enough: they are partition {closed.key} now."
    )
    return f"{waited} {reload_running(settings.dagster_home)}"


def _untouched(settings: Settings, keys: Collection[str]) -> list[str]:
    """Those without a published file and without work under way in any asset."""
    touched: set[str] = set()
    for asset in ASSETS:
        folders = settings.layout.asset(asset)
        touched.update(folders.published_keys(), folders.recorded_keys(), folders.journal_keys())
    return [key for key in keys if key not in touched]

"""What the sensor that looks after the catalogue is handed (``sensors/catalog_watch.py``)."""

from __future__ import annotations

import dagster as dg

from resources.alerts.outbox import Outbox
from sensors.catalog_watch import CatalogWatch, build_catalog_watch_sensor
from vlm_assets.catalog.catalog_copies import backup_paths, catalog_path, check_copies, last_put_back
from vlm_assets.catalog.catalog_file import CatalogError
from vlm_assets.settings import Settings


def build_catalog_sensor(settings: Settings) -> dg.SensorDefinition:
    """The sensor over the catalogue of this home; without a catalogue it has nothing to do."""
    home = settings.home

    def compare() -> None:
        if catalog_path(home).exists() or backup_paths(home)[0].exists():
            check_copies(home)

    watch = CatalogWatch(
        compare=compare,
        last_put_back=lambda: last_put_back(home),
        errors=CatalogError,
        outbox=Outbox(settings.state_directory / "alerts"),
    )
    return build_catalog_watch_sensor(watch, ticks=settings.state_directory / "ticks")

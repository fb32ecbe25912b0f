"""dataset_plan: what describing the rest will take, as an asset whose page has figures and what-ifs.

``vlm-assets plan`` says the same (``vlm_assets/services/forecast.py``). It also measures, where nothing was
measured under the current settings.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

from typing import TYPE_CHECKING

import dagster as dg

from vlm_assets.assets import markdown
from vlm_assets.config.resource_settings import (
    build_gpu,
    build_vision_language_model,
)
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.wording import counted, duration

if TYPE_CHECKING:
    from vlm_assets.services.forecast import Forecast

ASSET = "dataset_plan"

_DAY = 86_400.0


def plan_metadata(forecast: "Forecast") -> dict[str, dg.MetadataValue]:
    """What a person wants to know before the run; the numbers are plotted over time."""
    low, high = (duration(days * _DAY) for days in forecast.days_band)
    # A list: the page cuts a table of sixteen devices off at its right side.
    what_if = [
        f"{row}: {', '.join(f'{duration(days * _DAY)} on {devices}' for devices, days in by_devices.items())}"
        for row, by_devices in forecast.what_if.items()
    ]
    metadata: dict[str, dg.MetadataValue] = {
        "all of it anew" if forecast.is_anew else "what is left": dg.MetadataValue.text(
            f"{counted(forecast.properties, 'properties')}, {counted(forecast.images, 'images')},"
            f" {counted(forecast.partitions, 'partitions')}:"
            f" {low} to {high} on {counted(forecast.devices, 'devices')}"
        ),
        "what if": markdown.metadata(markdown.bullets(what_if)),
        "days": dg.MetadataValue.float(float(f"{forecast.days:.4g}")),
        "failures expected": dg.MetadataValue.float(float(f"{forecast.failures_expected:.4g}")),
        "odds of no failure": dg.MetadataValue.float(round(forecast.no_failure, 4)),
        "best commit interval (s)": dg.MetadataValue.float(round(forecast.commit_seconds_best, 1)),
        "range size for 2% start-up": dg.MetadataValue.int(forecast.range_size),
        "disk (bytes)": dg.MetadataValue.int(round(forecast.disk_bytes)),
        "disk free (bytes)": dg.MetadataValue.int(forecast.disk_free_bytes),
    }
    if forecast.notes:
        metadata["notes"] = markdown.metadata(markdown.bullets(forecast.notes))
    if forecast.compared is not None:
        metadata["the last plan"] = dg.MetadataValue.text(forecast.compared.sentence())
    return metadata


def build_dataset_plan(settings: Settings) -> dg.AssetsDefinition:
    """The asset. It measures nothing: no device is taken for a look at a page."""

    @dg.asset(
        key=settings.names.key(ASSET),
        group_name=settings.names.name("properties"),
        kinds={"duckdb"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        description=(
            f"Days, failures, disk and settings for what is left, from what {command('compare')} or"
            f" {command('plan')} measured; and how far the last plan was off."
        ),
    )
    def dataset_plan(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        from vlm_assets.services.forecast import compare_with_run, make_forecast
        from vlm_assets.services.measurement import current_measurement

        settings.name_in_commands()
        catalog, gpu = Catalog.open(settings.home), build_gpu(settings)
        measured = current_measurement(settings, build_vision_language_model(settings), gpu)
        if measured is None:
            raise dg.Failure(
                f"Nothing was measured under these settings: {command('plan')} measures.", allow_retries=False
            )
        compare_with_run(settings)
        devices = max(1, len(gpu.usable()))
        forecast = make_forecast(settings, catalog, measured, devices=devices, devices_here=devices)
        return dg.MaterializeResult(metadata=plan_metadata(forecast))

    return dataset_plan

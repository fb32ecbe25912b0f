"""The command ``plan``: measures where nothing is measured yet, and says the forecast."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated

import typer

from vlm_assets.assets.looked_at import asked_shares
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_all, say_as_json
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.question_sets import further_set
from vlm_assets.config.resource_settings import (
    build_gpu,
    build_vision_language_model,
)
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.forecast import (
    SECONDS_A_DAY,
    Forecast,
    compare_with_run,
    keep_forecast,
    make_forecast,
)
from vlm_assets.services.measurement import current_measurement, measure
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.wording import counted, duration

_EXAMPLES = """\b
vlm-assets plan
vlm-assets plan --devices 8 --price-per-hour 1.80
vlm-assets plan --set access     a question set by itself, images looked at again
vlm-assets plan --json"""


@app.command("plan", epilog=_EXAMPLES)
def plan_command(
    home: Home = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices that work; default: those of this machine.")
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0, help=f"Of one device for an hour; default {PREFIX}PRICE_PER_HOUR."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Properties to measure with, where nothing is measured yet.")
    ] = None,
    set_name: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="Of one question set, asked by itself.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what describing the rest will take: days, cost, disk, failures.

    Stands on what `vlm-assets compare` measured under these settings. Where nothing was measured yet, it
    describes a sample and runs a few small partitions in a folder of their own; no row of the home is
    written.
    The prediction is kept, and compared with the run when that is over.
    """
    settings = chosen_settings(home)
    catalog = Catalog.open(settings.home)
    if set_name is not None:
        settings = alone(settings, set_name)
    doing("looking of which properties it is asked")
    asked = asked_shares(settings, catalog)
    settings = settings.of_all()
    require_models(settings)
    gpu, model = build_gpu(settings), build_vision_language_model(settings)
    devices_here = max(1, len(gpu.usable()))
    doing("comparing the last plan with its run")
    compare_with_run(settings)
    doing("looking at the model and what was measured with it")
    measured = current_measurement(settings, model, gpu)
    if measured is None or measured.run is None:
        sample_size = limit or max(20, min(4 * settings.batch_size, 200))
        report = None if as_json else partial(say, err=True)
        measured = measure(settings, catalog, gpu, model, limit=sample_size, report=report)
    doing("planning what is left")
    forecast = make_forecast(
        settings,
        catalog,
        measured,
        devices=devices or devices_here,
        devices_here=devices_here,
        price_per_hour=settings.price_per_hour if price_per_hour is None else price_per_hour,
        asked=asked,
    )
    if not forecast.is_anew:
        keep_forecast(settings, forecast)
    if as_json:
        say_as_json(forecast.as_json())
    else:
        say_all(sentences(forecast))


def alone(settings: Settings, name: str) -> Settings:
    """The settings of a question set as if nothing else were asked. Raises SettingsError."""
    own = further_set(settings, name).settings
    return own.model_copy(update={"embedding_model": None})


def sentences(forecast: Forecast) -> list[str]:
    """The forecast, for people."""
    low, high = (duration(days * SECONDS_A_DAY) for days in forecast.days_band)
    finish = datetime.fromtimestamp(forecast.finish).astimezone().strftime("%Y-%m-%d %H:%M")
    subject = "Everything is described; all of it anew" if forecast.is_anew else "What is left"
    text = [
        f"{subject}: {counted(forecast.properties, 'properties')} with {counted(forecast.images, 'images')}"
        f" in {counted(forecast.partitions, 'partitions')}.",
        f"Time: {low} to {high} on {counted(forecast.devices, 'devices')}, most likely"
        f" {duration(forecast.days * SECONDS_A_DAY)}: done {finish} if it starts now.",
    ]
    if forecast.cost is not None and forecast.cost_band is not None:
        text.append(f"Cost: {forecast.cost_band[0]:,.2f} to {forecast.cost_band[1]:,.2f}.")
    text += [
        f"Disk: {_size(forecast.disk_bytes)} with second copies; {_size(forecast.disk_free_bytes)} are free.",
        f"Traffic, where images and results lie on S3: {_size(forecast.read_bytes)} read,"
        f" {_size(forecast.disk_bytes)} written.",
        f"Failures of devices or machines: {forecast.failures_expected:.2g} expected,"
        f" {forecast.no_failure:.0%} odds of none; work done twice:"
        f" {duration(forecast.days_lost * SECONDS_A_DAY)} of one device.",
        f"Commits: every {forecast.commit_seconds_best:,.0f} s wastes least"
        f" ({forecast.commit_cost_best:.3%} of the time; {PREFIX}COMMIT_SECONDS={forecast.commit_seconds:.0f}"
        f" wastes {forecast.commit_cost:.3%} and loses less by a kill).",
        f"Range size: from {counted(forecast.range_size, 'properties')} on start-up is below 2%; with"
        f" {forecast.range_size_now:,} as it is now, {forecast.start_share_now:.0%}.",
        f"What if (on so many devices; {command('compare')} with other settings adds a row):",
    ]
    for row, days_by_devices in forecast.what_if.items():
        times = [f"{count}: {duration(days * SECONDS_A_DAY)}" for count, days in days_by_devices.items()]
        table = ", ".join(times)
        text.append(f"  {row}\n    {table}")
    text += [f"Note: {note}" for note in forecast.notes]
    if forecast.compared is not None:
        text.append(f"The last plan: {forecast.compared.sentence()}")
    return text


def _size(size: float) -> str:
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= unit_bytes:
            return f"{size / unit_bytes:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"

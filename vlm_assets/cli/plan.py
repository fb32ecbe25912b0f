"""``vlm-assets plan``: what all of it will take, before it is begun."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import duration, say
from vlm_assets.settings import PREFIX, require_models

if TYPE_CHECKING:
    from vlm_assets.operate.plan import Plan

_EXAMPLES = """\b
vlm-assets plan
vlm-assets plan --devices 8 --price-per-hour 1.80
vlm-assets plan --json"""

Devices = Annotated[
    int | None, typer.Option(min=1, help="Devices that work; default: those of this machine.")
]
Price = Annotated[float | None, typer.Option(min=0.0, help="Of one device for an hour, in any currency.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Properties to measure with, where nothing is measured yet.")
]


@app.command(epilog=_EXAMPLES)
def plan(
    home: Home = None,
    devices: Devices = None,
    price_per_hour: Price = None,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Say what describing the rest will take: days, cost, disk, failures, and which settings fit.

    Stands on what `vlm-assets try` measured under these settings. Where nothing was measured yet, it
    describes a sample and makes one small partition in a folder of its own; no row of the home is written.
    The prediction is kept, and compared with the run when that is over.
    """
    from resources.engine.protocol import ModelLoadError
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.measurement import measure, measurement_of_now
    from vlm_assets.operate.plan import compare_with_run, keep_prediction, make_plan
    from vlm_assets.resource_settings import (
        build_gpu,
        build_text_embedding_model,
        build_vision_language_model,
    )

    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    require_models(current)
    gpu, model = build_gpu(current), build_vision_language_model(current)
    here = len(gpu.find())
    compare_with_run(current)
    found = measurement_of_now(current, model, gpu)
    if found is None or found.run is None:
        if not as_json:
            say("Nothing is measured under these settings yet: a sample and a small run take a minute or so.")
        wanted = limit or max(20, min(4 * current.batch_size, 200))
        found = measure(current, catalog, gpu, model, limit=wanted)
    try:
        width: int | None = build_text_embedding_model(current).width()
    except ModelLoadError:
        width = None
    made = make_plan(
        current,
        catalog,
        found,
        devices=devices or here,
        devices_here=here,
        price_per_hour=price_per_hour,
        vector_width=width,
    )
    if not made.is_anew:
        keep_prediction(current, made)
    if as_json:
        say_as_json(made.as_json())
    else:
        for line in lines(made):
            say(line)


def lines(plan: Plan) -> list[str]:
    """The plan in sentences."""
    days = 86_400.0
    low, high = (duration(one * days) for one in plan.days_band)
    what = "Everything is described; all of it anew" if plan.is_anew else "What is left"
    said = [
        f"{what}: {plan.properties:,} properties with {plan.images:,} images in"
        f" {plan.partitions:,} partitions.",
        f"Time: {low} to {high} on {plan.devices} devices, most likely {duration(plan.days * days)}: done"
        f" {_clock(plan.finish)} if it starts now.",
    ]
    if plan.cost is not None and plan.cost_band is not None:
        said.append(f"Cost: {plan.cost_band[0]:,.2f} to {plan.cost_band[1]:,.2f}.")
    said += [
        f"Disk: {_size(plan.disk_bytes)} with second copies; {_size(plan.disk_free_bytes)} are free.",
        f"Traffic, where images and results lie on S3: {_size(plan.read_bytes)} read,"
        f" {_size(plan.written_bytes)} written.",
        f"Failures of devices or machines: {plan.failures_expected:.2g} expected, {plan.no_failure:.0%} odds"
        f" of none; work done twice: {duration(plan.days_lost * days)} of one device.",
        f"Commits: every {plan.commit_seconds_best:,.0f} s wastes least ({plan.commit_cost_best:.3%} of the"
        f" time; {PREFIX}COMMIT_SECONDS={plan.commit_seconds:.0f} wastes {plan.commit_cost:.3%} and loses"
        " less by a kill).",
        f"Range size: from {plan.range_size:,} properties on start-up is below 2%; with"
        f" {plan.range_size_now:,} as it is now, {plan.start_share_now:.0%}.",
        "What if (days on so many devices; `vlm-assets try` with other settings adds a row):",
    ]
    for row in plan.what_if:
        table = ", ".join(f"{count}: {one:.3g}" for count, one in row.days.items())
        said.append(f"  {row.row}\n    {table}")
    said += [f"Note: {one}" for one in plan.notes]
    if plan.compared is not None:
        said.append(f"The last plan: {plan.compared.sentence()}")
    return said


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")


def _size(size: float) -> str:
    for unit, of in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= of:
            return f"{size / of:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"

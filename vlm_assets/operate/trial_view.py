"""The command ``try``: what a trial (``trial.py``) came to, on the terminal or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.operate.measurement import keep_trial
from vlm_assets.operate.terminal import AsJson, Home, app, chosen_settings, duration, say, say_as_json
from vlm_assets.operate.trial import Trial, run_trial

Limit = Annotated[int, typer.Option(min=1, help="Properties to describe.")]


@app.command("try", epilog="vlm-assets try --limit 20")
def try_command(home: Home = None, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Describe a few properties: the answers, the rate, what all would take.

    No partition is made.
    What was measured is kept for `vlm-assets plan`.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    require_models(current)
    gpu, model = build_gpu(current), build_vision_language_model(current)
    trial = run_trial(current, catalog, gpu, model, limit=limit)
    keep_trial(current, model, trial)
    if as_json:
        say_as_json(_as_json(trial))
    else:
        _show(trial)


def _as_json(trial: Trial) -> dict[str, object]:
    measured = {
        name: getattr(trial, name)
        for name in ("properties_per_second", "images_per_second", "days", "disk_bytes")
    }
    return asdict(trial) | measured


def _show(trial: Trial) -> None:
    for one in trial.described:
        say(one.property_id, bold=True)
        if one.description is None:
            say(f"  failed ({one.error_kind}): {one.error}")
        else:
            for name, value in one.description.items():
                say(f"  {name}: {value}")
        if (reason := trial.not_used.get(one.property_id)) is not None:
            say(f"  shown with {one.images_seen} images only: {reason}")
        for failure in one.images_failed:
            say(f"  image left out ({failure.kind}): {failure.error}")
    say(
        f"\n{len(trial.described)} properties in {trial.seconds:.1f} s on {trial.device}:"
        f" {trial.properties_per_second:.2f} properties/s, {trial.images_per_second:.1f} images/s"
        f" (in partitions of {trial.partition_rows}, starts of processes and models included;"
        f" the model loaded in {trial.load_seconds:.1f} s)"
    )
    asked = [one for one in trial.described if one.prompt_tokens]
    prompts = [one.prompt_tokens / one.attempts for one in asked] or [0.0]
    say(
        f"A property's images and prompt are {sum(prompts) / len(prompts):,.0f} tokens here,"
        f" {max(prompts):,.0f} at most."
        + ("" if trial.image_tokens is None else f" As set, at most: {trial.image_tokens.sentence()}.")
    )
    say(
        f"All {trial.catalogue_rows} would take {duration(86_400 * trial.days)} on {trial.devices}"
        f" device{'s' if trial.devices > 1 else ''} like it, and {trial.disk_bytes / 1e6:,.1f} MB of disk"
        " for the descriptions and their second copies."
    )

"""The command ``try``: what ``services/trial.py`` describes, in sentences or on a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.commands.html_page import Card, page, thumbnails, write_page
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.services.measurement import keep_trial
from vlm_assets.services.trial import Trial, run_trial
from vlm_durable.wording import counted, duration

_PAGE_PROPERTIES: Final = 200
_PAGE_IMAGES: Final = 12
_PAGE_HEIGHT: Final = 160


def cards(trial: Trial, catalog: Catalog) -> list[Card]:
    """Of a page: each property's first images beside its answer, or why it has none. Raises CatalogError."""
    answers = trial.described[:_PAGE_PROPERTIES]
    rows = [catalog.find(answer.property_id) for answer in answers]
    uris = [() if row is None else row.image_uris for row in rows]
    files = thumbnails(catalog, (shown[:_PAGE_IMAGES] for shown in uris), height=_PAGE_HEIGHT)
    return [
        Card(
            answer.property_id,
            trial.images_sentence(answer),
            thumbnail_files,
            {"failed": f"{answer.error_kind}: {answer.error}"}
            if answer.description is None
            else answer.description,
            uris=image_uris[:_PAGE_IMAGES],
            of=len(image_uris),
        )
        for answer, thumbnail_files, image_uris in zip(answers, files, uris, strict=True)
    ]


_EXAMPLES = """\b
vlm-assets try --limit 20
vlm-assets try --limit 50 --html tried.html"""


@app.command("try", epilog=_EXAMPLES)
def try_command(
    home: Home = None,
    limit: Annotated[int, typer.Option(min=1, help="Properties to describe.")] = 20,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a few properties: the answers, the rate, what all would take.

    No partition is made.
    What was measured is kept for `vlm-assets plan`.
    """
    settings = chosen_settings(home)
    catalog = Catalog.open(settings.home)
    require_models(settings)
    gpu, model = build_gpu(settings), build_vision_language_model(settings)
    trial = run_trial(settings, catalog, gpu, model, limit=limit)
    keep_trial(settings, model, trial)
    if html is not None:
        write_page(html, page(f"Tried on {trial.device}", cards(trial, catalog)))
    if as_json:
        figures = ("properties_per_second", "images_per_second", "days", "disk_bytes")
        say_as_json(asdict(trial) | {name: getattr(trial, name) for name in figures})
    else:
        _show(trial)
        if html is not None:
            say(f"Page: {html}")


def _show(trial: Trial) -> None:
    for answer in trial.described:
        say(answer.property_id, bold=True)
        if answer.description is None:
            say(f"  failed ({answer.error_kind}): {answer.error}")
        else:
            for name, value in answer.description.items():
                say(f"  {name}: {value}")
        if left_out := trial.images_sentence(answer):
            say(f"  {left_out}")
    say(
        f"\n{counted(len(trial.described), 'properties')} with {counted(trial.images, 'images')} in"
        f" {trial.seconds:.1f} s on"
        f" {trial.device}, after the load: {len(trial.described) / trial.seconds:.2f} properties/s,"
        f" {trial.images / trial.seconds:.1f} images/s."
    )
    say(
        f"In partitions of {trial.partition_rows:,}: {trial.properties_per_second:.2f} properties/s,"
        f" {trial.images_per_second:.1f} images/s. Each begins with {trial.start_seconds:.1f} s to start its"
        f" process and {trial.load_seconds:.1f} s to load the model."
    )
    asked = [answer for answer in trial.described if answer.prompt_tokens]
    prompts = [answer.prompt_tokens / answer.attempts for answer in asked] or [0.0]
    say(
        f"A property's images and prompt are {sum(prompts) / len(prompts):,.0f} tokens here,"
        f" {max(prompts):,.0f} at most."
        + ("" if trial.image_tokens is None else f" As set, at most: {trial.image_tokens.sentence()}.")
    )
    say(
        f"All {trial.catalogue_rows} would take {duration(86_400 * trial.days)} on"
        f" {counted(trial.devices, 'devices')} like it, and {trial.disk_bytes / 1e6:,.1f} MB of disk"
        " for the descriptions and their second copies."
    )

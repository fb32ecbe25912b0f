"""The command ``compare``: a trial of the settings, or of several contenders, in sentences or on a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from vlm_assets.commands.html_page import Card, ModelValue, page, thumbnails, write_page
from vlm_assets.commands.terminal import (
    AsJson,
    Home,
    TerminalConsole,
    app,
    chosen_settings,
    say,
    say_as_json,
    visible_line,
)
from vlm_assets.config.component_settings import settings_of_home
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_assets.services.comparison import ComparedSample, Comparison, Contender, compare
from vlm_assets.services.intervals import Share
from vlm_assets.services.measurement import keep_trial
from vlm_assets.services.second_opinion import SecondOpinion
from vlm_assets.services.trial import Trial, run_trial
from vlm_catalog.catalog import Catalog
from vlm_durable.wording import counted, duration

_PAGE_PROPERTIES: Final = 200
_PAGE_IMAGES: Final = 12
_PAGE_HEIGHT: Final = 160

_COMPARED_PROPERTIES: Final = 40
_COMPARED_IMAGES: Final = 6
_COMPARED_HEIGHT: Final = 120

_LIMIT_ALONE: Final = 20
_LIMIT_OF_SEVERAL: Final = 50
"""Fewer tell no difference between two contenders."""


def cards(trial: Trial, catalog: Catalog) -> list[Card]:
    """The cards of a page: a property's images beside its answer, or why it has none. Raises CatalogError."""
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
            else {
                name: ModelValue(value, (answer.confidence or {}).get(name))
                for name, value in answer.description.items()
            },
            uris=image_uris[:_PAGE_IMAGES],
            image_count=len(image_uris),
        )
        for answer, thumbnail_files, image_uris in zip(answers, files, uris, strict=True)
    ]


def tables(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """The numbers, for the terminal and the page: caption, head and rows of each table."""
    results = comparison.results
    names = [result.name for result in results]
    numbers = [
        ("agrees with the truth", [_sentence(result.overall) for result in results]),
        ("agrees with itself, asked twice", [_sentence(result.with_itself) for result in results]),
        ("asked again", [_sentence(result.asked_again) for result in results]),
        ("failed", [result.failed.sentence() for result in results]),
        ("first answer invalid", [result.invalid.sentence() for result in results]),
        ("prompt tokens", [f"{result.prompt_tokens:,.0f}" for result in results]),
        ("answer tokens", [f"{result.output_tokens:,.0f}" for result in results]),
        ("properties/s a device", [f"{result.properties_per_second:.3g}" for result in results]),
        ("time for all", [duration(86_400 * result.days) for result in results]),
        ("cost for all", ["" if result.cost is None else f"{result.cost:,.2f}" for result in results]),
    ]  # fmt: skip
    shown = [("Side by side", ["", *names], [[label, *cells] for label, cells in numbers if any(cells)])]
    if fields := list(dict.fromkeys(key for result in results for key in result.fields)):
        rows = [[key, *(_sentence(result.fields.get(key)) for result in results)] for key in fields]
        shown.append(("Fields that are right", ["", *names], rows))
    pairs = []
    for pair in comparison.pairs:
        better = "" if pair.better_by is None else pair.better_by.sentence()
        pairs.append([f"{pair.first} and {pair.second}", pair.agreement.sentence(), better])
    return [*shown, ("Agreement", ["", "fields alike", "first better by"], pairs)]


def _sentence(share: Share | None) -> str:
    return "" if share is None else share.sentence()


def comparison_cards(comparison: Comparison, catalog: Catalog) -> list[Card]:
    """The images beside the answers where they disagree."""
    ids = comparison.disagreements[:_COMPARED_PROPERTIES]
    rows = [catalog.find(property_id) for property_id in ids]
    uris = [() if row is None else row.image_uris for row in rows]
    images = thumbnails(
        catalog, (uris_of_property[:_COMPARED_IMAGES] for uris_of_property in uris), height=_COMPARED_HEIGHT
    )
    names = [result.name for result in comparison.results]
    written = []
    for property_id, files, uris_of_property in zip(ids, images, uris, strict=True):
        truth = comparison.truths.get(property_id)
        values = {}
        for key, answers in comparison.differences[property_id].items():
            sure = {name: comparison.confidences.get(name, {}).get(property_id) or {} for name in names}
            cells: list[object] = [
                ModelValue(answers[name], sure[name].get(key)) if name in answers else "not asked"
                for name in names
            ]
            values[key] = [*cells, truth.get(key, "")] if truth else cells
        written.append(
            Card(
                property_id,
                counted(len(values), "fields differ", "field differs"),
                files,
                values,
                [*names, "truth"] if truth else names,
                uris=uris_of_property[:_COMPARED_IMAGES],
                image_count=len(uris_of_property),
            )
        )
    return written


_EXAMPLES = """\b
vlm-assets compare --limit 20
vlm-assets compare --limit 50 --html tried.html
vlm-assets compare --model A --model B --truth truth.csv --html compared.html
vlm-assets compare --set second_look --truth truth.csv
vlm-assets compare --prompt 'Describe the house.' --limit 100 --twice"""

Values = list[str] | None


@app.command("compare", epilog=_EXAMPLES)
def compare_command(
    home: Home = None,
    model: Annotated[Values, typer.Option(help="A model's folder or hub id; repeat it.")] = None,
    prompt: Annotated[Values, typer.Option(help="Another prompt; repeat it.")] = None,
    schema: Annotated[Values, typer.Option(help="Another schema, as module:Class; repeat it.")] = None,
    processor_options: Annotated[
        Values, typer.Option(help="Other processor options, as JSON; repeat it.")
    ] = None,
    set_name: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="A question set that asks again and fills.")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="CSV or parquet with ids and true fields, or HOME/review.jsonl.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Properties to describe with each. Default: 20 of one, else 50.")
    ] = None,
    twice: Annotated[
        bool, typer.Option("--twice", help="Ask each twice: does it agree with itself?")
    ] = False,
    price_per_hour: Annotated[float | None, typer.Option(min=0.0, help="Of one device.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a sample of properties: with the settings, or with several models.

    Without a contender: the answers, the rate, what all would take. It is kept for `vlm-assets plan`.
    Each value of --model, --prompt, --schema and --processor-options is a contender: the settings with this
    value. All describe the same sample. A single contender is compared with the settings as they are.
    With --set the contenders are the settings, the set asked of every property, and both together as its
    `where` and `fills` say.
    No row is written and no partition is made. Intervals are 95%.
    """
    settings = chosen_settings(home)
    catalog = Catalog.open(settings.home)
    options = {
        "model": model,
        "prompt": prompt,
        "description_schema": schema,
        "processor_options": processor_options,
    }
    contenders = [
        Contender(
            value if option == "model" else f"{option.removeprefix('description_')} {value}",
            settings_of_home(**{option: value}, questions=None),
        )
        for option, values in options.items()
        for value in values or []
    ]
    second_opinion = None
    if set_name is not None:
        if contenders:
            raise typer.BadParameter("--set names the contenders by itself: leave out the others.")
        second_opinion = SecondOpinion.of_set(settings, set_name)
        contenders = [Contender("as set", settings), Contender(set_name, second_opinion.settings)]
    elif not contenders:
        if truth is not None or twice or price_per_hour is not None:
            raise typer.BadParameter("--truth, --twice and --price-per-hour are for several contenders.")
        _describe_alone(settings, catalog, limit or _LIMIT_ALONE, html, as_json=as_json)
        return
    if second_opinion is None and (len(contenders) == 1 or not model):
        contenders.insert(0, Contender("as set", settings))
    for contender in contenders:
        require_models(contender.settings)
    comparison = compare(
        contenders,
        catalog,
        ComparedSample(limit or _LIMIT_OF_SEVERAL, truth, twice),
        price_per_hour=price_per_hour,
        second_opinion=second_opinion,
        report=(lambda sentence: None) if as_json else lambda sentence: say(visible_line(sentence)),
    )
    if html is not None:
        names = " against ".join(result.name for result in comparison.results)
        title = f"{names}: {counted(comparison.sample, 'properties')}"
        write_page(html, page(title, comparison_cards(comparison, catalog), tables=tables(comparison)))
    if as_json:
        say_as_json(comparison.as_json())
        return
    for caption, head, rows in tables(comparison):
        table = Table(*map(escape, head), title=caption)
        for row in rows:
            table.add_row(*map(escape, row))
        TerminalConsole().print(table)
    say(f"They differ on {len(comparison.disagreements)} of {counted(comparison.sample, 'properties')}.")
    if html is not None:
        say(f"Page: {html}")


def _describe_alone(
    settings: Settings, catalog: Catalog, limit: int, html: Path | None, *, as_json: bool
) -> None:
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

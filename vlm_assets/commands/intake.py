"""What takes properties in: ``vlm-assets ingest``, and ``demo``, which only a checkout has.

The package never needs the ``examples`` folder. This module is the only one that imports from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vlm_assets.commands.terminal import (
    AsJson,
    Home,
    Port,
    Yes,
    agreed,
    app,
    chosen_settings,
    say,
    say_all,
    say_as_json,
)
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import build_gpu
from vlm_assets.config.settings import CHECKOUT, EXAMPLE, PREFIX, Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_assets.webserver.api import reload_running
from vlm_catalog.catalog import Catalog, CatalogMissingError
from vlm_catalog.image_root import ImageRoot
from vlm_catalog.ingest import BeforeUpdate, IngestProgress, IngestReport, close_tail, take_in
from vlm_catalog.listing import IngestRequest, ReadingOptions
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command, given_command
from vlm_durable.mirror.bucket import place_of
from vlm_durable.wording import counted

PROPERTIES = 240
RANGE_SIZE = 20
SEED = 7

_MOST_SLOTS = 4
"""Each is a run of its own with 0.7 GB."""

_FOLDER = CHECKOUT / "examples"

Properties = Annotated[int, typer.Option(min=1, help="Example properties to render.")]
RangeSize = Annotated[int | None, typer.Option(min=1, help="Properties a partition.")]
Seed = Annotated[int, typer.Option(help="Seed of the example properties.")]

_DEMO_EXAMPLES = """\b
vlm-assets demo --exit --seed 9 --home /tmp/other
vlm-assets demo --no-run --properties 60 --home /tmp/example"""


@app.command("demo", epilog=_DEMO_EXAMPLES)
def demo_command(
    home: Home = None,
    properties: Properties = PROPERTIES,
    range_size: RangeSize = None,
    seed: Seed = SEED,
    port: Port = 3000,
    exit_when_done: Annotated[
        bool, typer.Option("--exit", help="Stop when all is done; 0 only if all partitions are sound.")
    ] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Only render the example and take it in; nothing is described.")
    ] = False,
) -> None:
    """Start the Dagster UI and a backfill of everything that is missing.

    With VLM_ASSETS_SOURCE set, new properties of that source are taken in first. Without it, the command goes
    on with the home's catalogue; a home without a catalogue gets the example.
    """
    from vlm_assets.commands.run import run_backfill  # with Dagster, which an ingest does without

    current = chosen_settings(home)
    if no_run:
        _take_in_example(current, properties, range_size, seed)
        return
    of_example = current.source is None and _is_of_example(current.home)
    if of_example:
        _take_in_example(current, properties, range_size, seed)
        current = chosen_settings(home)
    elif current.source is None:
        say(f"{PREFIX}SOURCE is not set: nothing new is taken in. Going on with {current.home}.")
    require_models(current)
    if current.source is not None:
        say_all(_taken_in(current, IngestRequest(current.source, range_size, close=True)).sentences())
    else:
        close_tail(current.home, current.mirror)
    if of_example:
        current = current.model_copy(update={"devices": _devices(current)})
    code = run_backfill(
        current,
        port=port,
        exit_when_done=exit_when_done,
        accuracy=lambda: _accuracy(current) if of_example else None,
        environment={f"{PREFIX}DEVICES": current.devices},
    )
    raise typer.Exit(code)


def _take_in_example(settings: Settings, properties: int, range_size: int | None, seed: int) -> None:
    _find_examples()
    if not _is_of_example(settings.home):
        raise CommandError(
            f"{settings.home} holds a catalogue of other properties, and the example would mix with them."
            f" Give the example a home of its own: {given_command('--home', 'DIR')}."
        )
    from examples.rendered_properties import write_example

    say(f"Example: {counted(properties, 'properties')} with seed {seed} in {settings.home / EXAMPLE} ...")
    advance = partial(doing, "rendering the images of properties")
    advance(0, properties)
    listing = write_example(settings.home, properties=properties, seed=seed, advance=advance)
    report = take_in(
        IngestRequest(listing, range_size or RANGE_SIZE, close=True),
        settings.home,
        progress=lambda now: doing("taking properties in", now.properties, properties),
    )
    say_all(report.sentences())


def _devices(settings: Settings) -> str:
    """The devices of the example: without a GPU a slot a core, four at most, where no setting says else.

    A partition of the example is start-up and little else, which keeps no more than one core busy.
    """
    devices = build_gpu(settings).find()
    slots = max(len(devices), min(len(os.sched_getaffinity(0)), _MOST_SLOTS))
    on_cpu = all(device.kind == "cpu" for device in devices)
    return f"cpu:{slots}" if settings.devices == "auto" and on_cpu else settings.devices


def _accuracy(settings: Settings) -> str:
    _find_examples()
    from examples.accuracy import accuracy

    return accuracy(settings.home).report()


def _is_of_example(home: Path) -> bool:
    """Whether the home's catalogue is of the example, or there is none yet. Raises CatalogError."""
    try:
        catalog = Catalog.open(home)
    except CatalogMissingError:
        return True
    return catalog.images.real == ImageRoot.at(home / EXAMPLE).real


def _find_examples() -> None:
    """Make the checkout's ``examples`` importable, from any working directory. Raises CommandError."""
    if not (_FOLDER / "rendered_properties.py").is_file():
        raise CommandError(
            "The example properties and the example model are part of a checkout of this project, not of the"
            " installed package. Run this command in a checkout, or use your own images:"
            f" set {PREFIX}SOURCE and {PREFIX}MODEL."
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))


_FORMATS = """\b
A SOURCE is one of these. Image paths are relative to the listing's folder,
or to --image-root; absolute paths may lie inside it.
\b
Folder tree    each folder is a property, its name the id
  listings/4711/front.jpg      (or listings/4711/photos/front.jpg)
  listings/4711/kitchen.jpg
On S3          the same; credentials from the AWS environment
  s3://bucket/listings
\b
CSV, a row a property: images separated by |, or a JSON array
  property_id,images
  4711,4711/front.jpg|4711/kitchen.jpg
  4712,"[""4712/a.jpg"", ""4712/b.jpg""]"
\b
CSV, a row an image: the rows of an id may stand anywhere
  property_id,image
  4711,4711/front.jpg
  4711,4711/kitchen.jpg
\b
JSONL, a line a property
  {"property_id": "4711", "images": ["4711/front.jpg", "4711/kitchen.jpg"]}
\b
Parquet        property_id (text or whole numbers) and images (list of text),
               or a row an image with image (text)
\b
Column names   the id: property_id or id
               several images: images or image_uris
               one image: image, image_uri or image_path
               others are guessed (Listing ID, Photos), or given with
               --id-column NAME --image-column NAME
Delimiter      found out: comma, semicolon, tab or |
Encoding       UTF-8 and UTF-16 are found out; for others give --encoding
\b
vlm-assets ingest /srv/listings
vlm-assets ingest list.csv --image-root /srv/photos --skip-bad"""


@app.command("ingest", epilog=_FORMATS)
def ingest_command(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder tree ID/*.jpg, here or at s3://BUCKET/PREFIX, or a CSV, JSONL or parquet listing."
        ),
    ],
    home: Home = None,
    range_size: Annotated[int | None, typer.Option(min=1, help="Properties a partition.")] = None,
    image_root: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder, here or on S3, that image paths are relative to and may not leave. Several folders"
            " of this machine: give it several times."
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Take changed images of known properties too.")
    ] = False,
    close: Annotated[
        bool, typer.Option("--close", help="Make a partition of the last properties, however few.")
    ] = False,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Write bad entries to a reject file in the home, and take the rest."),
    ] = False,
    delimiter: Annotated[
        str | None, typer.Option(help="Of a CSV, one character or 'tab'. Default: found out.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of a CSV or JSONL, such as windows-1252. Default: found out.")
    ] = None,
    image_separator: Annotated[str, typer.Option(help="Between several images of one CSV field.")] = "|",
    id_column: Annotated[
        str | None, typer.Option(help="Of a listing: the column of the ids; case does not matter.")
    ] = None,
    image_column: Annotated[
        str | None, typer.Option(help="Of a listing: the column of the images; case does not matter.")
    ] = None,
    nested: Annotated[
        bool,
        typer.Option("--nested", help="Of a folder tree: images in all folders below a property's too."),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take properties into the catalogue. What is in it already never moves.

    With --update, it is said before which partitions become stale and what making them anew takes, and you
    are asked. Without a terminal and without --yes nothing is changed.
    """
    delimiter = "\t" if delimiter == "tab" else delimiter
    if delimiter is not None and len(delimiter) != 1:
        raise typer.BadParameter("The delimiter is one character, or the word tab.")
    if not image_separator:
        raise typer.BadParameter("The image separator has at least one character.")
    current = chosen_settings(home)
    costs: list[str] = []

    def before_update(catalog: Catalog, stale: Sequence[PropertyRange]) -> None:
        from vlm_assets.services.stale_work import stale_among  # with models, which most ingests do without

        doing("reckoning what becomes stale")
        work = stale_among(current, catalog, [bounds.key for bounds in stale])
        costs.extend(work.sentences())
        if not work.keys:
            return
        question = f"Take them, so that {counted(len(work.keys), 'partitions are', 'partition is')} stale?"
        if before := stale_among(current, Catalog.open(current.home), work.keys).keys:
            already = counted(len(before), "partitions are", "partition is")
            costs.append(
                f"Without these images {already} stale too, by the settings: {command('status')} says what"
                " else is."
            )
            newly = len(work.keys) - len(before)
            question = "Take them?" if not newly else f"Take them, so that {newly} more are stale?"
        if not as_json:
            say_all(("With the new images of known properties:", *costs))
        elif not yes:
            raise CommandError(f"{' '.join(costs)} Nothing was changed. To do it: {given_command('--yes')}.")
        if not agreed(question, yes):
            raise typer.Exit(1)

    request = IngestRequest(
        place_of(source),
        range_size,
        [place_of(root) for root in image_root or ()],
        update=update,
        close=close,
        skip_bad=skip_bad,
        options=ReadingOptions(delimiter, encoding, image_separator, id_column, image_column, nested),
    )
    report = _taken_in(current, request, before_update)
    sentences = list(report.sentences())
    if report.new_ranges:
        from vlm_assets.services.pace import range_size_advice  # with Dagster

        sentences.append(reload_running(current.dagster_home))
        images = min(report.images_listed / max(1, report.listed), current.max_images)
        advice = range_size_advice(current, report.range_size, images, report.request)
        sentences += [advice] if advice is not None else []
    if as_json:
        sentences += costs
        ranges = {
            name: [bounds.key for bounds in getattr(report, name)] for name in ("new_ranges", "stale_ranges")
        }
        say_as_json(vars(report) | ranges | {"request": report.request.words, "sentences": sentences})
        return
    say_all(sentences)


def _taken_in(
    settings: Settings,
    request: IngestRequest,
    before_update: BeforeUpdate = lambda catalog, stale: None,
) -> IngestReport:
    """Ingest with the settings' values where the request leaves them out, and say how far it is."""

    def advance(now: IngestProgress) -> None:
        share = f" ({now.done / now.total:.0%})" if now.total else ""
        doing(f"{now.stage}{share}: {counted(now.properties, 'properties')}, {counted(now.images, 'images')}")

    request = replace(
        request,
        range_size=request.range_size or settings.range_size,
        image_root=request.image_root or settings.image_root,
    )
    return take_in(
        request,
        settings.home,
        max_images=settings.max_images,
        progress=advance,
        before_update=before_update,
        store=settings.mirror,
    )

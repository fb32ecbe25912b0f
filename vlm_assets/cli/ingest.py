"""Command ``vlm-assets ingest``: arguments, the progress bar, and the report of ``catalog/ingest.py``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import AsJson, Home, app, chosen_settings, say_as_json
from vlm_assets.operate.terminal import say

if TYPE_CHECKING:
    from vlm_assets.catalog.ingest import IngestProgress, Progress

_LOG_SECONDS = 30.0
"""Between two lines of progress without a terminal."""

_FORMATS = """\b
A SOURCE is one of these. Image paths are relative to the listing's folder,
or to --image-root; absolute paths may lie inside it.
\b
Folder tree    each folder is a property, its name the id
  listings/4711/front.jpg
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
               other columns are not looked at
Delimiter      found out: comma, semicolon, tab or |
Encoding       UTF-8 and UTF-16 are found out; for others give --encoding
\b
vlm-assets ingest /srv/listings
vlm-assets ingest list.csv --image-root /srv/photos --skip-bad"""


@app.command(epilog=_FORMATS)
def ingest(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder tree ID/*.jpg, here or at s3://BUCKET/PREFIX, or a CSV, JSONL or parquet listing."
        ),
    ],
    home: Home = None,
    range_size: Annotated[int | None, typer.Option(min=1, help="Properties a partition.")] = None,
    image_root: Annotated[
        str | None,
        typer.Option(help="Folder, here or on S3, that image paths are relative to and may not leave."),
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
    as_json: AsJson = False,
) -> None:
    """Take properties into the catalogue. What is in it already never moves."""
    from resources.store.bucket import place_of
    from vlm_assets.catalog.ingest import ingest as take_in
    from vlm_assets.catalog.listing import ReadingOptions

    delimiter = "\t" if delimiter == "tab" else delimiter
    if delimiter is not None and len(delimiter) != 1:
        raise typer.BadParameter("The delimiter is one character, or the word tab.")
    if not image_separator:
        raise typer.BadParameter("The image separator has at least one character.")
    current = chosen_settings(home)
    with shown_progress() as progress:
        report = take_in(
            place_of(source),
            current.home,
            range_size=range_size or current.range_size,
            image_root=place_of(image_root) if image_root else current.image_root,
            update=update,
            close=close,
            skip_bad=skip_bad,
            options=ReadingOptions(delimiter, encoding, image_separator),
            max_images=current.max_images,
            progress=progress,
            store=current.store,
        )
    said = list(report.sentences())
    if report.new_ranges:
        from vlm_assets.operate.dagster_server.api import reload_running

        said.append(reload_running(current.dagster_home))
    if as_json:
        ranges = {name: [one.key for one in getattr(report, name)] for name in ("new_ranges", "stale_ranges")}
        say_as_json(vars(report) | ranges | {"said": said})
        return
    for sentence in said:
        say(sentence)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A progress bar on the terminal; without a terminal, a line every half minute. Both on stderr."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from vlm_assets.operate.terminal_console import TerminalConsole

    console = TerminalConsole(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(20),
        TaskProgressColumn(),
        TextColumn("{task.fields[images]:,} images"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("reading", total=None, images=0)
    told = time.monotonic()

    def show(now: IngestProgress) -> None:
        nonlocal told
        bar.update(
            task, description=now.stage, completed=now.done, total=now.total or None, images=now.images
        )
        if not console.is_terminal and time.monotonic() - told > _LOG_SECONDS:
            told = time.monotonic()
            share = f"{now.done / now.total:.0%}, " if now.total else ""
            say(f"{now.stage}: {share}{now.properties:,} properties, {now.images:,} images", err=True)

    with bar:
        yield show

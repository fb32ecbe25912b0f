"""The command line: ``vlm-assets`` and its commands.

What lives here: arguments, output and exit codes. What does not: anything that a command does. Heavy imports
stay inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli import alerts, care, devices, pause, trial
from vlm_assets.cli.options import AsJson, Home, chosen_settings, warn_of_example_model
from vlm_assets.settings import PREFIX

if TYPE_CHECKING:
    from vlm_assets.catalog.report import IngestReport
    from vlm_assets.operate.status import Status
    from vlm_assets.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Property descriptions and embeddings as Dagster partitions that are never lost.",
)

Properties = Annotated[int, typer.Option(min=1, help="Example properties to render.")]
RangeSize = Annotated[int | None, typer.Option(min=1, help="Properties a partition.")]
Seed = Annotated[int, typer.Option(help="Seed of the example properties.")]

_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
"""Times of the clock on the wall, as people write them."""

EXAMPLE_PROPERTIES = 240
EXAMPLE_RANGE_SIZE = 20
EXAMPLE_SEED = 7


_OURS = frozenset({"vlm_assets", "resources", "sensors"})


def main() -> None:
    """Run a command. Our own errors are sentences that say what to do: no traceback, exit code 2.

    So are those of a file that cannot be read or written. What a terminal cannot show is shown escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except Exception as error:
        if type(error).__module__.partition(".")[0] in _OURS:
            said = str(error)
        elif isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}. Put that right, and do it again."
        else:
            raise
        typer.secho(said, fg="red", err=True)
        sys.exit(2)


@app.command()
def settings() -> None:
    """List every setting, its value and what it means, those that are set in bold."""
    current = chosen_settings()
    for name, field in type(current).model_fields.items():
        value = getattr(current, name)
        # Whole names and values, however narrow the terminal: they are copied and searched for.
        said = f"{PREFIX}{name.upper()}={'' if value is None else value}"
        typer.secho(said, bold=name in current.model_fields_set)
        typer.echo(f"    {field.description}")


@app.command()
def ingest(
    source: Annotated[Path, typer.Argument(help="Folder tree ID/*.jpg, or a CSV, JSONL or parquet listing.")],
    home: Home = None,
    range_size: RangeSize = None,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder that image paths are relative to and may not leave.")
    ] = None,
    update: Annotated[bool, typer.Option(help="Take changed images of known properties too.")] = False,
) -> None:
    """Take properties into the catalogue. What is in it already never moves."""
    from vlm_assets.catalog.ingest import ingest as take_in

    current = chosen_settings(home)
    report = take_in(
        source,
        current.home,
        range_size=range_size or current.range_size,
        image_root=image_root or current.image_root,
        update=update,
    )
    _say(report)
    if report.new_ranges:
        from vlm_assets.operate.dagster_server.reload import reload_running

        typer.echo(reload_running(current.dagster_home))


@app.command()
def example(
    home: Home = None,
    properties: Properties = EXAMPLE_PROPERTIES,
    range_size: RangeSize = None,
    seed: Seed = EXAMPLE_SEED,
) -> None:
    """Render and catalogue the example properties; runs nothing."""
    _take_in_example(chosen_settings(home), properties, range_size, seed)


@app.command()
def demo(
    home: Home = None,
    properties: Properties = EXAMPLE_PROPERTIES,
    range_size: RangeSize = None,
    seed: Seed = EXAMPLE_SEED,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the pages, on loopback.")] = 3000,
    exit_when_done: Annotated[
        bool, typer.Option("--exit", help="Stop when all is done; 0 only if all partitions are sound.")
    ] = False,
) -> None:
    """Dagster UI and a backfill of all that is missing, with new properties of VLM_ASSETS_SOURCE taken in.

    Without a source: of what the home's catalogue holds, and where it holds nothing yet, of the example.
    """
    from vlm_assets.catalog.ingest import ingest as take_in
    from vlm_assets.demo.example import is_example
    from vlm_assets.operate.run import run_backfill
    from vlm_assets.resource_settings import build_gpu

    current = chosen_settings(home)
    of_example = current.source is None and is_example(current.home)
    if of_example:
        _take_in_example(current, properties, range_size, seed)
    elif current.source is None:
        typer.echo(f"{PREFIX}SOURCE is not set: nothing new is taken in. Going on with {current.home}.")
    else:
        report = take_in(
            current.source,
            current.home,
            range_size=range_size or current.range_size,
            image_root=current.image_root,
        )
        _say(report)
    warn_of_example_model(current)
    code = run_backfill(
        home=current.home,
        dagster_home=current.dagster_home,
        slots=len(build_gpu(current).find()),
        port=port,
        exit_when_done=exit_when_done,
        accuracy=lambda: _accuracy(current) if of_example else None,
        grace_seconds=current.grace_seconds,
    )
    raise typer.Exit(code)


@app.command()
def serve(
    home: Home = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the pages, on loopback.")] = 3000,
) -> None:
    """Dagster UI, daemon, schedules and alerts of a home, until it is told to end; for a service manager."""
    from rich.console import Console

    from vlm_assets.operate.dagster_server import serving
    from vlm_assets.resource_settings import build_gpu

    current = chosen_settings(home)
    warn_of_example_model(current)
    serving.serve(
        home=current.home,
        dagster_home=current.dagster_home,
        slots=len(build_gpu(current).find()),
        port=port,
        grace_seconds=current.grace_seconds,
        console=Console(soft_wrap=True),
    )


def _take_in_example(current: Settings, properties: int, range_size: int | None, seed: int) -> None:
    from vlm_assets.catalog.ingest import ingest as take_in
    from vlm_assets.demo.example import write_example

    typer.echo(f"Example: {properties} properties with seed {seed} in {current.home / 'example'} ...")
    listing = write_example(current.home, properties=properties, seed=seed)
    _say(take_in(listing, current.home, range_size=range_size or EXAMPLE_RANGE_SIZE))


def _accuracy(current: Settings) -> str:
    from vlm_assets.demo.accuracy import accuracy

    return accuracy(current.home).report()


def _say(report: IngestReport) -> None:
    for sentence in report.sentences():
        typer.echo(sentence)


@app.command()
def status(
    home: Home = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until Ctrl-C.")] = False,
    since: Annotated[
        datetime | None,
        typer.Option(formats=_TIMES, help="List what was tried again and done since then; else a day ago."),
    ] = None,
) -> None:
    """Say where every partition stands, what is left, in which order it runs, from what is on disk."""
    from rich.console import Console

    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate import status_view
    from vlm_assets.operate.status import read_status

    current = chosen_settings(home)

    def read() -> Status:
        catalog = Catalog.open(current.home)
        return read_status(current, catalog, since=since.timestamp() if since else None)

    if as_json:
        typer.echo(read().to_json())
    elif watch:
        status_view.watch(read, Console())
    else:
        status_view.show(Console(), read())


@app.command()
def show(
    property_id: Annotated[str, typer.Argument(help="The property's id, as in the catalogue.")],
    home: Home = None,
) -> None:
    """Show one property: its images, what was said of it, errors and attempts, and where that lies."""
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.property_view import view_property

    current = chosen_settings(home)
    for line in view_property(current, Catalog.open(current.home), property_id):
        typer.echo(line)


for commands in (alerts, care, devices, pause, trial):
    commands.register(app)

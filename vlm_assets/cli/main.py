"""The command line: ``vlm-assets`` and its commands.

What lives here: arguments, output and exit codes. What does not: anything that a command does. Heavy imports
stay inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli import alerts, care, devices, example, ingest, pause, publish, run, trial, withdraw
from vlm_assets.cli.options import AsJson, Home, chosen_settings
from vlm_assets.operate.terminal import VisibleFormatter, say, visible_line
from vlm_assets.settings import PREFIX, require_models

if TYPE_CHECKING:
    from vlm_assets.operate.status import Status

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Property descriptions and embeddings as Dagster partitions that are never lost.",
)


_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]
"""Times of the clock on the wall, as people write them."""

_OURS = frozenset({"vlm_assets", "resources", "sensors", "examples"})


def main() -> None:
    """Run a command. Our own errors are sentences that say what to do: no traceback, exit code 2.

    So are those of a file that cannot be read or written. What a terminal cannot show, or would obey, is
    shown escaped, in tracebacks and log records too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    try:
        app()
    except Exception as error:
        if type(error).__module__.partition(".")[0] in _OURS:
            said = str(error)
        elif isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}. Put that right, and do it again."
        else:
            say(traceback.format_exc(), err=True)
            sys.exit(1)
        say(said, fg="red", err=True)
        sys.exit(2)


@app.command()
def settings() -> None:
    """List every setting, its value and what it means, those that are set in bold."""
    current = chosen_settings()
    for name, field in type(current).model_fields.items():
        value = getattr(current, name)
        # Whole names and values, however narrow the terminal: they are copied and searched for.
        said = f"{PREFIX}{name.upper()}={'' if value is None else value}"
        say(said, bold=name in current.model_fields_set)
        say(f"    {field.description}")


@app.command()
def serve(
    home: Home = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the pages, on loopback.")] = 3000,
) -> None:
    """Dagster UI, daemon, schedules and alerts of a home, until it is told to end; for a service manager."""
    from vlm_assets.operate.dagster_server import serving
    from vlm_assets.operate.terminal_console import TerminalConsole
    from vlm_assets.resource_settings import build_gpu

    current = chosen_settings(home)
    require_models(current)
    serving.serve(
        home=current.home,
        dagster_home=current.dagster_home,
        slots=len(build_gpu(current).find()),
        port=port,
        grace_seconds=current.grace_seconds,
        console=TerminalConsole(soft_wrap=True),
    )


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
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate import status_view
    from vlm_assets.operate.status import read_status
    from vlm_assets.operate.terminal_console import TerminalConsole

    current = chosen_settings(home)

    def read() -> Status:
        catalog = Catalog.open(current.home)
        return read_status(current, catalog, since=since.timestamp() if since else None)

    if as_json:
        say(read().to_json())
    elif watch:
        status_view.watch(read, TerminalConsole())
    else:
        status_view.show(TerminalConsole(), read())


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
        say(visible_line(line))


for commands in (alerts, care, devices, example, ingest, pause, publish, run, trial, withdraw):
    commands.register(app)

"""The command line: ``vlm-assets``. Each module beside this one has the arguments and output of a command.

Heavy imports stay inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from vlm_assets.cli.options import app
from vlm_assets.operate.terminal import VisibleFormatter, say, show_home_in_commands
from vlm_assets.settings import SettingsError

_COMMANDS = (
    "alerts",
    "audit",
    "compare",
    "devices",
    "doctor",
    "example",
    "explore",
    "export",
    "ingest",
    "pause",
    "plan",
    "prune",
    "publish",
    "rehearse",
    "repair",
    "review",
    "run",
    "search",
    "serve",
    "settings",
    "show",
    "status",
    "trial",
    "withdraw",
)
"""Modules beside this one, in the order of the help."""

_OURS = frozenset({"vlm_assets", "resources", "sensors", "examples"})


def main() -> None:
    """Run a command. Exit codes: 0 fine, 1 something is wrong, 2 the command or a setting is.

    Our own errors are sentences that say what to do, without a traceback; so are those of a file that cannot
    be read or written. What a terminal cannot show, or would obey, is shown escaped, in tracebacks and log
    records too.
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
        sys.exit(2 if isinstance(error, SettingsError) else 1)


def _say_version(wanted: bool) -> None:
    if wanted:
        say(f"vlm-assets {version('vlm-assets')}")
        raise typer.Exit


@app.callback()
def vlm_assets(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Property descriptions and embeddings as Dagster partitions that are never lost.

    Exit codes: 0 fine, 1 something is wrong, 2 the command or a setting is wrong.
    """
    # Another command in the same process may mean another home.
    context.call_on_close(lambda: show_home_in_commands(None))


for command in _COMMANDS:
    import_module(f"vlm_assets.cli.{command}")

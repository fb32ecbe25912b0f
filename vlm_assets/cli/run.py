"""Command ``vlm-assets run``: arguments and exit codes of the terminal's backfill (``operate/run.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.options import Home, Port, app, chosen_settings
from vlm_assets.operate.terminal import say

if TYPE_CHECKING:
    from vlm_assets.operate.run import KeysOf
    from vlm_assets.operate.status import Status
    from vlm_assets.settings import Settings

_EXAMPLES = """\b
vlm-assets run                      every partition that is not complete
vlm-assets run --missing            and the last properties, too few to fill one
vlm-assets run --failed             partitions that failed
vlm-assets run 000000000-000000999  this partition"""


@app.command(epilog=_EXAMPLES)
def run(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Partitions, by key.")] = None,
    home: Home = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only partitions that failed.")] = False,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing",
            help="Also make a partition of the last properties, however few.",
        ),
    ] = False,
    port: Port = 3000,
) -> None:
    """Materialize partitions and show the progress; ends when they are done.

    Uses the Dagster that runs on this home, or starts one for as long as it takes.
    Finished work is kept, so the command can be repeated at any time.
    Exit code 0 if all these partitions are complete, 1 if not, 130 after Ctrl-C.
    """
    if bool(keys) + failed + missing > 1:
        raise typer.BadParameter("Give keys, or --failed, or --missing: one of the three.")
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.catalog.ingest import close_tail
    from vlm_assets.operate.dagster_server.api import reload_running
    from vlm_assets.operate.dagster_server.home import running_address
    from vlm_assets.operate.run import run_partitions
    from vlm_assets.operate.status import read_status
    from vlm_assets.operate.terminal_console import TerminalConsole
    from vlm_assets.settings import require_models

    current = chosen_settings(home)
    require_models(current)
    status = read_status(current, Catalog.open(current.home))
    if status.paused:
        paused = f"{status.paused[0].upper()}{status.paused[1:]}. Nothing runs until `vlm-assets resume`."
        say(paused, fg="red", err=True)
        raise typer.Exit(1)
    console = TerminalConsole(soft_wrap=True)
    if missing and (closed := close_tail(current.home, current.store)) is not None:
        console.print(f"The last {len(closed)} properties are partition {closed.key} now.")
        if running_address(current.dagster_home) is not None:
            console.print(reload_running(current.dagster_home))
    elif status.waiting_in_tail and not keys and not failed:
        console.print(
            f"In no partition yet: {status.waiting_in_tail} properties, too few to fill one."
            " `vlm-assets run --missing` takes them too."
        )
    wanted = _chosen(current, status, keys or [], failed=failed)
    raise typer.Exit(run_partitions(current, port=port, keys=wanted, console=console))


def _chosen(current: Settings, status: Status, keys: list[str], *, failed: bool) -> KeysOf | None:
    """The partitions that the arguments name; None: all. Raises CatalogError."""
    from vlm_assets.operate.run import failed_keys, known_keys

    if keys:
        known = known_keys(current.home, keys)
        return lambda api: known
    if failed:
        return lambda api: failed_keys(current.home, status, api)
    return None

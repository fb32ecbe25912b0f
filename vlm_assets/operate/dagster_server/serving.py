"""``vlm-assets serve``: the Dagster of a home under one roof, for a service manager; launches nothing itself.

What lives here: start, wait, end. What does not: the processes (``process_group.py``, ``server.py``)
and what ``vlm-assets demo`` does beyond them. One process that holds the home's lock and ends with all of
its children is what a service manager can restart without ever running two daemons on one database.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vlm_assets.assets.property_catalog import record_catalog
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.dagster_server.home import prepare_dagster_home
from vlm_assets.operate.dagster_server.process_group import interruptible
from vlm_assets.operate.dagster_server.server import DagsterServer, dagster_server, free_port

_FOREVER = 3600.0


def prepare(home: Path, dagster_home: Path, *, slots: int, port: int, console: Console) -> int:
    """Make Dagster's state fit the home's catalogue; gives the port that is free.

    Raises CatalogError, DagsterHomeError, NoFreePortError.
    """
    catalog = Catalog.open(home)
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=slots)
    record_catalog(dagster_home, catalog)
    found = free_port(port)
    if found != port:
        console.print(f"Port {port} is taken; this Dagster listens on {found}.")
    return found


def start_pages(server: DagsterServer, console: Console) -> None:
    """Start code server and webserver, and say so."""
    console.print(f"Starting Dagster on {server.address} (its logs: {server.logs}) ...")
    server.start_pages()


def farewell(console: Console, grace_seconds: float) -> None:
    """Say what an end means."""
    console.print(
        f"\nEnding Dagster. Runs commit what they have finished, {grace_seconds:.0f} s at most"
        " (Ctrl-C again: at once). The next start goes on from there."
    )


def serve(
    *, home: Path, dagster_home: Path, slots: int, port: int, grace_seconds: float, console: Console
) -> None:
    """Run webserver, code server and daemon until SIGTERM or Ctrl-C; ends too when one of them ends.

    slots: runs that hold a device at once. Raises CatalogError, DagsterHomeError, NoFreePortError,
    ProcessEndedError and CodeLocationError.
    """
    found = prepare(home, dagster_home, slots=slots, port=port, console=console)
    with (
        interruptible(),
        dagster_server(home, dagster_home, port=found, grace_seconds=grace_seconds) as server,
    ):
        try:
            start_pages(server, console)
            server.start_daemon()
            console.print("Schedules, sensors and alerts are on. Ctrl-C ends it.")
            while True:
                server.watch(_FOREVER)
        except KeyboardInterrupt:
            farewell(console, grace_seconds)

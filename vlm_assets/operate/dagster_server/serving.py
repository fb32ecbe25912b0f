"""``vlm-assets serve``: the Dagster of a home under one roof, for a service manager; launches nothing itself.

What lives here: start, wait, end. What does not: the processes (``process_group.py``, ``server.py``)
and what ``vlm-assets demo`` does beyond them. One process that holds the home's lock and ends with all of
its children is what a service manager can restart without ever running two daemons on one database.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from vlm_assets.assets.property_catalog import record_catalog
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.dagster_server.databases import LOST, damages, names_aside, set_aside
from vlm_assets.operate.dagster_server.home import only_dagster, prepare_dagster_home
from vlm_assets.operate.dagster_server.process_group import interruptible
from vlm_assets.operate.dagster_server.server import GRACE_SECONDS, DagsterServer, dagster_server, free_port
from vlm_assets.settings import load_settings

_FOREVER = 3600.0
_STANDS_SECONDS = 24 * 3600.0
_AGAIN_SECONDS = 20.0
"""A database that is damaged sooner after a start is left to a person: the disk damages what it is given."""


def prepare(home: Path, dagster_home: Path, *, slots: int, port: int, console: Console) -> int:
    """Make Dagster's state fit the home's catalogue; gives the port that is free.

    Raises CatalogError, DagsterHomeError, NoFreePortError.
    """
    catalog = Catalog.open(home)
    if dagster_home.is_dir():
        _renew_damaged_databases(home, dagster_home, console)
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=slots)
    record_catalog(dagster_home, catalog)
    found = free_port(port)
    if found != port:
        console.print(f"Port {port} is taken; this Dagster listens on {found}.")
    return found


def _renew_damaged_databases(home: Path, dagster_home: Path, console: Console) -> None:
    """Set damaged databases of Dagster's aside and say so, in the terminal and as an alert."""
    # Under the lock: a Dagster that runs is not to lose its databases.
    with only_dagster(dagster_home, wait_seconds=GRACE_SECONDS + 5.0):
        found = damages(dagster_home)
        aside = names_aside(dagster_home, found)
        sentences = {
            one.folder: f"{one.path} did not read ({one.why}). It was set aside in {aside[one.folder]}, and a"
            f" new one was begun. {LOST[one.folder]}"
            for one in found
        }
        # Told before it is done: a kill in between tells it twice, not never.
        _outbox(home).post_all(
            [_alert(folder, said, time.time()) for folder, said in sentences.items()], once_while_open=True
        )
        set_aside(dagster_home, aside)
    for said in sentences.values():
        console.print(f"[yellow]{escape(said)}[/]")


def _outbox(home: Path) -> Outbox:
    return Outbox(load_settings(home=home).state_directory / "alerts")


def _subject(folder: str) -> str:
    return f"state/Dagster's {folder}"


def _alert(folder: str, said: str, now: float) -> Alert:
    return Alert(
        kind="state_damaged",
        subject=_subject(folder),
        occurrence=said,
        severity="error",
        title=f"Dagster's {folder} was damaged and was begun anew",
        next_step=f"{said} Look at the disk's health.",
        at=now,
    )


def _close_alerts(outbox: Outbox, now: float) -> None:
    """Close the alerts that have stood for a day: the databases that were begun anew have been read since."""
    opened = outbox.open_subjects()
    for alert in [opened[one] for one in map(_subject, LOST) if one in opened]:
        if now - alert.at >= _STANDS_SECONDS:
            sentence = "It was begun anew a day ago and has been sound since."
            outbox.recovered(alert.subject, occurrence=alert.occurrence, sentence=sentence, at=now)


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

    Where a database of Dagster's is damaged meanwhile, everything is started again with a new one.
    slots: runs that hold a device at once. Raises CatalogError, DagsterHomeError, NoFreePortError,
    ProcessEndedError and CodeLocationError.
    """
    while True:
        started = time.monotonic()
        try:
            _serve_until_told(home, dagster_home, slots, port, grace_seconds, console)
        except Exception as error:
            # A process that ends, or does not start, may be the first sign of it.
            if not damages(dagster_home) or time.monotonic() - started < _AGAIN_SECONDS:
                raise
            console.print(f"[yellow]{escape(str(error))}[/]")
        else:
            return


def _serve_until_told(
    home: Path, dagster_home: Path, slots: int, port: int, grace_seconds: float, console: Console
) -> None:
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
                _close_alerts(_outbox(home), time.time())
        except KeyboardInterrupt:
            farewell(console, grace_seconds)

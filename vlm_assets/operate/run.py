"""``vlm-assets run`` and ``demo``: start Dagster on a catalogued home, launch a backfill, follow it, end.

``dagster_server/`` starts the processes, ``backfill.py`` chooses the partitions, ``backfill_view.py`` shows
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.backfill import ASSETS, Backfill
from vlm_assets.operate.backfill_view import BackfillSummary, ProgressLine, row_counts, where_to_click
from vlm_assets.operate.dagster_server.process_group import interruptible
from vlm_assets.operate.dagster_server.server import GRACE_SECONDS, DagsterServer, dagster_server
from vlm_assets.operate.dagster_server.serving import farewell, prepare, start_pages
from vlm_assets.operate.terminal_console import TerminalConsole

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM before all was done."""

_FOREVER = 3600.0


def run_backfill(
    *,
    home: Path,
    dagster_home: Path,
    slots: int,
    port: int = 3000,
    exit_when_done: bool = False,
    accuracy: Callable[[], str | None] = lambda: None,
    grace_seconds: float = GRACE_SECONDS,
    console: Console | None = None,
) -> int:
    """Run Dagster and a backfill on a home, until Ctrl-C or until all is done; gives the exit code.

    The code is 0 if every partition is complete and no check failed with ERROR, 1 otherwise, and 130 after
    Ctrl-C. slots: runs that hold a device at the same time. accuracy: a sentence about the finished output,
    or None. Raises CatalogError, DagsterHomeError, NoFreePortError, ProcessEndedError and DagsterApiError,
    whose messages say what to do.
    """
    console = console or TerminalConsole(soft_wrap=True)
    found = prepare(home, dagster_home, slots=slots, port=port, console=console)
    keys = [one.key for one in Catalog.open(home).ranges]
    summary: BackfillSummary | None = None
    with (
        interruptible(),
        dagster_server(home, dagster_home, port=found, grace_seconds=grace_seconds) as server,
    ):
        try:
            start_pages(server, console)
            summary = _backfill(server, Backfill(server.api, home, keys), accuracy, console)
            summary.print(console)
            if not exit_when_done:
                where_to_click(console, server.address)
                while True:
                    server.watch(_FOREVER)
        except KeyboardInterrupt:
            farewell(console, grace_seconds)
            if summary is None:
                return INTERRUPTED
    return 0 if summary.ok else 1


def _backfill(
    server: DagsterServer, work: Backfill, accuracy: Callable[[], str | None], console: Console
) -> BackfillSummary:
    before = work.progress()
    console.print(work.begin())
    server.start_daemon()
    if work.followed:
        # Often enough to watch, seldom enough that a large catalogue's keys are no load.
        interval = max(2.0, len(work.keys) / 2000)
        with ProgressLine(console, work.keys, done_before=before.done) as line:
            now = work.progress()
            line.show(now)
            while not work.ended(now):
                server.watch(interval)
                now = work.progress()
                line.show(now)
    return BackfillSummary(
        partitions=len(work.keys),
        complete=len(work.complete_keys()),
        failed_keys=sorted(work.progress().failed),
        rows=row_counts(work.home),
        failing=[check for asset in ASSETS for check in server.api.failing_checks(asset)],
        accuracy=accuracy(),
    )

"""``vlm-assets run`` and ``demo``: a backfill of a home, launched in Dagster and followed in the terminal.

A Dagster that runs on the home already is used; otherwise one is started, and ended at the end.
``dagster_server/`` starts the processes, ``backfill.py`` launches and shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from vlm_assets.assets.partition_state import State
from vlm_assets.assets.published_rows import first_failed
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_file import CatalogError
from vlm_assets.operate.backfill import ASSETS, Backfill, BackfillSummary, ProgressLine, where_to_click
from vlm_assets.operate.dagster_server.api import DagsterApi
from vlm_assets.operate.dagster_server.home import running_address
from vlm_assets.operate.dagster_server.process_group import interruptible
from vlm_assets.operate.dagster_server.server import (
    GRACE_SECONDS,
    dagster_server,
    farewell,
    prepare_home,
    start_pages,
)
from vlm_assets.operate.status import Status
from vlm_assets.operate.terminal_console import TerminalConsole
from vlm_assets.settings import Settings, load_settings

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM before all was done."""

_FOREVER = 3600.0
_FAILED = frozenset({State.FAILED, State.GIVEN_UP, State.REFUSED, State.DAMAGED, State.LOST})

KeysOf = Callable[[DagsterApi], Sequence[str]]
"""Chooses the partitions of a backfill, once Dagster can be asked."""


def all_keys(home: Path) -> list[str]:
    """Every partition of the catalogue. Raises CatalogError."""
    return [one.key for one in Catalog.open(home).ranges]


def known_keys(home: Path, keys: Sequence[str]) -> list[str]:
    """These partitions, each once. Raises CatalogError if the catalogue does not have one of them."""
    unknown = sorted(set(keys).difference(all_keys(home)))
    if unknown:
        raise CatalogError(
            f"{', '.join(unknown[:5])}: the catalogue in {home} has no such partition."
            " `vlm-assets status --json` lists them all."
        )
    return sorted(set(keys))


def failed_keys(home: Path, status: Status, api: DagsterApi) -> list[str]:
    """Partitions whose last run failed, or whose files are not what they should be, in either asset."""
    of_dagster = frozenset[str]().union(*(api.partition_keys(asset).failed for asset in ASSETS))
    on_disk = {one.key for one in status.partitions if one.state in _FAILED}
    return [key for key in all_keys(home) if key in of_dagster or key in on_disk]


def run_backfill(
    *,
    home: Path,
    dagster_home: Path,
    slots: int,
    port: int = 3000,
    keys: KeysOf | None = None,
    run_config: Mapping[str, object] | None = None,
    exit_when_done: bool = False,
    accuracy: Callable[[], str | None] = lambda: None,
    grace_seconds: float = GRACE_SECONDS,
    environment: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> int:
    """Start Dagster and a backfill on a home, until Ctrl-C or until all is done; gives the exit code.

    The code is 0 if every partition asked for is complete and no check of them failed with ERROR, 1
    otherwise, and 130 after Ctrl-C. keys: the partitions, all unless given. run_config: of each run. slots:
    runs that hold a device at the same time. accuracy: a sentence about the finished output, or None.
    environment: of Dagster's processes, in addition to this one's.

    Raises CatalogError, DagsterHomeError, ProcessEndedError and DagsterApiError, whose
    messages say what to do.
    """
    console = console or TerminalConsole(soft_wrap=True)
    found = prepare_home(home, dagster_home, slots=slots, port=port, console=console)
    summary: BackfillSummary | None = None
    with (
        interruptible(),
        dagster_server(
            home, dagster_home, port=found, grace_seconds=grace_seconds, environment=environment
        ) as server,
    ):
        try:
            start_pages(server, console)
            wanted = keys(server.api) if keys is not None else all_keys(home)
            work = Backfill(server.api, home, wanted, run_config or {})
            summary = _follow(work, accuracy, console, start=server.start_daemon, watch=server.watch)
            summary.print(console)
            _tell_plan(load_settings(home=home), console)
            if not exit_when_done:
                where_to_click(console, server.address)
                while True:
                    server.watch(_FOREVER)
        except KeyboardInterrupt:
            farewell(console, grace_seconds)
            if summary is None:
                return INTERRUPTED
    return 0 if summary.ok else 1


def run_partitions(
    settings: Settings,
    *,
    port: int,
    keys: KeysOf | None,
    run_config: Mapping[str, object] | None = None,
    console: Console,
) -> int:
    """Materialize partitions in the Dagster that runs on the home, else in one that is started for it.

    The arguments, exit codes and errors of ``run_backfill``.
    """
    from vlm_assets.resource_settings import build_gpu

    address = running_address(settings.dagster_home)
    if address is not None:
        return _run_in_running(address, home=settings.home, keys=keys, run_config=run_config, console=console)
    return run_backfill(
        home=settings.home,
        dagster_home=settings.dagster_home,
        slots=len(build_gpu(settings).find()),
        port=port,
        keys=keys,
        run_config=run_config,
        exit_when_done=True,
        grace_seconds=settings.grace_seconds,
        console=console,
    )


def _run_in_running(
    address: str,
    *,
    home: Path,
    keys: KeysOf | None,
    run_config: Mapping[str, object] | None,
    console: Console,
) -> int:
    """Launch a backfill in the Dagster at this address and follow it; the exit codes of ``run_backfill``.

    Ctrl-C ends the following alone. Raises CatalogError, DagsterApiError.
    """
    api = DagsterApi(address)
    with interruptible():
        try:
            console.print(f"Dagster runs on this home already: {address}")
            wanted = keys(api) if keys is not None else all_keys(home)
            summary = _follow(Backfill(api, home, wanted, run_config or {}), lambda: None, console)
        except KeyboardInterrupt:
            console.print(f"\nThe backfill goes on in {address}; `vlm-assets status` shows how far it is.")
            return INTERRUPTED
    summary.print(console)
    _tell_plan(load_settings(home=home), console)
    return 0 if summary.ok else 1


def _tell_plan(settings: Settings, console: Console) -> None:
    """Say how far the plan was off, where this run was planned."""
    from vlm_assets.operate.plan import compare_with_run

    if (compared := compare_with_run(settings)) is not None:
        console.print(compared.sentence(), highlight=False)


def _follow(
    work: Backfill,
    accuracy: Callable[[], str | None],
    console: Console,
    *,
    start: Callable[[], None] = lambda: None,
    watch: Callable[[float], None] = time.sleep,
) -> BackfillSummary:
    """Launch a backfill and show how it stands until it ends.

    start: of what launches its runs. watch: lets so many seconds pass, and raises if Dagster ends meanwhile.
    """
    console.print(work.begin())
    start()
    if work.followed:
        # Often enough to watch, seldom enough that a large catalogue's keys are no load.
        interval = max(2.0, len(work.keys) / 2000)
        with ProgressLine(console, work.keys) as line:
            now = work.progress()
            line.show(now, *work.rate())
            while not work.ended(now):
                watch(interval)
                now = work.progress()
                line.show(now, *work.rate())
    published = work.published()
    failing = [check for asset in ASSETS for check in work.api.failing_checks(asset)]
    return BackfillSummary(
        partitions=len(work.keys),
        complete=len(work.complete_keys()),
        failed_keys=sorted(work.progress().failed),
        published=published,
        first_failed=first_failed(load_settings(home=work.home).descriptions, published),
        failing=[check for check in failing if check.partition in work.keys],
        accuracy=accuracy(),
    )

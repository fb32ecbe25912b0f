"""``vlm-assets run`` and ``demo``: a backfill of a home, launched in Dagster and followed in the terminal.

A Dagster that runs on the home already is used; otherwise one is started, and ended at the end.
``dagster_server/`` starts the processes, ``backfill.py`` launches and shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vlm_assets.assets.partition_state import MEANING, PartitionStates, State, VerifiedFiles
from vlm_assets.assets.published_rows import unpublished_failures
from vlm_assets.assets.stored_settings import refuse_at_start
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_file import CatalogError
from vlm_assets.catalog.ingest import close_tail
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import device_slots
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.operate.backfill import ASSETS, Backfill, BackfillSummary, ProgressLine, where_to_click
from vlm_assets.operate.dagster_server.api import DagsterApi, reload_running
from vlm_assets.operate.dagster_server.home import running_address
from vlm_assets.operate.dagster_server.process_group import interruptible
from vlm_assets.operate.dagster_server.server import (
    GRACE_SECONDS,
    dagster_server,
    farewell,
    prepare_home,
)
from vlm_assets.operate.dagster_server.server import serve as serve_home
from vlm_assets.operate.status import Status, read_status
from vlm_assets.operate.terminal import Home, Port, TerminalConsole, Yes, agreed, app, chosen_settings, say

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
            server.start_pages(console)
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
    address = running_address(settings.dagster_home)
    if address is not None:
        return _run_in_running(address, home=settings.home, keys=keys, run_config=run_config, console=console)
    refuse_at_start(settings, lambda said: console.print(escape(said)))
    return run_backfill(
        home=settings.home,
        dagster_home=settings.dagster_home,
        slots=device_slots(settings),
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
    failing = [check for asset in ASSETS for check in work.api.failing_checks(asset)]
    return BackfillSummary(
        keys=work.keys,
        failed_keys=sorted(work.progress().failed),
        status=work.status(),
        failing=[check for check in failing if check.partition in work.keys],
        accuracy=accuracy(),
    )


_RUN_EXAMPLES = """\b
vlm-assets run                      every partition that is not complete
vlm-assets run --missing            and the last properties, too few to fill one
vlm-assets run --failed             partitions that failed
vlm-assets run 000000000-000000999  this partition"""


@app.command("run", epilog=_RUN_EXAMPLES)
def run_command(
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
    """Materialize partitions and show the progress until they are done.

    Uses the Dagster that runs on this home, or starts one for as long as it takes.
    Finished work is kept, so the command can be repeated at any time.
    Exit code 0 if all these partitions are complete, 1 if not, 130 after Ctrl-C.
    """
    if bool(keys) + failed + missing > 1:
        raise typer.BadParameter("Give keys, or --failed, or --missing: one of the three.")
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

    if keys:
        known = known_keys(current.home, keys)
        return lambda api: known
    if failed:
        return lambda api: failed_keys(current.home, status, api)
    return None


_PUBLISH_EXAMPLES = """\b
vlm-assets publish 000000000-000000999 --accept-failed"""


@app.command("publish", epilog=_PUBLISH_EXAMPLES)
def publish_command(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The partition.")],
    accept_failed: Annotated[
        bool, typer.Option("--accept-failed", help="Publish it although so many properties failed.")
    ] = False,
    home: Home = None,
    port: Port = 3000,
    yes: Yes = False,
) -> None:
    """Publish a partition that the check failed_share refused.

    Its failed properties stay as they are.
    The published record says that you accepted them, and the check warns from then on.
    Exit code 0 if the partition is published, 1 if not.
    """
    current = chosen_settings(home)
    wanted = known_keys(current.home, [key])
    states = PartitionStates(current, Catalog.open(current.home), verified=VerifiedFiles(None))
    found = states.of(current.descriptions.name, key)
    if found.state is not State.REFUSED:
        say(f"{key} is {found.state.value}: {MEANING[found.state]}. Nothing was done.", fg="yellow")
        raise typer.Exit(0 if found.state is State.DONE else 1)
    failures = unpublished_failures(current.descriptions.partition(key))
    say(f"{failures.sentence()}.")
    if not accept_failed:
        say(f"To publish it with them: `vlm-assets publish {key} --accept-failed`.", fg="yellow")
        raise typer.Exit(1)
    if not agreed(f"Publish {key} with {failures.failed} failed properties?", yes):
        raise typer.Exit(1)
    run_config = {"ops": {current.descriptions.name: {"config": {"accept_failed": True}}}}
    console = TerminalConsole(soft_wrap=True)
    raise typer.Exit(
        run_partitions(current, port=port, keys=lambda api: wanted, run_config=run_config, console=console)
    )


_SERVE_EXAMPLES = """\b
vlm-assets serve --home /srv/properties --port 3000"""


@app.command("serve", epilog=_SERVE_EXAMPLES)
def serve_command(home: Home = None, port: Port = 3000) -> None:
    """Run the Dagster UI, daemon, schedules and alerts of a home.

    Until SIGTERM or Ctrl-C.
    """
    from vlm_assets.operate.doctor import examine

    current = chosen_settings(home)
    require_models(current)
    refuse_at_start(current, say)
    for one in examine(current, quick=True):
        if one.level != "ok":
            say(f"{one.level}: {one.check}: {one.message}", fg="yellow", err=True)
    serve_home(
        home=current.home,
        dagster_home=current.dagster_home,
        slots=device_slots(current),
        port=port,
        grace_seconds=current.grace_seconds,
        console=TerminalConsole(soft_wrap=True),
    )

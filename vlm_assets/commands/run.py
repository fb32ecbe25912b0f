"""The commands ``run`` and ``serve``: a backfill (``services/backfill.py``) is launched, shown and followed.

A Dagster that runs on the home already is used; otherwise one is started, and ended at the end.
``webserver/`` starts the processes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, TypeVar, Unpack

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.text import Text

from vlm_assets.assets.partition_state import MEANING, PartitionStates, State
from vlm_assets.assets.published_rows import unpublished_failures
from vlm_assets.assets.stored_settings import refuse_at_start
from vlm_assets.commands.terminal import (
    Home,
    Port,
    TerminalConsole,
    Yes,
    agreed,
    answered_yes,
    app,
    chosen_settings,
    say,
    say_all,
)
from vlm_assets.config.component_settings import refuse_component
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.question_sets import config_of_runs, question_sets
from vlm_assets.config.settings import Settings
from vlm_assets.services.backfill import (
    SHOWN,
    Backfill,
    BackfillOptions,
    BackfillProgress,
    BackfillSummary,
    KeysOf,
    all_keys,
    dagster_facts,
    failed_keys,
    known_keys,
    summarize,
)
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.expected_cost import SetProgress
from vlm_assets.services.forecast import compare_with_run
from vlm_assets.services.progress import doing
from vlm_assets.services.stale_work import stale_among
from vlm_assets.services.status import Status, read_status
from vlm_assets.webserver.api import (
    DagsterApi,
    DagsterApiError,
    DagsterUnreachableError,
    reload_running,
)
from vlm_assets.webserver.home import running_address
from vlm_assets.webserver.process_group import interruptible
from vlm_assets.webserver.server import running_dagster, serve
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import close_tail
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted

_AGAIN_SECONDS = 2.0

_LAUNCHES = 5
"""How often a backfill is launched that Dagster gives up."""

_T = TypeVar("_T")


INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM before all was done."""


def run_backfill(
    settings: Settings,
    *,
    port: int = 3000,
    keys: KeysOf | None = None,
    exit_when_done: bool = False,
    accuracy: Callable[[], str | None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    console: Console | None = None,
    **options: Unpack[BackfillOptions],
) -> int:
    """Start Dagster and a backfill on a home, until Ctrl-C or until all is done; gives the exit code.

    The code is 0 if every partition asked for is complete and no check of them failed with ERROR, 1
    otherwise, and 130 after Ctrl-C. keys: the partitions, all unless given. accuracy: a sentence about the
    finished output, or None. environment: of Dagster's processes, in addition to this one's.

    Raises CatalogError, DagsterHomeError, ProcessEndedError and DagsterApiError, whose
    messages say what to do.
    """
    console = console or TerminalConsole(soft_wrap=True)
    summary: BackfillSummary | None = None
    with running_dagster(settings, port=port, console=console, environment=environment) as server:
        server.start_pages(console)
        patience = Patience(console, server.watch)
        summary = _run(patience, server.api, settings, keys, accuracy, start=server.start_daemon, **options)
        if not exit_when_done:
            where_to_click(console, server.address)
            server.stay()
    if summary is not None and exit_when_done:
        console.print(f"The pages have ended with this command. To open them again: {command('serve')}.")
    return _code(summary)


def run_partitions(
    settings: Settings,
    *,
    port: int,
    keys: KeysOf | None,
    console: Console,
    **options: Unpack[BackfillOptions],
) -> int:
    """Materialize partitions in the Dagster that runs on the home, else in one that is started for it.

    The arguments, exit codes and errors are those of ``run_backfill``. If Dagster runs already, Ctrl-C ends
    only this command, and the backfill goes on.
    """
    address = running_address(settings.dagster_home)
    if address is None:
        refuse_at_start(settings, lambda sentence: console.print(escape(sentence)))
        return run_backfill(settings, port=port, keys=keys, exit_when_done=True, console=console, **options)
    summary: BackfillSummary | None = None
    with interruptible():
        try:
            console.print(f"Dagster runs on this home already: {address}")
            api = DagsterApi(address, settings.dagster_home)
            patience = Patience(console, lambda seconds: _wait_for(api, seconds))
            summary = _run(patience, api, settings, keys, lambda: None, **options)
        except KeyboardInterrupt:
            console.print(f"\nThe backfill goes on in {address}; {command('status')} shows how far it is.")
    return _code(summary)


def _wait_for(api: DagsterApi, seconds: float) -> None:
    """Let so many seconds pass beside a Dagster that another process started.

    Raises DagsterApiError if it has ended.
    """
    time.sleep(seconds)
    address = running_address(api.dagster_home)
    if address is None:
        raise DagsterApiError(
            f"The Dagster of this home at {api.url} has ended. What is done is kept, and the backfill goes on"
            f" with the next start: {command('serve')}, or {command('run')}."
        )
    api.url = address  # it may have been started again meanwhile


def _run(
    patience: Patience,
    api: DagsterApi,
    settings: Settings,
    keys: KeysOf | None,
    accuracy: Callable[[], str | None],
    *,
    start: Callable[[], None] = lambda: None,
    **options: Unpack[BackfillOptions],
) -> BackfillSummary:
    """Choose the partitions, and follow their backfill to its end. The arguments are those of ``_follow``."""
    with contextlib.ExitStack() as opened:
        dagster = patience.ask(lambda: opened.enter_context(dagster_facts(settings)))
        chosen = patience.ask(lambda: keys(dagster)) if keys is not None else all_keys(settings.home)
        return _follow(Backfill(api, dagster, settings, chosen, **options), accuracy, patience, start=start)


def _code(summary: BackfillSummary | None) -> int:
    return INTERRUPTED if summary is None else 0 if summary.ok else 1


@dataclass(frozen=True)
class Patience:
    """Repeats a question that fails, for as long as the Dagster that is asked lives.

    watch: lets so many seconds pass, and raises if that Dagster has ended.
    """

    console: Console
    watch: Callable[[float], None]

    def ask(self, question: Callable[[], _T]) -> _T:
        """Repeat ``question`` while a service is away. Says when that begins and ends."""
        waits = False
        while True:
            try:
                answer = question()
            except Exception as error:
                why = _who_is_away(error)
                if why is None:
                    raise
                if not waits:
                    self.console.print(
                        f"[yellow]{escape(why.rstrip('.'))}. Runs go on meanwhile; asking again until"
                        " there is an answer.[/]"
                    )
                waits = True
                self.watch(_AGAIN_SECONDS)
            else:
                if waits:
                    self.console.print("There are answers again.")
                return answer


def _who_is_away(error: Exception) -> str | None:
    """Which service gave no answer, and why, in a line; None if no service is away.

    Raises CommandError where Dagster's database would answer another try in the same way.
    """
    if isinstance(error, DagsterUnreachableError | ControlStateError | StoreAwayError):
        return str(error)
    from sqlalchemy import exc

    # Dagster's own exception, after some tries to reach Postgres, has the last of them as its cause.
    cause = error if isinstance(error, exc.SQLAlchemyError) else error.__cause__
    if not isinstance(cause, exc.SQLAlchemyError):
        return None
    reason = getattr(cause, "orig", None) or cause
    why = str(reason).partition("\n")[0]
    is_away = isinstance(cause, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)
    # SQLite has this code for a statement that the tables do not fit.
    if is_away and getattr(reason, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR:
        return f"Dagster's database gave no answer: {why}"
    raise CommandError(
        f"Dagster's database is not what this version of Dagster expects: {why}. If it is of an earlier"
        " version, stop Dagster and migrate it: `dagster instance migrate`."
    ) from error


def _follow(
    work: Backfill,
    accuracy: Callable[[], str | None],
    patience: Patience,
    *,
    start: Callable[[], None] = lambda: None,
) -> BackfillSummary:
    """Launch a backfill, show its progress until it ends, and a summary.

    start: starts the process that launches its runs. A failed answer ends nothing: Dagster is asked again as
    long as it lives.
    """
    console = patience.console
    console.print(patience.ask(work.begin))
    start()
    for launch in range(1, _LAUNCHES + 1):
        if work.followed:
            _watch(work, patience)
        given_up = patience.ask(work.given_up)
        for sentence in given_up:
            console.print(f"[yellow]{escape(sentence)}[/]")
        if not (given_up or work.deferred) or launch == _LAUNCHES:
            break
        if given_up:
            patience.watch(launch * _AGAIN_SECONDS)
        console.print(patience.ask(work.begin))

    summary = patience.ask(lambda: summarize(work, accuracy))
    show_summary(console, summary)
    for asked in question_sets(work.settings):
        if (compared := compare_with_run(asked.settings)) is not None:
            # How far the plan was off, where this run was planned.
            console.print(f"{asked.asset.name}: {compared.sentence()}", highlight=False)
    return summary


def _watch(work: Backfill, patience: Patience) -> None:
    """Show the progress of a backfill until it ends."""
    # Often enough to watch, seldom enough that a large catalogue's keys are no load.
    interval = max(2.0, len(work.keys) / 2000)
    with ProgressLine(patience.console, work.keys) as line:

        def ended() -> bool:
            now = work.progress()
            line.show(now, work.slowest_set(now))
            return work.ended(now)

        while not patience.ask(ended):
            patience.watch(interval)


_RUN_EXAMPLES = """\b
vlm-assets run                      every partition that is not complete
vlm-assets run --missing            and the last properties, too few to fill one
vlm-assets run --failed             partitions that failed
vlm-assets run --stale              partitions that were made with other settings, or from other images
vlm-assets run 000000000-000000999  this partition, if it is not complete or stale
vlm-assets run 000000000-000000999 --accept-failed"""


@app.command("run", epilog=_RUN_EXAMPLES)
def run_command(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Partitions, by key.")] = None,
    home: Home = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only partitions that failed.")] = False,
    stale: Annotated[
        bool,
        typer.Option(
            "--stale",
            help="Only partitions that are stale: all their properties are described anew. `status` says why"
            " they are stale, and how long that takes.",
        ),
    ] = False,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing",
            help="Also make a partition of the last properties, however few.",
        ),
    ] = False,
    accept_failed: Annotated[
        bool,
        typer.Option(
            "--accept-failed",
            help="Publish the partition KEY that the check failed_share refused, although so many properties"
            " failed. They stay as they are, and the published record says that you accepted them.",
        ),
    ] = False,
    port: Port = 3000,
    yes: Yes = False,
) -> None:
    """Materialize partitions and show the progress until they are done.

    Uses the Dagster that runs on this home, or starts one for as long as it takes.
    Finished work is kept, so the command can be repeated at any time. Properties that failed are tried
    again in a partition that is not published, if it is named or taken by --failed.
    A stale partition was made with other settings or images than now. What it would take is said, and you
    are asked. Without a terminal, and after a no, it is left as it is, unless it is named, or --stale or
    --yes is given. Rows whose inputs are the same are kept, those of the two versions before included. The
    old file stays until the new one is complete.
    Exit code 0 if all these partitions are complete, 1 if not, 130 after Ctrl-C.
    """
    if bool(keys) + failed + stale + missing > 1:
        raise typer.BadParameter("Give keys, or --failed, or --stale, or --missing: one of the four.")
    if accept_failed and len(keys or ()) != 1:
        raise typer.BadParameter("Give the one KEY of the partition whose failed properties you accept.")
    current = chosen_settings(home)
    refuse_component(current)
    if accept_failed:
        (key,) = known_keys(current.home, keys or [])
        raise typer.Exit(_publish_refused(current, key, port=port, yes=yes))
    require_models(current)
    advance = partial(doing, "reading where partitions stand")
    status = read_status(current, Catalog.open(current.home), advance=advance)
    if status.paused:
        paused = f"{status.paused[0].upper()}{status.paused[1:]}."
        say(f"{paused} Nothing runs until {command('devices', 'resume')}.", fg="red", err=True)
        raise typer.Exit(1)
    console = TerminalConsole(soft_wrap=True)
    if missing and (closed := close_tail(current.home, current.mirror)) is not None:
        console.print(
            f"The last {counted(len(closed), 'properties are', 'property is')} partition {closed.key} now."
        )
        if running_address(current.dagster_home) is not None:
            console.print(reload_running(current.dagster_home))
    elif status.waiting_in_tail and not (keys or failed or stale):
        console.print(
            f"In no partition yet: {counted(status.waiting_in_tail, 'properties')}, too few to fill one."
            f" {command('run', '--missing')} takes them too."
        )
    keys_of = _chosen(current, status, keys or [], failed=failed, stale=stale)
    stale_too = bool(keys) or stale
    if failed:
        _say_stale_stay(status)
    elif stale_too or status.stale.keys:
        stale_too = _stale_too(current, status, keys or [], stale=stale, yes=yes)
    if stale_too and status.stale_unknown:
        for sentence in status.stale_unknown:
            say(sentence, fg="yellow", err=True)
        if not keys and not status.stale_keys:
            raise typer.Exit(1)
    code = run_partitions(
        current,
        port=port,
        keys=keys_of,
        stale_too=stale_too,
        retry_failed=failed or bool(keys),
        console=console,
    )
    raise typer.Exit(code)


def _stale_too(current: Settings, status: Status, keys: list[str], *, stale: bool, yes: bool) -> bool:
    """Say what making stale partitions anew takes, and ask. Returns whether to make them."""
    work = status.stale
    if keys and set(keys) & set(work.keys):
        work = stale_among(current, Catalog.open(current.home), sorted(set(keys) & set(work.keys)))
    if keys or stale:
        if stale or set(keys) & set(work.keys):
            say_all(work.sentences())
        return True
    say_all(work.sentences())
    if yes or answered_yes(f"Make {counted(len(work.keys), 'partitions')} anew?"):
        return True
    _say_stale_stay(status)
    return False


def _say_stale_stay(status: Status) -> None:
    if not status.stale.keys:
        return
    staying = counted(
        len(status.stale.keys), "stale partitions stay as they are", "stale partition stays as it is"
    )
    say(f"{staying}. To make what is stale anew: {command('run', '--stale')}.")


def _chosen(
    current: Settings, status: Status, keys: list[str], *, failed: bool, stale: bool
) -> KeysOf | None:
    """The partitions that the arguments name; None: all. Raises CatalogError."""

    if stale:
        return lambda dagster: sorted(status.stale_keys)
    if keys:
        checked_keys = known_keys(current.home, keys)
        return lambda dagster: checked_keys
    if failed:
        return lambda dagster: failed_keys(current.home, status, dagster)
    return None


def _publish_refused(current: Settings, key: str, *, port: int, yes: bool) -> int:
    """Publish a partition that the check failed_share refused, with its failed rows. The exit code."""
    verified = VerifiedFiles(current.state_directory)
    states = PartitionStates(current, Catalog.open(current.home), verified=verified)
    state = states.read(current.descriptions.name, key).state
    if state is not State.REFUSED:
        say(f"{key} is {state.value}: {MEANING[state]}. Nothing was done.", fg="yellow")
        return 0 if state is State.DONE else 1
    failures = unpublished_failures(current.descriptions.partition(key))
    say(f"{failures.sentence()}.")
    if not agreed(f"Publish {key} with {counted(failures.failed, 'failed properties')}?", yes):
        return 1
    run_config = config_of_runs(current, {current.descriptions.name: {"accept_failed": True}})
    console = TerminalConsole(soft_wrap=True)
    return run_partitions(
        current, port=port, keys=lambda dagster: [key], run_config=run_config, console=console
    )


_SERVE_EXAMPLES = """\b
vlm-assets serve --home /srv/properties --port 3000"""


@app.command("serve", epilog=_SERVE_EXAMPLES)
def serve_command(home: Home = None, port: Port = 3000) -> None:
    """Run the Dagster UI, daemon, schedules and alerts of a home.

    Until SIGTERM or Ctrl-C.
    """
    from vlm_assets.services.doctor.examination import examine

    current = chosen_settings(home)
    refuse_component(current)
    require_models(current)
    refuse_at_start(current, say)
    for diagnosis in examine(current, quick=True):
        if diagnosis.level != "ok":
            say(f"{diagnosis.level}: {diagnosis.check}: {diagnosis.message}", fg="yellow", err=True)
    serve(current, port=port, console=TerminalConsole(soft_wrap=True))


class ProgressLine:
    """A bar and, below it, partitions done, running and failed, properties and rate; two lines of 80 columns.

    Without a terminal: a line at every change.
    """

    def __init__(self, console: Console, keys: Sequence[str]) -> None:
        self._console = console
        self._sizes = {key: len(PropertyRange.from_key(key)) for key in keys}
        self._last_counts = ""
        self._bar = _BarAndState(
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=len(keys))

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: BackfillProgress, progress: SetProgress) -> None:
        """Show the progress; without a terminal, a line for each change."""
        properties = sum(progress.done.get(key, 0) for key in self._sizes)
        rate, seconds_left = progress.rate.per_second, progress.seconds_left(self._sizes)
        counts = (
            f"{len(now.done)}/{counted(len(self._sizes), 'partitions')}, {now.runs} running,"
            f" {len(now.failed)} failed"
            + (f", {len(now.never_started)} not started" * bool(now.never_started))
        )
        state = f"{counts}; {counted(properties, 'properties')}"
        if rate is not None and seconds_left is not None:
            state += f", {rate:.2f}/s, {timedelta(seconds=round(seconds_left))} left"
        self._bar.state = state
        self._bar.update(self._task, completed=len(now.done))
        if not self._console.is_terminal and counts != self._last_counts:
            self._console.print(state, highlight=False)
        self._last_counts = counts


class _BarAndState(Progress):
    """A bar with a line of text below it."""

    state = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The two lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.state, no_wrap=True, overflow="ellipsis")


def show_summary(console: Console, summary: BackfillSummary) -> None:
    """Print how a backfill ended."""
    colour = "green" if summary.ok else "red"
    console.print(
        f"[{colour}]{summary.complete} of {counted(len(summary.keys), 'partitions are', 'partition is')}"
        " complete.[/]"
    )
    properties = {"ok": summary.status.ok, "failed": sum(summary.status.failed_by_kind.values())}
    counts = ", ".join(f"{count:,} {name}" for name, count in properties.items() if count)
    console.print(f"Properties: {counts or 'none yet'}.")
    for failed in summary.status.first_failed:
        console.print(f"[yellow]Failed:[/] {escape(failed.sentence())}")
    if summary.accuracy:
        console.print(escape(summary.accuracy))
    outlooks, more = summary.outlooks
    for outlook in outlooks:
        colour = "red" if outlook.needs_person else "yellow"
        console.print(f"[{colour}]{outlook.ending}:[/] {escape(outlook.sentence())}.")
    if more:
        console.print(f"… and {counted(more, 'more partitions')} whose last run failed or was interrupted")
    if not all(outlook.needs_person for outlook in outlooks):
        console.print(
            f"That is while Dagster runs: {command('serve')}. {command('status')} says when."
            f" To do it now: {command('run')}."
        )
    checks = [
        f"[{'red' if result.severity == 'ERROR' else 'yellow'}]{result.severity}:[/] check {result.check}"
        f" of {result.asset}, partition {result.partition}: {escape(result.description)}"
        for result in summary.failing
    ]
    for line in checks[:SHOWN]:
        console.print(line)
    if len(checks) > SHOWN:
        console.print(f"… and {counted(len(checks) - SHOWN, 'more checks')} that did not pass")


def where_to_click(console: Console, address: str) -> None:
    """The pages to look at, and how to end."""
    console.print(f"\nLook at it:  [bold]{address}/assets/property_descriptions[/]")
    console.print("  a green partition: its rows, its rate, and a contact sheet with what the model said")
    console.print("  Overview, Metadata, Plots: how rates and rows go over the partitions")
    console.print("  Checks: what had to hold before a partition was published")
    console.print("Ctrl-C ends Dagster; what is done stays done.")

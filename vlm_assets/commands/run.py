"""``vlm-assets run``, ``publish`` and ``serve``: a backfill of a home, launched in Dagster and followed here.

A Dagster that runs on the home already is used; otherwise one is started, and ended at the end.
``webserver/`` starts the processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.text import Text

from sensors.retry_ledger import Attempts
from vlm_assets.assets.fingerprint import ANEW, KEEP
from vlm_assets.assets.partition_state import MEANING, PartitionStates, State
from vlm_assets.assets.published_rows import unpublished_failures
from vlm_assets.assets.stored_settings import refuse_at_start
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_file import CatalogError
from vlm_assets.catalog.ingest import close_tail
from vlm_assets.catalog.ranges import PropertyRange
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
)
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import read_rate
from vlm_assets.services.past_forecasts import compare_with_run
from vlm_assets.services.progress import doing
from vlm_assets.services.stale_work import stale_among
from vlm_assets.services.status import Status, read_status
from vlm_assets.webserver.api import (
    LAUNCHED_BY,
    STALE,
    DagsterApi,
    DagsterApiError,
    DagsterUnreachableError,
    FailingCheck,
    LaunchedBackfill,
    reload_running,
)
from vlm_assets.webserver.home import running_address
from vlm_assets.webserver.process_group import interruptible
from vlm_assets.webserver.server import running_dagster, serve
from vlm_durable.commands import command
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_durable.state.rate import Rate
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted

if TYPE_CHECKING:
    from sensors.outlook import Outlook

_SHOWN = 5

_AGAIN_SECONDS = 2.0

_LAUNCHES = 5
"""How often a backfill is launched that Dagster gives up."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class BackfillProgress:
    """The keys of a backfill by state, over all the assets: done means done in each of them.

    under_way: launched, most of them waiting for their turn. runs: runs that work at this moment.
    """

    done: frozenset[str]
    under_way: frozenset[str]
    failed: frozenset[str]
    runs: int


@dataclass
class Backfill:
    """The backfill of some partitions (``keys``), launched and followed from a terminal."""

    api: DagsterApi
    settings: Settings
    keys: Sequence[str]
    run_config: Mapping[str, object] = field(default_factory=dict)
    """The config of each run that it launches."""
    stale_too: bool = False
    """Whether a partition that was made under other settings counts as work to do."""
    followed: list[str] = field(default_factory=list)
    """Ids of the Dagster backfills that this one continues or has launched."""

    @property
    def assets(self) -> tuple[str, ...]:
        """The assets that it launches and follows."""
        return self.settings.computed_assets

    def begin(self) -> str:
        """Continue unfinished backfills, and launch one for the partitions that they lack. Says what it did.

        After an error it may be called again: it then finds a backfill whose launch was not answered.
        """
        self.followed.clear()
        status = self.status()
        incomplete = status.keys_left(stale_too=self.stale_too).intersection(self.keys)
        options = stale_options(self.assets, status.stale.settings, stale_too=self.stale_too)
        if not self.keys:
            return "Nothing to do: there is no such partition."
        sentences = []
        if not incomplete:
            sentences.append(
                f"Nothing to do: {len(self.keys)} of"
                f" {counted(len(self.keys), 'partitions are', 'partition is')} complete."
            )
        for backfill in self.api.unfinished_backfills(self.assets[0]):
            under_way = backfill.keys & incomplete
            if self.stale_too and backfill.stale != _in_words(options):
                # Its runs keep partitions that are stale now, or their option is unknown.
                under_way -= status.stale_keys
            if under_way:
                self.followed.append(backfill.id)
                incomplete -= under_way
                sentences.append(
                    f"Going on with backfill {backfill.id}:"
                    f" {counted(len(under_way), 'partitions are', 'partition is')} left."
                )
            anew = backfill.keys & status.stale_keys & frozenset(self.keys)
            if anew and not self.stale_too and backfill.stale != KEEP:
                sentences.append(
                    f"Backfill {backfill.id} was launched before to make"
                    f" {counted(len(anew), 'stale partitions')} anew, and goes on with that. Its page cancels"
                    f" it: {self.api.url}/runs/b/{backfill.id}."
                )
        if incomplete:
            sentences.append(self.launch(incomplete, options))
        return " ".join(sentences)

    def launch(self, keys: Collection[str], stale: Mapping[str, str]) -> str:
        """Launch a backfill of these partitions, all assets together. Says what it did.

        stale: for each asset, what its runs do with partitions that are stale by then.
        """
        new = self.api.launch_backfill(
            self.assets,
            sorted(keys),
            title=counted(len(keys), "partitions"),
            tags={LAUNCHED_BY: "terminal", STALE: _in_words(stale)},
            run_config=with_stale(self.run_config, stale),
        )
        self.followed.append(new)
        return f"Launched backfill {new} of {len(keys)} of {counted(len(self.keys), 'partitions')}."

    def progress(self) -> BackfillProgress:
        """The progress of the partitions."""
        assets = [self.api.partition_keys(asset) for asset in self.assets]
        return BackfillProgress(
            done=frozenset.intersection(*(keys.materialized for keys in assets)).intersection(self.keys),
            under_way=frozenset.union(*(keys.running for keys in assets)).intersection(self.keys),
            failed=frozenset.union(*(keys.failed for keys in assets)).intersection(self.keys),
            runs=self.api.runs_in("STARTED"),
        )

    def status(self) -> Status:
        """The status of the home, as ``vlm-assets status`` shows it."""
        return read_status(self.settings, Catalog.open(self.settings.home))

    def rate(self) -> tuple[Rate, Mapping[str, int]]:
        """The rate of the data set and the rows that are done, as ``vlm-assets status`` shows them."""
        return read_rate(self.settings, Catalog.open(self.settings.home))

    def ended(self, now: BackfillProgress) -> bool:
        """Whether Dagster has ended the backfills, so that nothing more will happen.

        The partitions that Dagster shows as done do not decide: one that is made again was done before.
        """
        # A failed run may be retried: only the backfill knows, and it is asked only when no run is under way.
        return not now.under_way and not any(backfill.unfinished for backfill in self._read_followed())

    def given_up(self) -> list[str]:
        """Why Dagster gave up backfills that have ended, a sentence each.

        Its daemon reads new ranges some seconds after the webserver, and gives up a backfill of those that it
        has not read yet.
        """
        return [
            f"Dagster gave up backfill {backfill.id}: {backfill.error}"
            for backfill in self._read_followed()
            if backfill.error
        ]

    def _read_followed(self) -> list[LaunchedBackfill]:
        return [self.api.backfill(backfill_id, self.assets[0]) for backfill_id in self.followed]


def stale_options(assets: Sequence[str], settings: Mapping[str, str], *, stale_too: bool) -> dict[str, str]:
    """The option of runs for stale partitions, by asset: to keep them, or the settings to make them for.

    settings: the digest of each asset's present settings; an unknown one is missing.
    """
    return {asset: settings.get(asset, ANEW) if stale_too else KEEP for asset in assets}


def with_stale(run_config: Mapping[str, object], stale: Mapping[str, str]) -> dict[str, object]:
    """Add the option for stale partitions of each asset to a run config."""
    ops: Any = run_config.get("ops", {})
    stale_ops = {
        asset: {"config": {**ops.get(asset, {}).get("config", {}), "stale": option}}
        for asset, option in stale.items()
    }
    return {**run_config, "ops": {**ops, **stale_ops}}


def _in_words(stale: Mapping[str, str]) -> str:
    return " ".join(dict.fromkeys(stale.values()))


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

    def show(self, now: BackfillProgress, rate: Rate, done: Mapping[str, int]) -> None:
        """Show the progress; without a terminal, a line for each change. done: rows by partition."""
        properties = sum(done.get(key, 0) for key in self._sizes)
        seconds_left = rate.seconds_left(size - done.get(key, 0) for key, size in self._sizes.items())
        counts = (
            f"{len(now.done)}/{counted(len(self._sizes), 'partitions')}, {now.runs} running,"
            f" {len(now.failed)} failed"
        )
        state = f"{counts}; {counted(properties, 'properties')}"
        if rate.per_second is not None and seconds_left is not None:
            state += f", {rate.per_second:.2f}/s, {timedelta(seconds=round(seconds_left))} left"
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


@dataclass(frozen=True)
class BackfillSummary:
    """How a backfill of some partitions (``keys``) ended.

    left_keys: partitions that are not complete. outlooks: what becomes of partitions whose last run did not
    end well, and how many more there are. status: that of the home after the end.
    """

    keys: Sequence[str]
    left_keys: frozenset[str]
    outlooks: tuple[Sequence[Outlook], int]
    status: Status
    failing: Sequence[FailingCheck]
    accuracy: str | None

    @property
    def complete(self) -> int:
        """How many of the partitions are complete."""
        return len(frozenset(self.keys) - self.left_keys)

    @property
    def ok(self) -> bool:
        """Whether every partition is complete and no check failed with ERROR."""
        return self.complete == len(self.keys) and all(check.severity != "ERROR" for check in self.failing)

    def print(self, console: Console) -> None:
        """The summary for people."""
        colour = "green" if self.ok else "red"
        console.print(
            f"[{colour}]{self.complete} of {counted(len(self.keys), 'partitions are', 'partition is')}"
            " complete.[/]"
        )
        properties = {"ok": self.status.ok, "failed": sum(self.status.failed_by_kind.values())}
        counts = ", ".join(f"{count:,} {name}" for name, count in properties.items() if count)
        console.print(f"Properties: {counts or 'none yet'}.")
        for failed in self.status.first_failed:
            console.print(f"[yellow]Failed:[/] {escape(failed.sentence())}")
        if self.accuracy:
            console.print(escape(self.accuracy))
        outlooks, more = self.outlooks
        for outlook in outlooks:
            colour = "red" if outlook.next_try is None else "yellow"
            console.print(f"[{colour}]{outlook.ending}:[/] {escape(outlook.sentence())}.")
        if more:
            console.print(
                f"… and {counted(more, 'more partitions')} whose last run failed or was interrupted"
            )
        if any(outlook.next_try is not None for outlook in outlooks):
            console.print(
                f"They are tried again while Dagster runs: {command('serve')}. At once: {command('run')}."
            )
        checks = [
            f"[{'red' if check.severity == 'ERROR' else 'yellow'}]{check.severity}:[/] check {check.name}"
            f" of {check.asset}, partition {check.partition}: {escape(check.description)}"
            for check in self.failing
        ]
        for line in checks[:_SHOWN]:
            console.print(line)
        if len(checks) > _SHOWN:
            console.print(f"… and {counted(len(checks) - _SHOWN, 'more checks')} that did not pass")


def where_to_click(console: Console, address: str) -> None:
    """The pages to look at, and how to end."""
    console.print(f"\nLook at it:  [bold]{address}/assets/property_descriptions[/]")
    console.print("  a green partition: its rows, its rate, and a contact sheet with what the model said")
    console.print("  Overview, Metadata, Plots: how rates and rows go over the partitions")
    console.print("  Checks: what had to hold before a partition was published")
    console.print("Ctrl-C ends Dagster; what is done stays done.")


INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM before all was done."""

_FAILED = frozenset({State.FAILED, State.GIVEN_UP, State.REFUSED, State.DAMAGED, State.LOST})

KeysOf = Callable[[DagsterApi], Sequence[str]]
"""Chooses the partitions of a backfill, once Dagster can be asked."""


def all_keys(home: Path) -> list[str]:
    """Every partition of the catalogue. Raises CatalogError."""
    return [bounds.key for bounds in Catalog.open(home).ranges]


def known_keys(home: Path, keys: Sequence[str]) -> list[str]:
    """These partitions, each once. Raises CatalogError if the catalogue does not have one of them."""
    unknown = sorted(set(keys).difference(all_keys(home)))
    if unknown:
        raise CatalogError(
            f"{', '.join(unknown[:5])}: the catalogue in {home} has no such partition."
            f" {command('status', '--json')} lists them all."
        )
    return sorted(set(keys))


def failed_keys(home: Path, status: Status, api: DagsterApi) -> list[str]:
    """Partitions whose last run failed, or whose files are not what they should be, in either asset."""
    failed_runs = frozenset[str]().union(*(api.partition_keys(asset).failed for asset in status.assets))
    failed_files = {partition.key for partition in status.partitions if partition.state in _FAILED}
    return [key for key in all_keys(home) if key in failed_runs or key in failed_files]


def run_backfill(
    settings: Settings,
    *,
    port: int = 3000,
    keys: KeysOf | None = None,
    run_config: Mapping[str, object] | None = None,
    stale_too: bool = False,
    exit_when_done: bool = False,
    accuracy: Callable[[], str | None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> int:
    """Start Dagster and a backfill on a home, until Ctrl-C or until all is done; gives the exit code.

    The code is 0 if every partition asked for is complete and no check of them failed with ERROR, 1
    otherwise, and 130 after Ctrl-C. keys: the partitions, all unless given. run_config: of each run.
    stale_too: whether stale partitions among them are made anew.
    accuracy: a sentence about the finished output, or None. environment: of Dagster's processes, in addition
    to this one's.

    Raises CatalogError, DagsterHomeError, ProcessEndedError and DagsterApiError, whose
    messages say what to do.
    """
    console = console or TerminalConsole(soft_wrap=True)
    summary: BackfillSummary | None = None
    with running_dagster(settings, port=port, console=console, environment=environment) as server:
        server.start_pages(console)
        patience = Patience(console, server.watch)
        work = _backfill(patience, server.api, settings, keys, run_config, stale_too=stale_too)
        summary = _follow(work, accuracy, patience, start=server.start_daemon)
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
    run_config: Mapping[str, object] | None = None,
    stale_too: bool = False,
    console: Console,
) -> int:
    """Materialize partitions in the Dagster that runs on the home, else in one that is started for it.

    The arguments, exit codes and errors are those of ``run_backfill``. If Dagster runs already, Ctrl-C ends
    only this command, and the backfill goes on.
    """
    address = running_address(settings.dagster_home)
    if address is None:
        refuse_at_start(settings, lambda sentence: console.print(escape(sentence)))
        return run_backfill(
            settings,
            port=port,
            keys=keys,
            run_config=run_config,
            stale_too=stale_too,
            exit_when_done=True,
            console=console,
        )
    summary: BackfillSummary | None = None
    with interruptible():
        try:
            console.print(f"Dagster runs on this home already: {address}")
            api = DagsterApi(address, settings.dagster_home)
            patience = Patience(console, lambda seconds: _wait_for(api, seconds))
            work = _backfill(patience, api, settings, keys, run_config, stale_too=stale_too)
            summary = _follow(work, lambda: None, patience)
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


def _backfill(
    patience: Patience,
    api: DagsterApi,
    settings: Settings,
    keys: KeysOf | None,
    run_config: Mapping[str, object] | None,
    *,
    stale_too: bool,
) -> Backfill:
    chosen = patience.ask(lambda: keys(api)) if keys is not None else all_keys(settings.home)
    return Backfill(api, settings, chosen, run_config or {}, stale_too)


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
            except (DagsterUnreachableError, ControlStateError, StoreAwayError) as error:
                if not waits:
                    self.console.print(
                        f"[yellow]{escape(str(error).rstrip('.'))}. Runs go on meanwhile; asking again until"
                        " there is an answer.[/]"
                    )
                waits = True
                self.watch(_AGAIN_SECONDS)
            else:
                if waits:
                    self.console.print("There are answers again.")
                return answer


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
        if not given_up or launch == _LAUNCHES:
            break
        patience.watch(launch * _AGAIN_SECONDS)
        console.print(patience.ask(work.begin))

    def summarize() -> BackfillSummary:
        failing = [check for asset in work.assets for check in work.api.failing_checks(asset)]
        status = work.status()
        left_keys = status.keys_left(stale_too=work.stale_too)
        return BackfillSummary(
            keys=work.keys,
            left_keys=left_keys,
            outlooks=_outlooks(work.settings, status, left_keys.intersection(work.keys)),
            status=status,
            failing=[check for check in failing if check.partition in work.keys],
            accuracy=accuracy(),
        )

    summary = patience.ask(summarize)
    summary.print(console)
    if (compared := compare_with_run(work.settings)) is not None:
        # How far the plan was off, where this run was planned.
        console.print(compared.sentence(), highlight=False)
    return summary


def _watch(work: Backfill, patience: Patience) -> None:
    """Show the progress of a backfill until it ends."""
    # Often enough to watch, seldom enough that a large catalogue's keys are no load.
    interval = max(2.0, len(work.keys) / 2000)
    with ProgressLine(patience.console, work.keys) as line:

        def ended() -> bool:
            now = work.progress()
            line.show(now, *work.rate())
            return work.ended(now)

        while not patience.ask(ended):
            patience.watch(interval)


def _outlooks(settings: Settings, status: Status, keys: frozenset[str]) -> tuple[Sequence[Outlook], int]:
    """What becomes of those of these partitions whose last run did not end well."""
    if not keys or not settings.dagster_home.is_dir():
        return (), 0
    import dagster as dg
    import sqlalchemy as sa

    from sensors.dagster_internals.runs import InstanceRuns
    from sensors.outlook import outlooks
    from sensors.retry_decision import ATTEMPTS, Policy

    rows = {
        partition.key: partition.rows for partition in reversed(status.partitions) if partition.key in keys
    }
    try:
        with dg.DagsterInstance.from_config(str(settings.dagster_home)) as instance:
            return outlooks(
                InstanceRuns(instance),
                Attempts(control_state(settings)).read(),
                rows,
                Policy(ATTEMPTS, settings.retry_minutes * 60.0),
                every_minutes=settings.retry_every_minutes,
                now=status.at,
                most=_SHOWN,
            )
    except sa.exc.SQLAlchemyError as error:
        raise DagsterUnreachableError(f"Dagster's database gave no answer: {error}") from error


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
    Finished work is kept, so the command can be repeated at any time.
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
    raise typer.Exit(run_partitions(current, port=port, keys=keys_of, stale_too=stale_too, console=console))


def _stale_too(current: Settings, status: Status, keys: list[str], *, stale: bool, yes: bool) -> bool:
    """Say what making stale partitions anew takes, and ask. Returns whether to make them."""
    work = status.stale
    if keys and set(keys) & set(work.keys):
        work = stale_among(current, Catalog.open(current.home), sorted(set(keys) & set(work.keys)))
    if keys or stale:
        if stale or set(keys) & set(work.keys):
            for sentence in work.sentences():
                say(sentence)
        return True
    for sentence in work.sentences():
        say(sentence)
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
        return lambda api: sorted(status.stale_keys)
    if keys:
        checked_keys = known_keys(current.home, keys)
        return lambda api: checked_keys
    if failed:
        return lambda api: failed_keys(current.home, status, api)
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
    run_config = {"ops": {current.descriptions.name: {"config": {"accept_failed": True}}}}
    console = TerminalConsole(soft_wrap=True)
    return run_partitions(current, port=port, keys=lambda api: [key], run_config=run_config, console=console)


_SERVE_EXAMPLES = """\b
vlm-assets serve --home /srv/properties --port 3000"""


@app.command("serve", epilog=_SERVE_EXAMPLES)
def serve_command(home: Home = None, port: Port = 3000) -> None:
    """Run the Dagster UI, daemon, schedules and alerts of a home.

    Until SIGTERM or Ctrl-C.
    """
    from vlm_assets.services.doctor.examination import examine

    current = chosen_settings(home)
    require_models(current)
    refuse_at_start(current, say)
    for diagnosis in examine(current, quick=True):
        if diagnosis.level != "ok":
            say(f"{diagnosis.level}: {diagnosis.check}: {diagnosis.message}", fg="yellow", err=True)
    serve(current, port=port, console=TerminalConsole(soft_wrap=True))

"""The commands ``run`` and ``serve``: a backfill (``services/followed_backfill.py``) on a console.

A Dagster that runs on the home already is used; otherwise one is started, and ended at the end.
``webserver/`` starts the processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Annotated, Unpack

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
    BackfillOptions,
    BackfillProgress,
    BackfillSummary,
    KeysOf,
    failed_keys,
    known_keys,
)
from vlm_assets.services.followed_backfill import Patience, materialize_partitions, watch_from_outside
from vlm_assets.services.forecast import compare_with_run
from vlm_assets.services.progress import doing
from vlm_assets.services.stale_work import stale_among
from vlm_assets.services.status import Status, read_status
from vlm_assets.webserver.api import DagsterApi, reload_running
from vlm_assets.webserver.home import running_address
from vlm_assets.webserver.process_group import interruptible
from vlm_assets.webserver.server import running_dagster, serve
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import close_tail
from vlm_durable.commands import command
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM before all was done."""


def run_backfill(
    settings: Settings,
    *,
    port: int,
    exit_when_done: bool,
    keys: KeysOf | None = None,
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
    code = INTERRUPTED
    with running_dagster(settings, port=port, console=console, environment=environment) as server:
        server.start_pages(console)
        patience = Patience(BackfillLines(console), server.watch)
        summary = materialize_partitions(
            patience, server.api, settings, keys, start=server.start_daemon, **options
        )
        code = show_end(console, settings, summary, accuracy())
        if not exit_when_done:
            where_to_click(console, server.address)
            server.stay()
    if code != INTERRUPTED and exit_when_done:
        console.print(f"The pages have ended with this command. To open them again: {command('serve')}.")
    return code


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
    code = INTERRUPTED
    with interruptible():
        try:
            console.print(f"Dagster runs on this home already: {address}")
            api = DagsterApi(address, settings.dagster_home)
            patience = Patience(BackfillLines(console), partial(watch_from_outside, api))
            summary = materialize_partitions(patience, api, settings, keys, **options)
            code = show_end(console, settings, summary)
        except KeyboardInterrupt:
            console.print(f"\nThe backfill goes on in {address}; {command('status')} shows how far it is.")
    return code


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
    named = sorted(set(keys) & set(work.keys))
    if named:
        work = stale_among(current, Catalog.open(current.home), named)
    if keys or stale:
        if stale or named:
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


class BackfillLines:
    """A backfill on a console: sentences, and a bar with the figures below it, two lines of 80 columns.

    Without a terminal: a line at every change in place of the bar.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, sentence: str) -> None:
        """Print a sentence."""
        self._console.print(escape(sentence))

    def warn(self, sentence: str) -> None:
        """Print a sentence in yellow."""
        self._console.print(f"[yellow]{escape(sentence)}[/]")

    @contextlib.contextmanager
    def progress(self, partitions: int) -> Iterator[Callable[[BackfillProgress], None]]:
        """A function that shows how far so many partitions are, until the context ends."""
        console, last_counts = self._console, ""
        bar = _BarAndState(
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        task = bar.add_task("", total=partitions)

        def show(now: BackfillProgress) -> None:
            nonlocal last_counts
            counts = (
                f"{len(now.done)}/{counted(partitions, 'partitions')}, {now.runs} running,"
                f" {len(now.failed)} failed"
                + (f", {len(now.never_started)} not started" * bool(now.never_started))
            )
            bar.state = f"{counts}; {counted(now.properties, 'properties')}"
            if now.rate is not None and now.seconds_left is not None:
                left = timedelta(seconds=round(now.seconds_left))
                bar.state += f", {now.rate:.2f}/s, {left} left"
            bar.update(task, completed=len(now.done))
            if not console.is_terminal and counts != last_counts:
                console.print(bar.state, highlight=False)
            last_counts = counts

        with bar:
            yield show


class _BarAndState(Progress):
    """A bar with a line of text below it."""

    state = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The two lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.state, no_wrap=True, overflow="ellipsis")


def show_end(
    console: Console, settings: Settings, summary: BackfillSummary, accuracy: str | None = None
) -> int:
    """Print how a backfill ended, and how far off its plan was where it had one. Gives the exit code."""
    show_summary(console, summary, accuracy)
    for asked in question_sets(settings):
        if (compared := compare_with_run(asked.settings)) is not None:
            console.print(f"{asked.asset.name}: {compared.sentence()}", highlight=False)
    return 0 if summary.ok else 1


def show_summary(console: Console, summary: BackfillSummary, accuracy: str | None = None) -> None:
    """Print how a backfill ended. accuracy: a sentence about the finished output."""
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
    if accuracy:
        console.print(escape(accuracy))
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

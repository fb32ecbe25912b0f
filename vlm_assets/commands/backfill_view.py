"""How a backfill is shown in a terminal: a bar while it is under way, and a summary at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.text import Text

from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.services.backfill import SHOWN, BackfillProgress, BackfillSummary
from vlm_durable.commands import command
from vlm_durable.state.rate import Rate
from vlm_durable.wording import counted


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
        colour = "red" if outlook.next_try is None else "yellow"
        console.print(f"[{colour}]{outlook.ending}:[/] {escape(outlook.sentence())}.")
    if more:
        console.print(f"… and {counted(more, 'more partitions')} whose last run failed or was interrupted")
    if any(outlook.next_try is not None for outlook in outlooks):
        console.print(
            f"They are tried again while Dagster runs: {command('serve')}. At once: {command('run')}."
        )
    checks = [
        f"[{'red' if check.severity == 'ERROR' else 'yellow'}]{check.severity}:[/] check {check.name}"
        f" of {check.asset}, partition {check.partition}: {escape(check.description)}"
        for check in summary.failing
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

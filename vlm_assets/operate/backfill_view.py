"""What the terminal shows of a backfill: the progress line, the summary, and the pages to look at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import duckdb
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.text import Text

from vlm_assets.assets.published_rows import FIRST, FailedRow
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.operate.backfill import ASSETS, BackfillProgress
from vlm_assets.operate.dagster_server.api import FailingCheck
from vlm_assets.operate.rate import Rate

_SHOWN = 5


class ProgressLine:
    """A bar and, below it, partitions done, running and failed, properties and rate; two lines of 80 columns.

    Without a terminal: a line at every change.
    """

    def __init__(self, console: Console, keys: Sequence[str]) -> None:
        self._console = console
        self._sizes = {key: len(PropertyRange.from_key(key)) for key in keys}
        self._said = ""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, now: BackfillProgress, rate: Rate) -> None:
        """Show how the partitions stand; without a terminal, a line for each change."""
        properties = self._properties(now.done)
        left = rate.seconds_left(sum(self._sizes.values()) - properties)
        counts = (
            f"{len(now.done)}/{len(self._sizes)} partitions, {now.runs} running, {len(now.failed)} failed"
        )
        state = f"{counts}; {properties:,} properties"
        if rate.per_second is not None and left is not None:
            state += f", {rate.per_second:.2f}/s, {timedelta(seconds=round(left))} left"
        self._bar.state = state
        self._bar.update(self._task, completed=len(now.done))
        if not self._console.is_terminal and counts != self._said:
            self._console.print(state, highlight=False)
        self._said = counts

    def _properties(self, keys: Collection[str]) -> int:
        return sum(self._sizes.get(key, 0) for key in keys)


class _BarAndState(Progress):
    """A bar with a line of text below it."""

    state = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The two lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.state, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True)
class BackfillSummary:
    """How a backfill ended.

    rows: number of published descriptions by status. first_failed: some of those that failed.
    """

    partitions: int
    complete: int
    failed_keys: Sequence[str]
    rows: dict[str, int]
    first_failed: Sequence[FailedRow]
    failing: Sequence[FailingCheck]
    accuracy: str | None

    @property
    def ok(self) -> bool:
        """Whether every partition is complete and no check failed with ERROR."""
        return self.complete == self.partitions and all(check.severity != "ERROR" for check in self.failing)

    def print(self, console: Console) -> None:
        """The summary for people."""
        colour = "green" if self.ok else "red"
        console.print(f"[{colour}]{self.complete} of {self.partitions} partitions are complete.[/]")
        rows = ", ".join(f"{count:,} {status}" for status, count in sorted(self.rows.items(), reverse=True))
        console.print(f"Properties: {rows or 'none yet'}.")
        for one in self.first_failed:
            console.print(f"[yellow]Failed:[/] {escape(one.sentence())}")
        if self.accuracy:
            console.print(escape(self.accuracy))
        for key in self.failed_keys[:_SHOWN]:
            console.print(f"[red]Failed:[/] partition {key}")
        if len(self.failed_keys) > _SHOWN:
            console.print(f"… and {len(self.failed_keys) - _SHOWN} more failed partitions")
        for check in self.failing[:_SHOWN]:
            console.print(
                f"[{'red' if check.severity == 'ERROR' else 'yellow'}]{check.severity}:[/] check {check.name}"
                f" of {check.asset}, partition {check.partition}: {escape(check.description)}"
            )
        if len(self.failing) > _SHOWN:
            console.print(f"… and {len(self.failing) - _SHOWN} more checks that did not pass")


def where_to_click(console: Console, address: str) -> None:
    """The pages to look at, and how to end."""
    console.print(f"\nLook at it:  [bold]{address}/assets/{ASSETS[0]}[/]")
    console.print("  a green partition: its rows, its rate, and a contact sheet with what the model said")
    console.print("  Overview, Metadata, Plots: how rates and rows go over the partitions")
    console.print("  Checks: what had to hold before a partition was published")
    console.print("Ctrl-C ends Dagster; what is done stays done.")


def row_counts(home: Path) -> dict[str, int]:
    """Rows of the published descriptions by status; empty where nothing is published."""
    files = str(home / ASSETS[0] / "*.parquet")
    if not any((home / ASSETS[0]).glob("*.parquet")):
        return {}
    with duckdb.connect() as connection:
        counted = connection.execute(
            "SELECT status, count(*) FROM read_parquet($1, union_by_name = true) GROUP BY status", [files]
        ).fetchall()
    return {str(status): int(count) for status, count in counted}


def first_failed(home: Path) -> list[FailedRow]:
    """The first of the properties that could not be described, with the reason."""
    if not any((home / ASSETS[0]).glob("*.parquet")):
        return []
    with duckdb.connect() as connection:
        rows = connection.execute(
            "SELECT property_id, error_kind, error FROM read_parquet($1, union_by_name = true)"
            " WHERE status <> 'ok' ORDER BY ordinal LIMIT $2",
            [str(home / ASSETS[0] / "*.parquet"), FIRST],
        ).fetchall()
    return [FailedRow(*map(str, row)) for row in rows]

"""The backfill that a terminal launches and follows: which partitions it asks Dagster for, how they stand.

What lives here too: what the terminal shows of it, the progress line, the summary and the pages to look at.
What does not: keeping Dagster running meanwhile (``run.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.text import Text

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.config.settings import load_settings
from vlm_assets.operate.dagster_server.api import LAUNCHED_BY, DagsterApi, FailingCheck
from vlm_assets.operate.expected_cost import Rate, read_rate
from vlm_assets.operate.status import Status, read_status

ASSETS = ("property_descriptions", "property_embeddings")

_SHOWN = 5


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
    home: Path
    keys: Sequence[str]
    run_config: Mapping[str, object] = field(default_factory=dict)
    """Of each run that it launches."""
    followed: list[str] = field(default_factory=list)
    """Ids of the Dagster backfills that this one continues or has launched."""

    def begin(self) -> str:
        """Continue unfinished backfills; launch one for the partitions that they lack. Says what it did."""
        incomplete = self.status().incomplete_keys.intersection(self.keys)
        if not self.keys:
            return "Nothing to do: there is no such partition."
        if not incomplete:
            return f"Nothing to do: {len(self.keys)} of {len(self.keys)} partitions are complete."
        said = []
        for backfill in self.api.unfinished_backfills(ASSETS[0]):
            under_way = backfill.keys & incomplete
            if under_way:
                self.followed.append(backfill.id)
                incomplete -= under_way
                said.append(f"Going on with backfill {backfill.id}: {len(under_way)} partitions are left.")
        if incomplete:
            said.append(self.launch(incomplete))
        return " ".join(said)

    def launch(self, keys: Collection[str]) -> str:
        """Launch one backfill of these partitions, all assets together; says what it did."""
        new = self.api.launch_backfill(
            ASSETS,
            sorted(keys),
            title=f"{len(keys)} partitions",
            tags={LAUNCHED_BY: "terminal"},
            run_config=self.run_config,
        )
        self.followed.append(new)
        return f"Launched backfill {new} of {len(keys)} of {len(self.keys)} partitions."

    def progress(self) -> BackfillProgress:
        """How the partitions stand now."""
        of_each = [self.api.partition_keys(asset) for asset in ASSETS]
        return BackfillProgress(
            done=frozenset.intersection(*(keys.materialized for keys in of_each)).intersection(self.keys),
            under_way=frozenset.union(*(keys.running for keys in of_each)).intersection(self.keys),
            failed=frozenset.union(*(keys.failed for keys in of_each)).intersection(self.keys),
            runs=self.api.runs_in("STARTED"),
        )

    def status(self) -> Status:
        """How the home stands, as ``vlm-assets status`` says."""
        return read_status(load_settings(home=self.home), Catalog.open(self.home))

    def rate(self) -> tuple[Rate, Mapping[str, int]]:
        """The rate of the data set and the rows that are done, as ``vlm-assets status`` says them."""
        return read_rate(load_settings(home=self.home), Catalog.open(self.home))

    def ended(self, now: BackfillProgress) -> bool:
        """Whether nothing more will happen: Dagster ended the backfills.

        A partition that is made again was done before, so what Dagster shows as done does not tell.
        """
        # A failed run may be retried: only the backfill knows, and it is asked only when all is quiet.
        return not now.under_way and not any(
            self.api.backfill(backfill, ASSETS[0]).unfinished for backfill in self.followed
        )


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

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: BackfillProgress, rate: Rate, done: Mapping[str, int]) -> None:
        """Show how the partitions stand; without a terminal, a line a change. done: rows by partition."""
        properties = sum(done.get(key, 0) for key in self._sizes)
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


class _BarAndState(Progress):
    """A bar with a line of text below it."""

    state = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The two lines."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.state, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True)
class BackfillSummary:
    """How a backfill of some partitions (``keys``) ended. status: of the home, when it had ended."""

    keys: Sequence[str]
    failed_keys: Sequence[str]
    status: Status
    failing: Sequence[FailingCheck]
    accuracy: str | None

    @property
    def complete(self) -> int:
        """How many of the partitions are complete."""
        return len(frozenset(self.keys) - self.status.incomplete_keys)

    @property
    def ok(self) -> bool:
        """Whether every partition is complete and no check failed with ERROR."""
        return self.complete == len(self.keys) and all(check.severity != "ERROR" for check in self.failing)

    def print(self, console: Console) -> None:
        """The summary for people."""
        colour = "green" if self.ok else "red"
        console.print(f"[{colour}]{self.complete} of {len(self.keys)} partitions are complete.[/]")
        found = {"ok": self.status.ok, "failed": sum(self.status.failed_by_kind.values())}
        counts = ", ".join(f"{count:,} {name}" for name, count in found.items() if count)
        console.print(f"Properties: {counts or 'none yet'}.")
        for one in self.status.first_failed:
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

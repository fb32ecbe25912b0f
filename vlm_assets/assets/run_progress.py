"""How far a materialization is, where its time went, and how it stands still while a pause stands.

What lives here: percent, rate and time left as events and log lines of the run; the seconds of its work as
numbers and a table; and the looks at the pause, at the start and at each batch. What does not: what is done
(the journal says that), the pause itself (``resources/state/pause.py``), and the schedules, which look at it
themselves. Term: Dagster asset observations, which stream to the run page and stay with the partition.

A run that starts while paused waits, and does not end: ended, a backfill's whole queue would go through the
devices in minutes and leave a failed run for each partition. Waiting, no more runs than there are devices
hold a process each, without a device and without a model; all others stay queued, and when the pause is
lifted everything goes on by itself. A run that works commits and ends, so that its device is free: Dagster
retries it as one that was interrupted, and the retry waits like any other start.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import dagster as dg

from resources.engine.feeding import TimeSpent
from resources.engine.protocol import Engine, WaitingEngine
from resources.journal.journal import Journal
from resources.state.database import ControlState
from resources.state.pause import Pause, pause_of, paused_nodes
from resources.state.sqlite_file import ControlStateError
from resources.state.workers import Phase, WorkerBeat
from sensors.dagster_internals.patience import without_waiting

INTERVAL_SECONDS = 30.0
"""Between two events: often enough to watch, seldom enough that weeks of them fit the event log."""


_LOOK_SECONDS = 1.0

_log = logging.getLogger(__name__)

_working: set[str] = set()
"""Runs that have begun to work in this process, and may hold a device."""


def wait_while_paused(context: dg.AssetExecutionContext, state: ControlState) -> None:
    """Return when nothing is paused. A run that has worked already ends instead, as ``end_if_paused`` does.

    There is no event to wait for: the pause may come from another machine. A control state that cannot be
    read is waited for too: it may hold a pause.
    """
    standing = _pause_or_trouble(state)
    if standing is None:
        return
    if isinstance(standing, Pause) and (standing.node is not None or context.run.run_id in _working):
        _end(context, standing)  # of a node: another one takes the partition at once
    said = standing.sentence() if isinstance(standing, Pause) else str(standing)
    context.log.warning(f"Waiting, without a device: {said}.")
    while _pause_or_trouble(state) is not None:
        time.sleep(_LOOK_SECONDS)
    context.log.info("Nothing is paused any more: going on.")


def end_if_paused(context: dg.AssetExecutionContext, state: ControlState) -> None:
    """Raise DagsterExecutionInterruptedError where a pause stands: what is submitted will be committed.

    Work goes on where the control state cannot be read: rows are committed without it.
    """
    standing = _pause_or_trouble(state)
    if isinstance(standing, Pause):
        _end(context, standing)
    if standing is not None:
        # Not to Dagster, whose database is the same: it would wait for it, and the device with it.
        _log.warning("A pause would not be noticed now: %s", standing)


def _pause_or_trouble(state: ControlState) -> Pause | ControlStateError | None:
    try:
        of_node = paused_nodes(state).get(socket.gethostname()) if state.is_shared else None
        return of_node or pause_of(state)
    except ControlStateError as error:
        return error


def _end(context: dg.AssetExecutionContext, pause: Pause) -> None:
    said = f"Interrupted, with all finished rows committed: {pause.sentence()}."
    context.log.warning(said)
    raise dg.DagsterExecutionInterruptedError(said)


class RunProgress:
    """Progress of one partition, which ends its work at the next batch where a pause stands.

    ``done`` starts at what was restored, so the percentage never restarts.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        *,
        expected: int,
        restored: int,
        journal: Journal,
        beat: WorkerBeat,
        state: ControlState,
        may_go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """may_go_on: asked at each batch; what it raises ends the work, with all finished rows committed."""
        self._context = context
        self._may_go_on = may_go_on
        self._expected = expected
        self._restored = restored
        self._journal = journal
        self._beat = beat
        self._state = state
        self._started = self._last_report = time.monotonic()
        self.computed = 0
        # Commits come from the journal's own thread, between two batches and during a long one.
        journal.on_commit(beat.commit)
        _working.add(beat.worker.run_id)

    def load(self, device: str | None) -> None:
        """The device is leased and the model is next. None: the model computes elsewhere.

        Where a pause began while the device was waited for, it is not used.
        """
        end_if_paused(self._context, self._state)
        self._beat.enter(Phase.LOADING, device=device)

    def start(self) -> None:
        """The model is loaded and the first property is next, unless a pause began meanwhile."""
        end_if_paused(self._context, self._state)
        self._started = time.monotonic()
        self._beat.enter(Phase.WORKING)

    def watch(self, engine: Engine) -> None:
        """Have the heartbeat say where the engine waits for its server: nobody expects a commit meanwhile."""
        if isinstance(engine, WaitingEngine):
            engine.waiting = self._waiting

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._beat.enter(Phase.LOADING)
        try:
            yield
        finally:
            self._beat.enter(Phase.WORKING)

    def advance(self, rows: int) -> None:
        """Count rows that were computed in this run; tells the page at most every INTERVAL_SECONDS.

        The rows are submitted already, so that a pause loses none of them.
        """
        self.computed += rows
        self._beat.beat(computed=self.computed, committed=self._journal.committed_rows)
        if time.monotonic() - self._last_report >= INTERVAL_SECONDS:
            self.report()
        end_if_paused(self._context, self._state)
        self._may_go_on()

    def warn(self, advice: str) -> None:
        """Say what a person should change, on the run's page."""
        self._context.log.warning(advice)

    @property
    def seconds(self) -> float:
        """Since the model was loaded: what the shares of the time are of."""
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Rows that this run committed per second of wall time since its launch; 0 before the first."""
        seconds = time.time() - self._beat.worker.started_at
        committed = self._journal.committed_rows - self._restored
        return committed / seconds if committed > 0 and seconds > 0 else 0.0

    def report(self) -> None:
        """Say how far it is: a log line, an observation of the partition; nothing where Dagster is away."""
        self._last_report = time.monotonic()
        done = self._journal.committed_rows
        percent = 100.0 * done / self._expected if self._expected else 100.0
        left = (self._expected - done) / self.rate if self.rate else None
        until = f", {timedelta(seconds=round(left))} left" if left is not None else ""
        said = f"{done} of {self._expected} properties ({percent:.0f}%), {self.rate:.1f} a second{until}"
        metadata: dict[str, dg.MetadataValue] = {
            "percent done": dg.MetadataValue.float(round(percent, 1)),
            "properties done": dg.MetadataValue.int(done),
            "properties/s": dg.MetadataValue.float(round(self.rate, 2)),
        }
        if left is not None:
            metadata["minutes left"] = dg.MetadataValue.float(round(left / 60, 1))
        observed = dg.AssetObservation(
            asset_key=self._context.asset_key, partition=self._context.partition_key, metadata=metadata
        )
        try:
            with without_waiting():
                self._context.log.info(said)
                self._context.log_event(observed)
        except Exception as error:  # Dagster's and the database's own: rows are committed without them
            _log.warning("Not told to Dagster: %s. %s", said, error)


@dataclass
class WorkTime:
    """Seconds of the work on one partition, after the model was loaded.

    feeding: the model's and what it waited for. phases: of the model's seconds, what the engine can tell
    apart (see ``Engine.seconds``). rows: results to Arrow. commit: waiting for the journal, its last flush
    included. total: from the first property to the last commit.
    """

    feeding: TimeSpent = field(default_factory=TimeSpent)
    phases: Mapping[str, float] = field(default_factory=dict)
    rows: float = 0.0
    commit: float = 0.0
    total: float = 0.0

    def metadata(self) -> dict[str, dg.MetadataValue]:
        """Each number by itself, and the table."""
        spent = self.feeding
        seconds = {
            "in model": spent.model,
            **{f"in {name}": self.phases[name] for name in ("prefill", "generation") if name in self.phases},
            "validating": spent.validating,
            "building rows": self.rows,
            "waiting for images": spent.waiting,
            "waiting for commit": self.commit,
            "reading images": spent.reading,
            "decoding images": spent.decoding,
            "in processor": spent.preparing + self.phases.get("processor", 0.0),
        }
        numbers: dict[str, dg.MetadataValue] = {
            f"seconds {name}": dg.MetadataValue.float(round(value, 3)) for name, value in seconds.items()
        }
        return {**numbers, "where the time went": dg.MetadataValue.md(self.table())}

    def table(self) -> str:
        """Shares of the whole: what the device did, what it waited for, and what went on beside it."""
        spent = self.feeding
        phases = dict(self.phases)
        # Where the engine takes several batches at once, they are validated beside each other and the model.
        validating = spent.validating if phases else 0.0
        parts = {
            "images and prompt (prefill)": phases.pop("prefill", 0.0),
            "answers (generation)": phases.pop("generation", 0.0),
            "processor, not ahead": phases.pop("processor", 0.0),
            "validation": validating,
        }
        parts["model, else" if self.phases else "model"] = max(0.0, spent.model - sum(parts.values()))
        parts |= {
            "waiting for images": spent.waiting,
            "rows": self.rows,
            "waiting for commit": self.commit,
        }
        parts["else"] = max(0.0, self.total - sum(parts.values()))
        beside = {
            "reading images": spent.reading,
            "decoding images": spent.decoding,
            "processor": spent.preparing,
        }
        rows = [
            *(_row(name, seconds, self.total) for name, seconds in parts.items()),
            *(_row(f"*beside it:* {name}", seconds, self.total) for name, seconds in beside.items()),
        ]
        return "\n".join(["| | s | share |", "|---|--:|--:|", *filter(None, rows)])


def _row(name: str, seconds: float, total: float) -> str:
    """A line of the table; none for what took no time."""
    return f"| {name} | {seconds:.1f} | {seconds / total:.1%} |" if seconds >= 0.0005 * total > 0 else ""

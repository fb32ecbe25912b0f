"""How far a materialization is, told to its page while it runs.

What lives here: percent, rate, time left, as events and log lines. What does not: what is done (the journal
says that). Term: Dagster asset observations, which stream to the run page and stay with the partition.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import dagster as dg

from resources.engine.protocol import Engine, WaitingEngine
from resources.journal.journal import Journal
from resources.state.workers import Phase, WorkerBeat

INTERVAL_SECONDS = 30.0
"""Between two events: often enough to watch, seldom enough that weeks of them fit the event log."""


class Progress:
    """Progress of one partition. ``done`` starts at what was restored, so the percentage never restarts."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        *,
        expected: int,
        restored: int,
        journal: Journal,
        beat: WorkerBeat,
    ) -> None:
        self._context = context
        self._expected = expected
        self._restored = restored
        self._journal = journal
        self._beat = beat
        self._started = self._last_report = time.monotonic()
        self.computed = 0
        # Commits come from the journal's own thread, between two batches and during a long one.
        journal.on_commit(beat.commit)

    def load(self, device: str | None) -> None:
        """The device is leased and the model is next. None: the model computes elsewhere."""
        self._beat.enter(Phase.LOADING, device=device)

    def start(self) -> None:
        """The model is loaded and the first property is next."""
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
        """Count rows that were computed in this run; tells the page at most every INTERVAL_SECONDS."""
        self.computed += rows
        self._beat.beat(computed=self.computed, committed=self._journal.committed_rows)
        if time.monotonic() - self._last_report >= INTERVAL_SECONDS:
            self.report()

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
        """Say how far it is: a log line, and an observation of the partition."""
        self._last_report = time.monotonic()
        done = self._journal.committed_rows
        percent = 100.0 * done / self._expected if self._expected else 100.0
        left = (self._expected - done) / self.rate if self.rate else None
        until = f", {timedelta(seconds=round(left))} left" if left is not None else ""
        self._context.log.info(
            f"{done} of {self._expected} properties ({percent:.0f}%), {self.rate:.1f} a second{until}"
        )
        metadata: dict[str, dg.MetadataValue] = {
            "percent done": dg.MetadataValue.float(round(percent, 1)),
            "properties done": dg.MetadataValue.int(done),
            "properties/s": dg.MetadataValue.float(round(self.rate, 2)),
        }
        if left is not None:
            metadata["minutes left"] = dg.MetadataValue.float(round(left / 60, 1))
        self._context.log_event(
            dg.AssetObservation(
                asset_key=self._context.asset_key, partition=self._context.partition_key, metadata=metadata
            )
        )

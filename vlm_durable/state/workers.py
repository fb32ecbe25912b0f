"""The heartbeat of each materialization: its partition, its speed, and whether its process still lives.

A row of the table ``workers`` is for people and for the health sensor. The working process holds the file
``.state/workers/RUN.ASSET.lock``, so that its death frees it. The journal says which rows are done.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from vlm_durable.files.files import make_directory
from vlm_durable.files.lock_files import create_locked, is_held
from vlm_durable.files.processes import boot_id, process_start
from vlm_durable.state.database import ControlState
from vlm_durable.state.nodes import Nodes
from vlm_durable.state.rate import Stretch, rate_of
from vlm_durable.state.tables import workers as _table

_BEAT_SECONDS = 2.0
_RATE_SECONDS = 120.0
_INTERVALS = 20
_WAITED_SECONDS = 1.0

_log = logging.getLogger(__name__)


class WorkerRecordError(OSError):
    """The heartbeat of a materialization cannot be kept, so nobody could tell whether it lives."""


class Phase(StrEnum):
    """The phase of a materialization. Rows are committed in WORKING alone."""

    PREPARING = "preparing"
    WAITING = "waiting for a device"
    LOADING = "loading the model"
    WORKING = "working"
    PUBLISHING = "publishing"


@dataclass(frozen=True)
class Worker:
    """One materialization, as its process last said.

    ``device``: id, None before it has one. ``process_start`` (clock ticks since boot) tells the process from
    a later one with its pid. ``..._at``: unix seconds. ``restored``: rows found committed at its start;
    ``computed``: by this run; ``committed``: in the journal now, restored ones included. ``rate``: properties
    a second over the last two minutes of work, 0 before the first. ``batch_seconds``: the longest time
    between two of its last commits, 0 before the first. ``moved``: when it last committed or changed its
    phase, in seconds of the machine's monotonic clock since ``boot_id``: it counts on whatever clocks do.
    ``uncopied``: committed segments that the store does not have yet; ``uncopied_seconds``: how long the
    oldest of them has waited, by its own clock at its last word, since clocks of machines differ.
    """

    run_id: str
    asset: str
    partition: str
    device: str | None
    pid: int
    process_start: int | None
    host: str
    boot_id: str
    started_at: float
    beat_at: float
    expected: int
    restored: int
    computed: int
    committed: int
    committed_at: float
    rate: float
    batch_seconds: float
    phase: Phase
    moved: float
    uncopied: int = 0
    uncopied_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name of the worker, of its row and of its lock."""
        return f"{self.run_id}.{self.asset}"

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine since this boot, so that its pid and monotonic times count here."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    def stretch(self, now: float) -> Stretch:
        """What it has committed since its launch. now: unix seconds."""
        rows = self.committed - self.restored
        return Stretch(self.device or "", self.started_at, max(now, self.started_at), rows)

    @property
    def percent(self) -> float:
        """The share of its partition that is computed."""
        return 100.0 * (self.restored + self.computed) / self.expected if self.expected else 100.0


class WorkerBeat:
    """The heartbeat of this process's materialization, as a context: the lock is held inside it.

    A beat is one row written without fsync, at each commit and else every two seconds at most. A beat that
    cannot be written is logged and work goes on. Any thread may call: commits happen beside the work.
    """

    def __init__(
        self,
        workers: Workers,
        worker: Worker,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self._workers = workers
        self._clock = clock
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._beside: tuple[WorkerBeat, ...] = ()
        self._uncopied_since: float | None = None
        self._waiting_since: float | None = None
        self._written = self._paced_since = monotonic()
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._samples: deque[tuple[float, int]] = deque([(self._written, 0)])
        self._write()
        self._lock = create_locked(workers.lock_of(worker))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def work_beside(self, beats: Iterable[WorkerBeat]) -> None:
        """Share the work with other partitions of this process.

        They enter its phases, none of them stands still while one commits, and none is given less time than
        that one until the next commit.
        """
        self._beside = tuple(beat for beat in beats if beat is not self)

    def resume(self, *, restored: int) -> None:
        """Note how many rows were committed before this run."""
        with self._guard:
            self.worker = replace(self.worker, restored=restored, committed=restored)
            self._write()

    def enter(self, phase: Phase, *, device: str | None = None) -> None:
        """Note the next phase, and its device; the time that the phase may take counts from here."""
        for beat in (self, *self._beside):
            beat._enter(phase, device)

    def _enter(self, phase: Phase, device: str | None) -> None:
        with self._guard:
            if not self._lock.is_open:
                return
            now = self._monotonic()
            device = device or self.worker.device
            started_at = self.worker.started_at
            if phase is Phase.WAITING:
                self._waiting_since = self._waiting_since or now
            elif self._waiting_since is not None:
                if now - self._waiting_since >= _WAITED_SECONDS:
                    # Another run had the device: this one has cost nothing until now.
                    started_at = self._clock()
                self._waiting_since = None
            self.worker = replace(
                self.worker,
                phase=phase,
                device=device,
                moved=now,
                beat_at=self._clock(),
                started_at=started_at,
            )
            self._paced_since = now
            self._samples = deque([(now, self.worker.computed)])
            self._write()

    def beat(self, *, computed: int, committed: int) -> None:
        """Note the progress after a batch. Cheap: most calls only read the clock."""
        with self._guard:
            has_committed = self._has_committed(committed)
            now = self._monotonic()
            self._samples.append((now, computed))
            while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_SECONDS:
                self._samples.popleft()
            since, before = self._samples[0]
            latest = Stretch(self.worker.device or "", since, now, computed - before)
            rate = (rate_of([latest]).per_second or 0.0) if now > since else self.worker.rate
            self.worker = replace(self.worker, computed=computed, beat_at=self._clock(), rate=rate)
            # A commit is written at once: others judge by it whether this process stands still.
            if has_committed or now - self._written >= _BEAT_SECONDS:
                self._write()
        if has_committed:
            self._move_beside()

    def commit(self, committed: int) -> None:
        """Note how many rows are committed, right after a commit. Nothing is written after the end."""
        with self._guard:
            has_committed = self._has_committed(committed)
            if has_committed and self._lock.is_open:
                self._write()
        if has_committed:
            self._move_beside()

    def _move_beside(self) -> None:
        learned = self.worker.batch_seconds
        for beat in self._beside:
            with beat._guard:
                if beat._lock.is_open:
                    beat.worker = replace(
                        beat.worker,
                        moved=beat._monotonic(),
                        beat_at=beat._clock(),
                        batch_seconds=max(beat.worker.batch_seconds, learned),
                    )
                    beat._write()

    def copy(self, segments: int, since: float | None) -> None:
        """Note how many committed segments are not in the store yet, and since when (unix seconds)."""
        with self._guard:
            if (segments or self.worker.uncopied) and self._lock.is_open:
                self._uncopied_since = since
                self.worker = replace(self.worker, uncopied=segments)
                self._write()

    def end(self) -> None:
        """Remove the record and free the lock. Safe to call twice."""
        with self._guard:
            if not self._lock.is_open:
                return
            self._workers.remove_record(self.worker)
            self._workers.lock_of(self.worker).unlink(missing_ok=True)
            self._lock.close()

    def _has_committed(self, committed: int) -> bool:
        """Note a commit; False where it was noted before, by the work or by the commit itself."""
        if committed <= self.worker.committed:
            return False
        now, committed_at = self._monotonic(), self._clock()
        # Since its own last commit: the others of the work commit right before it.
        self._intervals.append(now - self._paced_since)
        self._paced_since = now
        self.worker = replace(
            self.worker,
            committed=committed,
            committed_at=committed_at,
            beat_at=committed_at,
            moved=now,
            batch_seconds=max(self._intervals),
        )
        return True

    def _write(self) -> None:
        self._written = self._monotonic()
        since = self._uncopied_since
        seconds = 0.0 if since is None else max(0.0, self._clock() - since)
        self.worker = replace(self.worker, uncopied_seconds=seconds)
        try:
            self._workers.write_record(self.worker)
        except OSError as error:
            _log.warning("The heartbeat of %s was not written: %s", self.worker.name, error)


class Workers:
    """The heartbeats of all materializations of a home."""

    def __init__(self, state: ControlState) -> None:
        self._state = state
        self.directory = state.directory / "workers"

    def begin(
        self,
        *,
        run_id: str,
        asset: str,
        partition: str,
        expected: int,
        began: float | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> WorkerBeat:
        """Begin the heartbeat of this process's materialization. Raises WorkerRecordError.

        began: when its process was launched, in unix seconds; its start-up is part of the rate.
        """
        now = clock()
        worker = Worker(
            run_id=run_id,
            asset=asset,
            partition=partition,
            device=None,
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            host=socket.gethostname(),
            boot_id=boot_id(),
            started_at=now if began is None else began,
            beat_at=now,
            expected=expected,
            restored=0,
            computed=0,
            committed=0,
            committed_at=now,
            rate=0.0,
            batch_seconds=0.0,
            phase=Phase.PREPARING,
            moved=monotonic(),
        )
        try:
            make_directory(self.directory)
            return WorkerBeat(self, worker, clock=clock, monotonic=monotonic)
        except OSError as error:
            raise WorkerRecordError(
                error.errno,
                f"The heartbeat of run {run_id} cannot be kept in {self.directory}"
                f" ({error.strerror or error}): nobody could tell whether it lives. Give this user the right"
                " to write there, on a local disk. Nothing was computed and nothing is lost.",
            ) from error

    def living(self) -> list[Worker]:
        """The living workers on all machines. With an unreadable record, pid is 0 and the partition empty."""
        local = self.on_this_machine()
        return (
            [*local, *self._elsewhere({worker.name for worker in local})] if self._state.is_shared else local
        )

    def on_this_machine(self) -> list[Worker]:
        """The workers of this machine whose process holds its lock."""
        return [worker for worker, held in self._all() if held]

    def _elsewhere(self, local_names: Collection[str]) -> list[Worker]:
        """The workers that other nodes report. Raises ControlStateError."""
        nodes = Nodes(self._state).snapshot().nodes.values()
        names = {name for node in nodes if not node.is_dead for name in node.record.workers} - set(
            local_names
        )
        records = self._records() if names else {}
        return [_worker(name, records.get(name)) for name in sorted(names)]

    def _records(self) -> dict[str, dict[str, Any]]:
        """The last record of each worker, by its name. Raises ControlStateError."""
        return self._state.read_beats(
            lambda connection: {row.name: row.record for row in connection.execute(sa.select(_table))}
        )

    def dead(self) -> list[Worker]:
        """The workers whose process died before it could end its heartbeat."""
        return [worker for worker, held in self._all() if not held]

    def forget(self, worker: Worker) -> None:
        """Remove a dead worker's lock and record. Those of a living worker stay."""
        lock = self.lock_of(worker)
        if not is_held(lock):
            self.remove_record(worker)
            lock.unlink(missing_ok=True)

    def lock_of(self, worker: Worker) -> Path:
        """The lock that its process holds while it lives."""
        return self.directory / f"{worker.name}.lock"

    def write_record(self, worker: Worker) -> None:
        """Write a worker's record. Raises ControlStateError."""
        row = {"name": worker.name, "record": asdict(worker)}

        def write(connection: sa.Connection) -> None:
            is_own = _table.c.name == worker.name
            if connection.execute(_table.update().where(is_own).values(row)).rowcount == 0:
                connection.execute(_table.insert().values(row))

        self._state.beat(write)

    def remove_record(self, worker: Worker) -> None:
        """Remove a worker's record. A failure is logged: without its lock nobody reads the record."""
        delete = _table.delete().where(_table.c.name == worker.name)
        try:
            self._state.beat(lambda connection: connection.execute(delete))
        except OSError as error:
            _log.warning("The heartbeat of %s was not removed: %s", worker.name, error)

    def _all(self) -> list[tuple[Worker, bool]]:
        """Every worker with a lock file, and whether its process holds the lock."""
        held = {path.stem: is_held(path) for path in sorted(self.directory.glob("*.lock"))}
        if not held:
            return []
        try:
            records = self._records()
        except (OSError, ValueError, sa.exc.DBAPIError) as error:
            # A record torn by a power cut is replaced at the worker's next beat, or removed with it.
            _log.warning("The heartbeats cannot be read, so only who lives is known: %s", error)
            records = {}
        return [
            (_worker(name, records.get(name)), is_living)
            for name, is_living in held.items()
            if is_living is not None
        ]


def _worker(name: str, record: dict[str, Any] | None) -> Worker:
    """The worker of a record; without a readable record, only what its name tells."""
    try:
        if record is not None:
            # The record of a run that another version of this program began may have other fields.
            values = {column.name: record[column.name] for column in fields(Worker) if column.name in record}
            return Worker(**{**values, "phase": Phase(record["phase"])})
    except (ValueError, TypeError, KeyError):
        pass
    run_id, _, asset = name.partition(".")
    return Worker(
        run_id, asset, "", None, 0, None, "", "", 0.0, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, Phase.PREPARING, 0.0
    )

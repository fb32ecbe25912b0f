"""The heartbeat of each materialization: who works on which partition, how fast, and whether it still lives.

What lives here: ``RUN.STEP.json`` (a record, for people and for the health sensor) and ``RUN.STEP.lock``
(held by the working process, so that a dead one frees it). What does not: what is done (the journal says
that), who holds which device (``resources/gpu``), and what is made of a worker that stands still.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from resources.devices.lease_records import process_start
from resources.storage.files import make_directory, temporary_name
from resources.storage.lock_files import LockFile, is_held

_ABOUT = (
    "For people and for the health sensor; this file may be deleted. Whether its process lives is decided by"
    " the lock on the .lock file beside it, which must stay while the process runs."
)
_BEAT_SECONDS = 2.0
_RATE_SECONDS = 120.0
_INTERVALS = 20

_log = logging.getLogger(__name__)


class WorkerRecordError(OSError):
    """The heartbeat of a materialization cannot be kept, so nobody could tell whether it lives."""


class Phase(StrEnum):
    """What a materialization is at. Rows are committed in WORKING alone: only there do commits tell."""

    PREPARING = "preparing"
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

    @property
    def name(self) -> str:
        """How its files are called, and a worker is named."""
        return f"{self.run_id}.{self.asset}"

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine since this boot, so that pid and monotonic clock are ours."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    @property
    def percent(self) -> float:
        """How much of its partition is computed."""
        return 100.0 * (self.restored + self.computed) / self.expected if self.expected else 100.0


@cache
def boot_id() -> str:
    """What tells this boot of the machine from every other; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class WorkerBeat:
    """The heartbeat of this process's materialization, as a context: the lock is held inside it.

    A beat is one small file replaced without fsync, at each commit and else every two seconds at most. One
    that cannot be written is logged and work goes on. Any thread may call: commits happen beside the work.
    """

    def __init__(
        self,
        directory: Path,
        worker: Worker,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self._record, self._path = _paths(directory, worker.name)
        self._clock = clock
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._written = monotonic()
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._samples: deque[tuple[float, int]] = deque([(self._written, 0)])
        self._write()
        # Locked before it has its name, so that whoever finds it finds it held.
        self._lock = _locked_file(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def resume(self, *, restored: int) -> None:
        """Say how many rows were found committed."""
        with self._guard:
            self.worker = replace(self.worker, restored=restored, committed=restored)
            self._write()

    def enter(self, phase: Phase, *, device: str | None = None) -> None:
        """Say what comes next, and on which device; the time that it may take counts from here."""
        with self._guard:
            now = self._monotonic()
            device = device or self.worker.device
            self.worker = replace(self.worker, phase=phase, device=device, moved=now, beat_at=self._clock())
            self._samples = deque([(now, self.worker.computed)])
            self._write()

    def beat(self, *, computed: int, committed: int) -> None:
        """Say how far it is, after a batch. Costs nothing but a look at the clock in between."""
        with self._guard:
            has_committed = self._has_committed(committed)
            now = self._monotonic()
            self._samples.append((now, computed))
            while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_SECONDS:
                self._samples.popleft()
            since, before = self._samples[0]
            rate = (computed - before) / (now - since) if now > since else self.worker.rate
            self.worker = replace(self.worker, computed=computed, beat_at=self._clock(), rate=rate)
            # A commit is written at once: by it others judge whether this process stands still.
            if has_committed or now - self._written >= _BEAT_SECONDS:
                self._write()

    def commit(self, committed: int) -> None:
        """Say how many rows are committed, at the moment when they are. Nothing is written after the end."""
        with self._guard:
            if self._has_committed(committed) and self._lock.is_open:
                self._write()

    def end(self) -> None:
        """Take the record away and free the lock. Safe to call twice."""
        with self._guard:
            if not self._lock.is_open:
                return
            self._record.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            self._lock.close()

    def _has_committed(self, committed: int) -> bool:
        """Take note of a commit; False where it was said already, by the work or by the commit itself."""
        if committed <= self.worker.committed:
            return False
        now, said = self._monotonic(), self._clock()
        self._intervals.append(now - self.worker.moved)
        self.worker = replace(
            self.worker,
            committed=committed,
            committed_at=said,
            beat_at=said,
            moved=now,
            batch_seconds=max(self._intervals),
        )
        return True

    def _write(self) -> None:
        self._written = self._monotonic()
        try:
            _replace(self._record, {"about": _ABOUT, **asdict(self.worker)})
        except OSError as error:
            _log.warning("The heartbeat %s was not written: %s", self._record, error)


class Workers:
    """The heartbeats of all materializations of a home, kept in one folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(
        self,
        *,
        run_id: str,
        asset: str,
        partition: str,
        expected: int,
        restored: int = 0,
        device: str | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> WorkerBeat:
        """Begin the heartbeat of this process's materialization. Raises WorkerRecordError."""
        now = clock()
        worker = Worker(
            run_id=run_id,
            asset=asset,
            partition=partition,
            device=device,
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            host=socket.gethostname(),
            boot_id=boot_id(),
            started_at=now,
            beat_at=now,
            expected=expected,
            restored=restored,
            computed=0,
            committed=restored,
            committed_at=now,
            rate=0.0,
            batch_seconds=0.0,
            phase=Phase.PREPARING,
            moved=monotonic(),
        )
        try:
            make_directory(self.directory)
            return WorkerBeat(self.directory, worker, clock=clock, monotonic=monotonic)
        except OSError as error:
            raise WorkerRecordError(
                error.errno,
                f"The heartbeat of run {run_id} cannot be kept in {self.directory}"
                f" ({error.strerror or error}): nobody could tell whether it lives. Give this user the right"
                " to write there, on a local disk. Nothing was computed and nothing is lost.",
            ) from error

    def living(self) -> list[Worker]:
        """Workers whose process holds its lock. One whose record does not read has pid 0 and no partition."""
        return [_read(record) or _unreadable(record, record.stem) for record, held in self._records() if held]

    def dead(self) -> list[Worker]:
        """Workers whose process is gone: it died before it could end its heartbeat."""
        return [
            _read(record) or _unreadable(record, record.stem) for record, held in self._records() if not held
        ]

    def forget(self, worker: Worker) -> None:
        """Remove what a dead worker left. A living one's files stay."""
        record, lock = _paths(self.directory, worker.name)
        if not is_held(lock):
            record.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)

    def _records(self) -> Iterator[tuple[Path, bool]]:
        for lock in sorted(self.directory.glob("*.lock")):
            held = is_held(lock)
            if held is not None:
                yield lock.with_suffix(".json"), held


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.json", directory / f"{name}.lock"


def _read(path: Path) -> Worker | None:
    try:
        fields = json.loads(path.read_bytes())
        fields.pop("about", None)
        return Worker(**{**fields, "phase": Phase(fields["phase"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _unreadable(path: Path, name: str) -> Worker:
    """What the name alone says: a power cut may have left the record empty."""
    run_id, _, asset = name.partition(".")
    return Worker(
        run_id, asset, "", None, 0, None, "", "", 0.0, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, Phase.PREPARING, 0.0
    )


def _replace(path: Path, content: object) -> None:
    """Atomic, and not durable: after a power cut its process is dead, which is all that it could say."""
    temporary = temporary_name(path)
    try:
        temporary.write_text(json.dumps(content, indent=2))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _locked_file(path: Path) -> LockFile:
    temporary = temporary_name(path)
    file = LockFile(temporary)
    try:
        file.take()
        temporary.replace(path)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file

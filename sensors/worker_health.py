"""Workers over time: a stuck worker is ended, and a worker that is slower than its peers is named.

What lives here: heartbeats as readings for the judge (``progress_judge.py``), and the tick. Times come from
the machine's monotonic clock, and count only while this sensor ticked: a machine that slept, or a daemon that
was down, makes no worker stuck. What does not: how a run is ended (``run_end.py``), devices
(``device_health.py``, ``leases_after_end.py``), and starting anything again: an ended run is interrupted, and
Dagster's run retries or the scheduled re-materialization take its partition up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import dagster as dg

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.device_health import DeviceWatcher, tell_left_out, usable_devices
from sensors.health_watch import Watch
from sensors.leases_after_end import LeasesAfterEnd
from sensors.progress_judge import (
    SLOW_SECONDS,
    ProgressLimits,
    Reading,
    Standstill,
    slow_among,
    slow_since,
    standstill,
)
from sensors.run_end import RunEnder, RunToEnd
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable.files.processes import ProcessIdentity
from vlm_durable.state.workers import Phase, Worker, Workers
from vlm_engine.devices.leases import LeaseDirectoryError
from vlm_engine.devices.left_out import at_work_on

NAME = "worker_health"
INTERVAL_SECONDS = 5
"""How often Dagster's daemon runs sensors: it adds to the time that a worker may stand still."""


@dataclass(frozen=True)
class Stuck:
    """A worker that stands still, and the verdict."""

    worker: Worker
    verdict: Standstill


def stuck_workers(
    workers: Iterable[Worker], limits: ProgressLimits, *, now: float, watched_since: float
) -> list[Stuck]:
    """The workers of this machine that stand still for longer than they may."""
    verdicts = [
        (worker, standstill(_reading(worker), limits, now=now, watched_since=watched_since))
        for worker in workers
        if worker.is_here
    ]
    return [Stuck(worker, verdict) for worker, verdict in verdicts if verdict is not None]


def _reading(worker: Worker) -> Reading:
    """The reading of a heartbeat. While it waits for a device, a worker says so every few seconds."""
    return Reading(worker.moved, worker.phase is Phase.WORKING, worker.batch_seconds)


@dataclass(frozen=True)
class Slow:
    """A worker whose rate is far below its peers'. peer_rate: their median, in properties a second."""

    worker: Worker
    peer_rate: float

    @property
    def percent(self) -> float:
        """The percentage by which it is slower than its peers."""
        return 100.0 * (1.0 - self.worker.rate / self.peer_rate)


def slow_workers(workers: Sequence[Worker]) -> list[Slow]:
    """Workers that are slower now than the workers that do the same work beside them."""
    working = {worker.name: worker for worker in workers if worker.phase is Phase.WORKING and worker.rate > 0}
    slow: dict[str, float] = {}
    for asset in {worker.asset for worker in working.values()}:
        slow |= slow_among({name: worker.rate for name, worker in working.items() if worker.asset == asset})
    return [Slow(worker, slow[name]) for name, worker in working.items() if name in slow]


@dataclass(frozen=True)
class HealthWatcher:
    """Checks the workers and devices of a machine, without Dagster's classes.

    monotonic: seconds of the machine's clock.
    """

    workers: Workers
    outbox: Outbox
    devices: DeviceWatcher
    ender: RunEnder
    limits: ProgressLimits = field(default_factory=ProgressLimits)
    monotonic: Callable[[], float] = time.monotonic

    def check(self, watch: Watch, dagster: DagsterFacts, late: Sequence[RunToEnd] = ()) -> list[str]:
        """One tick: changes ``watch``, posts alerts, ends stuck workers. Returns sentences.

        late: runs to end that outlived their end.
        """
        living = [worker for worker in self.workers.living() if worker.pid]
        # First: an alert that cannot be written keeps no process alive.
        sentences = self.ender.end(self._to_end(watch, living, late), watch, dagster)
        self._tell_freed(living, watch.unix)
        self.devices.left_out.state.copy_if_due()
        return [
            *sentences,
            *self._name_slow(watch, living),
            *self.devices.check(watch),
            *tell_left_out(watch, self.devices.left_out, self.outbox, watch.unix, node=self.devices.node),
        ]

    def _to_end(self, watch: Watch, living: Sequence[Worker], late: Sequence[RunToEnd]) -> list[RunToEnd]:
        """The workers that stand still, the late runs, and workers that were told to end and still live."""
        all_stuck = stuck_workers(living, self.limits, now=watch.at, watched_since=watch.since)
        stuck_names = {stuck.worker.name for stuck in all_stuck}
        ending = [
            worker
            for worker in living
            if worker.name not in stuck_names and self.ender.is_ending(watch, worker.run_id, _process(worker))
        ]
        return [
            *(_run_to_end(stuck.worker, stuck, watch.unix) for stuck in all_stuck),
            # Before the others that live: one of those may have been told to end because its run was over.
            *late,
            *(_run_to_end(worker, None, watch.unix) for worker in ending),
        ]

    def _tell_freed(self, living: Sequence[Worker], now: float) -> None:
        alive = {worker.name for worker in living}
        for subject, alert in self.outbox.open_subjects().items():
            if alert.kind == "worker_stuck" and f"{alert.occurrence}.{subject.split('/')[0]}" not in alive:
                sentence = (
                    "The stuck worker has ended and its device is free; its partition is retried unless a"
                    " person cancelled its run."
                )
                self.outbox.note_recovery(subject, sentence=sentence, at=now)

    def _name_slow(self, watch: Watch, living: Sequence[Worker]) -> list[str]:
        """Alert of workers that have been slow for long; changes ``watch``. Returns sentences."""
        # Each node of a cluster names its own workers.
        slow_here = [slow for slow in slow_workers(living) if slow.worker.is_here]
        names = [slow.worker.name for slow in slow_here]
        watch.slow = slow_since(watch.slow, names, now=watch.at, watched_since=watch.since)
        sentences = []
        for slow in slow_here:
            worker = slow.worker
            seconds = watch.at - watch.slow[worker.name]
            if seconds < SLOW_SECONDS or worker.device is None:
                continue
            sentences.append(f"{_who(worker)} is {slow.percent:.0f}% slower than its peers.")
            # Once while it lasts: a device of a slower kind would be told of at each of its partitions.
            if f"devices/{worker.device}/slow" not in self.outbox.open_subjects():
                self.outbox.post(_slow_alert(slow, seconds, watch.unix))
        self._note_kept_pace(watch, living)
        return sentences

    def _note_kept_pace(self, watch: Watch, living: Sequence[Worker]) -> None:
        """Close the alerts of slow devices that keep pace again, or all of them if nobody works any more."""
        keep_pace = {worker.device for worker in living if worker.rate > 0 and worker.name not in watch.slow}
        watch.idle = None if living else max(watch.at if watch.idle is None else watch.idle, watch.since)
        # Between two partitions a device has no worker to compare, and after the last one it never will.
        is_over = watch.idle is not None and watch.at - watch.idle >= SLOW_SECONDS
        for subject, alert in self.outbox.open_subjects().items():
            device = subject.split("/")[1] if alert.kind == "worker_slow" else None
            if device is not None and (device in keep_pace or is_over):
                sentence = f"{device} keeps pace with the others again."
                if is_over:
                    sentence = f"Nobody has worked for {SLOW_SECONDS / 60:.0f} minutes."
                self.outbox.note_recovery(subject, sentence=sentence, at=watch.unix)


def build_worker_health_sensor(
    watcher: HealthWatcher,
    leases: LeasesAfterEnd,
    *,
    pool: str | None,
    ticks: Ticks,
    prepared: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. ticks: where it notes that it ticked.

    pool: its limit follows the devices in use; None: none is changed. prepared: how many more runs the pool
    lets begin than devices.
    """

    def decide(situation: Situation) -> Decided:
        dagster = situation.dagster
        watch = Watch.read(situation.cursor, now=watcher.monotonic(), unix=situation.now)
        left_out_before = set(watch.left_out)
        sentences: list[str] = []
        late: list[RunToEnd] = []
        try:
            late = leases.late(watch, watcher.workers.living(), dagster)
        except LeaseDirectoryError as error:
            sentences.append(str(error))
        sentences += watcher.check(watch, dagster, late)
        leases.tell_freed(watch)
        # At each tick while a device is left out: a new start sets the limit for all devices again.
        if pool is not None and (left_out_before or watch.left_out):
            previous, devices = usable_devices(watch, left_out_before), usable_devices(watch, watch.left_out)
            more = prepared()
            dagster.fit_pool(pool, previous=previous and previous + more, slots=devices and devices + more)
        return Decided(" ".join(sentences) or "Every worker moves and every device is sound.", watch.cursor())

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Ends workers that commit nothing for twice their own learned time and processes that keep a"
            " device after their run, names slow ones, and leaves out devices that failed twice. It starts"
            " nothing."
        ),
        ticks=ticks,
        clock=clock,
    )


def _run_to_end(worker: Worker, stuck: Stuck | None, now: float) -> RunToEnd:
    """stuck: None if the worker was told to end, and has moved since. now: unix seconds."""
    return RunToEnd(
        worker.run_id,
        who=_who(worker),
        why="stood still" if stuck is None else f"stands still for {stuck.verdict.seconds:.0f} s",
        process=_process(worker),
        alert=None if stuck is None else _stuck_alert(stuck, now),
        device=worker.device if _may_be_the_device(worker) else None,
        occurrence=at_work_on(worker.asset, worker.partition),
        kill_counts=True,
    )


def _stuck_alert(stuck: Stuck, now: float) -> Alert:
    worker = stuck.worker
    return Alert(
        kind="worker_stuck",
        subject=f"{worker.asset}/{worker.partition}/worker",
        occurrence=worker.run_id,
        severity="error",
        title=f"{_who(worker)} is stuck",
        next_step=(
            "Nothing for now: it is ended and its partition is retried on another device where there is one;"
            " committed rows stay. If it happens again on the same device, look at `nvidia-smi` and the"
            " kernel log: after two partitions that had to be killed on it, it is left out. If its batches do"
            " take that long: lower VLM_ASSETS_BATCH_IMAGES, or raise VLM_ASSETS_STUCK_SECONDS."
        ),
        partition=worker.partition,
        expected=f"a commit within {stuck.verdict.allowed_seconds:.0f} s ({worker.phase})",
        actual=f"none for {stuck.verdict.seconds:.0f} s, at {worker.percent:.0f}% of the partition",
        page=f"runs/{worker.run_id}",
        at=now,
    )


def _slow_alert(slow: Slow, seconds: float, now: float) -> Alert:
    """seconds: for how long the worker has been slow. now: unix seconds."""
    worker = slow.worker
    return Alert(
        kind="worker_slow",
        subject=f"devices/{worker.device}/slow",
        occurrence=worker.run_id,
        severity="warning",
        title=f"{_who(worker)} is {slow.percent:.0f}% slower than the workers beside it",
        next_step=(
            "Look at the device's temperature, clocks and other users (`nvidia-smi`), and at what its"
            " partition's images have that others have not. It goes on."
        ),
        partition=worker.partition,
        expected=f"about {slow.peer_rate:.2f} properties a second, the median of the others",
        actual=f"{worker.rate:.2f} properties a second for {seconds / 60:.0f} minutes",
        page=f"runs/{worker.run_id}",
        at=now,
    )


def _process(worker: Worker) -> ProcessIdentity:
    return ProcessIdentity(worker.pid, worker.process_start or 0, worker.boot_id)


def _may_be_the_device(worker: Worker) -> bool:
    """Whether the device may be why a worker stood still.

    It is not if the worker had computed everything, or went on computing while its commits waited: then the
    storage is slow, and a worker that ends waits there for its last commit.
    """
    if worker.phase is Phase.PUBLISHING or worker.percent >= 100:
        return False
    waiting = worker.computed > worker.committed - worker.restored
    computed_on = worker.beat_at - worker.committed_at > worker.batch_seconds > 0
    return not (waiting and computed_on)


def _who(worker: Worker) -> str:
    device = f" on {worker.device}" if worker.device else ""
    return f"The worker of {worker.asset} {worker.partition}{device} (run {worker.run_id}, pid {worker.pid})"

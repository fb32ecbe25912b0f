"""Workers over time: one that stands still is ended, one that is slower than its peers is named.

What lives here: who stands still or is slow, from heartbeats alone, and the tick that alerts and ends. Time
is that of the machine's monotonic clock, and counts only while somebody watched: a machine that slept, or a
daemon that was down, makes nobody stuck. What does not: devices (``device_health.py``,
``leases_after_end.py``), and starting anything again: an ended run is interrupted, and Dagster's run retries
or the scheduled re-materialization take its partition up.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.device_health import DeviceWatcher, tell_left_out, usable_devices
from sensors.health_watch import Watch
from sensors.leases_after_end import LeasesAfterEnd
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable.files.processes import ProcessIdentity
from vlm_durable.state.workers import Phase, Worker, Workers
from vlm_engine.devices.left_out import at_work_on

NAME = "worker_health"
INTERVAL_SECONDS = 5
"""As often as Dagster's daemon looks at sensors: it comes on top of the time a worker may stand still."""
LEARNED_TIMES = 2.0
"""A worker is stuck that commits nothing for so many times its own learned time."""
_SLOW_SHARE, _SLOW_SECONDS = 0.3, 600.0
"""A worker that is slower than its peers' median by this share, for so long, is named."""
_KILLED = "A person cancelled this run, its process did not end, and it is killed now."


@dataclass(frozen=True)
class WorkerLimits:
    """How long a worker may stand still, in seconds.

    Without a commit for twice its own learned time it is stuck, but not before ``least`` and in
    any case after ``most``. ``loading``: to prepare, for a model to load, and for a file to be published. Who
    waits for a device stands still for as long as the work on that takes.
    """

    least: float = 30.0
    most: float = 600.0
    loading: float = 1800.0
    grace: float = 10.0

    def allowed(self, worker: Worker) -> float:
        """Seconds that this worker may go without a commit, or in its phase."""
        if worker.phase is Phase.WORKING:
            if not worker.batch_seconds:
                return self.most
            return min(max(LEARNED_TIMES * worker.batch_seconds, self.least), self.most)
        return math.inf if worker.phase is Phase.WAITING else self.loading


@dataclass(frozen=True)
class Stuck:
    """A worker that stands still. still: seconds; allowed: seconds it had."""

    worker: Worker
    still: float
    allowed: float


def stuck_workers(
    workers: Iterable[Worker], limits: WorkerLimits, *, now: float, watched_since: float
) -> list[Stuck]:
    """The workers of this machine that stand still for longer than they may."""
    found = []
    for worker in workers:
        if worker.is_here:
            still = now - max(worker.moved, watched_since)
            allowed = limits.allowed(worker)
            if still > allowed:
                found.append(Stuck(worker, still, allowed))
    return found


@dataclass(frozen=True)
class Slow:
    """A worker whose rate is far below its peers'. peers: their median, properties a second."""

    worker: Worker
    peers: float


def slow_workers(workers: Sequence[Worker]) -> list[Slow]:
    """Workers that are slower than the median of those that do the same work beside them, at this moment."""
    found = []
    working = [one for one in workers if one.phase is Phase.WORKING and one.rate > 0]
    for worker in working:
        peers = [one.rate for one in working if one.asset == worker.asset and one.name != worker.name]
        if peers and worker.rate < (1.0 - _SLOW_SHARE) * statistics.median(peers):
            found.append(Slow(worker, statistics.median(peers)))
    return found


def slow_since(
    before: Mapping[str, float], slow: Iterable[Slow], *, now: float, watched_since: float
) -> dict[str, float]:
    """Since when each slow worker has been slow without a break, by its name."""
    return {
        one.worker.name: before.get(one.worker.name, now)
        if before.get(one.worker.name, now) >= watched_since
        else now
        for one in slow
    }


@dataclass(frozen=True)
class HealthWatcher:
    """What a tick looks at. Plain Python: what Dagster lends is handed in.

    monotonic: seconds of the machine's clock. send: signals a worker's process; False where it has ended.
    """

    workers: Workers
    outbox: Outbox
    devices: DeviceWatcher
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    monotonic: Callable[[], float] = time.monotonic
    send: Callable[[Worker, signal.Signals], bool] = lambda worker, number: _process(worker).send(number)

    def look(self, watch: Watch, dagster: DagsterFacts) -> list[str]:
        """One tick: changes ``watch``, posts alerts, ends what is stuck. Returns sentences."""
        living = [worker for worker in self.workers.living() if worker.pid]
        self.devices.left_out.state.copy_if_due()
        return [
            *self._end_stuck(watch, living, dagster),
            *self._name_slow(watch, living),
            *self.devices.look(watch),
            *tell_left_out(watch, self.devices.left_out, self.outbox, watch.unix, node=self.devices.node),
        ]

    def _end_stuck(self, watch: Watch, living: Sequence[Worker], dagster: DagsterFacts) -> list[str]:
        said = []
        now = watch.at
        stuck = stuck_workers(living, self.limits, now=now, watched_since=watch.since)
        for one in stuck:
            if one.worker.name not in watch.ended:
                self.outbox.post(self._stuck(one, watch.unix))
                dagster.mark_interrupted(one.worker.run_id)
                watch.ended[one.worker.name] = now
                said.append(f"{_who(one.worker)} stands still for {one.still:.0f} s and is told to end.")
                self._end(one.worker, signal.SIGTERM, said)
        alive = {worker.name: worker for worker in living}
        for name, at in list(watch.ended.items()):
            worker = alive.get(name)
            if worker is None:
                del watch.ended[name]
                run_id, _, asset = name.partition(".")
                said.append(f"The stuck worker of run {run_id} ({asset}) has ended; its device is free.")
            elif now - at >= self.limits.grace:
                # Cancelled before its process is killed: Dagster would start again what a person stopped.
                dagster.end_cancelled(worker.run_id, _KILLED)
                if self._end(worker, signal.SIGKILL, said):
                    self._hold_against_device(worker, outlives_kill=now - at >= 2 * self.limits.grace)
                    said.append(f"{_who(worker)} did not end when told to, and was killed.")
        self._tell_freed(alive, watch.unix)
        return said

    def _end(self, worker: Worker, number: signal.Signals, said: list[str]) -> bool:
        """Whether the signal reached the worker; says so where it may not be sent."""
        try:
            return self.send(worker, number)
        except PermissionError:
            said.append(
                f"{_who(worker)} is another user's process and cannot be ended from here: end it as that"
                " user, or run Dagster as the user whose runs they are."
            )
            return False

    def _tell_freed(self, alive: dict[str, Worker], now: float) -> None:
        for subject, alert in self.outbox.open_subjects().items():
            if alert.kind == "worker_stuck" and f"{alert.occurrence}.{subject.split('/')[0]}" not in alive:
                sentence = (
                    "The stuck worker has ended and its device is free; its partition is retried unless a"
                    " person cancelled its run."
                )
                self.outbox.note_recovery(subject, sentence=sentence, at=now)

    def _stuck(self, one: Stuck, now: float) -> Alert:
        worker = one.worker
        return Alert(
            kind="worker_stuck",
            subject=f"{worker.asset}/{worker.partition}/worker",
            occurrence=worker.run_id,
            severity="error",
            title=f"{_who(worker)} is stuck",
            next_step=(
                "Nothing for now: it is ended and its partition is retried on another device where there is"
                " one; committed rows stay. If it happens again on the same device, look at `nvidia-smi` and"
                " the kernel log: after two partitions that had to be killed on it, it is left out. If its"
                " batches do take that long: lower VLM_ASSETS_BATCH_IMAGES, or raise"
                " VLM_ASSETS_STUCK_SECONDS."
            ),
            partition=worker.partition,
            expected=f"a commit within {one.allowed:.0f} s ({worker.phase})",
            actual=f"none for {one.still:.0f} s, at {worker.percent:.0f}% of the partition",
            page=f"runs/{worker.run_id}",
            at=now,
        )

    def _hold_against_device(self, worker: Worker, *, outlives_kill: bool) -> None:
        """For one that did not honour SIGTERM: a hung device lets none through, a wait in Python does.

        One that outlives SIGKILL holds the device until the driver lets it go: it is left out at once.
        """
        if worker.device is not None and _may_be_the_device(worker):
            why = f"A worker of {worker.partition} stood still until it was killed (run {worker.run_id})."
            occurrence = at_work_on(worker.asset, worker.partition)
            self.devices.left_out.note_failure(worker.device, occurrence=occurrence, why=why)
            if outlives_kill:
                why = f"Its worker of {worker.partition} does not end when it is killed (pid {worker.pid})."
                self.devices.left_out.note_failure(worker.device, occurrence=f"{occurrence}, still", why=why)

    def _name_slow(self, watch: Watch, living: Sequence[Worker]) -> list[str]:
        # Of a cluster, each node names its own.
        slow = [one for one in slow_workers(living) if one.worker.is_here]
        watch.slow = slow_since(watch.slow, slow, now=watch.at, watched_since=watch.since)
        told = []
        for one in slow:
            worker = one.worker
            lasted = watch.at - watch.slow[worker.name]
            if lasted < _SLOW_SECONDS or worker.device is None:
                continue
            subject = f"devices/{worker.device}/slow"
            share = 100.0 * (1.0 - worker.rate / one.peers)
            told.append(f"{_who(worker)} is {share:.0f}% slower than its peers.")
            # Once while it lasts: a device of a slower kind would be told of at each of its partitions.
            if subject not in self.outbox.open_subjects():
                self.outbox.post(
                    Alert(
                        kind="worker_slow",
                        subject=subject,
                        occurrence=worker.run_id,
                        severity="warning",
                        title=f"{_who(worker)} is {share:.0f}% slower than the workers beside it",
                        next_step=(
                            "Look at the device's temperature, clocks and other users (`nvidia-smi`), and at"
                            " what its partition's images have that others have not. It goes on."
                        ),
                        partition=worker.partition,
                        expected=f"about {one.peers:.2f} properties a second, the median of the others",
                        actual=f"{worker.rate:.2f} properties a second for {lasted / 60:.0f} minutes",
                        page=f"runs/{worker.run_id}",
                        at=watch.unix,
                    )
                )
        keep_pace = {one.device for one in living if one.rate > 0 and one.name not in watch.slow}
        watch.idle = None if living else max(watch.at if watch.idle is None else watch.idle, watch.since)
        # Between two partitions nobody is compared; where all is done, nobody ever will be.
        is_over = watch.idle is not None and watch.at - watch.idle >= _SLOW_SECONDS
        for subject, alert in self.outbox.open_subjects().items():
            device = subject.split("/")[1] if alert.kind == "worker_slow" else None
            if device is not None and (device in keep_pace or is_over):
                sentence = f"{device} keeps pace with the others again."
                if is_over:
                    sentence = f"Nobody has worked for {_SLOW_SECONDS / 60:.0f} minutes."
                self.outbox.note_recovery(subject, sentence=sentence, at=watch.unix)
        return told


def build_worker_health_sensor(
    watcher: HealthWatcher,
    leases: LeasesAfterEnd,
    *,
    pool: str,
    ticks: Ticks,
    prepared: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. ticks: where it notes that it ticked.

    pool: its limit follows the devices in use. prepared: how many runs more it lets begin.
    """

    def decide(at: Situation) -> Decided:
        dagster = at.dagster
        watch = Watch.read(at.cursor, now=watcher.monotonic(), unix=at.now)
        told_before = set(watch.left_out)
        said = watcher.look(watch, dagster)
        said += leases.look(watch, watcher.workers.living(), dagster)
        # At each tick while one is left out: a new start sets the limit for all devices again.
        if told_before or watch.left_out:
            before, now = usable_devices(watch, told_before), usable_devices(watch, watch.left_out)
            more = prepared()
            dagster.fit_pool(pool, before=before and before + more, now=now and now + more)
        return Decided(" ".join(said) or "Every worker moves and every device is sound.", watch.cursor())

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


def _process(worker: Worker) -> ProcessIdentity:
    return ProcessIdentity(worker.pid, worker.process_start or 0, worker.boot_id)


def _may_be_the_device(worker: Worker) -> bool:
    """Whether the device may be why it stood still: not where it was done, or computed on without commits.

    Those are the storage's, and a worker that ends waits for its last commit there.
    """
    if worker.phase is Phase.PUBLISHING or worker.percent >= 100:
        return False
    waiting = worker.computed > worker.committed - worker.restored
    computed_on = worker.beat_at - worker.committed_at > worker.batch_seconds > 0
    return not (waiting and computed_on)


def _who(worker: Worker) -> str:
    device = f" on {worker.device}" if worker.device else ""
    return f"The worker of {worker.asset} {worker.partition}{device} (run {worker.run_id}, pid {worker.pid})"

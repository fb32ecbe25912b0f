"""Workers and devices over time: what stands still is ended, what is slow or sick is named.

What lives here: the tick that looks, alerts and ends. What does not: the judgement of workers
(``worker_judgement.py``) and of devices (``resources/devices/health.py``), counting a device's failures
(``resources/devices/left_out.py``), telling of those that are left out (``left_out_alerts.py``), devices that
are held after a run (``leases_after_end.py``), and starting anything again: an ended run is interrupted, and
Dagster's run retries or the scheduled re-materialization take its partition up.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import dagster as dg

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from resources.devices.errors import DeviceError
from resources.devices.find import Device
from resources.devices.health import DeviceHealth
from resources.devices.left_out import LeftOutDevices, at_work_on
from resources.processes import ProcessIdentity
from resources.state.workers import Phase, Worker, Workers
from sensors.dagster_facts import DagsterFacts
from sensors.health_watch import Watch
from sensors.leases_after_end import LeasesAfterEnd
from sensors.left_out_alerts import tell_left_out, usable_devices
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from sensors.worker_judgement import Stuck, WorkerLimits, slow_since, slow_workers, stuck_workers

NAME = "worker_health"
INTERVAL_SECONDS = 5
"""As often as Dagster's daemon looks at sensors: it comes on top of the time a worker may stand still."""
_KILLED = "A person cancelled this run, its process did not end, and it is killed now."
_SICK_AGAIN_SECONDS = 600.0
"""A device that is sick for so long without a break has failed twice; sound for so long, it is over."""


@dataclass(frozen=True)
class HealthWatcher:
    """What a tick looks at. Plain Python: what Dagster lends is handed in.

    find: the devices that the settings mean. judge: what speaks against each of them now, by id.
    monotonic: seconds of the machine's clock. send: signals a worker's process; False where it has ended.
    """

    workers: Workers
    outbox: Outbox
    left_out: LeftOutDevices
    find: Callable[[], Sequence[Device]]
    judge: Callable[[Sequence[Device]], Mapping[str, DeviceHealth]]
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    monotonic: Callable[[], float] = time.monotonic
    send: Callable[[Worker, signal.Signals], bool] = lambda worker, number: _process(worker).send(number)

    def look(self, watch: Watch, dagster: DagsterFacts) -> list[str]:
        """One tick: changes ``watch``, posts alerts, ends what is stuck. Returns sentences."""
        living = [worker for worker in self.workers.living() if worker.pid]
        self.left_out.state.copy_if_due()
        return [
            *self._end_stuck(watch, living, dagster),
            *self._name_slow(watch, living),
            *self._look_at_devices(watch),
            *tell_left_out(watch, self.left_out, self.outbox, watch.unix),
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
                    self._hold_against_device(worker)
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
                self.outbox.recovered(subject, sentence=sentence, at=now)

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
                " batches do take that long: lower VLM_ASSETS_BATCH_SIZE, or raise VLM_ASSETS_STUCK_SECONDS."
            ),
            partition=worker.partition,
            expected=f"a commit within {one.allowed:.0f} s ({worker.phase})",
            found=f"none for {one.still:.0f} s, at {worker.percent:.0f}% of the partition",
            page=f"runs/{worker.run_id}",
            at=now,
        )

    def _hold_against_device(self, worker: Worker) -> None:
        """For one that did not honour SIGTERM: a hung device lets none through, a wait in Python does."""
        if worker.device is not None and _may_be_the_device(worker):
            why = f"A worker of {worker.partition} stood still until it was killed (run {worker.run_id})."
            occurrence = at_work_on(worker.asset, worker.partition)
            self.left_out.note_failure(worker.device, occurrence=occurrence, why=why)

    def _name_slow(self, watch: Watch, living: Sequence[Worker]) -> list[str]:
        slow = slow_workers(living, self.limits)
        watch.slow = slow_since(watch.slow, slow, now=watch.at, watched_since=watch.since)
        told = []
        for one in slow:
            worker = one.worker
            lasted = watch.at - watch.slow[worker.name]
            if lasted < self.limits.slow or worker.device is None:
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
                        found=f"{worker.rate:.2f} properties a second for {lasted / 60:.0f} minutes",
                        page=f"runs/{worker.run_id}",
                        at=watch.unix,
                    )
                )
        keep_pace = {one.device for one in living if one.rate > 0 and one.name not in watch.slow}
        watch.idle = None if living else max(watch.at if watch.idle is None else watch.idle, watch.since)
        # Between two partitions nobody is compared; where all is done, nobody ever will be.
        is_over = watch.idle is not None and watch.at - watch.idle >= self.limits.slow
        for subject, alert in self.outbox.open_subjects().items():
            device = subject.split("/")[1] if alert.kind == "worker_slow" else None
            if device is not None and (device in keep_pace or is_over):
                sentence = f"{device} keeps pace with the others again."
                if is_over:
                    sentence = f"Nobody has worked for {self.limits.slow / 60:.0f} minutes."
                self.outbox.recovered(subject, sentence=sentence, at=watch.unix)
        return told

    def _look_at_devices(self, watch: Watch) -> list[str]:
        subject, now = "devices", watch.unix
        opened = self.outbox.open_subjects()
        # What a watch that was lost had told of goes on: no second failure, and not told anew.
        for told, alert in opened.items():
            if alert.kind == "device_sick" and told != subject:
                watch.sick.setdefault(told.removeprefix("devices/"), alert.at)
        try:
            found = self.find()
            watch.here = [device.id for device in found]
            # One that the driver lists no more is looked at too: nothing else would say that it is lost.
            watch.devices |= {device.id: asdict(device) for device in found}
            verdicts = self.judge([Device(**one) for one in watch.devices.values()])
        except DeviceError as error:
            if watch.blind_since is None:
                watch.blind_since = opened[subject].at if subject in opened else now
            self.outbox.post(
                Alert(
                    kind="device_sick",
                    subject=subject,
                    occurrence=f"blind since {watch.blind_since:.0f}",
                    severity="error",
                    title="The devices cannot be looked at",
                    next_step="Look at `nvidia-smi` and the kernel log; a reboot may be needed.",
                    found=str(error),
                    at=watch.blind_since,
                )
            )
            return [str(error)]
        watch.blind_since = None
        if subject in opened:
            sentence = "The driver answers again."
            self.outbox.recovered(subject, sentence=sentence, at=now)
        said: list[str] = []
        for device, verdict in verdicts.items():
            said.extend((*verdict.refused, *verdict.hot))
            if verdict.refused:
                self._tell_sick(watch, device, " ".join(verdict.refused))
            elif device in watch.sick:
                self._tell_sound(watch, device)
            self._tell_hot(watch, device, " ".join(verdict.hot), is_told=_hot(device) in opened)
        return said

    def _tell_hot(self, watch: Watch, device: str, why: str, *, is_told: bool) -> None:
        """A warning once while it lasts, and nothing more: slower is more than nothing."""
        now = watch.unix
        if why:
            watch.cool.pop(device, None)
            if not is_told:
                self.outbox.post(
                    Alert(
                        kind="device_hot",
                        subject=_hot(device),
                        occurrence=f"{now:.0f}",
                        severity="warning",
                        title=f"{device} is too hot, and slower for it",
                        next_step="Look at its cooling, its fans and the air in the room. It goes on.",
                        expected="clocks that its temperature does not hold down",
                        found=why,
                        at=now,
                    )
                )
        elif is_told:
            since = watch.cool[device] = max(watch.cool.get(device, watch.at), watch.since)
            if watch.at - since >= _SICK_AGAIN_SECONDS:
                del watch.cool[device]
                sentence = f"{device} was not too hot for {_SICK_AGAIN_SECONDS / 60:.0f} minutes."
                self.outbox.recovered(_hot(device), sentence=sentence, at=now)

    def _tell_sound(self, watch: Watch, device: str) -> None:
        """Once it has been so for long enough: one that throttles on and off is one trouble, not many."""
        watch.sick_again.pop(device, None)
        since = watch.sound[device] = max(watch.sound.get(device, watch.at), watch.since)
        if watch.at - since >= _SICK_AGAIN_SECONDS:
            del watch.sick[device], watch.sound[device]
            now = watch.unix
            sentence = f"Nothing has spoken against {device} for {_SICK_AGAIN_SECONDS / 60:.0f} minutes."
            self.outbox.recovered(f"devices/{device}", sentence=sentence, at=now)

    def _tell_sick(self, watch: Watch, device: str, why: str) -> None:
        now = watch.unix
        occurrence = f"sick since {watch.sick.setdefault(device, now):.0f}"
        watch.sound.pop(device, None)
        since = watch.sick_again[device] = max(watch.sick_again.get(device, watch.at), watch.since)
        self.outbox.post(
            Alert(
                kind="device_sick",
                subject=f"devices/{device}",
                occurrence=occurrence,
                severity="warning",
                title=f"{device} is not sound",
                next_step=(
                    "Nothing new starts on it while this lasts. Look at it: after ten minutes without a"
                    " break, or a second failure within a day, it is left out until you take it back."
                ),
                expected="nothing that speaks against it",
                found=why,
                at=now,
            )
        )
        self.left_out.note_failure(device, occurrence=occurrence, why=why)
        if watch.at - since >= _SICK_AGAIN_SECONDS:
            self.left_out.note_failure(device, occurrence=f"{occurrence}, still", why=why)


def build_worker_health_sensor(
    watcher: HealthWatcher,
    leases: LeasesAfterEnd,
    *,
    pool: str,
    ticks: Ticks,
    clock: Callable[[], float] = time.time,
) -> dg.SensorDefinition:
    """The sensor. pool: its limit follows the devices in use. ticks: where it notes that it ticked."""

    def decide(at: Situation) -> Decided:
        dagster = at.dagster
        watch = Watch.read(at.cursor, now=watcher.monotonic(), unix=at.now)
        told_before = set(watch.left_out)
        said = watcher.look(watch, dagster)
        said += leases.look(watch, watcher.workers.living(), dagster)
        # At each tick while one is left out: a new start sets the limit for all devices again.
        if told_before or watch.left_out:
            before, now = usable_devices(watch, told_before), usable_devices(watch, watch.left_out)
            dagster.fit_pool(pool, before=before, now=now)
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


def _hot(device: str) -> str:
    return f"devices/{device}/hot"


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

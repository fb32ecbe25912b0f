"""A whole run as discrete events: simulated time, model, devices and network; real decisions, real journal.

Real: the order of partitions, the batch plan, the retry schedule, the health of workers and devices,
reconciliation, the drift sensor, alerts, the control state, and the journal and publication of every
partition that a fault touches. Simulated: the clock, what the model takes, the machines, Dagster's queue and
run retries (``dagster_in_memory.py``), and the person, who reads the alerts some hours later.

The one folder of the home stands for the place that all nodes can go on from. ``fault_plan.py`` draws the
faults, ``partition_life.py`` has the process that dies, ``rehearse.py`` the report.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from dagster import DagsterRunStatus

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from faults.rehearsal.fault_plan import Fault, FaultKind
from faults.rehearsal.partition_life import ASSET, PartitionLife, Strike
from resources.alerts.outbox import Outbox
from resources.dagster_names import NEEDS_PERSON, NO_ATTEMPT
from sensors.alerts import AlertScan, Cursor
from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY
from sensors.device_health import DeviceWatcher
from sensors.failed_partitions import FailedPartitions
from sensors.health_watch import Watch
from sensors.partition_history import PartitionHistory
from sensors.published_file_drift import DriftWatcher, evaluation
from sensors.reconciliation import end_dead_runs
from sensors.run_end import RunEnder, RunToEnd
from sensors.worker_health import HealthWatcher
from vlm_assets.assets.checks import FailedShareLimits
from vlm_assets.assets.fingerprint import Meanings
from vlm_assets.automation.retries import build_failed_partitions
from vlm_assets.automation.sensors import DriftLooks, worker_limits
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import ExpectedCost
from vlm_assets.services.pace import Pace
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.files.processes import boot_id
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause_of
from vlm_durable.state.workers import Phase, Worker, Workers
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.published import PublishedPartitions, Verification
from vlm_durable.wording import counted
from vlm_engine.batches import BATCH_SECONDS, BatchSize, PlannedProperty, plan_batches, remaining
from vlm_engine.devices.find import Device
from vlm_engine.devices.health import DeviceHealth
from vlm_engine.devices.left_out import LeftOutDevices, at_work_on

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0

BASE_SECONDS = 190.0
"""Of a run beside its images, where nothing was measured: process, imports, model, publication."""

_LOADING, _PUBLISHING = 0.6, 0.05
"""Parts of that time: loading the model, just before the first property, and publishing."""

_QUIET_SECONDS = HOUR
"""Between two looks of all sensors while nothing is wrong: what they would see in between is nothing."""

_HEALTH_SECONDS, _LOOK_SECONDS, _DRIFT_SECONDS = 5.0, 30.0, HOUR
_WATCHED_SECONDS = 100.0
"""Between two looks while a device is sick: a longer gap counts as not watched."""

_PERSON_SECONDS = 8 * HOUR
"""After which a person has done what an alert asks for."""

_DAGSTER_RETRIES = 2
_MOST_OPERATIONS = 45
"""Changes of files that two commits take, and a few more: a later one is never reached."""

_HOST = socket.gethostname()
_S = DagsterRunStatus


@dataclass
class Run:
    """A run that works. began: when its first property begins; ends: when it publishes (unix seconds).

    seconds_per_image: on its device. poisoned: it ends at a property that breaks it.
    waiting: for images, with nothing begun. standing: its process hangs. dead: its process is gone.
    """

    run_id: str
    key: str
    device: str
    launched: float
    began: float
    ends: float
    seconds_per_image: float
    poisoned: bool = False
    waiting: bool = False
    standing: bool = False
    dead: bool = False
    ignores_terms: bool = False


@dataclass(frozen=True)
class Span:
    """What a device did, for the picture. how: of its end."""

    device: str
    start: float
    stop: float
    how: str


@dataclass
class Findings:
    """What a rehearsal counts. lost: rows that were promised and not there. recomputed: computed twice."""

    lost: int = 0
    doubled: int = 0
    recomputed: int = 0
    deaths: int = 0
    published: int = 0
    rows: int = 0
    by_hand: int = 0
    spans: list[Span] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Simulation:
    """One rehearsal. settings: of a home of its own, with a catalogue. pace: what runs take.

    each_day: called whenever another simulated day is over.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        seed: int,
        devices: int,
        nodes: int,
        pace: Pace,
        start: float,
        faults: Sequence[Fault],
        most_seconds: float,
        each_day: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.catalog = Catalog.open(settings.home)
        self.findings = Findings()
        self.start, self.faults = start, faults
        self.clock = SimulatedClock(start)
        self.chance = random.Random(seed)
        self.dagster = DagsterInMemory(self.clock)
        self.state = ControlState(settings.state_directory, clock=self.clock)
        self.outbox = Outbox(self.state)
        self.left_out = LeftOutDevices(self.state, self.clock)
        self.published = PublishedPartitions(settings.descriptions)
        self.devices = [
            Device(f"GPU-{number:02d}", "cuda", "a GPU", None, f"GPU-{number:02d}")
            for number in range(devices)
        ]
        self.node_of = {device.id: number % nodes for number, device in enumerate(self.devices)}
        self.speed = {device.id: self.chance.uniform(0.97, 1.03) for device in self.devices}
        self._pace, self._stop = pace, start + most_seconds
        self._each_day, self._day_ends = each_day, start + DAY
        self._publishing = _PUBLISHING * pace.base_seconds
        # As a run would advise where a batch takes longer.
        most = math.inf if settings.batch_images == "auto" else settings.batch_images
        images = int(max(1, min(most, BATCH_SECONDS / pace.image_seconds)))
        self._batch_size = BatchSize(settings.batch_size, images)
        self._images = np.minimum(self.catalog.image_counts(), settings.max_images)
        self._mean_images = float(self._images.mean())
        self._cost = ExpectedCost.from_catalog(settings, self.catalog)
        self._keys = tuple(device.key for device in self.catalog.ranges)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._queue: list[tuple[int, int, str]] = []
        self._runs: dict[str, Run] = {}
        self._nodes_down: dict[int, float] = {}
        self._disks_full: dict[int, float] = {}
        self._sick: dict[str, float] = {}
        self._images_away = self._daemon_down = self._watched_until = 0.0
        self._failing: dict[str, frozenset[int]] = {}
        self._accepted: set[str] = set()
        self._poison: dict[str, int] = {}
        self._computed: Counter[str] = Counter()
        self._promised: Counter[str] = Counter()
        self._restored: dict[str, list[int]] = {}
        self._lives: dict[str, PartitionLife] = {}
        self._retried: set[str] = set()
        self._unsettled: set[str] = set()
        self._looked: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._build_sensors()

    def _build_sensors(self) -> None:
        workers, state = SimulatedWorkers(self), self.state
        self._workers = workers
        real = build_failed_partitions(self.settings, self._keys)
        watched = replace(
            real.watched,
            assets=(ASSET,),
            working=lambda: {worker.partition for worker in workers.living()},
            heaviest_first=self._cost.heaviest_first,
            is_stale=lambda asset, key: False,
        )
        self._retries = FailedPartitions(watched, state, policy=real.policy, cap=real.cap)
        watcher = DeviceWatcher(self.outbox, self.left_out, lambda: self.devices, self._judge)
        self._health = HealthWatcher(
            workers,
            self.outbox,
            watcher,
            RunEnder(self.outbox, self.left_out, grace=self.settings.grace_seconds, send=self._signal),
            worker_limits(self.settings),
            monotonic=self.clock,
        )
        self._drift = DriftWatcher(
            [
                DriftLooks(
                    self.settings,
                    self.settings.descriptions,
                    self._keys,
                    Meanings.from_settings(self.settings),
                )
            ],
            workers,
            self.outbox,
            monotonic=self.clock,
        )
        self._scan = AlertScan(
            self.outbox,
            assets=[ASSET],
            watched={},
            paused=lambda: pause_of(state) is not None,
            working=lambda: {worker.run_id for worker in workers.living()},
            silence=self.settings.device_wait_seconds + 1200.0,
        )
        self._histories = {ASSET: PartitionHistory([ASSET])}
        self._watch: str | None = None
        self._cursor = Cursor()

    # Time.

    def run(self) -> Findings:
        """Let all happen, until every partition is published or the time is over."""
        for key in self._cost.heaviest_first(self._keys):
            self._launch(key, by="backfill")
        for fault in self.faults:
            self._at(self.start + fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self._at(self.start, self._tick)
        while self.findings.published < len(self._keys) and self._goes_on(self._stop):
            pass
        # Then until nothing is left to be put right or told, for a day at most.
        deadline = self.clock.now + DAY
        while (self._unsettled or self.open_alerts) and self._goes_on(deadline):
            pass
        return self.findings

    @property
    def open_alerts(self) -> Mapping[str, str]:
        """What is still open at the end: the kind of each subject's alert."""
        return {subject: alert.kind for subject, alert in self.outbox.open_subjects().items()}

    def _goes_on(self, until: float) -> bool:
        """Let the next event happen; False where none comes until then."""
        if not self._events or self._events[0][0] > until:
            return False
        at, _, happen = heapq.heappop(self._events)
        self.clock.now = max(self.clock.now, at)
        happen()
        self._dispatch()
        if self.clock.now >= self._day_ends:
            self._day_ends = self.clock.now + DAY
            self._each_day()
        return True

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), happen))

    # Runs.

    def _launch(self, key: str, *, by: str, **tags: str) -> None:
        if by == "backfill":
            tags = {"dagster/backfill": "the first", **tags}
        run_id = self.dagster.launch(key, [ASSET], _S.QUEUED, **tags)
        heapq.heappush(self._queue, (-self._cost.priority(key), next(self._number), run_id))

    def _dispatch(self) -> None:
        """What Dagster's daemon does each second: start what is queued, heaviest first."""
        if self.clock.now < self._daemon_down or not self._queue:
            return
        for device in self._free_devices():
            while self._queue:
                run_id = heapq.heappop(self._queue)[2]
                if self.dagster.runs[run_id].status is _S.QUEUED:
                    self._start(run_id, device)
                    break

    def _free_devices(self) -> list[str]:
        busy = {run.device for run in self._runs.values()}
        out = self.left_out.left_out()
        return [
            device.id
            for device in self.devices
            if device.id not in busy
            and device.id not in out
            and self.clock.now >= self._sick.get(device.id, 0.0)
            and self.clock.now >= self._nodes_down.get(self.node_of[device.id], 0.0)
        ]

    def _start(self, run_id: str, device: str) -> None:
        key = str(self.dagster.runs[run_id].partition)
        self.dagster.change(run_id, _S.STARTED)
        now, speed = self.clock.now, self._pace.speed(self._at_once(key, device))
        per_image = self.speed[device] * self._pace.image_seconds / speed
        beside = self._pace.run_seconds(0.0, first=now == self.start) / speed
        began = now + beside - self._publishing
        run = Run(run_id, key, device, now, began, began - _LOADING * beside, per_image)
        self._runs[run_id] = run
        record = self.published.record(key)
        if record is not None:
            self._at(run.ends, lambda: self._verify(run))
            return
        if self.clock.now < self._images_away:
            run.waiting = True
            run.ends = min(self._images_away, now + self.settings.device_wait_seconds)
            self._at(run.ends, lambda: self._start_again(run))
            return
        self._restore(key)
        done, property_range = set(self._restored[key]), PropertyRange.from_key(key)
        remaining = [
            ordinal for ordinal in range(property_range.start, property_range.stop) if ordinal not in done
        ]
        work = int(self._images[remaining].sum()) * per_image
        run.ends = run.began + work + self._publishing
        if key in self._poison:
            # Its process breaks at this property: when the batch before it has ended.
            run.ends, run.poisoned = began, True
            for ends, batch in self._batches(run):
                if self._poison[key] in batch:
                    break
                run.ends = ends
        self._at(run.ends, lambda: self._end(run))

    def _at_once(self, key: str, device: str) -> float:
        """How many runs share the cores of a device's machine while this one works, it included."""
        node, pace = self.node_of[device], self._pace
        alone = pace.base_seconds + self._cost.whole[key] * pace.image_seconds
        # One that ends soon is beside it for a part of its time; its place is taken while others wait.
        beside = sum(
            1.0 if self._queue else min(1.0, max(0.0, other.ends - self.clock.now) / max(alone, 1e-9))
            for other in self._runs.values()
            if self.node_of[other.device] == node
        )
        return min(beside + 1.0 + len(self._queue), float(Counter(self.node_of.values())[node]))

    def _start_again(self, run: Run) -> None:
        """It waited for the images: it begins now, or ends as interrupted."""
        if self._runs.get(run.run_id) is not run or run.dead:
            return
        del self._runs[run.run_id]
        if self.clock.now < self._images_away:
            self._fail(run, "interrupted", **{NO_ATTEMPT: run.run_id})
        else:
            self._start(run.run_id, run.device)

    def _restore(self, key: str) -> None:
        """Start the real journal, and compare what it has with what was promised."""
        life = self._life(key)
        ordinals = life.restored() if life.has_journal else []
        self.findings.lost += max(0, self._promised[key] - len(set(ordinals)))
        self.findings.doubled += len(ordinals) - len(set(ordinals))
        self.findings.recomputed += max(0, self._computed[key] - len(ordinals))
        self._restored[key] = ordinals
        self._promised[key] = self._computed[key] = len(ordinals)

    def _batches(self, run: Run) -> list[tuple[float, list[int]]]:
        """The planned batches that are left for a run: when each ends, and its ordinals."""
        life = self._life(run.key)
        start = life.range.start
        planned = [
            PlannedProperty(property_id, start + number, int(self._images[start + number]))
            for number, property_id in enumerate(life.ids)
        ]
        plan = plan_batches(planned, size=self._batch_size)
        done = {life.ids[ordinal - start] for ordinal in self._restored[run.key]}
        at, batches = run.began, []
        for batch in remaining(plan, done):
            at += sum(batch_property.images for batch_property in batch) * run.seconds_per_image
            batches.append((at, [batch_property.ordinal for batch_property in batch]))
        return batches

    def _end(self, run: Run) -> None:
        """A run has come to its end: it publishes, is refused, or breaks at a poisoned property."""
        if self._runs.get(run.run_id) is not run or run.standing or run.dead:
            return
        if run.poisoned and run.key in self._poison:
            self._die(run, publishing=False, dies=False)
            self._fail(run, "failed")
            return
        if self.clock.now < self._disks_full.get(self.node_of[run.device], 0.0):
            self._die(run, strike=Strike.FULL, publishing=True)
            self._fail(run, "failed")
            return
        life, limits = self._life(run.key), FailedShareLimits(self.settings.failed_share)
        if run.key not in self._accepted and limits.refuse(len(life.failing), len(life.range)):
            # All rows are there and the check refuses them: a person has to look.
            self._die(run, publishing=False, dies=False)
            share = f"{len(life.failing)} of {counted(len(life.range), 'rows')} failed"
            refused = Finding(FindingKind.IDS, ASSET, run.key, share)
            verdict = Verification(run.key, None, (refused,))
            self.dagster.report_evaluation(evaluation(ASSET, run.key, verdict, self.clock.now))
            self._fail(run, "failed", **{NEEDS_PERSON: run.run_id})
            return
        del self._runs[run.run_id]
        self.findings.published += 1
        self.findings.rows += life.publish()
        self.findings.progress.append((self.clock.now, self.findings.rows))
        for kept in (self._promised, self._computed, self._restored, self._lives):
            kept.pop(run.key, None)
        self._succeed(run, "published")

    def _succeed(self, run: Run, how: str) -> None:
        self._unsettled.discard(run.key)
        self.dagster.change(run.run_id, _S.SUCCESS)
        sound = Verification(run.key, self.published.record(run.key))
        self.dagster.report_evaluation(evaluation(ASSET, run.key, sound, self.clock.now))
        self.dagster.materialize(ASSET, run.key, run.run_id)
        self._span(run, how)

    def _verify(self, run: Run) -> None:
        """A published partition was started again: every byte is read, and what is damaged is put back."""
        if self._runs.get(run.run_id) is not run or run.dead:
            return
        del self._runs[run.run_id]
        if not self.published.verify(run.key).ok:
            self.published.restore(run.key)
        self._succeed(run, "verified")

    def _fail(self, run: Run, how: str, **tags: str) -> None:
        """The run ends with an error of its own."""
        self._runs.pop(run.run_id, None)
        self._unsettled.add(run.key)
        self.dagster.change(run.run_id, _S.FAILURE, **tags)
        self._span(run, how)

    def _span(self, run: Run, how: str) -> None:
        self.findings.spans.append(Span(run.device, run.launched, self.clock.now, how))

    def _die(
        self, run: Run, *, strike: Strike = Strike.KILL, publishing: bool | None = None, dies: bool = True
    ) -> None:
        """End the work of a run at this moment, with the real journal in a process that ends likewise.

        dies: without a word; else it commits what is finished and ends by itself. publishing: whether the
        process has come to its publication; None: that is seen from the time.
        """
        if run.waiting or self.published.record(run.key) is not None:
            return
        now = run.ends if run.standing else self.clock.now
        commit = self.settings.commit_seconds
        done = [(at, batch) for at, batch in self._batches(run) if at <= now]
        life = self._life(run.key)
        groups: list[list[int]] = []
        last = -1
        for at, batch in done:
            window = int((at - run.began) // commit)
            if window != last:
                groups.append([])
                last = window
            groups[-1] += batch
        rows = sum(map(len, groups))
        self._computed[run.key] += rows
        publishes = dies and (now >= run.ends - self._publishing if publishing is None else publishing)
        is_late = last == int((now - run.began) // commit)
        if dies and groups and is_late and not publishes and self.chance.random() < 0.5:
            groups.pop()  # It dies before this one is committed; else while it is.
        under_strike = groups[-2:] if dies else []
        before = [ordinal for group in groups[: len(groups) - len(under_strike)] for ordinal in group]
        promised, error = life.live(
            before,
            under_strike,
            strike=strike if dies else Strike.NOTHING,
            at=self.chance.randint(1, _MOST_OPERATIONS),
            publishes=publishes,
            dies=dies,
        )
        self.findings.deaths += dies
        self._promised[run.key] += promised
        if error is not None:
            self.findings.errors[error] += 1
        if self.published.record(run.key) is not None:
            # It was published, and died before it could say so: the next start finds that.
            self.findings.published += 1
            self.findings.rows += len(life.range)

    def _life(self, key: str) -> PartitionLife:
        failing = self._failing.get(key, frozenset())
        if key not in self._lives or self._lives[key].failing != failing:
            self._lives[key] = PartitionLife.for_key(self.settings, self.catalog, key, failing)
        return self._lives[key]

    # Faults.

    def _strike(self, fault: Fault) -> None:
        until = self.clock.now + fault.seconds
        self._watch_until(until + 20 * MINUTE)
        working = [
            run for run in self._runs.values() if not run.dead and self.published.record(run.key) is None
        ]
        run = working[int(fault.where * len(working))] if working else None
        node = int(fault.where * len(set(self.node_of.values())))
        match fault.kind:
            case FaultKind.KILL if run is not None:
                self._kill(run)
            case FaultKind.DEVICE if run is not None:
                self._fail_device(run, until)
            case FaultKind.HANG if run is not None:
                run.standing, run.ignores_terms = True, self.chance.random() < 0.7
                run.ends = self.clock.now
            case FaultKind.NODE:
                self._lose_node(node, until)
            case FaultKind.DISK:
                self._fill_disk(node, until)
            case FaultKind.STORE:
                self._lose_images(until)
            case FaultKind.IMAGES:
                self._spoil_images(fault.where)
            case FaultKind.POISON:
                self._poison_partition(fault.where)
            case FaultKind.FILE:
                self._damage_file(fault.where)
            case FaultKind.DAEMON:
                self._stop_daemon(until)
            case FaultKind.POWER:
                self._stop_daemon(until)
                for each in sorted(set(self.node_of.values())):
                    self._lose_node(each, until)
            case _:
                pass  # Nothing worked at that moment.

    def _kill(self, run: Run) -> None:
        """Its process is gone without a word: Dagster does not know yet."""
        if run.dead:
            return
        self._die(run)
        self._unsettled.add(run.key)
        run.dead = True
        self._look_soon()

    def _fail_device(self, run: Run, until: float) -> None:
        why = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
        self._sick[run.device] = until
        self._at(until, lambda: None)
        self._die(run, dies=False)
        self.left_out.note_failure(run.device, occurrence=at_work_on(ASSET, run.key), why=why)
        self._fail(run, "failed")

    def _lose_node(self, node: int, until: float) -> None:
        self._nodes_down[node] = max(self._nodes_down.get(node, 0.0), until)
        self._at(until, lambda: None)
        for run in list(self._runs.values()):
            if self.node_of[run.device] == node:
                if not run.standing:
                    self._kill(run)
                run.dead, run.standing = True, False
        self._look_soon()

    def _stop_daemon(self, until: float) -> None:
        self._daemon_down = max(self._daemon_down, until)
        self._at(until, lambda: None)

    def _fill_disk(self, node: int, until: float) -> None:
        self._disks_full[node] = until
        for run in list(self._runs.values()):
            if self.node_of[run.device] == node and not run.dead and not run.standing:
                self._die(run, strike=Strike.FULL)
                self._fail(run, "failed")

    def _lose_images(self, until: float) -> None:
        self._images_away = max(self._images_away, until)
        if until - self.clock.now < self.settings.device_wait_seconds:
            return  # Waited for.
        for run in list(self._runs.values()):
            if not run.dead and not run.standing and self.published.record(run.key) is None:
                self._die(run, publishing=False, dies=False)
                self._fail(run, "interrupted", **{NO_ATTEMPT: run.run_id})

    def _spoil_images(self, where: float) -> None:
        """Some properties of a partition to come have no image that can be read; seldom many of them."""
        key = self._waiting_key(where)
        if key is not None:
            property_range = PropertyRange.from_key(key)
            share = 0.4 if self.chance.random() < 0.2 else self.chance.uniform(0.001, 0.03)
            count = max(1, math.floor(share * len(property_range)))
            self._failing[key] = frozenset(
                self.chance.sample(range(property_range.start, property_range.stop), count)
            )

    def _poison_partition(self, where: float) -> None:
        key = self._waiting_key(where)
        if key is not None:
            property_range = PropertyRange.from_key(key)
            self._poison[key] = self.chance.randrange(property_range.start, property_range.stop)

    def _waiting_key(self, where: float) -> str | None:
        queued = [str(self.dagster.runs[run_id].partition) for *_, run_id in sorted(self._queue)]
        fresh = [key for key in queued if key not in self._failing and key not in self._poison]
        return fresh[int(where * len(fresh))] if fresh else None

    def _damage_file(self, where: float) -> None:
        """Half of a published file is gone."""
        keys = self.settings.descriptions.published_keys()
        if keys:
            path = self.settings.descriptions.partition(sorted(keys)[int(where * len(keys))]).published
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            self._unsettled.add(path.stem)

    # Sensors, the daemon and the person.

    def _watch_until(self, until: float) -> None:
        self._watched_until = max(self._watched_until, until)
        self._look_soon()

    def _look_soon(self) -> None:
        self._at(self.clock.now + _LOOK_SECONDS, self._tick_once)

    def _tick(self) -> None:
        """All sensors, and when they look next: closely while something is wrong."""
        self._tick_once()
        step = _QUIET_SECONDS
        if any(run.standing for run in self._runs.values()):
            step = _HEALTH_SECONDS
        elif any(run.dead for run in self._runs.values()):
            step = _LOOK_SECONDS
        elif self.clock.now < self._watched_until:
            step = _WATCHED_SECONDS
        elif self._unsettled:
            step = self.settings.retry_every_minutes * MINUTE
        self._at(self.clock.now + step, self._tick)

    def _tick_once(self) -> None:
        now = self.clock.now
        if now < self._daemon_down:
            return
        watch = Watch.read(self._watch, now=now, unix=now)
        self._health.check(watch, self.dagster)
        self._watch = watch.cursor()
        if self._is_due("reconciliation", _LOOK_SECONDS):
            self._reconcile()
        self._retry_as_dagster_does()
        if self._is_due("retries", self.settings.retry_every_minutes * MINUTE):
            ticked = self._retries.tick(self.dagster, tick=f"{now}", now=now)
            for launch in ticked.launches:
                self._launch(
                    launch.key, by="retry", **{LAUNCHED_BY: RETRY, "dagster/run_key": launch.run_key}
                )
        if self._is_due("drift", _DRIFT_SECONDS):
            self._look_at_files()
        if self._is_due("alerts", _LOOK_SECONDS):
            self._cursor, _ = self._scan.scan(self.dagster, self._cursor, now=now)
        self._act_as_person()

    def _is_due(self, name: str, seconds: float) -> bool:
        due = self.clock.now - self._looked.get(name, -math.inf) >= seconds
        if due:
            self._looked[name] = self.clock.now
        return due

    def _reconcile(self) -> None:
        end_dead_runs(self.dagster, self._workers, {})
        for run in list(self._runs.values()):
            if run.dead and self.dagster.runs[run.run_id].finished:
                del self._runs[run.run_id]
                self._span(run, "killed")

    def _retry_as_dagster_does(self) -> None:
        """Runs that were ended from outside are launched again, twice at most."""
        for run in self.dagster.runs_ended_since(self.clock.now - HOUR, [_S.FAILURE]):
            if run.run_id in self._retried or run.interrupted_by != "UNEXPECTED_TERMINATION":
                continue
            self._retried.add(run.run_id)
            if run.retry_number < _DAGSTER_RETRIES:
                self.dagster.change(run.run_id, _S.FAILURE, **{"dagster/will_retry": "true"})
                self._launch(
                    str(run.partition), by="Dagster", **{"dagster/retry_number": str(run.retry_number + 1)}
                )

    def _look_at_files(self) -> None:
        def tell(asset: str, key: str, verdict: Verification, at: float) -> None:
            self.dagster.report_evaluation(evaluation(asset, key, verdict, at))

        def failing(asset: str) -> Collection[str]:
            return self._histories[asset].failing(asset)

        self._drift.check(tell, failing, self.clock.now)
        self._histories[ASSET].update(self.dagster)

    def _act_as_person(self) -> None:
        """What alerts ask for is done some hours after they were raised."""
        now = self.clock.now
        for subject, alert in self.outbox.open_subjects().items():
            if now - alert.at < _PERSON_SECONDS or now - self._asked.get(subject, -math.inf) < DAY:
                continue
            if alert.kind == "device_left_out":
                device = subject.split("/")[1]
                if now >= self._sick.get(device, 0.0):
                    self.left_out.take_back(device)
                    self._asked[subject] = now
            elif (
                alert.kind in ("partition_given_up", "partition_needs_person", "check_failed")
                and alert.partition
            ):
                self._put_right(alert.partition)
                self._asked[subject] = now

    def _put_right(self, key: str) -> None:
        """A person looks at the partition, puts its cause right, and launches it by hand."""
        unfinished = [run for run in self.dagster.runs_in([_S.QUEUED, _S.STARTED]) if run.partition == key]
        if unfinished or self.published.record(key) is not None:
            return
        self._poison.pop(key, None)
        self._accepted.add(key)
        self.findings.by_hand += 1
        self._launch(key, by="a person")

    # What the sensors see.

    def _judge(self, devices: Sequence[Device]) -> dict[str, DeviceHealth]:
        now = self.clock.now
        return {
            device.id: DeviceHealth(refused=(f"{device.id} has uncorrectable memory errors.",))
            if now < self._sick.get(device.id, 0.0)
            else DeviceHealth()
            for device in devices
        }

    def _signal(self, ending: RunToEnd, number: signal.Signals) -> bool:
        """A worker is told to end, or killed."""
        run = self._runs.get(ending.run_id)
        if run is None:
            return False
        if number is signal.SIGKILL or not run.ignores_terms:
            self._die(run, dies=number is signal.SIGKILL, publishing=False)
            self._unsettled.add(run.key)
            del self._runs[run.run_id]
            self.dagster.change(run.run_id, _S.FAILURE)
            self._span(run, "killed")
        return True

    def workers(self, *, dead: bool) -> list[Worker]:
        """The heartbeats at this moment."""
        return [self._worker(run) for run in self._runs.values() if run.dead is dead]

    def _worker(self, run: Run) -> Worker:
        now, commit = self.clock.now, self.settings.commit_seconds
        is_loading = now < run.began
        return Worker(
            run_id=run.run_id,
            asset=ASSET,
            partition=run.key,
            device=run.device,
            pid=1,
            process_start=1,
            host=_HOST,
            boot_id=boot_id(),
            started_at=run.launched,
            beat_at=now,
            expected=len(PropertyRange.from_key(run.key)),
            restored=0,
            computed=0,
            committed=0,
            committed_at=now,
            rate=0.0 if is_loading else 1.0 / (run.seconds_per_image * self._mean_images),
            batch_seconds=0.0 if is_loading else commit,
            phase=Phase.LOADING if is_loading and not run.standing else Phase.WORKING,
            moved=run.ends if run.standing else now,
        )


class SimulatedWorkers(Workers):
    """The heartbeats of a simulation's runs."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.state)
        self._simulation = simulation

    def living(self) -> list[Worker]:
        """Workers whose process lives."""
        return self._simulation.workers(dead=False)

    def dead(self) -> list[Worker]:
        """Workers whose process is gone."""
        return self._simulation.workers(dead=True)

    def forget(self, worker: Worker) -> None:
        """Nothing is left of one here."""

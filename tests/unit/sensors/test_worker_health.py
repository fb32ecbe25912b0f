"""Devices over time and slow workers: named once, left out after two failures, and never for a gap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, replace

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from dagster._core.instance.config import PoolGranularity
from dagster._core.op_concurrency_limits_counter import GlobalOpConcurrencyLimitsCounter
from dagster._core.storage.dagster_run import RunOpConcurrency

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from resources.gpu.devices import Device
from resources.gpu.errors import DriverUnavailableError
from resources.gpu.health import Verdict
from resources.gpu.left_out import LeftOutDevices
from resources.processes import ProcessIdentity
from resources.workers import Phase, Workers, boot_id
from sensors.dagster_internals.runs import run_states
from sensors.dagster_runs import mark_interrupted
from sensors.health_watch import Watch
from sensors.leases_after_end import LeasesAfterEnd
from sensors.left_out_alerts import NONE_LEFT, usable_devices
from sensors.worker_health import HealthWatcher, build_worker_health_sensor

GPUS = [Device(f"GPU-{n}", "cuda", "A100", None, f"GPU-{n}") for n in range(3)]
UNTOLD = {"interrupt": lambda run_id: None, "settle": lambda run_id: None}
HOT = "GPU-1 is throttled: it is too hot."


class Clock:
    """Seconds that stand still until they are moved."""

    now = 1_000_000.0

    def __call__(self):
        return self.now


class Machine:
    """Three GPUs as the driver lists and judges them; a test changes what it says."""

    def __init__(self):
        self.listed = list(GPUS)
        self.against = {}
        self.hot = {}
        self.is_lost = False

    def find(self):
        if self.is_lost:
            raise DriverUnavailableError("The driver does not answer.")
        return self.listed

    def judge(self, devices):
        return {one.id: self.judged(one) for one in devices}

    def judged(self, device):
        if device.id not in {one.id for one in self.listed}:
            return Verdict((f"{device.id} is no longer listed by the driver.",))
        return Verdict(tuple(self.against.get(device.id, ())), tuple(self.hot.get(device.id, ())))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def watcher(tmp_path, clock, machine):
    return HealthWatcher(
        workers=Workers(tmp_path / "workers"),
        outbox=Outbox(tmp_path / "alerts"),
        left_out=LeftOutDevices(tmp_path / "devices_left_out.json", clock),
        find=machine.find,
        judge=machine.judge,
        clock=clock,
        monotonic=clock,
    )


@pytest.fixture
def leases(tmp_path, watcher, clock):
    return LeasesAfterEnd(tmp_path / "leases", watcher.outbox, grace=10.0, silence=1800.0, clock=clock)


@pytest.fixture
def tick(watcher, clock):
    """Ticks on, so many seconds after the last; gives the open alerts as (kind, subject)."""
    watch = Watch(boot=boot_id(), at=clock.now, since=clock.now)

    def tick(seconds=15.0):
        clock.now += seconds
        watch.at = clock.now
        watcher.look(watch, **UNTOLD)
        return [(one.kind, subject) for subject, one in watcher.outbox.open_subjects().items()]

    return tick


SICK = ("device_sick", "devices/GPU-1")
LEFT_OUT = ("device_left_out", "devices/GPU-1/left out")


class Standing:
    """Workers whose processes do nothing; ``stopped`` ones do not even take SIGTERM."""

    def __init__(self, made, clock):
        self.made = made
        self.clock = clock
        self.processes = {}
        self.workers = {}

    def begin(self, run_id, *, partition="k", device="GPU-1", stopped=False, **changes):
        process = self.processes[run_id] = subprocess.Popen(["sleep", "1000"])
        if stopped:
            process.send_signal(signal.SIGSTOP)
            # One that is not stopped yet takes SIGTERM first, though that was sent later.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        start = ProcessIdentity.of(process.pid).start
        changes = {"phase": Phase.WORKING, "batch_seconds": 10.0, "moved": self.clock.now, **changes}
        fields = {"run_id": run_id, "partition": partition, "device": device, "pid": process.pid}
        self.workers[run_id] = replace(self.made, **fields, process_start=start, **changes)

    def living(self):
        return [one for run_id, one in self.workers.items() if self.processes[run_id].poll() is None]

    def ended_by(self, run_id):
        return signal.Signals(-self.processes[run_id].wait(timeout=20))


@pytest.fixture
def standing(tmp_path, clock, monkeypatch):
    with Workers(tmp_path / "made").begin(run_id="r0", asset="a", partition="k0", expected=9) as beat:
        standing = Standing(beat.worker, clock)
    monkeypatch.setattr(Workers, "living", standing.living)
    yield standing
    for process in standing.processes.values():
        process.kill()
        process.wait()


@dg.job
def nothing():
    """A job whose runs are only ever pretended to be under way."""


def test_a_cancel_is_not_overruled_by_the_end_of_a_stuck_worker():
    """Marked as interrupted, what a person stopped would be started again; so would what has ended."""
    with dg.DagsterInstance.ephemeral() as instance:
        marked = set()
        for status in set(DagsterRunStatus) - {DagsterRunStatus.QUEUED}:  # which has no worker
            run_id = instance.create_run_for_job(nothing, status=status).run_id
            mark_interrupted(instance, run_id)
            if "dagster/failure_reason" in instance.get_run_by_id(run_id).tags:
                marked.add(status)
        mark_interrupted(instance, "forgotten")
    assert marked == {DagsterRunStatus.STARTING, DagsterRunStatus.STARTED}


def test_a_cancel_of_a_stuck_worker_stands_though_it_has_to_be_killed(
    watcher, leases, clock, standing, tmp_path
):
    """The code server calls a killed run failed, and Dagster would start it again: it is cancelled before."""
    sensor = build_worker_health_sensor(watcher, leases, pool="gpu", ticks=tmp_path / "ticks")
    cursor = None
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.create_run_for_job(nothing, status=DagsterRunStatus.STARTED)
        standing.begin(run.run_id, stopped=True)

        def tick():
            nonlocal cursor
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            sensor(context)
            cursor = context.cursor
            clock.now += 15
            return instance.get_run_by_id(run.run_id).status

        assert [tick() for _ in range(4)] == [DagsterRunStatus.STARTED] * 4
        assert "dagster/failure_reason" in instance.get_run_by_id(run.run_id).tags, "called stuck"
        instance.report_run_canceling(run)
        assert tick() is DagsterRunStatus.CANCELED
        assert standing.ended_by(run.run_id) is signal.SIGKILL
        assert run_states(instance, [run.run_id])[run.run_id].interrupted_by is None


def test_a_stuck_worker_is_ended_though_dagster_does_not_know_its_run(
    watcher, leases, clock, standing, tmp_path
):
    """After a lost database or a deleted run the device is freed all the same."""
    sensor = build_worker_health_sensor(watcher, leases, pool="gpu", ticks=tmp_path / "ticks")
    standing.begin("unknown")
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = None
        while not watcher.outbox.open_subjects():
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            sensor(context)
            cursor = context.cursor
            clock.now += 15
    assert standing.ended_by("unknown") is signal.SIGTERM


def test_another_users_stuck_worker_does_not_keep_the_others(watcher, clock, standing, monkeypatch):
    """A signal that may not be sent is said, and the tick goes on to the next worker."""
    standing.begin("theirs", device="GPU-0")
    standing.begin("ours")
    send = ProcessIdentity.send

    def refusing(self, number):
        if self.pid == standing.workers["theirs"].pid:
            raise PermissionError(1, os.strerror(1))
        return send(self, number)

    monkeypatch.setattr(ProcessIdentity, "send", refusing)
    watch = Watch(boot=boot_id(), at=clock.now, since=clock.now)
    watch.at += 31
    said = watcher.look(watch, **UNTOLD)
    assert standing.ended_by("ours") is signal.SIGTERM
    assert len([one for one in said if "run theirs" in one and "another user" in one]) == 1
    watch.at += 15
    said = watcher.look(watch, **UNTOLD)
    assert any("another user" in one for one in said)
    assert not any("was killed" in one for one in said)


@pytest.fixture
def end(tick, standing, watcher):
    """Begins a worker, lets it stand still until it is ended; gives how, and what its device then failed."""

    def end(run_id, **begun):
        standing.begin(run_id, **begun)
        tick(watcher.limits.loading + 1)
        if not begun.get("stopped"):
            standing.ended_by(run_id)
        tick(watcher.limits.grace)
        how = standing.ended_by(run_id)
        tick()
        records = watcher.left_out.records()
        return how, [one.occurrence for one in records["GPU-1"].failures] if records else []

    return end


def test_a_worker_that_ends_when_told_is_not_held_against_its_device(end):
    """Two stalls of the storage in a day would otherwise take every device out."""
    assert end("r1", partition="k1") == (signal.SIGTERM, [])
    assert end("r2", partition="k2") == (signal.SIGTERM, [])


def test_two_partitions_that_had_to_be_killed_leave_a_device_out(end, watcher):
    """One poison partition alone, at each of its retries, does not."""
    assert end("r1", partition="k1", stopped=True) == (signal.SIGKILL, ["a/k1"])
    assert end("r2", partition="k1", stopped=True) == (signal.SIGKILL, ["a/k1"])
    assert not watcher.left_out.left_out()
    assert end("r3", partition="k2", stopped=True) == (signal.SIGKILL, ["a/k1", "a/k2"])
    assert list(watcher.left_out.left_out()) == ["GPU-1"]


@pytest.mark.parametrize(
    "stalled",
    [
        {"phase": Phase.PUBLISHING},
        {"computed": 9},
        {"computed": 5, "committed": 2, "committed_at": 100.0, "beat_at": 120.0},
    ],
)
def test_a_stall_of_the_storage_is_not_held_against_the_device(end, stalled):
    """Its device was done, or went on after the last commit, and the end of its worker waits for the disk."""
    assert end("r1", stopped=True, **stalled) == (signal.SIGKILL, [])


def test_a_sick_device_is_named_once_and_its_recovery_too(tick, machine):
    """Throttling, ECC and the like come from the driver's word; a moment of it leaves nothing out."""
    assert tick() == []
    machine.against["GPU-1"] = [HOT]
    assert tick() == tick() == [SICK]
    machine.against.clear()
    assert tick() == [SICK], "it may come back in a moment"
    assert tick(601) == []


def test_a_device_that_stays_sick_is_left_out(tick, machine, watcher):
    """Ten minutes of it are two failures; a person is told how to take it back, and that it is back."""
    machine.against["GPU-1"] = [HOT]
    tick()
    assert tick(601) == [SICK, LEFT_OUT]
    (alert,) = [one for one in watcher.outbox.open_subjects().values() if one.kind == "device_left_out"]
    assert "--take-back GPU-1" in alert.next_step
    assert alert.found == HOT
    machine.against.clear()
    tick()
    assert tick(601) == [LEFT_OUT], "sound again, but left out until a person takes it back"
    watcher.left_out.take_back("GPU-1")
    assert tick() == []


def test_a_device_that_throttles_on_and_off_is_not_left_out(tick, machine, watcher):
    """Brief sightings, however many within ten minutes of each other, are one failure and one alert."""
    for _ in range(60):
        machine.against["GPU-1"] = [HOT]
        assert tick() == [SICK]
        machine.against.clear()
        assert tick() == tick() == [SICK]
    assert len(watcher.left_out.records()["GPU-1"].failures) == 1
    assert tick(601) == []
    machine.against["GPU-1"] = [HOT]
    assert tick() == [SICK, LEFT_OUT], "a second time on one day"


def test_that_every_device_is_left_out_is_told_once_and_that_one_is_taken_back(tick, watcher, machine):
    """Each device's own alert says that the others take over: here none does, and all stands still."""
    for gpu in GPUS:
        for run in "12":
            watcher.left_out.note_failure(gpu.id, occurrence=run, why=f"{gpu.id} is lost.")
    opened = tick()
    assert ("all_devices_left_out", NONE_LEFT) in opened
    alert = watcher.outbox.open_subjects()[NONE_LEFT]
    assert all(f"--take-back {gpu.id}" in alert.next_step for gpu in GPUS)
    assert "GPU-2 is lost." in alert.found
    machine.is_lost = True
    assert ("all_devices_left_out", NONE_LEFT) in tick()
    machine.is_lost = False
    tick()
    watcher.left_out.take_back("GPU-2")
    assert ("all_devices_left_out", NONE_LEFT) not in tick()
    told = [one["kind"] for one in watcher.outbox.recent(50) if one["event"] == "raised"]
    assert told.count("all_devices_left_out") == 1
    for run in "34":
        watcher.left_out.note_failure("GPU-2", occurrence=run, why="It is lost again.")
    assert ("all_devices_left_out", NONE_LEFT) in tick(), "another time"


def test_a_device_that_a_cluster_gave_is_always_left_to_work_on():
    """It is taken whatever is held against it, so nothing stands still for it."""
    given = replace(GPUS[0], given=True)
    watch = Watch(devices={given.id: asdict(given)}, here=[given.id])
    assert usable_devices(watch, [given.id]) == 1
    assert usable_devices(Watch(), ["GPU-1"]) == 1, "it is not known which devices there are"


def test_a_device_that_its_driver_slows_down_is_named_and_used(tick, machine, watcher):
    """A warm room must neither go unsaid nor take out a device that computes what it should."""
    hot = ("device_hot", "devices/GPU-1/hot")
    machine.hot["GPU-1"] = ["GPU-1 is throttled (at 87 °C): its driver slows it down, for it is too hot."]
    assert tick() == tick() == tick(601) == [hot]
    machine.hot.clear()
    assert tick() == tick(300) == [hot], "it may be as hot again in a moment"
    machine.hot["GPU-1"] = ["GPU-1 is throttled."]
    assert tick() == [hot]
    assert len(watcher.outbox.recent(10)) == 1
    machine.hot.clear()
    tick()
    assert tick(601) == []
    assert not watcher.left_out.records()
    machine.hot["GPU-1"] = ["GPU-1 is throttled."]
    assert tick() == [hot], "another time"


def test_a_lost_device_is_named_though_nobody_lists_it(tick, machine):
    """A device that the driver lists no more would otherwise vanish without a word."""
    tick()
    machine.listed = [GPUS[0], GPUS[2]]
    assert tick() == [SICK]


def test_a_driver_that_does_not_answer_is_told_once_each_time(tick, machine, watcher):
    """Nothing is known of any device then, and nothing is held against one; the next time is told again."""
    for _ in range(2):
        machine.is_lost = True
        assert tick() == tick() == [("device_sick", "devices")]
        machine.is_lost = False
        assert tick() == []
    assert not watcher.left_out.records()


def test_a_sick_device_that_was_told_of_is_known_though_the_watch_is_lost(watcher, machine, clock):
    """After a killed tick or a reboot it is the same trouble: one failure, one alert, and one recovery."""
    machine.against["GPU-1"] = [HOT]
    for _ in range(3):
        watcher.look(Watch.read(None, now=clock.now), **UNTOLD)
        clock.now += 15
    assert len(watcher.outbox.recent(10)) == 1
    assert len(watcher.left_out.records()["GPU-1"].failures) == 1
    machine.against.clear()
    watch = Watch.read(None, now=clock.now)
    for _ in range(2):
        watcher.look(watch, **UNTOLD)
        watch.at += 600
    assert not watcher.outbox.open_subjects()


def test_a_silence_of_the_driver_is_told_once_though_the_watch_is_lost(watcher, machine, clock):
    """A tick that is killed after it told has lost what it remembered."""
    machine.is_lost = True
    for _ in range(3):
        watcher.look(Watch.read(None, now=clock.now), **UNTOLD)
        clock.now += 15
    assert len(watcher.outbox.recent(10)) == 1


def test_a_slow_worker_is_named_after_ten_minutes_and_when_it_keeps_pace(
    tick, watcher, monkeypatch, tmp_path
):
    """30% below its peers without a break: a warning that names device and partition; then its end."""
    with Workers(tmp_path / "made").begin(run_id="r0", asset="a", partition="k0", expected=9) as beat:
        made = replace(beat.worker, phase=Phase.WORKING, batch_seconds=10.0)
    working = [
        replace(made, run_id=f"r{n}", partition=f"k{n}", device=f"GPU-{n}", rate=10.0) for n in range(3)
    ]
    rates = {1: 6.0}

    def living(self):
        now = watcher.monotonic()
        return [replace(one, moved=now, rate=rates.get(n, one.rate)) for n, one in enumerate(working)]

    monkeypatch.setattr(Workers, "living", living)
    assert [tick(60) for _ in range(10)] == [[]] * 10
    assert tick(60) == tick(60) == [("worker_slow", "devices/GPU-1/slow")]
    (alert,) = watcher.outbox.open_subjects().values()
    assert (alert.severity, alert.partition, alert.page) == ("warning", "k1", "runs/r1")
    assert "40% slower" in alert.title
    rates[1] = 9.0
    assert tick(60) == []


def test_nobody_stays_slow_when_all_is_done(tick, watcher, clock):
    """What is open is what is wrong now; a moment between two partitions is no end."""
    slow = "devices/GPU-1/slow"
    watcher.outbox.post(Alert("worker_slow", slow, "r1", "warning", "It is slow", "Look.", at=clock.now))
    assert [tick(60) for _ in range(10)] == [[("worker_slow", slow)]] * 10
    assert tick(60) == []


def test_a_damaged_file_of_devices_left_out_is_told_for_a_day(tick, watcher, clock):
    """Devices that were left out are used again then: not in silence."""
    clock.now = time.time()
    for occurrence in "12":
        watcher.left_out.note_failure("GPU-1", occurrence=occurrence, why="It failed.")
    path = watcher.left_out.path
    path.write_bytes(path.read_bytes()[:-9])
    assert tick() == tick() == [("state_damaged", "state/devices left out")]
    assert tick(24 * 3600) == []
    assert tick() == []


def test_a_gap_in_watching_starts_everybodys_time_anew(clock):
    """After a night's sleep, a reboot, or a cursor that does not read, nothing is concluded from before."""
    watch = Watch(boot=boot_id(), at=1000.0, since=500.0, slow={"r.a": 600.0}, left_out=["GPU-1"])
    cursor = json.dumps(watch.__dict__)
    assert Watch.read(cursor, now=1015.0).since == 500.0
    assert Watch.read(cursor, now=2000.0).since == 2000.0
    rebooted = Watch.read(cursor.replace(boot_id(), "another boot"), now=20.0)
    assert (rebooted.since, rebooted.slow, rebooted.left_out) == (20.0, {}, ["GPU-1"])
    for broken in (None, "", "{", '{"other": 1}', "[]"):
        assert Watch.read(broken, now=7.0).since == 7.0


def test_with_every_device_left_out_the_queue_waits_and_goes_on_by_itself(watcher, leases, tmp_path):
    """Else one run after the other would wait for a device and end, for all of the night."""
    sensor = build_worker_health_sensor(watcher, leases, pool="gpu", ticks=tmp_path / "ticks")
    with dg.DagsterInstance.local_temp() as instance:
        cursor = None

        def starts_after_tick():
            """Whether Dagster would take a run from its queue."""
            nonlocal cursor
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            sensor(context)
            cursor = context.cursor
            storage = instance.event_log_storage
            counter = GlobalOpConcurrencyLimitsCounter(
                instance,
                [queued],
                [],
                storage.get_concurrency_keys(),
                storage.get_pool_limits(),
                pool_granularity=PoolGranularity.RUN,
            )
            return not counter.is_blocked(queued)

        needs = RunOpConcurrency(root_key_counts={}, has_unconstrained_root_nodes=False, all_pools={"gpu"})
        queued = instance.create_run_for_job(nothing)._replace(run_op_concurrency=needs)
        instance.event_log_storage.set_concurrency_slots("gpu", 3)
        assert starts_after_tick()
        for gpu in GPUS:
            for run in "12":
                watcher.left_out.note_failure(gpu.id, occurrence=run, why="It is lost.")
        assert not starts_after_tick()
        assert not starts_after_tick()
        watcher.left_out.take_back("GPU-2")
        assert starts_after_tick()
        (limit,) = instance.event_log_storage.get_pool_limits()
        assert limit.limit == 1


def test_the_pool_follows_the_devices_in_use(watcher, leases, tmp_path):
    """A device left out takes no run; a lower limit that a person set stays theirs."""
    sensor = build_worker_health_sensor(watcher, leases, pool="gpu", ticks=tmp_path / "ticks")
    with dg.DagsterInstance.local_temp() as instance:
        cursor = None

        def limit_after_tick():
            nonlocal cursor
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            sensor(context)
            cursor = context.cursor
            return {one.name: one.limit for one in instance.event_log_storage.get_pool_limits()}["gpu"]

        instance.event_log_storage.set_concurrency_slots("gpu", 3)
        assert limit_after_tick() == 3
        for run in "12":
            watcher.left_out.note_failure("GPU-1", occurrence=run, why="It is lost.")
        assert limit_after_tick() == 2
        instance.event_log_storage.set_concurrency_slots("gpu", 3)
        assert limit_after_tick() == 2, "a new start had set it for all devices"
        watcher.left_out.take_back("GPU-1")
        assert limit_after_tick() == 3
        instance.event_log_storage.set_concurrency_slots("gpu", 1)
        for run in "34":
            watcher.left_out.note_failure("GPU-1", occurrence=run, why="It is lost.")
        assert limit_after_tick() == 1
        watcher.left_out.take_back("GPU-1")
        assert limit_after_tick() == 1
    assert (tmp_path / "ticks" / "worker_health.json").exists()

"""A worker that stands still is ended and its device freed, a slow one is named; only watched time counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace

import dagster as dg
import pytest
from dagster import DagsterRunStatus

from faults.rehearsal.dagster_in_memory import DagsterInMemory
from resources.alerts.alert import Alert
from sensors.dagster_internals.events import DagsterFacts
from sensors.health_watch import Watch
from sensors.progress_judge import ProgressLimits, Standstill
from sensors.run_end import RunToEnd
from sensors.worker_health import slow_workers, stuck_workers
from vlm_durable.files.processes import ProcessIdentity, boot_id
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Phase, Workers

LIMITS = ProgressLimits()


@pytest.fixture
def worker(tmp_path):
    with Workers(open_state(tmp_path)).begin(run_id="r", asset="a", partition="k", expected=100) as beat:
        return replace(beat.worker, phase=Phase.WORKING, moved=1000.0, rate=10.0)


@pytest.mark.parametrize("phase", Phase)
def test_only_a_worker_at_work_is_expected_to_commit(worker, phase):
    """A model that loads, a device that is waited for and a file that is published have their own time."""
    one = replace(worker, phase=phase, batch_seconds=40.0)
    allowed = 80.0 if phase is Phase.WORKING else 1800.0
    assert not stuck_workers([one], LIMITS, now=1000.0 + allowed, watched_since=0.0)
    (stuck,) = stuck_workers([one], LIMITS, now=1001.0 + allowed, watched_since=0.0)
    assert stuck.verdict == Standstill(allowed + 1, allowed)


def test_time_that_nobody_watched_makes_nobody_stuck(worker):
    """A machine that slept for a night, or a daemon that was down, must not end every worker."""
    one = replace(worker, batch_seconds=40.0)
    assert not stuck_workers([one], LIMITS, now=50_000.0, watched_since=49_950.0)
    assert stuck_workers([one], LIMITS, now=50_081.0, watched_since=50_000.0)


def test_a_worker_of_another_machine_or_boot_is_not_judged(worker):
    """Its clock and its pid are not ours."""
    for change in ({"host": "other"}, {"boot_id": "other"}):
        assert not stuck_workers([replace(worker, **change)], LIMITS, now=1e9, watched_since=0.0)


def test_a_wall_clock_that_jumps_makes_nobody_stuck(worker):
    """Fault 16: what people read as a time is never used to judge."""
    one = replace(worker, batch_seconds=40.0, beat_at=0.0, committed_at=0.0, started_at=9e9)
    assert not stuck_workers([one], LIMITS, now=1010.0, watched_since=0.0)


def test_a_worker_is_compared_with_those_that_do_the_same_work(worker):
    """30% below the others doing the same work."""
    peers = [replace(worker, run_id=f"p{n}", rate=10.0 + n) for n in range(3)]
    other_asset = replace(worker, run_id="e", asset="b", rate=1000.0)
    assert not slow_workers([replace(worker, rate=7.8), *peers, other_asset])
    (slow,) = slow_workers([replace(worker, rate=7.0), *peers, other_asset])
    assert (slow.worker.run_id, slow.peer_rate) == ("r", 11.0)
    assert not slow_workers([replace(worker, rate=7.0)]), "nobody to compare with"


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
        start = ProcessIdentity.from_pid(process.pid).start
        changes = {"phase": Phase.WORKING, "batch_seconds": 10.0, "moved": self.clock.now, **changes}
        fields = {"run_id": run_id, "partition": partition, "device": device, "pid": process.pid}
        self.workers[run_id] = replace(self.made, **fields, process_start=start, **changes)

    def living(self):
        return [one for run_id, one in self.workers.items() if self.processes[run_id].poll() is None]

    def ended_by(self, run_id):
        return signal.Signals(-self.processes[run_id].wait(timeout=20))


@pytest.fixture
def standing(tmp_path, clock, monkeypatch):
    with Workers(open_state(tmp_path)).begin(run_id="r0", asset="a", partition="k0", expected=9) as beat:
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
            DagsterFacts(instance).mark_interrupted(run_id)
            if "dagster/failure_reason" in instance.get_run_by_id(run_id).tags:
                marked.add(status)
        DagsterFacts(instance).mark_interrupted("forgotten")
    assert marked == {DagsterRunStatus.STARTING, DagsterRunStatus.STARTED}


def test_a_cancel_of_a_stuck_worker_stands_though_it_has_to_be_killed(standing, sense):
    """The code server calls a killed run failed, and Dagster would start it again: it is cancelled before."""
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.create_run_for_job(nothing, status=DagsterRunStatus.STARTED)
        standing.begin(run.run_id, stopped=True)

        def tick():
            sense(instance)
            return instance.get_run_by_id(run.run_id).status

        assert [tick() for _ in range(4)] == [DagsterRunStatus.STARTED] * 4
        assert "dagster/failure_reason" in instance.get_run_by_id(run.run_id).tags, "called stuck"
        instance.report_run_canceling(run)
        assert tick() is DagsterRunStatus.CANCELED
        assert standing.ended_by(run.run_id) is signal.SIGKILL
        assert DagsterFacts(instance).run_states([run.run_id])[run.run_id].interrupted_by is None


def test_a_stuck_worker_is_ended_though_dagster_does_not_know_its_run(watcher, standing, sense):
    """After a lost database or a deleted run the device is freed all the same."""
    standing.begin("unknown")
    with dg.DagsterInstance.ephemeral() as instance:
        while not watcher.outbox.open_subjects():
            sense(instance)
    assert standing.ended_by("unknown") is signal.SIGTERM


def test_another_users_stuck_worker_does_not_keep_the_others(look, clock, standing, monkeypatch):
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
    said = look(watch)
    assert standing.ended_by("ours") is signal.SIGTERM
    assert len([one for one in said if "run theirs" in one and "another user" in one]) == 1
    watch.at += 15
    said = look(watch)
    assert any("another user" in one for one in said)
    assert not any("was killed" in one for one in said)


def test_a_worker_that_is_killed_after_its_run_is_not_held_against_its_device(watcher, standing, clock):
    """A person stopped it and ended its run by force: it moved until then, and its device is sound."""
    standing.begin("r1", stopped=True)
    worker = standing.workers["r1"]
    process = ProcessIdentity(worker.pid, worker.process_start, worker.boot_id)
    late = RunToEnd("r1", "It", "outlived its run", process, device="GPU-1", occurrence="held after r1")
    watch = Watch(boot=boot_id(), at=clock.now, since=clock.now)
    for _ in range(2):
        watcher.check(watch, DagsterInMemory(clock), [late])
        watch.at += watcher.ender.grace
    assert standing.ended_by("r1") is signal.SIGKILL
    assert not watcher.devices.left_out.records()


@pytest.fixture
def end(tick, standing, watcher):
    """Begins a worker, lets it stand still until it is ended; gives how, and what its device then failed."""

    def end(run_id, **begun):
        standing.begin(run_id, **begun)
        tick(watcher.limits.loading + 1)
        if not begun.get("stopped"):
            standing.ended_by(run_id)
        tick(watcher.ender.grace)
        how = standing.ended_by(run_id)
        tick()
        records = watcher.devices.left_out.records()
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
    assert not watcher.devices.left_out.left_out()
    assert end("r3", partition="k2", stopped=True) == (signal.SIGKILL, ["a/k1", "a/k2"])
    assert list(watcher.devices.left_out.left_out()) == ["GPU-1"]


def test_a_device_whose_worker_outlives_sigkill_is_left_out_at_once(tick, standing, watcher, monkeypatch):
    """It waits in the driver, and holds the device for as long as that takes."""
    monkeypatch.setattr(ProcessIdentity, "send", lambda self, number: True)
    standing.begin("r1", partition="k1", stopped=True)
    tick(watcher.limits.loading + 1)
    tick(watcher.ender.grace)
    assert not watcher.devices.left_out.left_out(), "it was killed a moment ago"
    tick(watcher.ender.grace)
    assert list(watcher.devices.left_out.left_out()) == ["GPU-1"]


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


def test_a_slow_worker_is_named_after_ten_minutes_and_when_it_keeps_pace(
    tick, watcher, monkeypatch, tmp_path
):
    """30% below its peers without a break: a warning that names device and partition; then its end."""
    with Workers(open_state(tmp_path)).begin(run_id="r0", asset="a", partition="k0", expected=9) as beat:
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


def test_a_gap_in_watching_starts_everybodys_time_anew(clock):
    """After a night's sleep, a reboot, or a cursor that does not read, nothing is concluded from before."""
    watch = Watch(boot_id(), 1000.0, 500.0, slow={"r.a": 600.0}, configured=["cpu-0"], left_out=["GPU-1"])
    cursor = json.dumps(watch.__dict__)
    assert Watch.read(cursor, now=1015.0, unix=1015.0).since == 500.0
    earlier = cursor.replace('"configured"', '"here"').replace('"ending"', '"after_end_told": {}, "ended"')
    earlier_version = Watch.read(earlier, now=1015.0, unix=1015.0)
    assert (earlier_version.since, earlier_version.configured) == (500.0, watch.configured)
    assert Watch.read(cursor, now=2000.0, unix=2000.0).since == 2000.0
    rebooted = Watch.read(cursor.replace(boot_id(), "another boot"), now=20.0, unix=20.0)
    assert (rebooted.since, rebooted.slow, rebooted.left_out) == (20.0, {}, ["GPU-1"])
    older = json.dumps({**watch.__dict__, "devices": {"GPU-1": {"id": "GPU-1", "gone": 1}}})
    for broken in (None, "", "{", '{"other": 1}', "[]", '{"devices": []}', older):
        assert Watch.read(broken, now=7.0, unix=7.0).since == 7.0

"""A worker that does not move is ended and its device freed; a cancel of a person's stays one."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace

import dagster as dg
import pytest
from dagster import DagsterRunStatus

from resources.processes import ProcessIdentity, boot_id
from resources.state.database import open_state
from resources.state.workers import Phase, Workers
from sensors.dagster_internals.instance_facts import InstanceFacts
from sensors.health_watch import Watch
from sensors.ticks import Ticks
from sensors.worker_health import build_worker_health_sensor


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
            InstanceFacts(instance).mark_interrupted(run_id)
            if "dagster/failure_reason" in instance.get_run_by_id(run_id).tags:
                marked.add(status)
        InstanceFacts(instance).mark_interrupted("forgotten")
    assert marked == {DagsterRunStatus.STARTING, DagsterRunStatus.STARTED}


def test_a_cancel_of_a_stuck_worker_stands_though_it_has_to_be_killed(
    watcher, leases, clock, standing, tmp_path
):
    """The code server calls a killed run failed, and Dagster would start it again: it is cancelled before."""
    sensor = build_worker_health_sensor(
        watcher, leases, pool="gpu", ticks=Ticks(watcher.outbox.state), clock=clock
    )
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
        assert InstanceFacts(instance).run_states([run.run_id])[run.run_id].interrupted_by is None


def test_a_stuck_worker_is_ended_though_dagster_does_not_know_its_run(
    watcher, leases, clock, standing, tmp_path
):
    """After a lost database or a deleted run the device is freed all the same."""
    sensor = build_worker_health_sensor(
        watcher, leases, pool="gpu", ticks=Ticks(watcher.outbox.state), clock=clock
    )
    standing.begin("unknown")
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = None
        while not watcher.outbox.open_subjects():
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            sensor(context)
            cursor = context.cursor
            clock.now += 15
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

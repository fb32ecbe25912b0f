"""A worker that is stopped in mid-work is found, ended and its device freed; one that works is left alone."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory
from resources.alerts.outbox import Outbox
from resources.gpu import GpuResource
from sensors.device_health import DeviceWatcher
from sensors.health_watch import Watch
from sensors.progress_judge import ProgressLimits
from sensors.run_end import RunEnder
from sensors.worker_health import HealthWatcher
from tests.support.waiting import wait_until
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers
from vlm_engine.devices.health import DeviceHealth
from vlm_engine.devices.leases import LeaseHolder

SCRIPT = Path(__file__).with_name("working_process.py")
LOG = logging.getLogger("test")
OTHER = LeaseHolder("other", "k", "s")
LIMITS = ProgressLimits(least=2.0)


def working(state, run_id, seconds=0.2):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, state, run_id, f"k of {run_id}", str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


@pytest.fixture
def gpu(tmp_path):
    return GpuResource(leases_directory=str(tmp_path / "leases"), devices="cpu:2", wait_seconds=0)


@pytest.fixture
def watcher(tmp_path, gpu):
    outbox = Outbox(open_state(tmp_path / ".state"))
    devices = DeviceWatcher(
        outbox, gpu.left_out_devices(), gpu.find, lambda found: {one.id: DeviceHealth() for one in found}
    )
    return HealthWatcher(
        workers=Workers(open_state(tmp_path)),
        outbox=outbox,
        devices=devices,
        ender=RunEnder(outbox, gpu.left_out_devices(), grace=0.3),
        limits=LIMITS,
    )


class Interrupted(DagsterInMemory):
    """Dagster's facts, that keep which runs were called interrupted."""

    def __init__(self, interrupted):
        super().__init__(time.time)
        self.mark_interrupted = interrupted.append


def tick(watcher, watch, interrupted):
    watch.at, watch.unix = time.monotonic(), time.time()
    return watcher.check(watch, Interrupted(interrupted))


def tick_until_ended(process, watcher, watch, interrupted):
    """Tick until the watcher has ended this process."""

    def tick_and_sleep(seconds):
        tick(watcher, watch, interrupted)
        time.sleep(seconds)

    wait_until(
        lambda: process.poll() is not None,
        "the end of the stopped worker",
        seconds=60,
        every=0.05,
        pause=tick_and_sleep,
    )


def test_a_stopped_worker_is_ended_and_its_device_freed(tmp_path, gpu, watcher):
    """In about twice its own learned time, by SIGKILL where SIGTERM does not reach it; told once."""
    stuck, device = working(tmp_path, "stuck")
    sound, other = working(tmp_path, "sound")
    watch, interrupted = Watch.read(None, now=time.monotonic(), unix=time.time()), []
    try:
        wait_until(lambda: all(one.committed > 5 for one in watcher.workers.living()), "five commits each")
        stuck.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        learned = next(one for one in watcher.workers.living() if one.run_id == "stuck").batch_seconds
        tick_until_ended(stuck, watcher, watch, interrupted)
        freed = time.monotonic() - stopped
        print(f"learned time {learned:.2f} s, allowed {max(2 * learned, LIMITS.least):.2f} s, {freed=:.2f} s")
        assert stuck.returncode == -signal.SIGKILL
        assert interrupted == ["stuck"]
        assert [held.device.id for held in gpu.leases().holders()] == [other]
        (alert,) = watcher.outbox.open_subjects().values()
        assert (alert.kind, alert.partition, alert.page) == ("worker_stuck", "k of stuck", "runs/stuck")
        said = tick(watcher, watch, interrupted)
        assert any("has ended" in sentence for sentence in said)
        assert not watcher.outbox.open_subjects(), "told that it is over"
        assert device in watcher.devices.left_out.records()
        assert sound.poll() is None, "one that works is never ended"
    finally:
        for process in (stuck, sound):
            process.kill()
            process.wait()


def test_twice_stuck_on_a_device_leaves_it_out(tmp_path, gpu, watcher):
    """With two partitions: a person is told once how to take it back, and the other one takes over."""
    watch, interrupted = Watch.read(None, now=time.monotonic(), unix=time.time()), []
    devices = []
    for run in ("r1", "r2", "r3"):
        gone = gpu.leases().acquire(OTHER, wait_seconds=0, log=LOG) if run == "r2" else None
        process, device = working(tmp_path, run)
        if gone is not None:
            gone.release()
        devices.append(device)
        if run == "r3":
            process.kill()
            process.wait()
            break
        wait_until(lambda: any(one.batch_seconds for one in watcher.workers.living()), "a learned time")
        process.send_signal(signal.SIGSTOP)
        tick_until_ended(process, watcher, watch, interrupted)
    assert devices == ["cpu-0", "cpu-0", "cpu-1"]
    (alert,) = [one for one in watcher.outbox.open_subjects().values() if one.kind == "device_left_out"]
    assert "--take-back cpu-0" in alert.next_step
    gpu.left_out_devices().take_back("cpu-0")
    tick(watcher, watch, interrupted)
    assert not [one for one in watcher.outbox.open_subjects().values() if one.kind == "device_left_out"]

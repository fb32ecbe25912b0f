"""Three GPUs as their driver tells of them, a clock moved on by hand, and the watcher of both."""

from __future__ import annotations

import dagster as dg
import pytest

from faults.rehearsal.dagster_in_memory import DagsterInMemory, SimulatedClock
from resources.alerts.outbox import Outbox
from sensors.device_health import DeviceWatcher
from sensors.health_watch import Watch
from sensors.leases_after_end import LeasesAfterEnd
from sensors.run_end import RunEnder
from sensors.ticks import Ticks
from sensors.worker_health import HealthWatcher, build_worker_health_sensor
from vlm_durable.files.processes import boot_id
from vlm_durable.state.database import ControlState, open_state
from vlm_durable.state.workers import Workers
from vlm_engine.devices.find import Device, DeviceError
from vlm_engine.devices.health import DeviceHealth
from vlm_engine.devices.left_out import LeftOutDevices


class Machine:
    """Three GPUs as the driver lists and judges them; a test changes what it says."""

    def __init__(self):
        self.listed = [Device(f"GPU-{n}", "cuda", "A100", None, f"GPU-{n}") for n in range(3)]
        self.against = {}
        self.hot = {}
        self.is_lost = False

    def find(self):
        if self.is_lost:
            raise DeviceError("The driver does not answer.")
        return self.listed

    def judge(self, devices):
        return {one.id: self.judged(one) for one in devices}

    def judged(self, device):
        if device.id not in {one.id for one in self.listed}:
            return DeviceHealth((f"{device.id} is no longer listed by the driver.",))
        return DeviceHealth(tuple(self.against.get(device.id, ())), tuple(self.hot.get(device.id, ())))


@pytest.fixture
def clock():
    """It stands still."""
    return SimulatedClock()


@pytest.fixture
def machine():
    """All well."""
    return Machine()


@pytest.fixture
def watcher(tmp_path, clock, machine):
    """Of workers and devices, nothing told yet."""
    outbox = Outbox(open_state(tmp_path))
    left_out = LeftOutDevices(ControlState(tmp_path / "state", clock=clock), clock)
    devices = DeviceWatcher(outbox, left_out, machine.find, machine.judge)
    ender = RunEnder(outbox, left_out)
    return HealthWatcher(Workers(open_state(tmp_path)), outbox, devices, ender, monotonic=clock)


@pytest.fixture
def leases(tmp_path, watcher, clock):
    """What a worker's device is freed by after its run."""
    return LeasesAfterEnd(tmp_path / "leases", watcher.ender, silence=1800.0, home=str(tmp_path))


@pytest.fixture
def look(watcher, clock):
    """One look of the watcher, whose runs Dagster does not know; gives what it said."""
    dagster = DagsterInMemory(clock)

    def look(watch):
        watch.unix = clock.now
        return watcher.check(watch, dagster)

    return look


@pytest.fixture
def tick(watcher, look, clock):
    """Ticks on, so many seconds after the last; gives the open alerts as (kind, subject)."""
    watch = Watch(boot=boot_id(), at=clock.now, since=clock.now)

    def tick(seconds=15.0):
        clock.now += seconds
        watch.at = clock.now
        look(watch)
        return [(one.kind, subject) for subject, one in watcher.outbox.open_subjects().items()]

    return tick


@pytest.fixture
def sense(watcher, leases, clock):
    """Ticks the sensor as Dagster does, 15 seconds after the last time; gives the pool's limit."""
    ticks, cursor = Ticks(watcher.outbox.state), None

    def sense(instance, *, prepared=0):
        nonlocal cursor
        sensor = build_worker_health_sensor(
            watcher, leases, pool="gpu", ticks=ticks, clock=clock, prepared=lambda: prepared
        )
        context = dg.build_sensor_context(instance=instance, cursor=cursor)
        sensor(context)
        cursor = context.cursor
        clock.now += 15
        return {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}.get("gpu")

    return sense

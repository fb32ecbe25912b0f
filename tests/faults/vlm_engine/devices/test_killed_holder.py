"""A holder that dies or stops, with real processes: the lock is the operating system's, not a file's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vlm_engine.devices.find import find_devices
from vlm_engine.devices.leases import DeviceLeases, LeaseHolder, NoDeviceFreeError

LOG = logging.getLogger("test_killed_holder")
NEXT = LeaseHolder("run-next", "000001000-000001999", "property_descriptions")


@dataclass
class Holder:
    """A running holder.py."""

    process: subprocess.Popen[str]
    device: str
    children: list[int]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; its children live on."""
        self.process.kill()
        self.process.wait()


Start = Callable[[str], Holder]


@pytest.fixture
def leases(tmp_path: Path) -> DeviceLeases:
    return DeviceLeases(tmp_path, find_devices("cpu:1", {}))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    holders: list[Holder] = []

    def start(children: str) -> Holder:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("holder.py"), tmp_path, "cpu:1", children],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        holders.append(Holder(process, said["device"], said["children"]))
        return holders[-1]

    yield start
    for holder in holders:
        for pid in holder.children:
            os.kill(pid, signal.SIGKILL)
        holder.kill()
        assert holder.process.stdout is not None
        holder.process.stdout.close()


@pytest.mark.parametrize("children", ["none", "spawn", "forkserver", "fork", "subprocess"])
def test_a_killed_holder_frees_its_device_at_once(start: Start, leases: DeviceLeases, children: str) -> None:
    """SIGKILL of the holder frees the device at once, though its children live, however they were started."""
    holder = start(children)
    with pytest.raises(NoDeviceFreeError, match=rf"run-{children} .*pid {holder.process.pid} "):
        leases.acquire(NEXT, wait_seconds=0, log=LOG)
    holder.kill()
    with leases.acquire(NEXT, wait_seconds=0, log=LOG) as lease:
        assert lease.device.id == holder.device
        for pid in holder.children:
            os.kill(pid, 0)  # still alive
        (held,) = leases.holders()
        assert held.record is not None
        assert held.record.holder == NEXT


def test_a_stopped_holder_keeps_its_device(start: Start, leases: DeviceLeases) -> None:
    """A paused process still has its memory on the device: nobody else gets it."""
    holder = start("none")
    holder.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED)
    with pytest.raises(NoDeviceFreeError):
        leases.acquire(NEXT, wait_seconds=0, log=LOG)


def test_a_record_left_by_a_killed_holder_is_not_held(start: Start, leases: DeviceLeases) -> None:
    """The note of a dead process stays on the disk and is not shown as a holder."""
    start("none").kill()
    assert (leases.directory / "cpu-0.json").exists()
    assert leases.holders() == []


def test_a_child_by_fork_does_not_think_it_holds_the_lease(leases: DeviceLeases) -> None:
    """A forked child neither keeps nor frees its parent's device, whatever it does with the lease object."""
    with leases.acquire(NEXT, wait_seconds=0, log=LOG) as lease:
        pid = os.fork()
        if pid == 0:
            failed = True
            try:
                failed = lease.held
                lease.release()
            finally:
                os._exit(failed)  # never back into pytest
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        (held,) = leases.holders()
        assert held.record is not None
        assert held.record.pid == os.getpid()

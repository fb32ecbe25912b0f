"""One lease a process: taken once, pinned, given again."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from resources.devices import process_lease
from resources.devices.errors import NoDeviceFreeError, PinnedElsewhereError
from resources.devices.find import find_devices
from resources.devices.lease_records import LeaseHolder
from resources.devices.leases import DeviceLeases, Lease
from resources.devices.process_lease import lease_for_process

LOG = logging.getLogger("test_process_lease")
DESCRIBE = LeaseHolder("run", "000000000-000000999", "property_descriptions")
EMBED = LeaseHolder("run", "000000000-000000999", "property_embeddings")


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceLeases:
    """Two slots, in a process that holds none yet and is as it was afterwards."""
    monkeypatch.setattr(process_lease, "_lease", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as before")
    return DeviceLeases(tmp_path, find_devices("cpu:2", {}))


def lease(leases: DeviceLeases, holder: LeaseHolder = DESCRIBE) -> Lease:
    return lease_for_process(lambda: leases, holder, wait_seconds=0, log=LOG)


def test_a_later_step_gets_the_same_device(leases: DeviceLeases) -> None:
    """Steps of one process share one device, and the record names the step that uses it now."""
    with lease(leases) as first:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert lease(leases, EMBED) is first
        (held,) = leases.holders()
        assert held.record is not None
        assert held.record.holder == EMBED


def test_steps_in_two_threads_share_one_device(leases: DeviceLeases) -> None:
    """Two steps that ask at the same moment do not take two devices."""
    found: list[Lease] = []
    together = threading.Barrier(2)

    def step() -> None:
        together.wait()
        found.append(lease(leases))

    threads = [threading.Thread(target=step) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with found[0]:
        assert found[0] is found[1]
        assert len(leases.holders()) == 1


def test_after_a_release_a_new_lease_is_taken(leases: DeviceLeases) -> None:
    """A lease that was given back is not handed out as if it were held."""
    first = lease(leases)
    first.release()
    with lease(leases) as second:
        assert second is not first
        assert second.held


def test_a_device_that_cannot_be_pinned_is_given_back(
    leases: DeviceLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CUDA already runs elsewhere the error leaves no device locked."""
    running = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", running)
    with pytest.raises(PinnedElsewhereError):
        lease(leases)
    assert leases.holders() == []


def test_a_step_that_found_none_may_ask_again(leases: DeviceLeases) -> None:
    """A failed wait leaves nothing behind: the next step in the same process starts afresh."""
    with (
        leases.acquire(EMBED, wait_seconds=0, log=LOG) as one,
        leases.acquire(EMBED, wait_seconds=0, log=LOG),
    ):
        with pytest.raises(NoDeviceFreeError):
            lease(leases)
        one.release()
        with lease(leases) as mine:
            assert mine.device == one.device

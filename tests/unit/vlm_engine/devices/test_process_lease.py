"""One lease a process: taken once, pinned, given again; and what CUDA will see there."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlm_engine.devices.find import Device, DeviceError, find_devices
from vlm_engine.devices.leases import (
    DeviceLeases,
    Lease,
    LeaseHolder,
    NoDeviceFreeError,
    lease_for_process,
    pin,
)

GPU = Device("GPU-a", "cuda", "A100", None, "GPU-a")
SLOT = Device("cpu-0", "cpu", "CPU slot 0 of 1", None, "")
LOG = logging.getLogger("test_process_lease")
DESCRIBE = LeaseHolder("run", "000000000-000000999", "property_descriptions")
EMBED = LeaseHolder("run", "000000000-000000999", "property_embeddings")


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceLeases:
    """Two slots, in a process that holds none yet and is as it was afterwards."""
    monkeypatch.setattr("vlm_engine.devices.leases._lease", None)
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
    with pytest.raises(DeviceError):
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


def torch_with(monkeypatch: pytest.MonkeyPatch, *, initialised: bool) -> None:
    """Put a torch in place that says whether CUDA runs; a machine without a GPU cannot make it true."""
    cuda = SimpleNamespace(is_initialized=lambda: initialised)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


def test_a_gpu_is_the_only_one_that_cuda_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leased GPU alone is visible, and numbers count as nvidia-smi counts."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": "x"}
    pin(GPU, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PATH": "x"}


def test_a_cpu_slot_hides_every_gpu() -> None:
    """Work in a CPU slot cannot land on a GPU that another run has leased."""
    environment: dict[str, str] = {}
    pin(SLOT, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("before", [{}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}])
@pytest.mark.parametrize("device", [GPU, SLOT])
def test_too_late_is_an_error_by_name(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], device: Device
) -> None:
    """Where torch already runs CUDA on another device nothing is changed and the error says what to do."""
    torch_with(monkeypatch, initialised=True)
    environment = dict(before)
    with pytest.raises(DeviceError, match=f"{device.id}.*Lease the device before"):
        pin(device, environment)
    assert environment == before


def test_torch_on_the_same_device_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that set the device before the process started, and a torch that runs on it, are accepted."""
    torch_with(monkeypatch, initialised=True)
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-a"}
    pin(GPU, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_an_imported_torch_that_does_not_run_cuda_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch reads nothing yet: CUDA_VISIBLE_DEVICES still counts."""
    torch_with(monkeypatch, initialised=False)
    environment: dict[str, str] = {}
    pin(GPU, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_a_cpu_slot_leaves_cores_to_decoding_and_a_set_number_of_threads_stays() -> None:
    """Model threads on every core would wait for each other whenever decoding takes one away."""
    (slot,) = find_devices("cpu:1", {}, cores=8)
    environment: dict[str, str] = {}
    pin(slot, environment)
    assert environment["OMP_NUM_THREADS"] == "4"
    chosen = {"OMP_NUM_THREADS": "7"}
    pin(slot, chosen)
    assert chosen["OMP_NUM_THREADS"] == "7"
    assert [one.threads for one in find_devices("cpu:4", {}, cores=2)] == [1] * 4

"""Pinning: what CUDA will see in this process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from resources.devices.errors import PinnedElsewhereError
from resources.devices.find import Device, find_devices
from resources.devices.pinning import pin

GPU = Device("GPU-a", "cuda", "A100", None, "GPU-a")
SLOT = Device("cpu-0", "cpu", "CPU slot 0 of 1", None, "")


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
    with pytest.raises(PinnedElsewhereError, match=f"{device.id}.*Lease the device before"):
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

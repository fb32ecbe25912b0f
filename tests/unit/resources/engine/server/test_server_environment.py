"""How a server is pinned to its device, and what of its environment is kept. Its life is in tests/faults."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from resources.devices.find import Device, find_devices
from resources.devices.nvml import GpuReading
from resources.engine.server.server_environment import server_environment, variable_digests

GPU = Device("GPU-a", "cuda", "A100", 80 << 30, "GPU-a")


@dataclass
class Recorded:
    """What NVML said once."""

    answer: list[GpuReading]

    def readings(self) -> list[GpuReading]:
        """The recorded answer."""
        return self.answer


@pytest.mark.parametrize(
    ("device", "readings", "visible"),
    [
        (GPU, [GpuReading(0, "GPU-b", "A100"), GpuReading(3, "GPU-a", "A100")], "3"),
        (GPU, [], "GPU-a"),
        (Device("MIG-a", "cuda", "A100 MIG", None, "MIG-a"), [GpuReading(1, "MIG-a", "A100")], "MIG-a"),
        (Device("given-7-2", "cuda", "given", None, "2", given=True), [], "2"),
    ],
    ids=["listed", "not listed", "MIG", "given"],
)
def test_a_server_sees_its_gpu_alone(device: Device, readings: list[GpuReading], visible: str) -> None:
    """The leased GPU is all that the server sees; by number where that is known, which vLLM needs."""
    pinned = server_environment(device, {"PATH": "/bin"}, nvml=Recorded(readings))
    assert pinned == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_server_on_a_cpu_slot_is_bounded_as_the_engine_in_process() -> None:
    """A CPU slot hides every GPU and bounds the threads; our settings and secrets stay with us."""
    (slot,) = find_devices("cpu:1", {}, cores=8)
    ours = {"VLM_ASSETS_ALERT_TARGETS": "secret", "DAGSTER_HOME": "/home", "HF_HOME": "/cache"}
    assert server_environment(slot, ours) == {
        "HF_HOME": "/cache", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4",
    }  # fmt: skip


def test_digests_of_the_environment_tell_no_secret_and_no_terminal() -> None:
    """They compare two environments, by one server's key alone; where it was started from changes nothing."""
    given = {"HF_TOKEN": "secret", "PATH": "/bin", "OMP_NUM_THREADS": "4"}
    kept = variable_digests(given | {"SSH_TTY": "/dev/pts/7", "SHLVL": "2"}, "key")
    assert kept.keys() == {"HF_TOKEN", "PATH"}
    assert kept == variable_digests(given | {"SHLVL": "3"}, "key")
    for other in (variable_digests(given | {"HF_TOKEN": "other"}, "key"), variable_digests(given, "another")):
        assert other["HF_TOKEN"] != kept["HF_TOKEN"]
    assert variable_digests({"A": "\udcff"}, "key"), "a value that is no text"

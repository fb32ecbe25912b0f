"""The adapter to the driver, with the driver's answers simulated below nvidia-ml-py's own functions.

Against a real driver it is tested in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from vlm_engine.devices.find import Device, DeviceError, DriverNvml, GpuReading, torch_trouble
from vlm_engine.devices.health import HealthCheck


class SimulatedDriver:
    """A machine whose GPUs are dicts of answers; an answer that is an exception is raised."""

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = gpus
        self.open = False

    def answer(self, name: str) -> Callable[..., Any]:
        """The function of nvidia-ml-py that asks a GPU for ``name``."""

        def say(handle: dict[str, Any], *_: Any) -> Any:
            said = handle.get(name, pynvml.NVMLError_NotSupported())
            if isinstance(said, Exception):
                raise said
            return said

        return say

    def handle(self, index: int) -> dict[str, Any]:
        """One GPU, unless it is lost."""
        lost = self.gpus[index].get("lost")
        if lost:
            raise lost
        return self.gpus[index]

    def instance(self, handle: dict[str, Any], slot: int) -> dict[str, Any]:
        """One MIG instance; most slots are empty."""
        if slot not in handle["instances"]:
            raise pynvml.NVMLError_NotFound()
        return dict(handle["instances"][slot])


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[SimulatedDriver], SimulatedDriver]:
    def install(driver: SimulatedDriver) -> SimulatedDriver:
        replacements = {
            "nvmlInit": lambda: setattr(driver, "open", True),
            "nvmlShutdown": lambda: setattr(driver, "open", False),
            "nvmlDeviceGetCount": lambda: len(driver.gpus),
            "nvmlDeviceGetHandleByIndex": driver.handle,
            "nvmlDeviceGetUUID": driver.answer("uuid"),
            "nvmlDeviceGetName": driver.answer("name"),
            "nvmlDeviceGetMemoryInfo": driver.answer("memory"),
            "nvmlDeviceGetTotalEccErrors": driver.answer("ecc"),
            "nvmlDeviceGetFieldValues": driver.answer("fields"),
            "nvmlDeviceGetCurrentClocksThrottleReasons": driver.answer("throttles"),
            "nvmlDeviceGetTemperature": driver.answer("temperature"),
            "nvmlDeviceGetMigMode": driver.answer("mig"),
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": driver.instance,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(pynvml, name, replacement)
        return driver

    return install


Install = Callable[[SimulatedDriver], SimulatedDriver]


def field(code: int, value: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=value))]


DATA_CENTRE = {
    "uuid": "GPU-a",
    "name": "NVIDIA A100-SXM4-80GB",
    "memory": SimpleNamespace(total=80, free=70),
    "ecc": 2,
    "fields": field(0, 1),
    "throttles": 8,
    "temperature": 91,
    "mig": [0, 0],
}


def test_no_driver_means_no_gpus() -> None:
    """A machine without an NVIDIA driver (such as one that runs these tests) is not an error."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        assert DriverNvml().readings() == []
    else:
        pynvml.nvmlShutdown()
        assert DriverNvml().readings() != []


def test_a_driver_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken driver is not taken for a machine without GPUs, which would then work on its CPU for weeks."""

    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    with pytest.raises(DeviceError, match=r"version mismatch.*VLM_ASSETS_DEVICES=cpu"):
        DriverNvml().readings()


def test_a_gpu_is_read_whole(install: Install) -> None:
    """Every figure that a verdict needs is read from its own place, and NVML is closed again."""
    driver = install(SimulatedDriver(DATA_CENTRE))
    assert DriverNvml().readings() == [
        GpuReading(0, "GPU-a", "NVIDIA A100-SXM4-80GB", 80, 70, 2, 1, 8, 91),
    ]
    assert not driver.open


@pytest.mark.parametrize(
    "fields",
    [field(pynvml.NVML_ERROR_NOT_SUPPORTED, 0), field(pynvml.NVML_ERROR_INVALID_ARGUMENT, 7)],
    ids=["not supported", "unknown to an older driver"],
)
def test_what_a_gpu_does_not_report_is_none(install: Install, fields: list[SimpleNamespace]) -> None:
    """A consumer card without ECC, MIG or recovery action is read without an error."""
    install(SimulatedDriver({"uuid": "GPU-c", "name": "RTX 4090", "fields": fields}))
    assert DriverNvml().readings() == [GpuReading(0, "GPU-c", "RTX 4090")]


def test_one_lost_gpu_does_not_hide_the_others(install: Install) -> None:
    """A GPU that fell off the bus is listed with its fault, and the one after it is still found."""
    install(SimulatedDriver({"lost": pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)}, DATA_CENTRE))
    lost, sound = DriverNvml().readings()
    assert (lost.uuid, lost.fault) == ("unreadable-0", "NVML says: GPU is lost")
    assert (sound.uuid, sound.fault) == ("GPU-a", None)


def test_a_question_that_breaks_is_a_fault_of_that_gpu(install: Install) -> None:
    """A GPU that asks for a reset in the middle of its answers keeps its name and gets a fault."""
    reset = pynvml.NVMLError(pynvml.NVML_ERROR_RESET_REQUIRED)
    install(SimulatedDriver({**DATA_CENTRE, "ecc": reset}))
    (reading,) = DriverNvml().readings()
    assert (reading.uuid, reading.fault) == ("GPU-a", "NVML says: GPU requires restart")


@pytest.mark.parametrize(
    "error",
    [pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN), AttributeError("no such function"), OSError("gone")],
)
@pytest.mark.parametrize("reading", ["ecc", "fields", "throttles", "temperature", "mig", "memory"])
def test_an_unforeseen_error_of_an_optional_reading_says_nothing(
    install: Install, reading: str, error: Exception
) -> None:
    """Guards: a sound GPU is not passed over because its driver, or nvidia-ml-py, fails at one question."""
    install(SimulatedDriver({**DATA_CENTRE, "fields": field(0, 0), "ecc": 0, "throttles": 0, reading: error}))
    (gpu,) = DriverNvml().readings()
    assert (gpu.uuid, gpu.fault) == ("GPU-a", None)
    assert HealthCheck(DriverNvml(), min_free_bytes=1)(Device("GPU-a", "cuda", "", None, "GPU-a")) == ()


@pytest.mark.parametrize(
    ("built", "driver", "sentence"),
    [
        ("'13.0'", 13000, None),
        ("'13.2'", 13000, None),
        ("'13.0'", 12080, "runs CUDA 12.8 and the installed torch is built for CUDA 13.0: update the driver"),
        ("'12.9'", 13000, None),
        ("None", 13000, "built for CPUs alone: install the CUDA build"),
        ("'13.0'", pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN), None),
    ],
)
def test_a_driver_older_than_the_build_is_named(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    built: str,
    driver: int | Exception,
    sentence: str | None,
) -> None:
    """Before a run fails at its model: by torch's own files, without importing it."""
    install(SimulatedDriver(DATA_CENTRE))
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {built}\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)

    def ask() -> int:
        if isinstance(driver, Exception):
            raise driver
        return driver

    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", ask)
    trouble = torch_trouble(DriverNvml())
    assert trouble is None if sentence is None else sentence in str(trouble)


def test_mig_instances_stand_for_their_gpu(install: Install) -> None:
    """In MIG mode the instances are the devices, with their own memory and their GPU's troubles."""
    instances = {
        slot: {"uuid": f"MIG-{slot}", "name": "MIG 3g", "memory": SimpleNamespace(total=40, free=slot)}
        for slot in (0, 4)
    }
    install(SimulatedDriver({**DATA_CENTRE, "mig": [1, 1], "instances": instances}))
    assert DriverNvml().readings() == [
        GpuReading(0, "MIG-0", "MIG 3g", 40, 0, 2, 1, 8, 91),
        GpuReading(0, "MIG-4", "MIG 3g", 40, 4, 2, 1, 8, 91),
    ]


def test_mig_without_an_instance_is_a_fault(install: Install) -> None:
    """A GPU in MIG mode that nobody cut is not quietly missing."""
    install(SimulatedDriver({**DATA_CENTRE, "mig": [1, 1], "instances": {}}))
    (reading,) = DriverNvml().readings()
    assert reading.uuid == "GPU-a"
    assert "no instance" in str(reading.fault)

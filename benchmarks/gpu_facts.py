"""What a person needs to believe a figure of a GPU: device, driver, versions, clocks, power and temperature.

torch is not imported, and nothing is put on the device.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Any, Final

_PACKAGES: Final = ("torch", "transformers", "xgrammar", "numpy", "pillow", "dagster", "vllm")


def versions() -> dict[str, Any]:
    """Python's version and those of the packages that decide about speed; None for one that is not there."""
    packages: dict[str, Any] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return packages | {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def gpu_readings() -> list[dict[str, Any]]:
    """Every GPU as NVML sees it now; [] where there is no driver. A reading that fails is None."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_reading(pynvml, index) for index in range(_optional(pynvml.nvmlDeviceGetCount) or 0)]
    finally:
        pynvml.nvmlShutdown()


def _reading(pynvml: Any, index: int) -> dict[str, Any]:
    """MHz, watts, degrees Celsius and bytes; why clocks are slowed down as NVML's bit mask."""
    gpu = _optional(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    milliwatts = _optional(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu))
    limit = _optional(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
    return {
        "name": _optional(lambda: str(pynvml.nvmlDeviceGetName(gpu))),
        "uuid": _optional(lambda: str(pynvml.nvmlDeviceGetUUID(gpu))),
        "driver": _optional(lambda: str(pynvml.nvmlSystemGetDriverVersion())),
        "cuda": _optional(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2())),
        "sm_mhz": _optional(lambda: int(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))),
        "memory_mhz": _optional(lambda: int(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM))),
        "watts": None if milliwatts is None else milliwatts / 1000,
        "watts_allowed": None if limit is None else limit / 1000,
        "celsius": _optional(lambda: int(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))),
        "throttle_reasons": _optional(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))),
        "memory_used": _optional(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)),
    }


def _optional(question: Callable[[], Any]) -> Any:
    """The answer, or None: no figure is lost because a driver does not know a question."""
    try:
        return question()
    except Exception:  # nvidia-ml-py raises more than NVMLError: TypeError, AttributeError
        return None

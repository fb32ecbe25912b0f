"""What the NVIDIA driver says about its GPUs at one moment: the only place that talks to NVML.

Reading lives here; which devices are used (find.py) and which are refused (health.py) does not.
Terms: NVML, MIG (a GPU cut into instances that count as devices of their own).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from resources.devices.device_errors import DeviceError


@dataclass(frozen=True)
class GpuReading:
    """One GPU, or one MIG instance, as NVML describes it. None: this GPU does not report it.

    ``index`` is the number that nvidia-smi shows (PCI order; a MIG instance has its GPU's), memory is in
    bytes, ``uncorrected_ecc`` counts since the driver was loaded, ``throttle_reasons`` is NVML's bit mask
    of clock event reasons, ``temperature`` in degrees Celsius. Errors, recovery action, throttling and
    temperature of a MIG instance are its GPU's.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    uncorrected_ecc: int | None = None
    recovery_action: int | None = None
    throttle_reasons: int | None = None
    temperature: int | None = None
    fault: str | None = None
    """Why the driver could not be asked, in its own words; set, nothing else here can be relied on."""


class Nvml(Protocol):
    """The seam to the driver: tests put recorded readings here."""

    def readings(self) -> list[GpuReading]:
        """All GPUs and MIG instances in the order of nvidia-smi, read anew; [] where there is no driver."""
        ...


class DriverNvml:
    """NVML through nvidia-ml-py, opened and closed at each reading, so that no state outlives a GPU reset."""

    def readings(self) -> list[GpuReading]:
        """Read every GPU. Raises DeviceError where a driver is installed and does not answer."""
        import pynvml

        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
            return []
        except pynvml.NVMLError as error:
            raise DeviceError(
                f"The NVIDIA driver does not answer: {error}. Look at `nvidia-smi`; a driver that was just "
                "updated needs a reboot. To run without GPUs set VLM_ASSETS_DEVICES=cpu."
            ) from error
        try:
            count = int(pynvml.nvmlDeviceGetCount())
            return [reading for index in range(count) for reading in _read_gpu(pynvml, index)]
        except pynvml.NVMLError as error:
            raise DeviceError(f"The NVIDIA driver does not list its GPUs: {error}.") from error
        finally:
            pynvml.nvmlShutdown()


def _read_gpu(pynvml: Any, index: int) -> list[GpuReading]:
    """One reading of a whole GPU, or one for each of its MIG instances; never raises for one bad GPU."""
    uuid = f"unreadable-{index}"
    name = f"GPU number {index}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        name = str(pynvml.nvmlDeviceGetName(handle))
        gpu = GpuReading(
            index,
            uuid,
            name,
            uncorrected_ecc=_ask(
                pynvml,
                lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                    handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
                ),
            ),
            recovery_action=_ask(pynvml, lambda: _recovery_action(pynvml, handle)),
            throttle_reasons=_ask(pynvml, lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            temperature=_ask(
                pynvml, lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            ),
        )
        mig = _ask(pynvml, lambda: pynvml.nvmlDeviceGetMigMode(handle)[0])
        if mig == pynvml.NVML_DEVICE_MIG_ENABLE:
            instances = _mig_handles(pynvml, handle)
            if not instances:
                fault = "MIG is on and it has no instance: create one (nvidia-smi mig -cgi), or turn MIG off"
                return [replace(gpu, fault=fault)]
            return [_completed(pynvml, gpu, instance) for instance in instances]
        return [_completed(pynvml, gpu, handle)]
    except pynvml.NVMLError as error:
        return [GpuReading(index, uuid, name, fault=f"NVML says: {error}")]


def _completed(pynvml: Any, gpu: GpuReading, handle: Any) -> GpuReading:
    """The GPU's reading with name, id and memory of what ``handle`` is: the GPU itself or one instance."""
    memory = _ask(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return replace(
        gpu,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(_ask(pynvml, lambda: pynvml.nvmlDeviceGetName(handle)) or gpu.name),
        memory_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
    )


def _recovery_action(pynvml: Any, handle: Any) -> int:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    return int(value.value.uiVal)


def _mig_handles(pynvml: Any, handle: Any) -> list[Any]:
    handles = []
    for instance in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance))
        except pynvml.NVMLError_NotFound:
            continue  # slots are numbered sparsely
    return handles


def _ask(pynvml: Any, question: Callable[[], Any]) -> Any:
    """The answer, or None where this GPU or driver does not report it (consumer cards have no ECC)."""
    try:
        return question()
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_InvalidArgument,  # an older driver that does not know a field id
    ):
        return None

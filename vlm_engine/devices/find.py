"""Which devices there are to work on: GPUs, MIG instances, what a cluster gave, or CPU slots.

This module finds and names devices, and it alone asks the NVIDIA driver about its GPUs. Whether a device is
sound is in health.py, whether it is free in leases.py. Terms: NVML, MIG (a GPU cut into instances that count
as devices of their own).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

_CLUSTER_MARKERS = {"SLURM_JOB_ID": "Slurm job", "VLM_RAY_RUN": "Ray run"}
# The second is ours (``vlm_cluster/ray_launcher.py``): Ray tells a job's process no id.
_NO_DEVICES = {"", "-1", "NoDevFiles"}  # CUDA, people and Slurm write these for "none".
_MOST_DEFAULT_SLOTS = 8
_TOGETHER = "+"


class DeviceError(Exception):
    """A failure to find, lease or pin a device. The message says what happened, where, and what to do."""


@dataclass(frozen=True)
class Device:
    """One thing that a materialization can hold to itself.

    ``id`` names it in leases, rows and the UI: ``GPU-uuid``, ``MIG-uuid``, ``cpu-0``, ``GPU-uuid+GPU-uuid``
    for two that work on one model, and ``given-JOB-ENTRY`` for a device that a cluster gave and NVML does not
    know. ``memory_bytes``: of several devices, the smallest memory of one. ``visible``: the value of
    CUDA_VISIBLE_DEVICES in the process that holds it ("" for a CPU slot). ``given``: a cluster chose it, so
    its health is logged and it is used all the same.
    """

    id: str
    kind: Literal["cuda", "cpu"]
    name: str
    memory_bytes: int | None
    visible: str
    given: bool = False
    threads: int | None = None
    """For a CPU slot: threads that the model computes with."""
    at_once: int = field(default=1, compare=False)
    """For a leased device: how many devices of the machine may work at once, and share its cores."""

    @property
    def model_name(self) -> str:
        """The same for all devices that compute alike."""
        return self.name if self.kind == "cuda" else f"CPU slot of {self.threads} threads"

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the devices that work together; its own, where it is one."""
        return members(self.id)


def named(devices: Sequence[Device]) -> str:
    """The setting that means these devices of this machine, or as many CPU slots."""
    if any(device.kind == "cpu" for device in devices):
        return f"cpu:{len(devices)}"
    return ",".join(member for device in devices for member in device.visible.split(","))


def members(device: str) -> tuple[str, ...]:
    """The ids of the devices that a device's id stands for."""
    return tuple(device.split(_TOGETHER))


def grouped(devices: Sequence[Device], count: int) -> list[Device]:
    """Groups of ``count`` neighbours, each as one device for one model; a rest is not used.

    Neighbours in PCI order have the shortest way to each other. The groups are the same for every run, so two
    runs never hold a part of a group that the other waits for. Raises DeviceError.
    """
    if count == 1:
        return list(devices)
    if any(device.kind == "cpu" or device.id.startswith("MIG-") for device in devices):
        raise DeviceError(
            f"VLM_ASSETS_DEVICES_PER_MODEL is {count}, and {devices[0].id} ({devices[0].name}) cannot work"
            " with others on one model: whole GPUs can. Set it to 1, or choose GPUs in VLM_ASSETS_DEVICES."
        )
    if len(devices) < count:
        raise DeviceError(
            f"VLM_ASSETS_DEVICES_PER_MODEL is {count}, and {len(devices)} may be used here:"
            f" {', '.join(device.id for device in devices)}. Set it lower, or VLM_ASSETS_DEVICES to more."
        )
    return [_together(devices[start : start + count]) for start in range(0, len(devices) - count + 1, count)]


def _together(devices: Sequence[Device]) -> Device:
    memory = [device.memory_bytes for device in devices]
    return Device(
        _TOGETHER.join(device.id for device in devices),
        "cuda",
        f"{len(devices)} x {devices[0].name}",
        None if None in memory else min(size for size in memory if size is not None),
        ",".join(device.visible for device in devices),
        given=all(device.given for device in devices),
    )


def find_devices(
    setting: str,
    environment: Mapping[str, str],
    *,
    nvml: Nvml | None = None,
    cores: int | None = None,
    node: str = "",
) -> list[Device]:
    """The devices that the value of VLM_ASSETS_DEVICES means on this machine, in a fixed order, never empty.

    setting: ``auto``: what a cluster gave, else every GPU that CUDA_VISIBLE_DEVICES leaves, else CPU slots.
    ``given``: exactly the devices in CUDA_VISIBLE_DEVICES. ``cpu`` or ``cpu:N``: CPU slots, no GPU. Otherwise
    a list of numbers as nvidia-smi shows them, GPU or MIG UUIDs or beginnings of UUIDs; the number of a GPU
    in MIG mode means all its instances. CUDA_VISIBLE_DEVICES, where it is set, bounds every choice. ``cores``
    (default: those this process may use) decides the number of CPU slots. ``node``: in a cluster, the name of
    this machine in the names of its CPU slots, which would be alike on all machines.

    Raises DeviceError.
    """
    setting = setting.strip()
    if setting == "cpu" or setting.startswith("cpu:"):
        return _cpu_slots(setting, cores, node)
    readings = (nvml or DriverNvml()).readings()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    cluster = _cluster(environment)
    if setting == "given" or (cluster and visible is not None):
        devices = _given(visible, cluster or "environment", readings)
    elif visible is not None and readings:
        devices = _pick(_entries(visible), _gpus(readings), "CUDA_VISIBLE_DEVICES")
    else:
        devices = _gpus(readings)
    if setting == "given" and not devices:
        raise DeviceError(
            "The devices are to be given by the environment, but CUDA_VISIBLE_DEVICES is "
            f"{'not set' if visible is None else 'empty'}. Ask the cluster for a GPU, or set "
            "VLM_ASSETS_DEVICES to auto, cpu or a list."
        )
    if setting in ("auto", "given"):
        return [device for device, _ in devices] or _cpu_slots("cpu", cores, node)
    entries = _entries(setting)
    if not entries:
        raise DeviceError(_setting_help(setting))
    return [device for device, _ in _pick(entries, devices, "VLM_ASSETS_DEVICES")]


_Numbered = tuple[Device, str]
"""A device with the number that nvidia-smi shows for it, or the cluster's name for it."""


def _gpus(readings: Sequence[GpuReading]) -> list[_Numbered]:
    return [(_device(reading, reading.uuid), str(reading.index)) for reading in readings]


def _device(reading: GpuReading, visible: str, *, given: bool = False) -> Device:
    return Device(reading.uuid, "cuda", reading.name, reading.memory_bytes, visible, given)


def _given(visible: str | None, cluster: str, readings: Sequence[GpuReading]) -> list[_Numbered]:
    """One device an entry, whatever NVML says: a cluster may number devices in its own way.

    Where NVML knows an entry, its UUID is the id, so that two jobs with the same GPU still share its lease.
    An entry that NVML does not know is named with the job: number 0 of two Slurm jobs are two devices.
    """
    devices = []
    for entry in _entries(visible or ""):
        matches = [reading for reading in readings if _names(entry, reading.uuid, str(reading.index))]
        if len(matches) == 1:
            device = _device(matches[0], entry, given=True)
        else:
            job = cluster.rpartition(" ")[2]
            device = Device(f"given-{job}-{entry}", "cuda", f"given by {cluster}", None, entry, given=True)
        devices.append((device, entry))
    return devices


def _pick(entries: Sequence[str], devices: Sequence[_Numbered], source: str) -> list[_Numbered]:
    """The devices that ``entries`` name, in their order, each once. Raises DeviceError."""
    picked: dict[str, _Numbered] = {}
    for entry in entries:
        matches = [pair for pair in devices if _names(entry, pair[0].id, pair[1])]
        if not entry.isdigit() and len(matches) > 1:
            raise DeviceError(
                f"{source} names {entry!r}, with which the ids of {len(matches)} devices begin: "
                f"{_listing(devices)}. Give more of the id."
            )
        if not matches:
            hint = "" if entry.isdigit() or "-" in entry else f" {_setting_help(entry)}"
            if not devices and not hint:
                hint = " Where there is no GPU, VLM_ASSETS_DEVICES is auto, cpu, or cpu:2 for two CPU slots."
            raise DeviceError(
                f"{source} names {entry!r}, which is not among the devices that may be used here (those that "
                f"the driver lists and CUDA_VISIBLE_DEVICES, if set, leaves): {_listing(devices)}.{hint}"
            )
        picked.update((pair[0].id, pair) for pair in matches)
    return list(picked.values())


def _names(entry: str, uuid: str, number: str) -> bool:
    return entry == number or (not entry.isdigit() and uuid.startswith(entry))


def _entries(text: str) -> list[str]:
    entries = [entry.strip() for entry in text.split(",")]
    return [entry for entry in dict.fromkeys(entries) if entry not in _NO_DEVICES]


def _listing(devices: Sequence[_Numbered]) -> str:
    return ", ".join(f"{number} ({device.id}, {device.name})" for device, number in devices) or "none"


def _cluster(environment: Mapping[str, str]) -> str | None:
    """The cluster's job that gives devices ("Slurm job 17"), or None."""
    for marker, kind in _CLUSTER_MARKERS.items():
        if environment.get(marker):
            return f"{kind} {environment[marker]}"
    return None


def is_cpu_slot(id_: str) -> bool:
    """Whether this is the id of a CPU slot without a machine's name. Such slots are never missing."""
    return re.fullmatch(r"cpu-\d+", id_) is not None


def _cpu_slots(setting: str, cores: int | None, node: str) -> list[Device]:
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    count = _slot_count(setting, cores)
    # Half of a slot's cores for the model; the other half decodes and commits. With a thread on every core
    # OpenMP's threads spin while they wait for the one whose core was taken: measured 10 times slower.
    threads = max(cores // count // 2, 1)
    return [
        Device(
            f"{node}/cpu-{slot}" if node else f"cpu-{slot}",
            "cpu",
            f"CPU slot {slot} of {count}",
            None,
            "",
            threads=threads,
        )
        for slot in range(count)
    ]


def _slot_count(setting: str, cores: int) -> int:
    """How many CPU slots; by default one for every two cores, at least 1 and at most 8.

    Two cores a slot because a materialization keeps two busy: the model in one, decoding and committing
    in the other. At most 8 because each slot is a process with its own torch and its own copy of the model.
    """
    if setting == "cpu":
        return min(max(cores // 2, 1), _MOST_DEFAULT_SLOTS)
    number = setting.removeprefix("cpu:")
    if not number.isdecimal() or int(number) < 1:
        raise DeviceError(_setting_help(setting))
    return int(number)


def torch_trouble(nvml: DriverNvml) -> str | None:
    """Why the installed torch cannot use this machine's GPUs; None where nothing speaks against it.

    Reads torch's files and asks the driver: torch is not imported, and nothing is put on a GPU.
    """
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    built = re.search(r"^cuda\b[^=\n]*= '(\d+)\.(\d+)", version, re.MULTILINE)
    if built is None:
        return (
            "The installed torch is built for CPUs alone: install the CUDA build of the version in"
            " constraints.txt, or set VLM_ASSETS_DEVICES=cpu."
        )
    driver = nvml.cuda_version()
    # Within a major version a newer build runs on an older driver.
    if driver is not None and driver[0] < int(built[1]):
        return (
            f"The NVIDIA driver runs CUDA {driver[0]}.{driver[1]} and the installed torch is built for CUDA"
            f" {built[1]}.{built[2]}: update the driver, or install torch's build for CUDA {driver[0]}."
        )
    return None


def _setting_help(setting: str) -> str:
    return (
        f"{setting!r} does not name devices. VLM_ASSETS_DEVICES is one of: auto, given, cpu, cpu:2 (two CPU "
        "slots), or a list of numbers or UUIDs as `nvidia-smi -L` shows them, such as 0,1 or GPU-8f1c."
    )


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
    """Why the driver could not be asked, in its own words. Where it is set, no other field is reliable."""


class Nvml(Protocol):
    """The seam to the driver: tests put recorded readings here."""

    def readings(self) -> list[GpuReading]:
        """All GPUs and MIG instances in the order of nvidia-smi, read anew; [] where there is no driver."""
        ...


class DriverNvml:
    """NVML through nvidia-ml-py, opened and closed at each reading, so that no state outlives a GPU reset."""

    def cuda_version(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver runs, major and minor; None where it does not say."""
        import pynvml

        try:
            pynvml.nvmlInit()
            version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return None
        return version // 1000, version % 1000 // 10

    def driver_version(self) -> str | None:
        """The driver's own version, such as ``580.65.06``; None where there is none or it does not say."""
        import pynvml

        try:
            pynvml.nvmlInit()
            version = pynvml.nvmlSystemGetDriverVersion()
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return None
        return str(version)

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
    """The GPU's reading with name, id and memory of ``handle``: the GPU itself or one instance."""
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
            continue  # Slots are numbered sparsely.
    return handles


def _ask(pynvml: Any, question: Callable[[], Any]) -> Any:
    """The driver's answer, or None where it has none: consumer cards have no ECC, older drivers fewer
    functions.

    Only errors that say that the GPU itself is gone are raised: a GPU is needed, an optional reading is not.
    """
    try:
        return question()
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired):
        raise
    except Exception:  # Later drivers, or another nvidia-ml-py, may raise other errors.
        return None

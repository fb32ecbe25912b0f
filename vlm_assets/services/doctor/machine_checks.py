"""What ``doctor`` tries of the machine: space, storage, devices, limits and the clock."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.extensions import Findings, Level, describing_model
from vlm_assets.config.resource_settings import build_gpu, runs_at_once
from vlm_assets.config.settings import CHECKOUT, IS_CHECKOUT, PREFIX, Settings
from vlm_assets.services.measurement import read_measurements
from vlm_assets.services.trial import COPIES
from vlm_durable.commands import command
from vlm_durable.files import file_systems
from vlm_durable.wording import counted
from vlm_engine.devices.find import Device, DriverNvml, GpuReading, torch_trouble
from vlm_engine.devices.health import HealthCheck

_ROW_BYTES: Final = 4096.0
"""Of a description and its vector, where nothing is measured yet."""
_RUN_BYTES: Final = 1 << 30
"""Memory of a run beside its model: interpreter, torch, Dagster and the images of a few batches."""
_FILES: Final = 4096
_SHARED_BYTES: Final = 64 << 20
_HOT: Final = 85
_UNSYNCHRONISED: Final = 5
_CAMPAIGN_MINUTES: Final = 0.1
_GIB: Final = 1 << 30


def examine_space(settings: Settings) -> Findings:
    """The home's disk has room for the results that are to come, and for their files. Raises CatalogError."""
    catalog = Catalog.open(settings.home)
    measured = next(iter(read_measurements(settings)), None)
    row = _ROW_BYTES if measured is None else measured.row_bytes + 4096.0
    published = sum(
        path.stat().st_size
        for asset in (settings.descriptions, settings.embeddings)
        if asset.published.is_dir()
        for path in asset.published.iterdir()
    )
    need = COPIES * max(0.0, row * catalog.rows - published)
    disk = os.statvfs(settings.home)
    free = disk.f_bavail * disk.f_frsize
    sentence = f"{free / 1e9:,.1f} GB are free, and about {need / 1e9:,.1f} GB are to come"
    if measured is None:
        sentence += f" (a guess: {command('plan')} measures)"
    if free < need:
        yield "error", f"{sentence}: make room in {settings.home}, or {command('prune')}."
    elif free < 1.5 * need:
        yield "warning", f"{sentence}: a second generation would not fit beside it."
    else:
        yield "ok", f"{sentence}."
    files = 8 * 2 * len(catalog.ranges)
    if disk.f_files and disk.f_favail < files:
        yield (
            "error",
            f"{counted(disk.f_favail, 'files')} can be made on this disk and about {files:,} will be:"
            f" take another file"
            " system, or larger ranges.",
        )


def examine_storage(settings: Settings) -> Findings:
    """The home's file system keeps what was made durable."""
    if IS_CHECKOUT:
        # With kills and flips on the spot, which are part of a checkout alone.
        program = [sys.executable, "-m", "faults", "--home-dir", str(settings.home)]
        done = subprocess.run(
            [*program, "--minutes", str(_CAMPAIGN_MINUTES)],
            cwd=CHECKOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
        )
        lines = [line.removeprefix("- ") for line in done.stdout.splitlines()]
        if done.returncode not in (0, 1) or not lines:
            raise RuntimeError(f"The storage could not be tried: {done.stderr.strip()[-300:]}")
        against = " ".join(lines[1:]) if done.returncode else ""
        sentence = " ".join(lines)
    else:
        verdict = file_systems.examine(settings.home)
        against, sentence = " ".join(verdict.against), verdict.sentences().replace("\n- ", " ")
    yield ("error", f"{settings.home}: {against}") if against else ("ok", sentence)


def examine_devices(settings: Settings) -> Findings:
    """Each device is sound, and the model fits into its memory. Raises DeviceError."""
    gpu = build_gpu(settings)
    devices = gpu.find()
    has_gpu = any(device.kind == "cuda" for device in devices)
    readings = {reading.uuid: reading for reading in DriverNvml().readings()} if has_gpu else {}
    health = HealthCheck(DriverNvml(), round(settings.device_min_free_gib * _GIB)).judge_all(devices)
    held = {holder.device.id for holder in gpu.leases().holders()}
    left_out = gpu.left_out_devices().left_out()
    weights = weight_bytes(settings)
    if has_gpu and (trouble := torch_trouble(DriverNvml())) is not None:
        yield "error", trouble
    for device in devices:
        findings: list[tuple[Level, str]] = []
        findings += [("error", sentence) for sentence in health[device.id].refused]
        findings += [("warning", sentence) for sentence in health[device.id].hot]
        if device.id in left_out:
            findings.append(("error", left_out[device.id].sentence(device.id)))
        findings += _memory_findings(device, readings.get(device.id), weights, is_held=device.id in held)
        size = "" if device.memory_bytes is None else f", {device.memory_bytes / _GIB:.1f} GiB"
        yield from findings or [("ok", f"{device.id} ({device.name}{size}): nothing speaks against it.")]


def _memory_findings(device: Device, reading: GpuReading | None, weights: int, *, is_held: bool) -> Findings:
    """Whether the weights fit into a device, how hot it is, and who else takes its memory."""
    memory = device.memory_bytes
    if memory is not None and weights * 1.2 > memory:
        yield (
            "error",
            f"{device.id} has {memory / _GIB:.1f} GiB and the model's files alone have"
            f" {weights / _GIB:.1f} GiB: take a smaller or quantized model, or a larger device.",
        )
    if reading is None:
        return
    if reading.temperature is not None and reading.temperature >= _HOT:
        yield "warning", f"{device.id} is at {reading.temperature} °C: look at its cooling."
    if reading.free_bytes is not None and memory is not None:
        taken = memory - reading.free_bytes
        if not is_held and taken > memory / 10:
            yield "warning", f"Other processes hold {taken / _GIB:.1f} GiB of {device.id}: see `nvidia-smi`."


def weight_bytes(settings: Settings) -> int:
    """Bytes of the describing model's weights; 0 where it is no local folder."""
    model = describing_model(settings)
    folder = Path(model) if model else None
    if folder is None or not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def examine_limits(settings: Settings) -> Findings:
    """Open files, shared memory and memory are enough for the runs. Raises DeviceError."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        level: Level = "warning" if soft >= 1024 else "error"
        yield (
            level,
            f"{counted(soft, 'open files are', 'open file is')} allowed: `ulimit -n {_FILES}` (systemd:"
            f" LimitNOFILE={_FILES}).",
        )
    else:
        yield "ok", f"Open files: {'no limit' if soft == resource.RLIM_INFINITY else f'{soft:,}'}."
    shared = Path("/dev/shm")  # noqa: S108 - looked at, not written
    if shared.is_dir():
        disk = os.statvfs(shared)
        size = disk.f_blocks * disk.f_frsize
        if size < _SHARED_BYTES:
            yield (
                "warning",
                f"Shared memory is {size / (1 << 20):.0f} MiB: a model server needs more (--shm-size).",
            )
    devices = build_gpu(settings).find()
    on_cpu = sum(device.kind == "cpu" for device in devices)
    runs = max(len(devices), runs_at_once(settings))
    need = runs * _RUN_BYTES + (1.2 * weight_bytes(settings)) * max(1, on_cpu)
    memory = memory_bytes()
    sentence = f"{memory / _GIB:.1f} GiB of memory; {counted(runs, 'runs')} at once: about"
    sentence += f" {need / _GIB:.1f} GiB"
    if memory < need:
        yield "warning", f"{sentence}: use fewer devices ({PREFIX}DEVICES), or give the container more."
    else:
        yield "ok", f"{sentence}."


def memory_bytes() -> float:
    """Memory that this machine, or this container, can still give."""
    limits = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(float(line.split()[1]) * 1024)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            limits.append(float(Path(limit).read_text()) - float(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # No limit, or another version of control groups.
    return max(0.0, min(limits, default=math.inf))


def examine_clock(settings: Settings) -> Findings:
    """The clock is right, as far as this machine can tell."""
    newest = max((path.stat().st_mtime for path in settings.home.iterdir()), default=0.0)
    ahead = newest - time.time()
    if ahead > 60:
        yield (
            "error",
            f"Files of {settings.home} are {ahead:.0f} s in the future: the clock was put back, or the disk's"
            " server has another time. Put the clock right.",
        )
        return
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    if state == _UNSYNCHRONISED:
        yield "warning", "Nothing keeps this clock right (no NTP): alerts and signatures for S3 depend on it."
    else:
        yield "ok", "The clock is plausible."

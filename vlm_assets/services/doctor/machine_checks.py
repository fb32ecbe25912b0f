"""What ``doctor`` tries of the machine and its services.

Space, storage, devices, limits, clock; the control state, the store, alert targets and Dagster.
"""

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

import sqlalchemy as sa

from sensors.ticks import Ticks
from vlm_assets.config.extensions import Findings, Level, describing_model, launcher_of
from vlm_assets.config.resource_settings import build_gpu, control_state, runs_at_once
from vlm_assets.config.settings import CHECKOUT, IS_CHECKOUT, PREFIX, Settings
from vlm_assets.services.alert_delivery import build_delivery, send_trial
from vlm_assets.services.measurement import read_measurements
from vlm_assets.services.trial import COPIES
from vlm_assets.webserver.api import DagsterApi, Queue
from vlm_assets.webserver.home import POOL, STARTING_SECONDS, damages, running_address, start_timeout
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files import file_systems
from vlm_durable.state.pause import pause_of
from vlm_durable.state.tables import alert_events
from vlm_durable.wording import counted, duration
from vlm_engine.devices.find import Device, DriverNvml, GpuReading, torch_trouble
from vlm_engine.devices.health import HealthCheck

_ROW_BYTES: Final = 4096.0
"""The size of a description with its vector, where nothing is measured yet."""
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
        for asset in settings.partitioned_assets
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


_ALERT_SECONDS: Final = 15.0
_DEFINITIONS_SECONDS: Final = 60.0
_STORE_SECONDS: Final = 5.0
_STATE_SECONDS: Final = 1.0
_RESTORED_SECONDS: Final = 7 * 24 * 3600.0


def examine_state(settings: Settings) -> Findings:
    """The control state takes a change, and nothing is paused. Raises ControlStateError."""
    began = time.monotonic()
    state = control_state(settings)
    # Changes nothing, and needs all that a change needs.
    state.write(lambda connection: connection.execute(alert_events.delete().where(sa.false())).rowcount)
    paused = pause_of(state)
    where = "SQLite in the home" if settings.state_url is None else "Postgres"
    took = time.monotonic() - began
    if took > _STATE_SECONDS:
        yield (
            "warning",
            f"The control state ({where}) answered after {took:.1f} s: each look of a sensor waits as long.",
        )
    else:
        yield "ok", f"The control state ({where}) answers in {1000 * took:.0f} ms."
    for restoration in state.restorations()[-1:]:
        if time.time() - restoration.at < _RESTORED_SECONDS:
            yield "warning", restoration.sentence()
    if paused:
        yield "warning", f"Nothing is started: {paused.sentence()}. {command('devices', 'resume')}."


def examine_store(settings: Settings) -> Findings:
    """The store honours what the order of writers depends on. Raises StoreError."""
    store = settings.mirror
    if not store.keeps_copies:
        yield "ok", f"No store is set ({PREFIX}STORE): this home alone holds what is finished."
        return
    began = time.monotonic()
    store.prove()
    took = time.monotonic() - began
    yield "ok", f"{store} honours conditions and checksums; ten requests took {took:.2f} s."
    if took > _STORE_SECONDS:
        yield "warning", "That is slow: each finished partition takes some ten requests more. Is it far away?"


def examine_alerts(settings: Settings) -> Findings:
    """Every alert target takes a test message, and no alert is open. Raises SettingsError."""
    delivery = build_delivery(settings)
    if not delivery.targets:
        yield (
            "warning",
            f"Nobody is told of trouble: set {PREFIX}ALERT_TARGETS, then {command('alerts', 'test')}.",
        )
    else:
        for target, refusal in send_trial(delivery, settings, seconds=_ALERT_SECONDS):
            if refusal is None:
                yield "ok", f"{target.name} took a test message."
            else:
                yield "error", f"{target.name} did not take a test message: {refusal}."
    open_alerts = delivery.outbox.open_subjects()
    if open_alerts:
        yield "warning", f"{counted(len(open_alerts), 'alerts are', 'alert is')} open: {command('alerts')}."


def examine_dagster(settings: Settings) -> Findings:
    """Dagster runs with the definitions and its daemons, or else the definitions load."""
    for damage in damages(settings.dagster_home) if settings.dagster_home.is_dir() else ():
        yield (
            "error",
            f"Dagster's database {damage.path} is damaged ({damage.why}): start Dagster again, it is"
            " renewed.",
        )
    seconds = start_timeout(settings.dagster_home)
    if seconds is not None and seconds < STARTING_SECONDS:
        yield (
            "warning",
            f"A run has {duration(seconds)} to start, and a busy machine takes longer: a person changed"
            f" {settings.dagster_home / 'dagster.yaml'}. Set start_timeout_seconds in it to"
            f" {STARTING_SECONDS:.0f}, or move it away, and start Dagster again, which writes a new one.",
        )
    address = running_address(settings.dagster_home)
    if address is not None:
        silent = Ticks(control_state(settings)).silence(now=time.time())
        if silent is not None:
            yield "error", f"{silent.title}: {silent.actual}. {silent.next_step}"
        api = DagsterApi(address, settings.dagster_home)
        if api.definitions_loaded():
            yield "ok", f"Dagster runs at {address} and has the definitions."
        else:
            yield "error", f"Dagster at {address} does not have the definitions: see its log, start it again."
        queue = api.queue(POOL)
        for name, why in queue.failing_daemons.items():
            yield "error", f"Dagster's daemon {name} does not work ({why}): see its log, start Dagster again."
        if not launcher_of(settings).has_sensors:
            yield from pool_findings(queue, runs_at_once(settings))
        return
    environment = {**os.environ, f"{PREFIX}HOME": str(settings.home)}
    environment.pop("DAGSTER_HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", "import vlm_assets.definitions"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_DEFINITIONS_SECONDS,
    )
    if done.returncode:
        yield "error", f"The definitions do not load: {done.stderr.strip().splitlines()[-1]}"
    else:
        yield "ok", f"Dagster does not run on this home; the definitions load. {command('serve')} starts it."


def pool_findings(queue: Queue, may_work: int) -> Findings:
    """Whether the queue of a running Dagster lets as many runs work at once as may."""
    sentence = (
        f"{counted(queue.queued, 'runs wait', 'run waits')} and {queue.started} work; the pool {POOL}"
        f" lets {queue.slots} work at once"
    )
    if queue.slots == 0:
        yield (
            "error",
            f"{sentence}: nothing starts. Deployment > Concurrency sets it; a start of Dagster does too.",
        )
    elif queue.slots != may_work:
        yield "warning", f"{sentence}, and {may_work} may: start Dagster again, which sets the pool."
    else:
        yield "ok", f"{sentence}."

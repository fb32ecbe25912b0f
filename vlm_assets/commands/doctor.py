"""Everything that a long run will need, tried for real in two minutes; each finding says what to do.

Quick checks for every start, and slow ones for a person who is about to begin.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import resource
import shlex
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np
import sqlalchemy as sa
import typer

from sensors.cluster import STARTING_SECONDS
from sensors.ticks import Ticks
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.extensions import DoctorCheck, Level, describing_model, installed
from vlm_assets.config.resource_settings import (
    build_gpu,
    build_vision_language_model,
    control_state,
    runs_at_once,
)
from vlm_assets.config.settings import CHECKOUT, ENV_FILE, IS_CHECKOUT, PREFIX, Settings
from vlm_assets.services.alert_delivery import build_delivery, send_trial
from vlm_assets.services.measurement import read_measurements
from vlm_assets.services.progress import doing
from vlm_assets.services.request_vector import embed_text
from vlm_assets.services.trial import COPIES, run_trial, sample
from vlm_assets.webserver.api import DagsterApi, Queue
from vlm_assets.webserver.home import POOL, damages, running_address, start_timeout
from vlm_durable.commands import command
from vlm_durable.files import file_systems
from vlm_durable.state.pause import pause_of
from vlm_durable.state.tables import alert_events
from vlm_durable.wording import counted, duration
from vlm_engine.devices.find import DriverNvml, torch_trouble
from vlm_engine.devices.health import HealthCheck
from vlm_engine.devices.leases import NoDeviceFreeError
from vlm_engine.images.images import PropertyJob, people_call, recognised_format
from vlm_engine.images.thumbnails import Thumbnails
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.model_source import NO_EMBEDDER
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import load_schema

Said = Iterator[tuple[Level, str]]

IMAGES: Final = 200
_IMAGES_SECONDS: Final = 40.0
_CAMPAIGN_MINUTES: Final = 0.1
_ALERT_SECONDS: Final = 15.0
_DEFINITIONS_SECONDS: Final = 60.0
_DEVICE_WAIT_SECONDS: Final = 2.0

_ROW_BYTES: Final = 4096.0
"""Of a description and its vector, where nothing is measured yet."""

_RUN_BYTES: Final = 1 << 30
"""Memory of a run beside its model: interpreter, torch, Dagster and the images of a few batches."""

_SUFFIXES: Final = {"JPG": "JPEG", "JFIF": "JPEG", "HEIF": "HEIC", "TIF": "TIFF"}

_FILES: Final = 4096
_SHARED_BYTES: Final = 64 << 20
_HOT: Final = 85
_UNSYNCHRONISED: Final = 5
_UNREADABLE_WARN: Final = 0.01

_STORE_SECONDS: Final = 5.0
_STATE_SECONDS: Final = 1.0
_RESTORED_SECONDS: Final = 7 * 24 * 3600.0

_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Diagnosis:
    """What one check says."""

    check: str
    level: Level
    message: str


def examine(settings: Settings, *, quick: bool = False) -> Iterator[Diagnosis]:
    """Run the checks, each finding as it is made. A check that fails itself is a finding too."""
    chosen = [check for check in checks() if check.is_quick or not quick]
    for number, check in enumerate(chosen):
        doing(f"trying what a run will need ({check.name}), checks", number, len(chosen))
        try:
            for level, message in check.examine(settings):
                yield Diagnosis(check.name, level, message)
        except Exception as error:
            yield Diagnosis(check.name, "error", str(error).strip() or type(error).__name__)


def checks() -> Sequence[DoctorCheck]:
    """All checks in their order: the quick ones first, those of extensions after the core's quick ones."""
    of_extensions = [check for extension in installed() for check in extension.doctor_checks()]
    return [*QUICK, *sorted(of_extensions, key=lambda check: not check.is_quick), *SLOW]


def _settings(settings: Settings) -> Said:
    """Settings that contradict each other, or mean nothing here."""
    require_models(settings)
    build_prompt(load_schema(settings.description_schema), settings.prompt)
    wrong = list(contradictions(settings))
    yield from wrong
    if not wrong:
        yield "ok", "No setting contradicts another; the schema makes a prompt."


def _neighbours(settings: Settings) -> Said:
    """Other accounts of this machine: what of ours they may write, enter or read."""
    folders = [*settings.layout.open_to_others()]
    if settings.dagster_home.is_dir() and stat.S_IMODE(settings.dagster_home.stat().st_mode) & 0o077:
        folders.append(settings.dagster_home)
    for folder in folders:
        right = "go-w" if folder == settings.home else "go-rwx"
        yield (
            "error",
            f"Other accounts of this machine may write in or enter {folder}: they could stop the service or"
            f" replace what is in it. Close it to them: {shlex.join(['chmod', right, str(folder)])}",
        )
    mode = ENV_FILE.stat().st_mode if ENV_FILE.is_file() else 0
    if mode & 0o077:
        yield (
            "error" if mode & 0o022 else "warning",
            f"Other accounts of this machine may {'write' if mode & 0o022 else 'read'} {ENV_FILE}, which"
            " decides what runs and may hold secrets. Close it to them:"
            f" {shlex.join(['chmod', '600', str(ENV_FILE)])}",
        )
    elif not folders:
        yield "ok", "No other account of this machine may write in the home or read its settings."


def contradictions(settings: Settings) -> Said:
    """Settings of which each is possible, and which do not go together."""
    if settings.commit_seconds >= settings.stuck_seconds:
        yield (
            "error",
            f"{PREFIX}COMMIT_SECONDS ({settings.commit_seconds:g}) is not below {PREFIX}STUCK_SECONDS"
            f" ({settings.stuck_seconds:g}): a sound worker would be ended between two commits. Commit"
            " sooner.",
        )
    elif settings.commit_seconds > 60:
        yield (
            "warning",
            f"{PREFIX}COMMIT_SECONDS is {settings.commit_seconds:g}: a kill loses more than a minute.",
        )
    if settings.batch_images != "auto" and settings.batch_images < settings.max_images:
        yield (
            "warning",
            f"{PREFIX}BATCH_IMAGES ({settings.batch_images}) is below {PREFIX}MAX_IMAGES"
            f" ({settings.max_images}): properties with more images are a batch alone, which is slow.",
        )
    cores = len(os.sched_getaffinity(0))
    if settings.decode_workers > 2 * cores:
        yield (
            "warning",
            f"{PREFIX}DECODE_WORKERS is {settings.decode_workers} and this process may use {cores} cores.",
        )
    for name, revision in (("model", "model_revision"), ("embedding_model", "embedding_revision")):
        where = getattr(settings, name)
        if where and Path(where).is_dir() and getattr(settings, revision):
            yield (
                "warning",
                f"{PREFIX}{revision.upper()} means nothing for a local folder ({where}): unset it.",
            )
    if settings.embedding_revision and settings.embedding_model is None:
        yield (
            "warning",
            f"{PREFIX}EMBEDDING_REVISION means nothing without {PREFIX}EMBEDDING_MODEL.",
        )
    if isinstance(settings.source, Path) and not settings.source.exists():
        yield "warning", f"{PREFIX}SOURCE: {settings.source} is not there; nothing new can be taken in."


def _catalogue(settings: Settings) -> Said:
    catalog = Catalog.open(settings.home)
    yield "ok", f"{counted(catalog.rows, 'properties')} in {counted(len(catalog.ranges), 'partitions')}."
    if catalog.waiting:
        yield (
            "warning",
            f"{counted(catalog.waiting, 'properties are', 'property is')} too few to fill a partition:"
            f" {command('run', '--missing')} takes"
            " them too.",
        )
    for root in catalog.images.places:
        if isinstance(root, Path) and not root.is_dir():
            yield "error", f"The images' folder {root} is not there: mount it, or ingest again."


def _space(settings: Settings) -> Said:
    catalog = Catalog.open(settings.home)
    measured = next(iter(read_measurements(settings)), None)
    row = _ROW_BYTES if measured is None else measured.row_bytes + 4096.0
    there = sum(
        one.stat().st_size
        for asset in (settings.descriptions, settings.embeddings)
        if asset.published.is_dir()
        for one in asset.published.iterdir()
    )
    need = COPIES * max(0.0, row * catalog.rows - there)
    disk = os.statvfs(settings.home)
    free = disk.f_bavail * disk.f_frsize
    said = f"{free / 1e9:,.1f} GB are free, and about {need / 1e9:,.1f} GB are to come"
    if measured is None:
        said += f" (a guess: {command('plan')} measures)"
    if free < need:
        yield "error", f"{said}: make room in {settings.home}, or {command('prune')}."
    elif free < 1.5 * need:
        yield "warning", f"{said}: a second generation would not fit beside it."
    else:
        yield "ok", f"{said}."
    files = 8 * 2 * len(catalog.ranges)
    if disk.f_files and disk.f_favail < files:
        yield (
            "error",
            f"{counted(disk.f_favail, 'files')} can be made on this disk and about {files:,} will be:"
            f" take another file"
            " system, or larger ranges.",
        )


def _devices(settings: Settings) -> Said:
    gpu = build_gpu(settings)
    devices = gpu.find()
    has_gpu = any(one.kind == "cuda" for one in devices)
    readings = {one.uuid: one for one in DriverNvml().readings()} if has_gpu else {}
    health = HealthCheck(DriverNvml(), round(settings.device_min_free_gib * _GIB)).judge_all(devices)
    holders = {one.device.id for one in gpu.leases().holders()}
    left_out = gpu.left_out_devices().left_out()
    weights = weight_bytes(settings)
    if has_gpu and (trouble := torch_trouble(DriverNvml())) is not None:
        yield "error", trouble
    for device in devices:
        found = health[device.id]
        reading = readings.get(device.id)
        said: list[tuple[Level, str]] = [("error", one) for one in found.refused]
        said += [("warning", one) for one in found.hot]
        if device.id in left_out:
            said.append(("error", left_out[device.id].sentence(device.id)))
        memory = device.memory_bytes
        if memory is not None and weights * 1.2 > memory:
            said.append(
                (
                    "error",
                    f"{device.id} has {memory / _GIB:.1f} GiB and the model's files alone have"
                    f" {weights / _GIB:.1f} GiB: take a smaller or quantized model, or a larger device.",
                )
            )
        if reading is not None and reading.temperature is not None and reading.temperature >= _HOT:
            said.append(("warning", f"{device.id} is at {reading.temperature} °C: look at its cooling."))
        if reading is not None and reading.free_bytes is not None and memory is not None:
            taken = memory - reading.free_bytes
            if device.id not in holders and taken > memory / 10:
                said.append(
                    (
                        "warning",
                        f"Other processes hold {taken / _GIB:.1f} GiB of {device.id}: see `nvidia-smi`.",
                    )
                )
        size = "" if memory is None else f", {memory / _GIB:.1f} GiB"
        yield from said or [("ok", f"{device.id} ({device.name}{size}): nothing speaks against it.")]


def weight_bytes(settings: Settings) -> int:
    """Bytes of the describing model's weights; 0 where it is no local folder."""
    model = describing_model(settings)
    folder = Path(model) if model else None
    if folder is None or not folder.is_dir():
        return 0
    return sum(one.stat().st_size for one in folder.glob("*.safetensors"))


def _limits(settings: Settings) -> Said:
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
    on_cpu = sum(one.kind == "cpu" for one in devices)
    need = len(devices) * _RUN_BYTES + (1.2 * weight_bytes(settings)) * max(1, on_cpu)
    memory = memory_bytes()
    said = f"{memory / _GIB:.1f} GiB of memory; {counted(len(devices), 'runs')} at once: about"
    said += f" {need / _GIB:.1f} GiB"
    if memory < need:
        yield "warning", f"{said}: use fewer devices ({PREFIX}DEVICES), or give the container more."
    else:
        yield "ok", f"{said}."


def memory_bytes() -> float:
    """Memory that this machine, or this container, can still give."""
    known = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            known.append(float(line.split()[1]) * 1024)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            known.append(float(Path(limit).read_text()) - float(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # No limit, or another version of control groups.
    return max(0.0, min(known, default=math.inf))


def _clock(settings: Settings) -> Said:
    newest = max((one.stat().st_mtime for one in settings.home.iterdir()), default=0.0)
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


def _state(settings: Settings) -> Said:
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
    for one in state.restorations()[-1:]:
        if time.time() - one.at < _RESTORED_SECONDS:
            yield "warning", one.sentence()
    if paused:
        yield "warning", f"Nothing is started: {paused.sentence()}. {command('devices', 'resume')}."


def _storage(settings: Settings) -> Said:
    if IS_CHECKOUT:
        # With kills and flips on the spot, which are part of a checkout alone.
        command = [sys.executable, "-m", "faults", "--home-dir", str(settings.home)]
        done = subprocess.run(
            [*command, "--minutes", str(_CAMPAIGN_MINUTES)],
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
        said = " ".join(lines)
    else:
        verdict = file_systems.examine(settings.home)
        against, said = " ".join(verdict.against), verdict.sentences().replace("\n- ", " ")
    yield ("error", f"{settings.home}: {against}") if against else ("ok", said)


def _images(settings: Settings) -> Said:
    catalog = Catalog.open(settings.home)
    jobs, outside, sizes = _sampled_images(catalog)
    formats, bad, kinds = Counter[str](), Counter[str](), Counter[str]()
    first, seen, seconds = "", 0, 0.0
    deadline = time.monotonic() + _IMAGES_SECONDS
    with WorkerPool(
        Thumbnails(16),
        workers=settings.decode_workers,
        prefetch_batches=1,
        max_pixels=settings.max_pixels,
        max_images=1,
        image_seconds=_IMAGES_SECONDS / 4,
        fetch=catalog.images.fetch,
    ) as pool:
        for job, (loaded,) in zip(jobs, pool.feed([[job] for job in jobs]), strict=False):
            doing("reading images", formats.total(), len(jobs))
            name = _format(job.image_paths[0])
            formats[name] += 1
            seen, seconds = seen + loaded.seen, seconds + loaded.seconds
            for failure in loaded.failed:
                bad[name] += 1
                kinds[failure.kind] += 1
                first = first or failure.error
            if time.monotonic() > deadline:
                break
    if outside:
        name = f"outside of {catalog.image_root}"
        formats[name] = bad[name] = kinds["denied"] = outside
    looked = formats.total()
    rate = f"{seen / seconds:.1f} images/s a core" if seconds else "no rate"
    share = f"{bad.total() / max(1, looked):.1%} cannot be read"
    if bad:
        share += f": {', '.join(f'{count} of {formats[name]} {name}' for name, count in bad.most_common())}"
        share += f" ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())})"
    properties = len({job.property_id for job in jobs})
    said = f"{counted(looked, 'images')} of {counted(properties, 'properties')}: "
    said += ", ".join(f"{count} {name}" for name, count in formats.most_common())
    if sizes:
        said += f"; {median(sizes) / 1e6:.2f} MB, {max(sizes) / 1e6:.2f} at most"
    said += f"; {share}; {rate}"
    if not looked:
        yield "warning", "The catalogue lists no image."
    elif bad.total() == looked:
        yield "error", f"{said}. {catalog.images.advice} First: {first}"
    elif kinds["no_decoder"]:
        yield "error", f"{said}. First: {first}"
    elif bad.total() > _UNREADABLE_WARN * looked:
        yield "warning", f"{said}. First: {first}"
    else:
        yield "ok", f"{said}."


def _sampled_images(catalog: Catalog) -> tuple[list[PropertyJob], int, list[int]]:
    """Images of properties spread over the catalogue, any of a property's; how many lie outside; bytes.

    The same images each time, so that what was mended is seen to be.
    """
    jobs, outside, sizes = list[PropertyJob](), 0, list[int]()
    rows = [row for row in sample(catalog, IMAGES).to_pylist() if row["image_uris"]]
    chance = random.Random(catalog.catalog_id)  # noqa: S311 - a sample, no secret
    for row in rows:
        uris = row["image_uris"]
        for at in sorted(chance.sample(range(len(uris)), min(len(uris), IMAGES // len(rows)))):
            try:
                path = catalog.image_path(uris[at])
            except InvalidImagePathError:
                outside += 1
                continue
            if (size := row["image_bytes"][at]) is not None:
                sizes.append(size)
            jobs.append(PropertyJob(row["property_id"], row["ordinal"], (str(path),), (uris[at],)))
    return jobs, outside, sizes


def _format(path: str) -> str:
    """Of a file by its first bytes; by its name where these do not say, and of an object on S3.

    Nothing is decoded: that is for a worker, which such a file may end.
    """
    known = None
    with contextlib.suppress(OSError, ValueError):  # The worker says why.
        if not path.startswith("s3://") and Path(path).is_file():
            with Path(path).open("rb") as stream:
                known = recognised_format(stream.read(64))
    suffix = Path(path).suffix[1:].upper()
    return people_call(known or _SUFFIXES.get(suffix, suffix) or "of no known format")


def _model(settings: Settings) -> Said:
    catalog = Catalog.open(settings.home)
    gpu = replace(build_gpu(settings), wait_seconds=_DEVICE_WAIT_SECONDS)
    try:
        trial = run_trial(settings, catalog, gpu, build_vision_language_model(settings), limit=1)
    except NoDeviceFreeError as error:
        yield "warning", f"Not tried, for every device is at work: {error}"
        return
    one = trial.described[0]
    took = f"loaded in {trial.load_seconds:.1f} s on {trial.device}"
    if one.description is None:
        yield (
            "error",
            f"It {took}, and could not describe {one.property_id} ({one.error_kind}): {one.error}."
            f" {command('compare')} shows more.",
        )
        return
    yield "ok", f"It {took} and described {one.property_id}."
    known = trial.image_tokens
    if known is None:
        return
    if known.fitting < known.images:
        yield (
            "warning",
            f"{known.sentence()}: fewer {PREFIX}MAX_PIXELS or {PREFIX}IMAGE_TOKENS lets all of them fit.",
        )
    else:
        yield "ok", f"{known.sentence()}."


def _embedder(settings: Settings) -> Said:
    if settings.embedding_model is None:
        yield "warning", NO_EMBEDDER
        return
    began = time.monotonic()
    vector = embed_text(settings, "A stone cottage with two floors and a garden.")
    length = float(np.linalg.norm(vector))
    if not math.isfinite(length) or length < 1e-6:
        yield "error", "The embedding model makes a vector that is zero or no numbers: take another one."
        return
    yield (
        "ok",
        f"The embedding model made a vector of {len(vector)} numbers from a text in"
        f" {time.monotonic() - began:.1f} s, loading included.",
    )


def _store(settings: Settings) -> Said:
    store = settings.store
    if store is None:
        yield "ok", f"No store is set ({PREFIX}STORE): this home alone holds what is finished."
        return
    began = time.monotonic()
    store.prove()
    took = time.monotonic() - began
    yield "ok", f"{store} honours conditions and checksums; ten requests took {took:.2f} s."
    if took > _STORE_SECONDS:
        yield "warning", "That is slow: each finished partition takes some ten requests more. Is it far away?"


def _alerts(settings: Settings) -> Said:
    delivery = build_delivery(settings)
    if not delivery.targets:
        yield (
            "warning",
            f"Nobody is told of trouble: set {PREFIX}ALERT_TARGETS, then {command('alerts', 'test')}.",
        )
    else:
        for target, said in send_trial(delivery, settings, seconds=_ALERT_SECONDS):
            if said is None:
                yield "ok", f"{target.name} took a test message."
            else:
                yield "error", f"{target.name} did not take a test message: {said}."
    standing = delivery.outbox.open_subjects()
    if standing:
        yield "warning", f"{counted(len(standing), 'alerts are', 'alert is')} open: {command('alerts')}."


def _dagster(settings: Settings) -> Said:
    for one in damages(settings.dagster_home) if settings.dagster_home.is_dir() else ():
        yield (
            "error",
            f"Dagster's database {one.path} is damaged ({one.why}): start Dagster again, it is renewed.",
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
        if settings.ray_address is None:
            # In a cluster the pool follows the nodes.
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


def pool_findings(queue: Queue, may_work: int) -> Said:
    """Whether the queue of a running Dagster lets as many runs work at once as may."""
    said = (
        f"{counted(queue.queued, 'runs wait', 'run waits')} and {queue.started} work; the pool {POOL}"
        f" lets {queue.slots} work at once"
    )
    if queue.slots == 0:
        yield (
            "error",
            f"{said}: nothing starts. Deployment > Concurrency sets it; a start of Dagster does too.",
        )
    elif queue.slots != may_work:
        yield "warning", f"{said}, and {may_work} may: start Dagster again, which sets the pool."
    else:
        yield "ok", f"{said}."


QUICK: Final = (
    DoctorCheck("settings", _settings, is_quick=True),
    DoctorCheck("neighbours", _neighbours, is_quick=True),
    DoctorCheck("catalogue", _catalogue, is_quick=True),
    DoctorCheck("space", _space, is_quick=True),
    DoctorCheck("devices", _devices, is_quick=True),
    DoctorCheck("limits", _limits, is_quick=True),
    DoctorCheck("clock", _clock, is_quick=True),
    DoctorCheck("state", _state, is_quick=True),
)
"""Each takes a fraction of a second."""

SLOW: Final = (
    DoctorCheck("store", _store),
    DoctorCheck("images", _images),
    DoctorCheck("storage", _storage),
    DoctorCheck("dagster", _dagster),
    DoctorCheck("alerts", _alerts),
    DoctorCheck("embedder", _embedder),
    # Last: the device that it takes is this process's until it ends.
    DoctorCheck("model", _model),
)


_EXAMPLES = """\b
vlm-assets doctor
vlm-assets doctor --quick --json"""

COLORS = {"ok": "green", "warning": "yellow", "error": "red"}

Quick = Annotated[bool, typer.Option("--quick", help="Only what takes under two seconds.")]


@app.command("doctor", epilog=_EXAMPLES)
def doctor_command(home: Home = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Try all that a long run will need, and say what is wrong.

    Looks at settings, catalogue, images, storage, space, store, state, devices, model, embedder, alerts,
    limits, clock and Dagster. Describes one property, sends a test message to each alert target, and takes
    two minutes at most. Nothing of the home is changed. Exit code 1 where a check finds an error.
    """
    found = []
    for one in examine(chosen_settings(home), quick=quick):
        found.append(one)
        if not as_json:
            say(f"{one.level:7}  {one.check}: {one.message}", fg=COLORS[one.level])
    if as_json:
        say_as_json([asdict(one) for one in found])
    raise typer.Exit(1 if any(one.level == "error" for one in found) else 0)

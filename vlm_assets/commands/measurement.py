"""A look before weeks of spending: a sample described, small partitions run, and what they took, kept.

``vlm-assets try`` describes a few properties with the engine of a real run, and no row is written. What it
took is kept under everything that decides its rate. ``plan.py``, which says what follows for a catalogue, has
small partitions run in a home of their own too.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, stdev
from typing import IO, Annotated, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer
from pydantic import TypeAdapter, ValidationError

from resources.gpu import GpuResource
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets.fingerprint import description_parts, digest_of
from vlm_assets.assets.property_descriptions import DescriptionWork
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_file import SCHEMA as CATALOG_SCHEMA
from vlm_assets.catalog.ingest import ingest
from vlm_assets.commands.html_page import Card, page, thumbnails, write_page
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, doing_nothing, say, say_as_json
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model
from vlm_assets.config.settings import PREFIX, Settings, of_env_file
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, write_new
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted, duration
from vlm_engine.devices.find import Device, named
from vlm_engine.ladder import Described
from vlm_engine.protocol import ImageTokens, MeasuringEngine

COPIES = 2
"""Copies of a published file at rest: itself and its verified second copy."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """What a sample took.

    seconds: after the model was loaded. bytes: of the sample's rows as parquet. batches: properties, images
    and seconds of wall time of each.
    start_seconds: that the process of a run takes to start. partition_rows: properties of a partition.
    image_tokens: what images cost, where the engine knows. cpu_seconds: of this process and its workers,
    after the model was loaded. not_used: by property, why images of it that can be read were not shown.
    images_listed: by property, how many it has.
    """

    described: tuple[Described, ...]
    catalogue_rows: int
    device: str
    devices: int
    load_seconds: float
    seconds: float
    bytes: int
    batches: tuple[tuple[int, int, float], ...]
    start_seconds: float = 0.0
    partition_rows: int = 1
    image_tokens: ImageTokens | None = None
    cpu_seconds: float = 0.0
    not_used: Mapping[str, str] = field(default_factory=dict)
    images_listed: Mapping[str, int] = field(default_factory=dict)

    def images_sentence(self, one: Described) -> str:
        """How many of its images the model saw, and why not all; empty where it saw all."""
        why = [self.not_used[one.property_id]] if one.property_id in self.not_used else []
        why += [f"{failure.uri} left out ({failure.kind}): {failure.error}" for failure in one.images_failed]
        if not why:
            return ""
        listed = self.images_listed.get(one.property_id, one.images_seen + len(one.images_failed))
        begin = "described from" if one.status == "ok" else "saw"
        return f"{begin} {one.images_seen} of {counted(listed, 'images')}; {'; '.join(why)}"

    @property
    def properties_per_second(self) -> float:
        """On one device, over whole partitions, with the start of each one's process and model."""
        seconds = self.start_seconds + self.load_seconds
        return self.partition_rows / (seconds + self.partition_rows * self.seconds / len(self.described))

    @property
    def images_per_second(self) -> float:
        """On one device, with the same starts as ``properties_per_second``."""
        return self.properties_per_second * self.images / len(self.described)

    @property
    def images(self) -> int:
        """Of the sample, as they were shown."""
        return sum(one.images_seen for one in self.described)

    @property
    def days(self) -> float:
        """For the whole catalogue on all devices found."""
        return self.catalogue_rows / self.properties_per_second / self.devices / 86_400

    @property
    def disk_bytes(self) -> float:
        """For the descriptions of the whole catalogue, second copies included."""
        return COPIES * self.bytes / len(self.described) * self.catalogue_rows


def sample(catalog: Catalog, limit: int, among: Collection[str] | None = None) -> pa.Table:
    """Up to ``limit`` rows of the catalogue, evenly spread over it, so that the rate holds for all of it.

    among: only properties with these ids.
    """
    there: Sequence[int] = range(catalog.rows) if among is None else catalog.ordinals_of(among)
    count = min(limit, len(there))
    ordinals = [there[index * len(there) // count] for index in range(count)]
    rows = [
        catalog.slice(wanted).take(pa.array([ordinal - wanted.start for ordinal in some]))
        for wanted, some in groupby(ordinals, catalog.range_of)
    ]
    return pa.concat_tables([CATALOG_SCHEMA.empty_table(), *rows])


def run_trial(
    settings: Settings,
    catalog: Catalog,
    gpu: GpuResource,
    model: VisionLanguageModel,
    *,
    limit: int,
    among: Collection[str] | None = None,
    name: str = "the sample",
) -> Trial:
    """Describe a sample on a leased device. Raises CatalogError, DeviceError, ModelLoadError, SchemaError.

    name: of the sample, for who waits.
    """
    doing("reading the catalogue")
    work = DescriptionWork.for_range(settings, catalog, catalog.range_of(0), model)
    work = replace(work, properties=sample(catalog, limit, among))
    batches = work.plan(frozenset())
    digest = model.server_digest(work.prompt)
    devices = len(gpu.find())  # Before the lease: pinning hides the others from this process.
    lease = gpu.lease(run_id="trial", partition="sample", step="try", log=_log, server_digest=digest)
    described: list[Described] = []
    tables: list[pa.Table] = []
    tried: list[tuple[int, int, float]] = []
    of_workers = _cpu_seconds(resource.RUSAGE_CHILDREN)
    doing(f"loading the model on {lease.device.id}")
    with work.workers(lease.device, batches) as workers:
        started = time.monotonic()
        engine = work.model.load(lease.device, schema=work.schema, prompt=work.prompt)
        loaded = before = time.monotonic()
        spent = _cpu_seconds(resource.RUSAGE_SELF)
        doing(f"describing {name}", 0, work.properties.num_rows)
        with work.feeding(engine, workers) as feeding:
            for batch in feeding.described(work.load(workers, batches)):
                images = sum(one.images_seen for one in batch.described)
                tried.append((len(batch.described), images, time.monotonic() - before))
                before = time.monotonic()
                described += batch.described
                doing(f"describing {name}", len(described), work.properties.num_rows)
                tables.append(work.rows(batch.described, engine, lease.device))
            ended, spent = time.monotonic(), _cpu_seconds(resource.RUSAGE_SELF) - spent
    spent += _cpu_seconds(resource.RUSAGE_CHILDREN) - of_workers
    doing("starting the process of a run, to time it")
    start_seconds = _start_seconds()
    stream = io.BytesIO()
    rows = pa.concat_tables(tables)
    pq.write_table(rows, stream, compression="zstd")
    named = ("property_id", "images_not_used_reason")
    reasons = zip(*(rows[name].to_pylist() for name in named), strict=True)
    return Trial(
        described=tuple(sorted(described, key=lambda one: one.ordinal)),
        catalogue_rows=catalog.rows,
        device=f"{lease.device.id} ({lease.device.name})",
        devices=devices,
        load_seconds=loaded - started,
        seconds=ended - loaded,
        bytes=stream.tell(),
        batches=tuple(tried),
        start_seconds=start_seconds,
        partition_rows=max(1, catalog.rows // max(1, len(catalog.ranges))),
        image_tokens=engine.image_tokens if isinstance(engine, MeasuringEngine) else None,
        cpu_seconds=spent,
        images_listed=dict(
            zip(
                work.properties["property_id"].to_pylist(),
                pc.list_value_length(work.properties["image_uris"]).to_pylist(),
                strict=True,
            )
        ),
        not_used={property_id: reason for property_id, reason in reasons if reason is not None},
    )


_PAGE_PROPERTIES: Final = 200
_PAGE_IMAGES: Final = 12
_PAGE_HEIGHT: Final = 160


def cards(trial: Trial, catalog: Catalog) -> list[Card]:
    """Of a page: each property's first images beside its answer, or why it has none. Raises CatalogError."""
    shown = trial.described[:_PAGE_PROPERTIES]
    rows = [catalog.find(one.property_id) for one in shown]
    uris = [() if row is None else row.image_uris for row in rows]
    made = thumbnails(catalog, (one[:_PAGE_IMAGES] for one in uris), height=_PAGE_HEIGHT)
    return [
        Card(
            one.property_id,
            trial.images_sentence(one),
            files,
            {"failed": f"{one.error_kind}: {one.error}"} if one.description is None else one.description,
            uris=named[:_PAGE_IMAGES],
            of=len(named),
        )
        for one, files, named in zip(shown, made, uris, strict=True)
    ]


def _cpu_seconds(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


@cache
def _start_seconds() -> float:
    """What a run's process takes before it can load a model: Dagster, and these definitions."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import vlm_assets.definitions"], check=False, capture_output=True)
    return time.monotonic() - began


_OLD_SECONDS: Final = 24 * 3600.0
_COMMITS: Final = 5

_LOOK_SECONDS: Final = 2.0

RUN_ROWS: Final = 20
"""Properties of a measured partition, at most: what a larger one takes beyond it follows from the rate."""

LAUNCH_SECONDS: Final = 1.5
"""Between the end of a run and the start of the next one's process: Dagster's queue looks every second."""

_DAGSTER_SECONDS: Final = 20.0
"""Until Dagster is started and the first run launched, on two cores."""

STEADY_RUNS: Final = 4
"""Runs with all devices at work that are measured, at least."""

_HELD_UP: Final = 3.0
"""A run that took more than this many times the median was held up."""

_SHARED: Final = ("leases", "models")
"""Folders of the state that the runs in a home of their own share: devices are leased as ever."""

_OWN: Final = (
    "STORE",
    "STATE_URL",
    "RAY_ADDRESS",
    "ALERT_TARGETS",
    "UI_ADDRESS",
    "SOURCE",
    "RUN_NEW_RANGES_AFTER_HOURS",
)
"""Settings that runs in a home of their own do without: they reach nobody and nothing outside of it."""


@dataclass(frozen=True)
class MeasuredRun:
    """Real runs of small partitions under Dagster, both assets each: seconds from launch to publication.

    properties, images: of a partition. devices: that worked at once. seconds: with all devices at work;
    alone_seconds: with one at work. between_seconds: on a device, from a publication to the next launch. The
    first on each device are left out: on a new machine they compile modules and fill caches, once.
    repetitions: runs with all devices at work. spread: standard deviation of the logarithm of their seconds.
    """

    properties: int
    images: float
    devices: int
    seconds: float
    alone_seconds: float
    between_seconds: float
    repetitions: int = 0
    spread: float = 0.0

    @classmethod
    def of(
        cls, times: Sequence[tuple[float, float]], *, properties: int, images: float, devices: int
    ) -> Self:
        """From launches and publications (unix seconds): a first wave, more of them, and one alone."""
        launched = sorted(began for began, _ in times)
        seconds = [ended - began for began, ended in sorted(times)]
        steady = seconds[devices:-1] if devices > 1 else seconds[devices:]
        # A run that a device or a machine held up is a failure, and a plan adds failures by itself.
        steady = [one for one in steady if one <= _HELD_UP * median(steady)]
        gaps = [
            began - ended
            for began, ended in zip(launched[devices:], sorted(ended for _, ended in times), strict=False)
        ]
        return cls(
            properties,
            images,
            devices,
            seconds=fmean(steady),
            alone_seconds=min(seconds[-1], fmean(steady)) if devices > 1 else fmean(steady),
            between_seconds=max(0.0, median(gaps)),
            repetitions=len(steady),
            spread=stdev(map(math.log, steady)) if len(steady) > 1 else 0.0,
        )


@dataclass(frozen=True)
class Measurement:
    """What was measured under everything that decides a rate.

    name: a digest of that. at: unix seconds. batches: properties, images and seconds of wall time of
    each. batch_images: of the largest. row_bytes: of a description as parquet. commit_seconds: of one
    durable commit on the home's storage. start_seconds: that the process of a run takes to start. run:
    None until one was measured, and with a model server: that stays loaded from run to run in a real
    home.
    """

    name: str
    at: float
    model: str
    engine: str
    device: str
    max_pixels: int
    batch_size: int
    batch_images: int
    load_seconds: float
    cpu_seconds: float
    batches: tuple[tuple[int, int, float], ...]
    row_bytes: float
    commit_seconds: float
    start_seconds: float
    run: MeasuredRun | None = None

    @property
    def images(self) -> int:
        """All that were shown."""
        return sum(images for _, images, _ in self.batches)

    @property
    def steady(self) -> tuple[tuple[int, int, float], ...]:
        """The batches without the first, which pays for what is made once; all where there are too few."""
        return self.batches[1:] if len(self.batches) > 2 else self.batches

    @property
    def seconds_an_image(self) -> float:
        """Of one device, model loaded."""
        return sum(one[2] for one in self.steady) / max(1, sum(one[1] for one in self.steady))

    @property
    def cpu_an_image(self) -> float:
        """Seconds of a core."""
        return self.cpu_seconds / max(1, self.images)


_MEASUREMENT = TypeAdapter(Measurement)


def keep_trial(settings: Settings, model: VisionLanguageModel, trial: Trial) -> Measurement:
    """Keep what a trial measured, in place of an earlier one of the same name. Raises OSError."""
    measured = Measurement(
        name=_name(settings, model, trial.device),
        at=time.time(),
        model=model.exact()[0],
        engine=_engine(model),
        device=trial.device,
        max_pixels=settings.max_pixels,
        batch_size=settings.batch_size,
        batch_images=max(images for _, images, _ in trial.batches),
        load_seconds=trial.load_seconds,
        cpu_seconds=trial.cpu_seconds,
        batches=trial.batches,
        row_bytes=trial.bytes / max(1, len(trial.described)),
        commit_seconds=_commit_seconds(settings, trial.bytes),
        start_seconds=trial.start_seconds,
    )
    old = next((one for one in kept(settings) if one.name == measured.name), None)
    return keep(settings, replace(measured, run=old.run if old else None))


def kept(settings: Settings) -> list[Measurement]:
    """All measurements of the home, newest first; one that does not read is left out: it can be made anew."""
    found = []
    for path in _folder(settings).glob("*.json"):
        with contextlib.suppress(OSError, BrokenSealError, ValidationError):
            found.append(_MEASUREMENT.validate_python(read_sealed(path)))
    return sorted(found, key=lambda one: one.at, reverse=True)


def measurement_of_now(
    settings: Settings, model: VisionLanguageModel, gpu: GpuResource
) -> Measurement | None:
    """The measurement that fits the settings, on a device that is here; None where there is none."""
    devices = [f"{one.id} ({one.name})" for one in gpu.find()]
    names = {_name(settings, model, device) for device in devices}
    return next((one for one in kept(settings) if one.name in names), None)


def measure(
    settings: Settings,
    catalog: Catalog,
    gpu: GpuResource,
    model: VisionLanguageModel,
    *,
    limit: int,
    tell: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure and keep what is not kept yet: a sample, then real runs of small partitions.

    tell: is told before each of the two what it is, and of the second how long it takes. Without it, nothing
    is shown. Raises what ``run_trial`` raises, CommandError, OSError, and FormatVersionError.
    """
    said = tell or (lambda sentence: None)
    if model.server is None and not gpu.usable():
        raise CommandError(f"Every device is left out, so nothing can be measured: {command('devices')}.")
    found = measurement_of_now(settings, model, gpu)
    if found is None:
        said(sample_announcement(catalog, model, limit))
        if model.server is None:
            _try_apart(limit, quiet=tell is None)
            found = measurement_of_now(settings, model, gpu)
        else:
            found = keep_trial(settings, model, run_trial(settings, catalog, gpu, model, limit=limit))
    if found is None:
        raise CommandError(
            f"The settings changed while a sample was described. Do it again: {command('plan')}."
        )
    if found.run is None and model.server is None:
        said(runs_announcement(catalog, found, len(gpu.usable())))
        found = keep(settings, replace(found, run=_measured_run(settings, catalog, gpu.usable())))
    return found


_NOTHING_WRITTEN: Final = "nothing of it is written into the home's results, and Ctrl-C ends it."


def sample_announcement(catalog: Catalog, model: VisionLanguageModel, limit: int) -> str:
    """What is measured first where nothing is known; how long it takes shows by how far it is."""
    rest = ", and how long the rest of measuring takes is said after it" if model.server is None else ""
    size = counted(min(limit, catalog.rows), "properties")
    return (
        f"Nothing is measured under these settings: a sample of {size} is described, once{rest};"
        f" {_NOTHING_WRITTEN}"
    )


def runs_announcement(catalog: Catalog, found: Measurement, devices: int) -> str:
    """Which small partitions run, and how long that takes by what the sample took."""
    runs, rows = runs_to_measure(devices), _run_rows(catalog)
    a_property = sum(one[1] for one in found.batches) / max(1, sum(one[0] for one in found.batches))
    a_run = found.start_seconds + found.load_seconds + rows * a_property * found.seconds_an_image
    seconds = _DAGSTER_SECONDS + runs / devices * (a_run + LAUNCH_SECONDS)
    return (
        f"What a run takes is not measured under these settings: {counted(runs, 'small partitions')} of"
        f" {counted(rows, 'properties')} run, as for real. That takes about {duration(seconds)}, once;"
        f" {_NOTHING_WRITTEN}"
    )


def _try_apart(limit: int, *, quiet: bool) -> None:
    """Describe a sample and keep what it took, in a process of its own: its device is free when it has ended.

    It shows by itself how far it is. Raises CommandError.
    """
    doing_nothing()
    program = Path(sys.executable).with_name("vlm-assets")
    words = [str(program), "try", "--limit", str(limit), *(["--json"] if quiet else [])]
    if subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode:
        raise CommandError(
            "A sample could not be described, so nothing can be planned. Why stands above;"
            f" {command('doctor')} tries all that a run needs."
        )


def _run_rows(catalog: Catalog) -> int:
    """Properties of a measured partition."""
    return min(RUN_ROWS, max((len(one) for one in catalog.ranges), default=catalog.rows))


def runs_to_measure(devices: int) -> int:
    """A first wave on all devices, at least ``STEADY_RUNS`` more, and one alone."""
    return devices * (1 + math.ceil(STEADY_RUNS / devices)) + (devices > 1)


def _measured_run(settings: Settings, catalog: Catalog, usable: Sequence[Device]) -> MeasuredRun:
    """Run small partitions of a sample as `vlm-assets run` does, in a home of their own on the same disk.

    All usable devices work at once, as they will: they share cores, and Dagster works beside them.
    """
    devices = len(usable)
    size = _run_rows(catalog)
    count = runs_to_measure(devices)
    rows = sample(catalog, size * count).to_pylist()
    with _scratch(settings) as folder:
        home = folder / "home"
        listing = folder / "listing.jsonl"
        with listing.open("w") as file:
            for number in range(size * count):
                # A small catalogue comes several times, under other names.
                row = rows[number % len(rows)]
                images = [catalog.images.as_written(uri) for uri in row["image_uris"]]
                said = {"property_id": f"{number} {row['property_id']}", "images": images}
                file.write(json.dumps(said) + "\n")
        ingest(listing, home, range_size=size, image_root=catalog.images.places)
        state = home / settings.state_directory.name
        make_directory(state)
        for name in _SHARED:
            make_directory(settings.state_directory / name)
            (state / name).symlink_to(settings.state_directory / name)
        own = settings.model_copy(update={"home": home})
        assets = [own.layout.asset(name) for name in own.computed_assets]
        log = folder / "log"
        with log.open("wb") as output, _running(home, _environment(settings, usable), output) as process:
            began, ended = time.monotonic(), 0
            while process.poll() is None:
                now = len(assets[-1].published_keys())
                if now > ended:
                    ended, left = now, (time.monotonic() - began) / now * (count - now)
                text = "running small partitions" + (f", about {duration(left)} left" if ended else "")
                doing(text, ended, count)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
        times = [[launch_and_end(of, one.key) for of in assets] for one in Catalog.open(home).ranges]
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    published = [[span for span in spans if span is not None] for spans in times]
    whole = [(spans[0][0], spans[-1][1]) for spans in published if len(spans) == len(assets)]
    if len(whole) < count:
        raise CommandError(
            f"{counted(count, 'partitions')} of {counted(size, 'properties')} ran to measure what a run"
            f" takes, and"
            f" {count - len(whole)} did not come to their end: {' '.join(lines[-3:]) or 'nothing was said'}"
            f" {command('doctor')} says what is wrong."
        )
    shown = [min(settings.max_images, len(row["image_uris"])) for row in rows]
    return MeasuredRun.of(whole, properties=size, images=size * fmean(shown), devices=devices)


@contextlib.contextmanager
def _running(
    home: Path, environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """`vlm-assets run` of a home of its own, on any free port; it ends with the context."""
    program = Path(sys.executable).with_name("vlm-assets")
    process = subprocess.Popen(
        [program, "run", "--home", home, "--port", "0"], env=environment, stdout=output, stderr=output
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _environment(settings: Settings, usable: Sequence[Device]) -> dict[str, str]:
    """Of runs in a home of their own: the settings as they are, but for what leads out of it.

    That home knows of no device that is left out: the usable ones are named.
    """
    known = {**of_env_file(), **os.environ}
    left_out = {"DAGSTER_HOME", *(PREFIX + name for name in _OWN)}
    chosen = {"ENV_FILE": os.devnull, "ENGINE": "transformers", "DEVICES": named(usable)}
    if settings.model is not None:
        chosen["MODEL"] = settings.model
    if settings.embedding_model is not None:
        chosen["EMBEDDING_MODEL"] = settings.embedding_model
    return {
        **{name: value for name, value in known.items() if name not in left_out},
        **{PREFIX + name: value for name, value in chosen.items()},
    }


def launch_and_end(asset: AssetFolders, key: str) -> tuple[float, float] | None:
    """When the run that published a partition was launched, and when it was published (unix seconds).

    None where nothing is published. Raises RecordDamagedError.
    """
    record = PublishedPartitions(asset).record(key)
    if record is None or record.metadata.get("began") is None:
        return None
    return float(record.metadata["began"]), datetime.fromisoformat(record.published_at).timestamp()


@contextlib.contextmanager
def _scratch(settings: Settings) -> Iterator[Path]:
    """A folder on the home's disk that goes when it is left; those of killed processes go a day later."""
    folder = _folder(settings) / "runs"
    make_directory(folder)
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > _OLD_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        yield Path(made)


def _commit_seconds(settings: Settings, size: int) -> float:
    """What it takes to make a segment and a manifest durable, as a commit does; the median of a few."""
    spent = []
    with _scratch(settings) as folder:
        for number in range(_COMMITS):
            began = time.monotonic()
            write_new(folder / f"{number}.segment", os.urandom(max(1, size)))
            write_new(folder / f"{number}.manifest", os.urandom(4096))
            spent.append(time.monotonic() - began)
    return sorted(spent)[_COMMITS // 2]


def keep(settings: Settings, measured: Measurement) -> Measurement:
    """Keep it in place of an earlier one of its name. Raises OSError."""
    write_sealed(_folder(settings) / f"{measured.name}.json", asdict(measured))
    return measured


def _folder(settings: Settings) -> Path:
    return settings.state_directory / "measured"


def _engine(model: VisionLanguageModel) -> str:
    return "transformers" if model.server is None else "server"


def _name(settings: Settings, model: VisionLanguageModel, device: str) -> str:
    meaning = description_parts(settings, model)
    chosen = [_engine(model), settings.batch_size, settings.batch_images, settings.decode_workers, device]
    return digest_of({"meaning": meaning, "chosen": chosen})


_EXAMPLES = """\b
vlm-assets try --limit 20
vlm-assets try --limit 50 --html tried.html"""


@app.command("try", epilog=_EXAMPLES)
def try_command(
    home: Home = None,
    limit: Annotated[int, typer.Option(min=1, help="Properties to describe.")] = 20,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a few properties: the answers, the rate, what all would take.

    No partition is made.
    What was measured is kept for `vlm-assets plan`.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    require_models(current)
    gpu, model = build_gpu(current), build_vision_language_model(current)
    trial = run_trial(current, catalog, gpu, model, limit=limit)
    keep_trial(current, model, trial)
    if html is not None:
        write_page(html, page(f"Tried on {trial.device}", cards(trial, catalog)))
    if as_json:
        figures = ("properties_per_second", "images_per_second", "days", "disk_bytes")
        say_as_json(asdict(trial) | {name: getattr(trial, name) for name in figures})
    else:
        _show(trial)
        if html is not None:
            say(f"Page: {html}")


def _show(trial: Trial) -> None:
    for one in trial.described:
        say(one.property_id, bold=True)
        if one.description is None:
            say(f"  failed ({one.error_kind}): {one.error}")
        else:
            for name, value in one.description.items():
                say(f"  {name}: {value}")
        if left_out := trial.images_sentence(one):
            say(f"  {left_out}")
    say(
        f"\n{counted(len(trial.described), 'properties')} with {counted(trial.images, 'images')} in"
        f" {trial.seconds:.1f} s on"
        f" {trial.device}, after the load: {len(trial.described) / trial.seconds:.2f} properties/s,"
        f" {trial.images / trial.seconds:.1f} images/s."
    )
    say(
        f"In partitions of {trial.partition_rows:,}: {trial.properties_per_second:.2f} properties/s,"
        f" {trial.images_per_second:.1f} images/s. Each begins with {trial.start_seconds:.1f} s to start its"
        f" process and {trial.load_seconds:.1f} s to load the model."
    )
    asked = [one for one in trial.described if one.prompt_tokens]
    prompts = [one.prompt_tokens / one.attempts for one in asked] or [0.0]
    say(
        f"A property's images and prompt are {sum(prompts) / len(prompts):,.0f} tokens here,"
        f" {max(prompts):,.0f} at most."
        + ("" if trial.image_tokens is None else f" As set, at most: {trial.image_tokens.sentence()}.")
    )
    say(
        f"All {trial.catalogue_rows} would take {duration(86_400 * trial.days)} on"
        f" {counted(trial.devices, 'devices')} like it, and {trial.disk_bytes / 1e6:,.1f} MB of disk"
        " for the descriptions and their second copies."
    )

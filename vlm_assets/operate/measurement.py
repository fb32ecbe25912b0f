"""Measurements that are kept: what describing takes here, and what a whole run takes beside describing.

What lives here: keeping a trial under everything that decides its rate, finding the one that fits the
settings of now, and one real run of a small partition in a home of its own. What does not: describing the
sample (``trial.py``), and what follows for a catalogue (``plan.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from resources.devices.resource import GpuResource
from resources.engine.models.vision_language_model import VisionLanguageModel
from resources.storage.files import make_directory, write_new
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed
from resources.store.bucket import place_of
from vlm_assets.assets.fingerprint import description_parts, digest_of
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.operate.trial import Trial, run_trial, sample
from vlm_assets.settings import Settings

_OLD_SECONDS: Final = 24 * 3600.0
_COMMITS: Final = 5

RUN_ROWS: Final = 64
"""Properties of the small partition, at most: what a larger one takes beyond it follows from the rate."""

_SHARED: Final = ("leases", "models")
"""Folders of the state that the run in a home of its own shares: devices are leased as ever."""

_RUN: Final = """
import sys
from pathlib import Path
import dagster as dg
from vlm_assets.definitions import build_defs
from vlm_assets.settings import load_settings
settings = load_settings(
    home=Path(sys.argv[1]), store=None, state_url=None, alert_targets=None, engine="transformers"
)
defs = build_defs(settings)
with dg.DagsterInstance.local_temp(str(Path(sys.argv[1]) / "dagster")) as instance:
    done = dg.materialize(
        [one for one in defs.assets if isinstance(one, dg.AssetsDefinition)],
        selection=["property_descriptions", "property_embeddings"],
        partition_key=sys.argv[2],
        instance=instance,
        resources=defs.resources,
    )
sys.exit(0 if done.success else 1)
"""


class MeasurementError(RuntimeError):
    """A run could not be measured."""


@dataclass(frozen=True)
class MeasuredRun:
    """A real run of one partition, both assets: seconds from its start to its end, and of CPU."""

    properties: int
    images: int
    seconds: float
    cpu_seconds: float


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
    def images_a_property(self) -> float:
        """Of the sample."""
        return self.images / max(1, sum(one[0] for one in self.batches))

    @property
    def cpu_an_image(self) -> float:
        """Seconds of a core."""
        return self.cpu_seconds / max(1, self.images)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Measurement:
        """As it was kept. Raises TypeError, KeyError."""
        run = content["run"]
        return cls(
            **{
                **content,
                "batches": tuple(tuple(one) for one in content["batches"]),
                "run": None if run is None else MeasuredRun(**run),
            }
        )


def keep_trial(settings: Settings, model: VisionLanguageModel, trial: Trial) -> Measurement:
    """Keep what a trial measured, in place of an earlier one of the same name. Raises OSError."""
    before = [0.0, *(one.out_at for one in trial.batches)]
    measured = Measurement(
        name=_name(settings, model, trial.device),
        at=time.time(),
        model=model.exact()[0],
        engine=_engine(model),
        device=trial.device,
        max_pixels=settings.max_pixels,
        batch_size=settings.batch_size,
        batch_images=max(one.images for one in trial.batches),
        load_seconds=trial.load_seconds,
        cpu_seconds=trial.cpu_seconds,
        batches=tuple(
            (one.properties, one.images, one.out_at - start)
            for one, start in zip(trial.batches, before, strict=False)
        ),
        row_bytes=trial.bytes / max(1, len(trial.described)),
        commit_seconds=_commit_seconds(settings, trial.bytes),
        start_seconds=trial.start_seconds,
    )
    old = next((one for one in kept(settings) if one.name == measured.name), None)
    return _keep(settings, replace(measured, run=old.run if old else None))


def kept(settings: Settings) -> list[Measurement]:
    """All measurements of the home, newest first; one that does not read is left out: it can be made anew."""
    found = []
    for path in _folder(settings).glob("*.json"):
        with contextlib.suppress(OSError, BrokenSealError, KeyError, TypeError, ValueError):
            found.append(Measurement.of_json(read_sealed(path)))
    return sorted(found, key=lambda one: one.at, reverse=True)


def measurement_of_now(
    settings: Settings, model: VisionLanguageModel, gpu: GpuResource
) -> Measurement | None:
    """The measurement that fits the settings, on a device that is here; None where there is none."""
    devices = [f"{one.id} ({one.name})" for one in gpu.find()]
    names = {_name(settings, model, device) for device in devices}
    return next((one for one in kept(settings) if one.name in names), None)


def measure(
    settings: Settings, catalog: Catalog, gpu: GpuResource, model: VisionLanguageModel, *, limit: int
) -> Measurement:
    """Measure and keep what is not kept yet: a sample, and one real run of a small partition.

    Raises what ``run_trial`` raises, MeasurementError and OSError.
    """
    found = measurement_of_now(settings, model, gpu)
    run = None if found is None else found.run
    if run is None and model.server is None:
        # Before the sample, whose lease is this process's until it ends.
        run = _measured_run(settings, catalog)
    if found is None:
        found = keep_trial(settings, model, run_trial(settings, catalog, gpu, model, limit=limit))
    return found if found.run == run else _keep(settings, replace(found, run=run))


def _measured_run(settings: Settings, catalog: Catalog) -> MeasuredRun:
    """Materialize one partition of a sample as a run does, in a home of its own on the same disk."""
    usual = max((len(one) for one in catalog.ranges), default=catalog.rows)
    rows = sample(catalog, min(RUN_ROWS, usual)).to_pylist()
    with _scratch(settings) as folder:
        home = folder / "home"
        listing = folder / "listing.jsonl"
        lines = [json.dumps({"property_id": row["property_id"], "images": row["image_uris"]}) for row in rows]
        listing.write_text("\n".join(lines) + "\n")
        ingest(listing, home, range_size=len(rows), image_root=place_of(catalog.image_root), close=True)
        state = home / settings.state_directory.name
        state.mkdir(exist_ok=True)
        for name in _SHARED:
            shared = settings.state_directory / name
            make_directory(shared)
            (state / name).symlink_to(shared)
        (home / "dagster").mkdir()
        key = Catalog.open(home).ranges[0].key
        environment = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
        environment["VLM_ASSETS_HOME"] = str(settings.home)
        if settings.model is not None:
            environment["VLM_ASSETS_MODEL"] = settings.model
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", _RUN, home, key],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
        )
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise MeasurementError(
            f"A run of {len(rows)} properties, to measure what a run takes, ended with {done.returncode}:"
            f" {lines[-1].strip()}. `vlm-assets doctor` says what is wrong."
        )
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    images = sum(min(settings.max_images, len(row["image_uris"])) for row in rows)
    return MeasuredRun(len(rows), images, seconds, cpu)


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


def _keep(settings: Settings, measured: Measurement) -> Measurement:
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

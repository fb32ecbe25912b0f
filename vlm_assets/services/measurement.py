"""What a sample and small partitions took, kept under everything that decides a rate.

``trial.py`` describes the sample, and ``small_runs.py`` runs the partitions. ``forecast.py`` says what
follows for a catalogue.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from resources.gpu import GpuResource
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets.fingerprint import description_parts, digest_of
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.small_runs import (
    LAUNCH_SECONDS,
    MeasuredRun,
    environment,
    measure_small_runs,
    measured_folder,
    run_rows,
    runs_to_measure,
    scratch_folder,
)
from vlm_assets.services.trial import Trial, run_trial
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files.files import write_new
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_durable.wording import counted, duration

_COMMITS: Final = 5

_DAGSTER_SECONDS: Final = 20.0
"""The time until Dagster is started and the first run launched, on two cores."""


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
        """The seconds that one device with its model loaded takes for an image."""
        seconds = sum(seconds for _, _, seconds in self.steady)
        return seconds / max(1, sum(images for _, images, _ in self.steady))

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
    earlier = [other for other in read_measurements(settings) if other.name == measured.name]
    return keep_measurement(settings, replace(measured, run=earlier[0].run if earlier else None))


def read_measurements(settings: Settings) -> list[Measurement]:
    """All measurements of the home, newest first, but those that do not read: they can be made anew."""
    measurements = []
    for path in measured_folder(settings).glob("*.json"):
        with contextlib.suppress(OSError, BrokenSealError, ValidationError):
            measurements.append(_MEASUREMENT.validate_python(read_sealed(path)))
    return sorted(measurements, key=lambda measured: measured.at, reverse=True)


def current_measurement(
    settings: Settings, model: VisionLanguageModel, gpu: GpuResource
) -> Measurement | None:
    """The measurement that fits the settings, on a device that is here; None where there is none."""
    devices = [f"{device.id} ({device.name})" for device in gpu.find()]
    names = {_name(settings, model, device) for device in devices}
    return next((measured for measured in read_measurements(settings) if measured.name in names), None)


def measure(
    settings: Settings,
    catalog: Catalog,
    gpu: GpuResource,
    model: VisionLanguageModel,
    *,
    limit: int,
    report: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure and keep what is not kept yet: a sample, then real runs of small partitions.

    report: called before each of the two with what it is, and before the second with how long it takes.
    Without it, nothing is shown. Raises what ``run_trial`` raises, CommandError, OSError, and
    FormatVersionError.
    """
    if model.server is None and not gpu.usable():
        raise CommandError(f"Every device is left out, so nothing can be measured: {command('devices')}.")
    announce = report or (lambda sentence: None)
    measured = current_measurement(settings, model, gpu)
    if measured is None:
        rest = ", and how long the rest of measuring takes is said after it" if model.server is None else ""
        announce(
            "Nothing is measured under these settings: a sample of"
            f" {counted(min(limit, catalog.rows), 'properties')} is described, once{rest}; {_NOTHING_WRITTEN}"
        )
        if model.server is None:
            _try_apart(settings, limit, quiet=report is None)
            measured = current_measurement(settings, model, gpu)
        else:
            trial = run_trial(settings, catalog, gpu, model, limit=limit)
            measured = keep_trial(settings, model, trial)
    if measured is None:
        raise CommandError(
            f"The settings changed while a sample was described. Do it again: {command('plan')}."
        )
    if measured.run is None and model.server is None:
        announce(runs_announcement(catalog, measured, len(gpu.usable())))
        run = measure_small_runs(settings, catalog, gpu.usable())
        measured = keep_measurement(settings, replace(measured, run=run))
    return measured


_NOTHING_WRITTEN: Final = "nothing of it is written into the home's results, and Ctrl-C ends it."


def runs_announcement(catalog: Catalog, measured: Measurement, devices: int) -> str:
    """Which small partitions run, and how long that takes by what the sample took."""
    runs, rows = runs_to_measure(devices), run_rows(catalog)
    properties = sum(properties for properties, _, _ in measured.batches)
    images_a_property = measured.images / max(1, properties)
    describing = rows * images_a_property * measured.seconds_an_image
    a_run = measured.start_seconds + measured.load_seconds + describing
    seconds = _DAGSTER_SECONDS + runs / devices * (a_run + LAUNCH_SECONDS)
    return (
        f"What a run takes is not measured under these settings: {counted(runs, 'small partitions')} of"
        f" {counted(rows, 'properties')} run, as for real. That takes about {duration(seconds)}, once;"
        f" {_NOTHING_WRITTEN}"
    )


def _try_apart(settings: Settings, limit: int, *, quiet: bool) -> None:
    """Describe a sample and keep what it took, in a process of its own: its device is free when it has ended.

    It shows by itself how far it is. Raises CommandError.
    """
    program = Path(sys.executable).with_name("vlm-assets")
    words = [str(program), "compare", "--limit", str(limit), *(["--json"] if quiet else [])]
    if subprocess.run(words, stdout=subprocess.DEVNULL, env=environment(settings), check=False).returncode:
        raise CommandError(
            "A sample could not be described, so nothing can be planned. Why stands above;"
            f" {command('doctor')} tries all that a run needs."
        )


def _commit_seconds(settings: Settings, size: int) -> float:
    """What it takes to make a segment and a manifest durable, as a commit does; the median of a few."""
    spent = []
    with scratch_folder(settings) as folder:
        for number in range(_COMMITS):
            began = time.monotonic()
            write_new(folder / f"{number}.segment", os.urandom(max(1, size)))
            write_new(folder / f"{number}.manifest", os.urandom(4096))
            spent.append(time.monotonic() - began)
    return sorted(spent)[_COMMITS // 2]


def keep_measurement(settings: Settings, measured: Measurement) -> Measurement:
    """Keep it in place of an earlier one of its name. Raises OSError."""
    write_sealed(measured_folder(settings) / f"{measured.name}.json", asdict(measured))
    return measured


def _engine(model: VisionLanguageModel) -> str:
    return "transformers" if model.server is None else "server"


def _name(settings: Settings, model: VisionLanguageModel, device: str) -> str:
    meaning = description_parts(settings, model)
    chosen = [_engine(model), settings.batch_size, settings.batch_images, settings.decode_workers, device]
    return digest_of({"meaning": meaning, "chosen": chosen})

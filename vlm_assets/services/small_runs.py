"""Real runs of small partitions, in a home of their own on the same disk, and what they took."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean, median, stdev
from typing import IO, Final, Self

from vlm_assets.config.extensions import describing_model, installed
from vlm_assets.config.settings import CHECKOUT, PREFIX, Settings, of_env_file, own_settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_assets.services.trial import sample
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.processes import child_has_ended, end_processes
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted, duration
from vlm_engine.devices.find import Device, named

_OLD_SECONDS: Final = 24 * 3600.0

_LOOK_SECONDS: Final = 2.0

RUN_ROWS: Final = 20
"""Properties of a measured partition, at most: what a larger one takes beyond it follows from the rate."""

LAUNCH_SECONDS: Final = 1.5
"""The time from a run's end to the start of the next process: Dagster's queue looks every second."""

STEADY_RUNS: Final = 4
"""Runs with all devices at work that are measured, at least."""

_HELD_UP: Final = 3.0
"""A run that took more than this many times the median was held up."""

_SHARED: Final = ("leases", "models")
"""Folders of the state that the runs in a home of their own share: devices are leased as ever."""

_OWN: Final = (
    "STORE",
    "STATE_URL",
    "ALERT_TARGETS",
    "UI_ADDRESS",
    "SOURCE",
    "RUN_NEW_RANGES_AFTER_HOURS",
)
"""Settings that runs in a home of their own do without, as those of extensions: they reach nobody and nothing
outside of it."""

_ASKED: Final = ("description_schema", "prompt", "model", "processor_options", "embedding_model")
"""Settings that a question set may have for itself, and the embedder, which it lacks."""


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
    def from_times(
        cls, times: Sequence[tuple[float, float]], *, properties: int, images: float, devices: int
    ) -> Self:
        """Read launches and publications (unix seconds): a first wave, more of them, and one alone."""
        launched = sorted(began for began, _ in times)
        seconds = [ended - began for began, ended in sorted(times)]
        steady = seconds[devices:-1] if devices > 1 else seconds[devices:]
        # A run that a device or a machine held up is a failure, and a plan adds failures by itself.
        steady = [taken for taken in steady if taken <= _HELD_UP * median(steady)]
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


def run_rows(catalog: Catalog) -> int:
    """Properties of a measured partition."""
    return min(RUN_ROWS, max((len(range_) for range_ in catalog.ranges), default=catalog.rows))


def runs_to_measure(devices: int) -> int:
    """A first wave on all devices, at least ``STEADY_RUNS`` more, and one alone."""
    return devices * (1 + math.ceil(STEADY_RUNS / devices)) + (devices > 1)


def measure_small_runs(settings: Settings, catalog: Catalog, usable: Sequence[Device]) -> MeasuredRun:
    """Run small partitions of a sample as `vlm-assets run` does, in a home of their own on the same disk.

    All usable devices work at once, as they will: they share cores, and Dagster works beside them.
    """
    devices = len(usable)
    size = run_rows(catalog)
    count = runs_to_measure(devices)
    rows = sample(catalog, size * count).to_pylist()
    with scratch_folder(settings) as folder:
        home = folder / "home"
        listing = folder / "listing.jsonl"
        with listing.open("w") as file:
            for number in range(size * count):
                # A small catalogue comes several times, under other names.
                row = rows[number % len(rows)]
                images = [catalog.images.as_written(uri) for uri in row["image_uris"]]
                listed = {"property_id": f"{number} {row['property_id']}", "images": images}
                file.write(json.dumps(listed) + "\n")
        ingest(listing, home, range_size=size, image_root=catalog.images.places)
        state = home / settings.state_directory.name
        make_directory(state)
        for name in _SHARED:
            make_directory(settings.state_directory / name)
            (state / name).symlink_to(settings.state_directory / name)
        own = settings.model_copy(update={"home": home})
        # That home has one question set.
        names = [DESCRIPTIONS, *(name for name in own.computed_assets if name == EMBEDDINGS)]
        assets = [own.layout.asset(name) for name in names]
        log = folder / "log"
        with log.open("wb") as output, _running(home, _apart(settings, usable), output) as process:
            began, ended = time.monotonic(), 0
            while process.poll() is None:
                published = len(assets[-1].published_keys())
                if published > ended:
                    left = (time.monotonic() - began) / published * (count - published)
                    ended = published
                text = "running small partitions" + (f", about {duration(left)} left" if ended else "")
                doing(text, ended, count)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
        ranges = Catalog.open(home).ranges
        times = [[launch_and_end(asset, range_.key) for asset in assets] for range_ in ranges]
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    by_partition = [[span for span in spans if span is not None] for spans in times]
    whole = [(spans[0][0], spans[-1][1]) for spans in by_partition if len(spans) == len(assets)]
    if len(whole) < count:
        raise CommandError(
            f"{counted(count, 'partitions')} of {counted(size, 'properties')} ran to measure what a run"
            f" takes, and"
            f" {count - len(whole)} did not come to their end: {' '.join(lines[-3:]) or 'nothing was said'}"
            f" {command('doctor')} says what is wrong."
        )
    shown = [min(settings.max_images, len(row["image_uris"])) for row in rows]
    return MeasuredRun.from_times(whole, properties=size, images=size * fmean(shown), devices=devices)


_END_SECONDS: Final = 120.0
"""The time in which it ends its own processes, with their grace."""


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
        # It ends its own runs meanwhile, and what is left of them ends with it.
        end_processes(process.send_signal, partial(child_has_ended, process), grace=_END_SECONDS)


def _apart(settings: Settings, usable: Sequence[Device]) -> dict[str, str]:
    """The environment of runs in a home of their own: that of ``environment``, but for what leads out of it.

    That home knows of no device that is left out: the usable ones are named.
    """
    apart = environment(settings) | {f"{PREFIX}ENGINE": "transformers", f"{PREFIX}DEVICES": named(usable)}
    if (model := describing_model(settings)) is not None:
        apart[f"{PREFIX}MODEL"] = model
    of_extensions = (name.upper() for extension in installed() for name in own_settings(extension.settings))
    left_out = {"DAGSTER_HOME", *(PREFIX + name for name in (*_OWN, *of_extensions))}
    return {name: value for name, value in apart.items() if name not in left_out}


def environment(settings: Settings) -> dict[str, str]:
    """The environment of a program that asks what these settings ask, and no further question set."""
    inherited = {**of_env_file(), **os.environ, f"{PREFIX}ENV_FILE": os.devnull}
    asked = {name: getattr(settings, name) for name in _ASKED}
    left_out = {PREFIX + name.upper() for name in (*_ASKED, "questions")}
    # The schema's module may lie beside a file of question sets, of which that program knows nothing.
    module = settings.description_schema.partition(":")[0]
    folder = Path(str(import_module(module).__file__)).parents[module.count(".")]
    # Its runs work in other folders than this process.
    if folder != CHECKOUT:
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {
        **{name: value for name, value in inherited.items() if name not in left_out},
        **{PREFIX + name.upper(): value for name, value in asked.items() if value is not None},
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
def scratch_folder(settings: Settings) -> Iterator[Path]:
    """Make a folder on the home's disk that goes at the end; those of killed processes go a day later."""
    folder = measured_folder(settings) / "runs"
    make_directory(folder)
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > _OLD_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        yield Path(made)


def measured_folder(settings: Settings) -> Path:
    """The folder in which measurements of a home are kept."""
    return settings.state_directory / "measured"

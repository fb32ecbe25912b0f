"""Describing a sample with the engine of a real run, before weeks of spending: no row is written."""

from __future__ import annotations

import io
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from resources.gpu import GpuResource
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import SCHEMA as CATALOG_SCHEMA
from vlm_durable.wording import counted
from vlm_engine.ladder import Described
from vlm_engine.protocol import ImageTokens, image_tokens_of

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

    def images_sentence(self, answer: Described) -> str:
        """How many of its images the model saw, and why not all; empty where it saw all."""
        why = [self.not_used[answer.property_id]] if answer.property_id in self.not_used else []
        why += [
            f"{failure.uri} left out ({failure.kind}): {failure.error}" for failure in answer.images_failed
        ]
        if not why:
            return ""
        listed = self.images_listed.get(answer.property_id, answer.images_seen + len(answer.images_failed))
        begin = "described from" if answer.status == "ok" else "saw"
        return f"{begin} {answer.images_seen} of {counted(listed, 'images')}; {'; '.join(why)}"

    @property
    def properties_per_second(self) -> float:
        """The rate of one device over whole partitions, with the start of each one's process and model."""
        seconds = self.start_seconds + self.load_seconds
        return self.partition_rows / (seconds + self.partition_rows * self.seconds / len(self.described))

    @property
    def images_per_second(self) -> float:
        """The rate of one device, with the same starts as ``properties_per_second``."""
        return self.properties_per_second * self.images / len(self.described)

    @property
    def images(self) -> int:
        """The number of images of the sample that were shown."""
        return sum(described.images_seen for described in self.described)

    @property
    def days(self) -> float:
        """The days that the whole catalogue takes on all devices found."""
        return self.catalogue_rows / self.properties_per_second / self.devices / 86_400

    @property
    def disk_bytes(self) -> float:
        """The bytes that the descriptions of the whole catalogue take, with second copies."""
        return COPIES * self.bytes / len(self.described) * self.catalogue_rows


def sample(catalog: Catalog, limit: int, among: Collection[str] | None = None) -> pa.Table:
    """Up to ``limit`` rows of the catalogue, evenly spread over it, so that the rate holds for all of it.

    among: only properties with these ids.
    """
    population: Sequence[int] = range(catalog.rows) if among is None else catalog.ordinals_of(among)
    count = min(limit, len(population))
    ordinals = [population[index * len(population) // count] for index in range(count)]
    rows = [
        catalog.slice(range_).take(pa.array([ordinal - range_.start for ordinal in of_range]))
        for range_, of_range in groupby(ordinals, catalog.range_of)
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
    digest = model.server_digest(work.prompt)
    devices = len(gpu.find())  # Before the lease: pinning hides the others from this process.
    lease = gpu.lease(run_id="trial", partition="sample", step="try", log=_log, server_digest=digest)
    described: list[Described] = []
    tables: list[pa.Table] = []
    tried: list[tuple[int, int, float]] = []
    of_workers = _cpu_seconds(resource.RUSAGE_CHILDREN)
    doing(f"loading the model on {lease.device.id}")
    with work.workers(lease.device) as workers:
        started = time.monotonic()
        engine = work.model.load(lease.device, schema=work.schema, prompt=work.prompt)
        loaded = before = time.monotonic()
        spent = _cpu_seconds(resource.RUSAGE_SELF)
        doing(f"describing {name}", 0, work.properties.num_rows)
        with work.describing(engine, workers, work.batch_sizes()) as describing:
            for batch in describing.describe(work.jobs):
                images = sum(answer.images_seen for answer in batch.described)
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
        described=tuple(sorted(described, key=lambda answer: answer.ordinal)),
        catalogue_rows=catalog.rows,
        device=f"{lease.device.id} ({lease.device.name})",
        devices=devices,
        load_seconds=loaded - started,
        seconds=ended - loaded,
        bytes=stream.tell(),
        batches=tuple(tried),
        start_seconds=start_seconds,
        partition_rows=max(1, catalog.rows // max(1, len(catalog.ranges))),
        image_tokens=image_tokens_of(engine),
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


def _cpu_seconds(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


@cache
def _start_seconds() -> float:
    """What a run's process takes before it can load a model: Dagster, and these definitions."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import vlm_assets.definitions"], check=False, capture_output=True)
    return time.monotonic() - began

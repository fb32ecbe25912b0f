"""A look before weeks of spending: a few properties described, the rate, and what all of them would take.

What lives here: sampling the catalogue, describing the sample with the engine of a real run, and the
arithmetic. What does not: keeping what was measured (``measurement.py``), and partitions, for no row is
written.
"""

from __future__ import annotations

import io
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq

from resources.devices.resource import GpuResource
from resources.engine.ladder import Described
from resources.engine.models.vision_language_model import VisionLanguageModel
from resources.engine.protocol import ImageTokens, MeasuringEngine
from vlm_assets.assets.property_descriptions import DescriptionWork
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_file import SCHEMA as CATALOG_SCHEMA
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.config.settings import Settings

COPIES = 2
"""Copies of a published file at rest: itself and its verified second copy."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TriedBatch:
    """A batch of a trial. seconds: with the engine. out_at: seconds after the model was loaded."""

    properties: int
    images: int
    seconds: float
    out_at: float


@dataclass(frozen=True)
class Trial:
    """What a sample took.

    seconds: after the model was loaded. bytes: of the sample's rows as parquet. batches: as they came out.
    start_seconds: that the process of a run takes to start. partition_rows: properties of a partition.
    image_tokens: what images cost, where the engine knows. cpu_seconds: of this process and its workers,
    after the model was loaded. not_used: by property, why images of it that can be read were not shown.
    """

    described: tuple[Described, ...]
    catalogue_rows: int
    device: str
    devices: int
    load_seconds: float
    seconds: float
    bytes: int
    batches: tuple[TriedBatch, ...]
    start_seconds: float = 0.0
    partition_rows: int = 1
    image_tokens: ImageTokens | None = None
    cpu_seconds: float = 0.0
    not_used: Mapping[str, str] = field(default_factory=dict)

    @property
    def properties_per_second(self) -> float:
        """On one device, over whole partitions, with the start of each one's process and model."""
        seconds = self.start_seconds + self.load_seconds
        return self.partition_rows / (seconds + self.partition_rows * self.seconds / len(self.described))

    @property
    def images_per_second(self) -> float:
        """On one device."""
        return sum(one.images_seen for one in self.described) / self.seconds

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
    return pa.concat_tables([CATALOG_SCHEMA.empty_table(), *_rows(catalog, ordinals)])


def _rows(catalog: Catalog, ordinals: Sequence[int]) -> Iterator[pa.Table]:
    by_range: dict[PropertyRange, list[int]] = {}
    for ordinal in ordinals:
        by_range.setdefault(catalog.range_of(ordinal), []).append(ordinal)
    for wanted, some in by_range.items():
        yield catalog.slice(wanted).take(pa.array([ordinal - wanted.start for ordinal in some]))


def run_trial(
    settings: Settings,
    catalog: Catalog,
    gpu: GpuResource,
    model: VisionLanguageModel,
    *,
    limit: int,
    among: Collection[str] | None = None,
) -> Trial:
    """Describe a sample on a leased device. Raises CatalogError, DeviceError, ModelLoadError, SchemaError."""
    work = DescriptionWork.of(settings, catalog, catalog.range_of(0), model)
    work = replace(work, properties=sample(catalog, limit, among))
    batches = work.plan(frozenset())
    digest = model.server_digest(work.prompt)
    devices = len(gpu.find())  # Before the lease: pinning hides the others from this process.
    lease = gpu.lease(run_id="trial", partition="sample", step="try", log=_log, server_digest=digest)
    described: list[Described] = []
    tables: list[pa.Table] = []
    tried: list[TriedBatch] = []
    of_workers = _cpu_seconds(resource.RUSAGE_CHILDREN)
    with work.workers(lease.device, batches) as workers:
        started = time.monotonic()
        engine = work.model.load(lease.device, schema=work.schema, prompt=work.prompt)
        loaded, spent = time.monotonic(), _cpu_seconds(resource.RUSAGE_SELF)
        with work.feeding(engine, workers) as feeding:
            for batch in feeding.described(work.load(workers, batches)):
                images = sum(one.images_seen for one in batch.described)
                out_at = time.monotonic() - loaded
                tried.append(TriedBatch(len(batch.described), images, batch.seconds, out_at))
                described += batch.described
                tables.append(work.rows(batch.described, engine, lease.device))
            ended, spent = time.monotonic(), _cpu_seconds(resource.RUSAGE_SELF) - spent
    spent += _cpu_seconds(resource.RUSAGE_CHILDREN) - of_workers
    stream = io.BytesIO()
    rows = pa.concat_tables(tables)
    pq.write_table(rows, stream, compression="zstd")
    reasons = zip(
        *(rows[name].to_pylist() for name in ("property_id", "images_not_used_reason")), strict=True
    )
    return Trial(
        described=tuple(sorted(described, key=lambda one: one.ordinal)),
        catalogue_rows=catalog.rows,
        device=f"{lease.device.id} ({lease.device.name})",
        devices=devices,
        load_seconds=loaded - started,
        seconds=ended - loaded,
        bytes=stream.tell(),
        batches=tuple(tried),
        start_seconds=_start_seconds(),
        partition_rows=max(1, catalog.rows // max(1, len(catalog.ranges))),
        image_tokens=engine.image_tokens if isinstance(engine, MeasuringEngine) else None,
        cpu_seconds=spent,
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

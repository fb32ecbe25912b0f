"""The asset of a question set: one partition a property range, one row a property, asked of its images.

``property_descriptions`` is the first set's. Here are the asset, whose function shows the order of its
materialization, the columns, and the work that fills them. The steps that all assets share are in
``materialize.py``, the model in ``vlm_engine``.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import dagster as dg
import pyarrow as pa

from resources.gpu import GpuResource
from resources.interrupts import interrupted_once
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets import markdown
from vlm_assets.assets.asset_metadata import DESCRIPTIONS, table_metadata
from vlm_assets.assets.checks import (
    DESCRIPTION_CHECKS,
    Acceptance,
    CheckOutcome,
    FailedShareLimits,
    check_descriptions,
    check_specs,
)
from vlm_assets.assets.dagster_versions import description_code_version
from vlm_assets.assets.fingerprint import (
    CATALOGUE_SLICE,
    Fingerprint,
    description_parts,
    description_settings,
    digest_of,
)
from vlm_assets.assets.learned_labels import keep_learned
from vlm_assets.assets.materialize import (
    Event,
    Materialization,
    Metadata,
    RunOptions,
    range_of_run,
)
from vlm_assets.assets.partition import CONFIDENCE, INPUTS
from vlm_assets.assets.partition_page import (
    FAILED_SHOWN,
    IMAGES_A_PROPERTY,
    THUMBNAIL_HEIGHT,
    SheetRow,
    contact_sheet,
    read_quality,
)
from vlm_assets.assets.published_rows import record_metadata
from vlm_assets.assets.run_watch import ImagesAwayError, ImagesWatch, RunProgress, wait_until_available
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_file import WITHDRAWN, is_tombstone
from vlm_assets.catalog.ranges import EMBEDDINGS, PropertyRange
from vlm_assets.config.engine_choice import keep_engine
from vlm_assets.config.question_sets import QuestionSet
from vlm_assets.config.resource_settings import IO_MANAGER, control_state
from vlm_assets.config.settings import Settings
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.segments import later_column
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_engine.batches import BatchSizes, MeasuredSizes
from vlm_engine.describing import Describing
from vlm_engine.devices.find import Device
from vlm_engine.images.images import PropertyJob
from vlm_engine.images.thumbnails import make_thumbnails
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.ladder import AnswerGuard, Described
from vlm_engine.prompt import Prompt, build_prompt
from vlm_engine.protocol import Engine, ImageTokens, ModelLoadError, image_tokens_of
from vlm_engine.schema import DescriptionSchema, SchemaError, confidence_type, load_schema
from vlm_engine.server.running_server import ServerUnreachableError

INVALID_SHARE = 0.5
"""Share of the model's last answers that may be no descriptions, else the run stops: most mean a model,
prompt or schema that cannot work. A larger VLM_ASSETS_FAILED_SHARE is taken instead."""
PREFETCH_BATCHES = 2
"""Batches loaded ahead of the model: one is ready while the next is loaded. More would only take memory."""

_IMAGE_FAILURE = pa.struct([("uri", pa.string()), ("kind", pa.string()), ("error", pa.string())])


def description_rows(description: pa.StructType) -> pa.Schema:
    """The columns of a partition; ``description`` is the user's schema as a struct."""
    return pa.schema(
        [
            ("property_id", pa.string()),
            ("ordinal", pa.int64()),
            ("status", pa.string()),
            ("error_kind", pa.string()),
            ("error", pa.string()),
            ("description", description),
            later_column(CONFIDENCE, confidence_type(description)),
            ("raw_text", pa.string()),
            ("tries", pa.int32()),
            ("attempts", pa.int32()),
            ("images_seen", pa.int32()),
            ("images_used", pa.list_(pa.string())),
            ("images_not_used", pa.list_(pa.string())),
            ("images_not_used_reason", pa.string()),
            ("images_failed", pa.list_(_IMAGE_FAILURE)),
            ("prompt_tokens", pa.int32()),
            ("output_tokens", pa.int32()),
            ("finish_reason", pa.string()),
            ("seconds", pa.float64()),
            ("model", pa.string()),
            ("model_revision", pa.string()),
            (INPUTS, pa.string()),
            ("fingerprint", pa.string()),
            ("device", pa.string()),
            ("described_at", pa.timestamp("us", tz="UTC")),
        ]
    )


def build_described_asset(
    settings: Settings, asked: QuestionSet, partitions: dg.PartitionsDefinition[str], *, upstream: str
) -> dg.AssetsDefinition:
    """The asset of a question set. ``upstream``: the catalogue's asset, which lists the properties."""
    names, asset = settings.names, asked.asset.name

    @dg.asset(
        key=names.key(asset),
        partitions_def=partitions,
        deps=[names.key(upstream)],
        io_manager_key=names.name(IO_MANAGER),
        required_resource_keys={names.name("gpu"), names.name(asked.model_key)},
        pool="gpu",
        group_name=names.name("properties"),
        kinds={"parquet", "transformers"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        code_version=description_code_version(asked.settings),
        metadata=_metadata(asked),
        check_specs=check_specs(names.key(asset), DESCRIPTION_CHECKS, partitions),
        description=(
            "One structured description a property, by a vision-language model that looks at all of its"
            " images together. One partition is one range of the catalogue and one parquet file. Materialize"
            " resumes what was interrupted; a complete partition is verified and left alone."
        ),
    )
    def described_asset(context: dg.AssetExecutionContext, config: RunOptions) -> Iterator[Event]:
        gpu: GpuResource = names.resource(context, "gpu")
        model: VisionLanguageModel = names.resource(context, asked.model_key)
        catalog, property_range = range_of_run(context, settings)
        work = wait_until_available(
            context,
            settings,
            lambda: DescriptionWork.for_range(asked.settings, catalog, property_range, model),
            unavailable=ServerUnreachableError,
            title="No model to work with",
        )
        with Materialization.begin(context, settings, asset, work, config) as run:
            if run.is_complete:
                yield from interrupted_once(context.run.run_id, run.verify())
                return
            with run.resume() as journal:
                computed: Metadata = {}
                if run.to_do(journal):
                    wait_until_available(
                        context,
                        settings,
                        work.images.raise_if_away,
                        unavailable=ImagesAwayError,
                        title="No images to describe",
                    )
                    with (
                        work.prepared(journal, gpu.find()) as workers,
                        run.device(
                            gpu,
                            server_digest=model.server_digest(work.prompt),
                            computes_elsewhere=model.is_at_address,
                            needed_by=EMBEDDINGS,
                        ) as device,
                    ):
                        keep_engine(asked.settings, context.log)
                        keep_learned(asked.settings, work.fingerprint.parts["model"])
                        computed = work.describe(run, journal, device, workers)
                yield from interrupted_once(context.run.run_id, run.publish(journal, computed))

    return described_asset


def _metadata(asked: QuestionSet) -> dict[str, Any]:
    """Columns and place of the partitions; nothing if the schema cannot be used, and a run says why."""
    try:
        schema = load_schema(asked.settings.description_schema)
    except SchemaError:
        return {}
    rows = description_rows(schema.arrow_type)
    return table_metadata(asked.settings, asked.asset.name, rows, DESCRIPTIONS, description=schema)


@dataclass(frozen=True)
class DescriptionWork:
    """Turns properties of the catalogue into rows. Plain Python: Dagster's resources are passed in."""

    settings: Settings
    catalog: Catalog
    range: PropertyRange
    properties: pa.Table
    """Rows of the catalogue: those of the range."""
    schema: DescriptionSchema
    prompt: Prompt
    model: VisionLanguageModel
    fingerprint: Fingerprint

    @classmethod
    def for_range(
        cls, settings: Settings, catalog: Catalog, property_range: PropertyRange, model: VisionLanguageModel
    ) -> Self:
        """The work of one range. Raises CatalogError, SchemaError, ModelLoadError."""
        schema = load_schema(settings.description_schema)
        prompt = build_prompt(schema, settings.prompt)
        fingerprint = Fingerprint(
            {
                CATALOGUE_SLICE: catalog.slice_digest(property_range),
                **description_parts(settings, model, schema=schema, prompt=prompt),
            },
            description_settings(settings, model),
        )
        properties = catalog.slice(property_range)
        return cls(settings, catalog, property_range, properties, schema, prompt, model, fingerprint)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the range, in the order of the catalogue."""
        return tuple(self.properties["property_id"].to_pylist())

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The digest of all that decides a row, by id: images, model, prompt, schema, decoding."""
        meaning = {name: part for name, part in self.fingerprint.parts.items() if name != CATALOGUE_SLICE}
        columns = (self.properties[name].to_pylist() for name in ("property_id", "inputs_digest"))
        return {
            property_id: digest_of({"images": images, **meaning})
            for property_id, images in zip(*columns, strict=True)
        }

    def rows_schema(self) -> pa.Schema:
        """The columns of this range's rows."""
        return description_rows(self.schema.arrow_type)

    @cached_property
    def jobs(self) -> tuple[PropertyJob, ...]:
        """The images of each property, in the catalogue's order."""
        columns = (self.properties[name].to_pylist() for name in ("property_id", "ordinal", "image_uris"))
        return tuple(
            PropertyJob(property_id, ordinal, tuple(uris))
            for property_id, ordinal, uris in zip(*columns, strict=True)
        )

    @cached_property
    def uris(self) -> dict[int, tuple[str, ...]]:
        """The images of each property by its ordinal, in the catalogue's order."""
        return {job.ordinal: job.image_uris for job in self.jobs}

    def batch_sizes(self, device: Device | None = None) -> BatchSizes:
        """The size of this partition's batches. device: where it is measured; None: nowhere."""
        properties, images = self.settings.batch_size, self.settings.batch_images
        if images != "auto":
            return BatchSizes(properties, images)
        if device is None:
            return BatchSizes(properties)
        measured = MeasuredSizes(control_state(self.settings), *self._measured_of(device))
        return BatchSizes(properties, measured=measured)

    def _measured_of(self, device: Device) -> tuple[str, str]:
        """The key of remembered rates: a device's name, and a digest of all that decides the answers."""
        meaning = {name: part for name, part in self.fingerprint.parts.items() if name != CATALOGUE_SLICE}
        return device.model_name, digest_of({**meaning, "properties": self.settings.batch_size})

    def describe(
        self, run: Materialization, journal: Journal, device: Device, workers: WorkerPool
    ) -> Metadata:
        """Describe what is left to do, and hand the journal the rows of each batch when it is done."""
        progress, guard = run.progress, AnswerGuard(max(INVALID_SHARE, self.settings.failed_share))
        with progress.loading_model():
            engine = self.model.load(device, schema=self.schema, prompt=self.prompt)
        with self.describing(engine, workers, self.batch_sizes(device)) as describing:
            self._refuse_another_model(engine)
            journal.plan = describing.begin(journal.plan)
            with run.at_work(engine, device, journal):
                for to_do in run.rounds(journal):
                    tries = journal.failed_tries
                    for batch in describing.describe(self.jobs, to_do):
                        if batch.advice is not None:
                            progress.warn(batch.advice)
                        self.images.judge_batch(batch.described)
                        with progress.building_rows():
                            rows = self.rows(batch.described, engine, device, tries)
                        journal.submit(rows)
                        progress.advance(sum(answer.property_id not in tries for answer in batch.described))
                        guard.count(batch.described)
        return self._work_metadata(progress, describing, engine, device)

    def _work_metadata(
        self, progress: RunProgress, describing: Describing, engine: Engine, device: Device
    ) -> Metadata:
        spent, image_tokens = describing.spent, image_tokens_of(engine)
        return {
            "device": dg.MetadataValue.text(f"{self.model.device_name(device)} ({device.name})"),
            "properties/s": dg.MetadataValue.float(round(progress.rate, 3)),
            "images": dg.MetadataValue.int(spent.images),
            "prompt tokens a property": dg.MetadataValue.int(
                round(spent.prompt_tokens / max(1, spent.attempts))
            ),
            **(
                {}
                if image_tokens is None
                else {"image tokens": dg.MetadataValue.text(image_tokens.sentence())}
            ),
            "batches": dg.MetadataValue.text(describing.sizes.size.sentence()),
            "seconds of the longest batch": dg.MetadataValue.float(round(spent.longest, 3)),
            "seconds loading model": dg.MetadataValue.float(round(progress.load_seconds, 3)),
            **progress.work_time(spent, engine).metadata(),
        }

    def describing(self, engine: Engine, workers: WorkerPool, sizes: BatchSizes) -> Describing:
        """The engine with all that it needs to describe properties; leaving it closes the engine."""
        return Describing(engine, workers, self.schema, self.settings.max_new_tokens, sizes)

    def _refuse_another_model(self, engine: Engine) -> None:
        """Raise ModelLoadError where the engine's model is not the fingerprint's."""
        expected = self.fingerprint.parts["model"]
        if engine.revision != expected:
            raise ModelLoadError(
                f"The model was exchanged while this materialization began: {expected} was looked at, and"
                f" {engine.revision} ({engine.model}) is loaded. Nothing was described with it. Materialize"
                " the partition again: it then takes what is there."
            )

    @cached_property
    def images(self) -> ImagesWatch:
        """The watch that tells a disk that is away from images that were deleted."""
        may_be_gone = self.settings.failed_share >= 1.0
        return ImagesWatch(self.catalog, self.range, self.properties, may_be_gone)

    @contextlib.contextmanager
    def prepared(self, journal: Journal, devices: Sequence[Device]) -> Iterator[WorkerPool]:
        """All that the work needs beside a device: modules and workers. devices: one kind, one is to come."""
        with self.workers(devices[0], journal.done_ids) as workers:
            self.model.prepare(devices)
            yield workers

    def workers(self, device: Device, done_ids: Collection[str] = ()) -> WorkerPool:
        """The processes that load images ahead of the model, of all properties that are not done."""
        settings, left = self.settings, (job for job in self.jobs if job.property_id not in done_ids)
        images = sum(min(len(job.image_uris), settings.max_images) for job in left)
        return WorkerPool(
            self.model.output(device, self.prompt, images=images),
            workers=settings.decode_workers,
            prefetch_batches=PREFETCH_BATCHES,
            max_pixels=settings.max_pixels,
            max_images=settings.max_images,
            source=self.catalog.images,
        )

    def rows(
        self,
        described: Sequence[Described],
        engine: Engine,
        device: Device,
        tries: Mapping[str, int] = MappingProxyType({}),
    ) -> pa.Table:
        """Results as rows, with where each came from. tries: of properties that were tried before."""
        image_tokens = image_tokens_of(engine)
        provenance = {
            "model": engine.model,
            "model_revision": engine.revision,
            "fingerprint": self.fingerprint.digest,
            "device": self.model.device_name(device),
            "described_at": datetime.now(UTC),
        }
        rows = [
            {
                "property_id": answer.property_id,
                "ordinal": answer.ordinal,
                "status": answer.status,
                "error_kind": WITHDRAWN if is_tombstone(answer.property_id) else answer.error_kind,
                "error": answer.error,
                "description": answer.description,
                CONFIDENCE: answer.confidence,
                "raw_text": answer.raw_text,
                "tries": tries.get(answer.property_id, 0) + 1,
                "attempts": answer.attempts,
                "images_seen": answer.images_seen,
                **self._images_of(answer, image_tokens),
                "images_failed": [vars(failure) for failure in answer.images_failed],
                "prompt_tokens": answer.prompt_tokens,
                "output_tokens": answer.output_tokens,
                "finish_reason": answer.finish_reason,
                "seconds": answer.seconds,
                INPUTS: self.inputs[answer.property_id],
                **provenance,
            }
            for answer in described
        ]
        return pa.Table.from_pylist(rows, schema=self.rows_schema())

    def _images_of(
        self, answer: Described, image_tokens: ImageTokens | None
    ) -> dict[str, list[str] | str | None]:
        """The images that the answer was made from, and those left out though nothing failed, and why."""
        failed = {failure.uri for failure in answer.images_failed}
        sound = [uri for uri in self.uris[answer.ordinal] if uri not in failed]
        # The model is shown the first images that can be read, in the catalogue's order.
        used, left_out = sound[: answer.images_seen], sound[answer.images_seen :]
        reason = answer.fewer_images or f"VLM_ASSETS_MAX_IMAGES is {self.settings.max_images}"
        if (
            answer.fewer_images is None
            and image_tokens is not None
            and image_tokens.fitting < image_tokens.images
        ):
            reason = image_tokens.sentence()
        if not used:  # A failed row says why in its own columns.
            reason = answer.error or reason
        return {
            "images_used": used,
            "images_not_used": left_out,
            "images_not_used_reason": reason if left_out else None,
        }

    def check(self, file: Path, *, accepted: Acceptance) -> list[CheckOutcome]:
        """The checks of this range on a file."""
        limits, key = self._limits(accepted), self.range.key
        return check_descriptions(file, self.ids, self.rows_schema(), limits, key=key)

    def would_refuse(self, failed: int, *, accepted: Acceptance) -> bool:
        """Whether the checks would refuse a file with ``failed`` failed rows."""
        return self._limits(accepted).refuse(failed, len(self.ids))

    def _limits(self, accepted: Acceptance) -> FailedShareLimits:
        return FailedShareLimits(self.settings.failed_share, accepted)

    def record_metadata(self, file: Path) -> dict[str, Any]:
        """What the published record keeps of the rows."""
        return record_metadata(PartitionRows(file))

    def metadata(self, file: Path) -> Metadata:
        """What the page of a finished file shows: a contact sheet, the quality, and the counts."""
        quality = read_quality(PartitionRows(file))
        looked_at = [*quality.sample, *quality.failed[:FAILED_SHOWN]]
        return {
            "contact sheet": markdown.metadata(contact_sheet(self._sheet_rows(looked_at))),
            "quality": markdown.metadata(quality.table()),
            "expected": dg.MetadataValue.int(len(self.ids)),
            "ok": dg.MetadataValue.int(quality.ok),
            "failed": dg.MetadataValue.int(quality.rows - quality.ok),
        }

    def _sheet_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[SheetRow]:
        uris = [self.uris[row["ordinal"]] for row in rows]
        shown = [
            PropertyJob(row["property_id"], row["ordinal"], tuple(of_row[:IMAGES_A_PROPERTY]))
            for row, of_row in zip(rows, uris, strict=True)
        ]
        thumbnails = make_thumbnails(shown, height=THUMBNAIL_HEIGHT, source=self.catalog.images)
        return [
            SheetRow(
                row["property_id"],
                files,
                row.get("description"),
                row["error"],
                len(of_row),
                row.get(CONFIDENCE),
            )
            for row, files, of_row in zip(rows, thumbnails, uris, strict=True)
        ]

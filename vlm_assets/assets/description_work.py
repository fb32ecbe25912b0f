"""The descriptions of a range: their columns, what a row is made of, and what an engine needs for them.

The loop that asks the engine is in ``joined_sets.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import dagster as dg
import pyarrow as pa

from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets import markdown
from vlm_assets.assets.checks import Acceptance, CheckOutcome, FailedShareLimits, check_descriptions
from vlm_assets.assets.fingerprint import (
    CATALOGUE_SLICE,
    LOOKED_AT,
    WHERE,
    Fingerprint,
    description_parts,
    description_settings,
    digest_of,
    row_parts,
)
from vlm_assets.assets.looked_at import LookedAt
from vlm_assets.assets.materialize import Metadata
from vlm_assets.assets.partition import CONFIDENCE, INPUTS, NOT_ASKED
from vlm_assets.assets.partition_page import (
    FAILED_SHOWN,
    IMAGES_A_PROPERTY,
    THUMBNAIL_HEIGHT,
    SheetRow,
    contact_sheet,
    read_quality,
)
from vlm_assets.assets.published_rows import record_metadata
from vlm_assets.assets.run_watch import ImagesWatch
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import WITHDRAWN, is_tombstone
from vlm_catalog.ranges import PropertyRange
from vlm_durable.journal.segments import later_column
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_engine.batches import FIRST_IMAGES, BatchSizes, MeasuredSizes
from vlm_engine.describing import Describing
from vlm_engine.devices.find import Device
from vlm_engine.images.images import PropertyJob
from vlm_engine.images.thumbnails import make_thumbnails
from vlm_engine.images.worker_pool import WorkerPool
from vlm_engine.ladder import Described
from vlm_engine.prompt import FurtherQuestion, Prompt, build_prompt
from vlm_engine.protocol import Engine, ImageTokens, ModelLoadError, image_tokens_of
from vlm_engine.schema import DescriptionSchema, confidence_type, load_schema

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
    looked_at: LookedAt | None = None
    """What the set's condition found; None: it has none."""

    @classmethod
    def for_range(
        cls, settings: Settings, catalog: Catalog, property_range: PropertyRange, model: VisionLanguageModel
    ) -> Self:
        """The work of one range. Raises CatalogError, SchemaError, ModelLoadError.

        Of a set with a condition PublishedError and WhereError too: what it looks at is not there.
        """
        schema = load_schema(settings.description_schema)
        prompt = build_prompt(schema, settings.prompt)
        properties = catalog.slice(property_range)
        looked_at = None
        if settings.where is not None:
            ids = properties["property_id"].to_pylist()
            looked_at = LookedAt.read(settings.where, settings.layout, property_range.key, ids)
        fingerprint = Fingerprint(
            {
                CATALOGUE_SLICE: catalog.slice_digest(property_range),
                **({} if looked_at is None else {LOOKED_AT: looked_at.digest}),
                **description_parts(settings, model, schema=schema, prompt=prompt),
            },
            description_settings(settings, model),
        )
        return cls(
            settings, catalog, property_range, properties, schema, prompt, model, fingerprint, looked_at
        )

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the range, in the order of the catalogue."""
        return tuple(self.properties["property_id"].to_pylist())

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The digest of all that decides a row, by id: images, model, prompt, schema, decoding.

        Of a property that is not asked: the condition, and the values that it looked at.
        """
        parts = self.fingerprint.parts
        meaning = row_parts(parts)
        columns = (self.properties[name].to_pylist() for name in ("property_id", "inputs_digest"))
        return {
            property_id: digest_of({"images": images, **meaning})
            if (values := self.left_out.get(property_id)) is None
            else digest_of({WHERE: parts[WHERE], LOOKED_AT: values})
            for property_id, images in zip(*columns, strict=True)
        }

    @cached_property
    def left_out(self) -> dict[str, list[Any]]:
        """The properties that are not asked, with the values that the condition saw; no withdrawn one."""
        looks = {} if self.looked_at is None else self.looked_at.looks
        return {
            property_id: list(look.values)
            for property_id, look in looks.items()
            if not look.holds and not is_tombstone(property_id)
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

    @property
    def question(self) -> FurtherQuestion:
        """What it asks, for an engine that asks other questions too."""
        return FurtherQuestion(self.prompt, self.schema, self.settings.max_new_tokens)

    def batch_sizes(
        self, device: Device | None = None, *, further: Sequence[DescriptionWork] = ()
    ) -> BatchSizes:
        """The size of this partition's batches.

        device: where it is measured; None: nowhere. further: the work that is asked with it.
        """
        images, measured = self.settings.batch_images, None
        if images == "auto":
            images = FIRST_IMAGES
            if device is not None:
                name, digest = self._measured_of(device)
                if further:
                    digest = digest_of([digest, *(work._measured_of(device)[1] for work in further)])
                measured = MeasuredSizes(control_state(self.settings), name, digest)
        return BatchSizes(self.settings.batch_size, images, measured)

    def _measured_of(self, device: Device) -> tuple[str, str]:
        """The key of remembered rates: a device's name, and a digest of all that decides the answers."""
        meaning = row_parts(self.fingerprint.parts)
        return device.model_name, digest_of({**meaning, "properties": self.settings.batch_size})

    def describing(
        self,
        engine: Engine,
        workers: WorkerPool,
        sizes: BatchSizes,
        *,
        further: Sequence[FurtherQuestion] = (),
    ) -> Describing:
        """The engine with all that it needs to describe properties; leaving it closes the engine."""
        tokens = self.settings.max_new_tokens
        return Describing(engine, workers, self.schema, tokens, sizes, further=further)

    def refuse_another_model(self, engine: Engine) -> None:
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

    def workers(
        self,
        device: Device,
        done_ids: Collection[str] = (),
        *,
        further: Sequence[FurtherQuestion] = (),
    ) -> WorkerPool:
        """The processes that load images ahead of the model, of all properties that are not done."""
        settings, left = self.settings, (job for job in self.jobs if job.property_id not in done_ids)
        images = sum(min(len(job.image_uris), settings.max_images) for job in left)
        return WorkerPool(
            self.model.output(device, self.prompt, images=images, further=further),
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

    def rows_left_out(self, ids: Collection[str]) -> pa.Table:
        """The rows of those of these properties that the condition leaves out."""
        columns = (self.properties[name].to_pylist() for name in ("property_id", "ordinal"))
        now = datetime.now(UTC)
        rows = [
            {
                "property_id": property_id,
                "ordinal": ordinal,
                "status": NOT_ASKED,
                **dict.fromkeys(("tries", "attempts", "images_seen", "prompt_tokens", "output_tokens"), 0),
                **dict.fromkeys(("images_used", "images_not_used", "images_failed"), ()),
                INPUTS: self.inputs[property_id],
                "fingerprint": self.fingerprint.digest,
                "described_at": now,
            }
            for property_id, ordinal in zip(*columns, strict=True)
            if property_id in self.left_out and property_id in ids
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
        left_out = None if self.looked_at is None else frozenset(self.left_out)
        return check_descriptions(file, self.ids, self.rows_schema(), limits, key=key, left_out=left_out)

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
            "failed": dg.MetadataValue.int(quality.rows - quality.ok - quality.not_asked),
            **({} if self.looked_at is None else {"not asked": dg.MetadataValue.int(quality.not_asked)}),
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

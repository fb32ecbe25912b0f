"""property_embeddings: one vector a property, of the text of its description, in the same partitions.

Here are the asset, whose function shows the order of its materialization, the columns, and the work that
fills them. The steps that both assets share are in ``materialize.py``, the model in
``resources/text_embedding.py``.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import dagster as dg
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from resources.gpu import GpuResource
from resources.text_embedding import TextEmbedder, TextEmbeddingModel
from resources.vision_language_model import VisionLanguageModel
from vlm_assets.assets.asset_metadata import EMBEDDINGS, table_metadata
from vlm_assets.assets.checks import EMBEDDING_CHECKS, Acceptance, CheckOutcome, check_embeddings, check_specs
from vlm_assets.assets.dagster_versions import embedding_code_version
from vlm_assets.assets.fingerprint import TEXTS, Fingerprint, digest_of, embedding_parts, embedding_settings
from vlm_assets.assets.materialize import Event, Materialization, Metadata, RunOptions, range_of_run
from vlm_assets.assets.partition import INPUTS, OK
from vlm_assets.config.question_sets import joined_assets, question_sets
from vlm_assets.config.resource_settings import IO_MANAGER
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.journal.journal import Journal
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.wording import counted
from vlm_engine.devices.find import Device
from vlm_engine.devices.left_out import ImpossibleResultError
from vlm_engine.model_source import NO_EMBEDDER
from vlm_engine.prompt import build_prompt
from vlm_engine.protocol import ModelLoadError
from vlm_engine.schema import SchemaError, description_text, load_schema

ROWS_TOGETHER = 256
"""Descriptions embedded and handed to the journal at a time: well under a second of work."""


def build_property_embeddings(
    settings: Settings, partitions: dg.PartitionsDefinition[str]
) -> dg.AssetsDefinition:
    """The asset. What is embedded is the text of the descriptions."""
    names, asset = settings.names, settings.embeddings.name
    joined = joined_assets(settings, settings.descriptions.name)
    other_sets = {asked.asset.name for asked in question_sets(settings)}.difference(joined)
    unnamed = f" {NO_EMBEDDER}" if settings.embedding_model is None else ""

    @dg.asset(
        key=names.key(asset),
        partitions_def=partitions,
        ins={"descriptions": dg.AssetIn(names.key(settings.descriptions.name))},
        io_manager_key=names.name(IO_MANAGER),
        required_resource_keys=set(map(names.name, ("gpu", "vision_language_model", "text_embedding_model"))),
        pool="gpu",
        group_name=names.name("properties"),
        kinds={"parquet", "transformers"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        code_version=embedding_code_version(settings),
        # The width is the model's, and asking for it can take a download.
        metadata=table_metadata(settings, asset, embedding_rows(1), EMBEDDINGS),
        check_specs=check_specs(names.key(asset), EMBEDDING_CHECKS, partitions),
        description=(
            "One vector a property, made from the text of its description by a text-embedding model. A"
            f" property whose description failed has a row with a null vector.{unnamed}"
        ),
    )
    def property_embeddings(
        context: dg.AssetExecutionContext,
        config: RunOptions,
        descriptions: PartitionRows,
    ) -> Iterator[Event]:
        gpu: GpuResource = names.resource(context, "gpu")
        vision_language_model: VisionLanguageModel = names.resource(context, "vision_language_model")
        text_embedding_model: TextEmbeddingModel = names.resource(context, "text_embedding_model")
        catalog, property_range = range_of_run(context, settings)
        work = EmbeddingWork.for_range(catalog, property_range, descriptions, text_embedding_model)
        with Materialization.begin(context, settings, asset, work, config) as run:
            if run.is_complete:
                yield from run.verify()
                return
            with run.resume() as journal:
                computed: Metadata = {}
                if run.to_do(journal):
                    # The model server that describes stays on the device, where there is one.
                    selection = context.run.asset_selection
                    asked = [name for name in joined if not selection or names.key(name) in selection]
                    digest = _server_digest(settings, vision_language_model, max(1, len(asked)))
                    with run.device(gpu, server_digest=digest, needed_by=other_sets) as device:
                        computed = work.embed(run, journal, device)
                yield from run.publish(journal, computed)

    return property_embeddings


def _server_digest(settings: Settings, model: VisionLanguageModel, questions: int) -> str | None:
    try:
        prompt = build_prompt(load_schema(settings.description_schema), settings.prompt)
        return model.server_digest(prompt, questions)
    except (ModelLoadError, SchemaError):
        return None


def _cut_off(embedder: TextEmbedder) -> str:
    """How many texts of this run were longer than the model's limit, in words."""
    if embedder.longest is None:
        return "0: the model's files name no limit"
    return f"{embedder.cut_off:,} are longer than the {embedder.longest:,} tokens that the model takes"


def embedding_rows(width: int) -> pa.Schema:
    """The columns of a partition; ``width`` is that of the embedding model."""
    return pa.schema(
        [
            ("property_id", pa.string()),
            ("ordinal", pa.int64()),
            ("status", pa.string()),
            ("embedding", pa.list_(pa.float32(), width)),
            ("model", pa.string()),
            ("model_revision", pa.string()),
            (INPUTS, pa.string()),
            ("fingerprint", pa.string()),
            ("device", pa.string()),
            ("embedded_at", pa.timestamp("us", tz="UTC")),
        ]
    )


@dataclass(frozen=True)
class EmbeddingWork:
    """Turns the published descriptions of a range into rows; a failed description has a null vector."""

    range: PropertyRange
    ids: tuple[str, ...]
    descriptions: PartitionRows
    model: TextEmbeddingModel
    fingerprint: Fingerprint

    @classmethod
    def for_range(
        cls,
        catalog: Catalog,
        property_range: PropertyRange,
        descriptions: PartitionRows,
        model: TextEmbeddingModel,
    ) -> Self:
        """The work of one range. Raises CatalogError, ModelLoadError."""
        record = descriptions.record
        if record is None:
            raise ValueError(f"{descriptions.path} is not a published partition")
        fingerprint = Fingerprint(
            {TEXTS: str(record.metadata[TEXTS]), **embedding_parts(model)}, embedding_settings(model)
        )
        ids = tuple(catalog.slice(property_range)["property_id"].to_pylist())
        return cls(property_range, ids, descriptions, model, fingerprint)

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The digest of all that decides a row, by id: the text of its description, and the model."""
        meaning = {name: part for name, part in self.fingerprint.parts.items() if name != TEXTS}
        digests = {}
        for batch in self.descriptions.iter_batches(["property_id", "status", "description"]):
            for row in batch.to_pylist():
                text = description_text(row["description"]) if row["status"] == OK else None
                digests[row["property_id"]] = digest_of({"text": text, **meaning})
        return digests

    def rows_left_out(self, ids: Collection[str]) -> pa.Table:
        """None: every description has a row."""
        return self.rows_schema().empty_table()

    def would_refuse(self, failed: int, *, accepted: Acceptance) -> bool:
        """Always false: a failed description is a row without a vector, and no fault."""
        return False

    def record_metadata(self, file: Path) -> dict[str, Any]:
        """Nothing beyond what every record keeps."""
        return {}

    def rows_schema(self) -> pa.Schema:
        """The columns of this range's rows."""
        return embedding_rows(self.model.width())

    def embed(self, run: Materialization, journal: Journal, device: Device) -> Metadata:
        """Embed every description that the journal lacks."""
        progress = run.progress
        with progress.loading_model():
            embedder = self.model.load(device)
        missing = pa.array(sorted(journal.missing_ids), pa.string())
        try:
            with run.at_work(embedder, device):
                for batch in self.descriptions.iter_batches(
                    ["property_id", "ordinal", "status", "description"], batch_rows=ROWS_TOGETHER
                ):
                    described = batch.filter(pc.is_in(batch["property_id"], value_set=missing))
                    with progress.building_rows():
                        rows = self.rows(described, embedder, device)
                    journal.submit(rows)
                    progress.advance(rows.num_rows)
                # Before the model is unloaded: the last rows do not wait for that.
                journal.flush()
        finally:
            embedder.close()
        return {
            "device": dg.MetadataValue.text(f"{device.id} ({device.name})"),
            "properties/s": dg.MetadataValue.float(round(progress.rate, 3)),
            "seconds in model": dg.MetadataValue.float(round(progress.rows_seconds, 3)),
            "seconds waiting for commit": dg.MetadataValue.float(round(journal.commit_wait_seconds, 3)),
            "seconds loading model": dg.MetadataValue.float(round(progress.load_seconds, 3)),
            "texts cut off": dg.MetadataValue.text(_cut_off(embedder)),
        }

    def rows(self, described: pa.RecordBatch, embedder: TextEmbedder, device: Device) -> pa.Table:
        """Descriptions as rows with their vectors, and where each came from."""
        statuses: list[str] = described["status"].to_pylist()
        ok = [index for index, status in enumerate(statuses) if status == OK]
        texts = [description_text(described["description"][index].as_py()) for index in ok]
        vectors: list[object] = [None] * len(statuses)
        embedded = embedder.embed(texts)
        refuse_unsound([described["property_id"][index].as_py() for index in ok], embedded, device.id)
        for index, vector in zip(ok, embedded, strict=True):
            vectors[index] = vector
        count = len(statuses)
        schema = embedding_rows(embedder.width)
        columns = [
            described["property_id"],
            described["ordinal"],
            described["status"],
            pa.array(vectors, schema.field("embedding").type),
            pa.array([embedder.model] * count, pa.string()),
            pa.array([embedder.revision] * count, pa.string()),
            pa.array(
                [self.inputs[property_id] for property_id in described["property_id"].to_pylist()],
                pa.string(),
            ),
            pa.array([self.fingerprint.digest] * count, pa.string()),
            pa.array([device.id] * count, pa.string()),
            pa.array([datetime.now(UTC)] * count, schema.field("embedded_at").type),
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def check(self, file: Path, *, accepted: Acceptance) -> list[CheckOutcome]:
        """The checks of this range on a file. ``accepted`` has no effect: no vector fails."""
        return check_embeddings(
            file, self.ids, self.rows_schema(), self.descriptions.path, key=self.range.key
        )

    def metadata(self, file: Path) -> Metadata:
        """Counts of a finished file, and what embedded its rows."""
        statuses, models = Counter[str](), dict[str, None]()
        for batch in PartitionRows(file).iter_batches(["status", "model", "model_revision"]):
            statuses.update(batch["status"].to_pylist())
            made_by = zip(batch["model"].to_pylist(), batch["model_revision"].to_pylist(), strict=True)
            models |= {f"{model} ({revision})": None for model, revision in made_by}
        return {
            "embedded by": dg.MetadataValue.text(", ".join(models)),
            "expected": dg.MetadataValue.int(len(self.ids)),
            "ok": dg.MetadataValue.int(statuses[OK]),
            "failed": dg.MetadataValue.int(statuses.total() - statuses[OK]),
        }


def refuse_unsound(ids: Sequence[str], vectors: npt.NDArray[np.float32], device: str) -> None:
    """Raise ImpossibleResultError where one of the vectors [ids, width] is zero or not finite."""
    with np.errstate(all="ignore"):
        sound = np.isfinite(vectors).all(axis=1) & (np.abs(vectors).max(axis=1, initial=0.0) > 0)
    if sound.all():
        return
    first = [ids[row] for row in np.flatnonzero(~sound)[:5]]
    raise ImpossibleResultError(
        f"{int((~sound).sum())} of {counted(len(ids), 'vectors')} computed on {device} are zero or not"
        " finite (first:"
        f" {', '.join(map(repr, first))}). Nothing of this batch was taken; what is committed stays. Look at"
        " the device (`nvidia-smi`, ECC errors), which comes last from now on; where another one gives the"
        " same, at the embedding model. Materialize the partition again: it goes on from here."
    )

"""property_embeddings: one vector a property, of the text of its description, partitioned like those.

What lives here: the columns, what decides their meaning, and the work that fills them. What does not: the
asset (``assets.py``), the order of a materialization (``materialization.py``), the model
(``resources/engine/embedder.py``).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from resources.devices.find import Device
from resources.engine.embedder import TextEmbedder, description_text
from resources.engine.resource import TextEmbeddingModel
from resources.journal.journal import Journal
from resources.publishing.partition_rows import PartitionRows
from vlm_assets.assets.checks import CheckOutcome, check_embeddings
from vlm_assets.assets.fingerprint import TEXTS, Fingerprint
from vlm_assets.assets.garbage import refuse_unsound
from vlm_assets.assets.materialize import (
    OK,
    Metadata,
)
from vlm_assets.assets.run_progress import Progress
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange

ASSET = "property_embeddings"

ROWS_TOGETHER = 256
"""Descriptions embedded and handed to the journal at a time: well under a second of work."""


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
            ("fingerprint", pa.string()),
            ("device", pa.string()),
            ("embedded_at", pa.timestamp("us", tz="UTC")),
        ]
    )


def meaning_parts(model: TextEmbeddingModel) -> dict[str, str]:
    """What the settings decide of a vector's meaning. Raises ModelLoadError."""
    return {"embedding_model": model.exact_revision()}


@dataclass(frozen=True)
class EmbeddingWork:
    """What turns the published descriptions of a range into rows; a failed one has a null vector."""

    ids: tuple[str, ...]
    descriptions: PartitionRows
    model: TextEmbeddingModel
    fingerprint: Fingerprint

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        wanted: PropertyRange,
        descriptions: PartitionRows,
        model: TextEmbeddingModel,
    ) -> Self:
        """The work of one range. Raises CatalogError, ModelLoadError."""
        record = descriptions.record
        if record is None:
            raise ValueError(f"{descriptions.path} is not a published partition")
        fingerprint = Fingerprint({TEXTS: str(record.metadata[TEXTS]), **meaning_parts(model)})
        ids = tuple(catalog.slice(wanted)["property_id"].to_pylist())
        return cls(ids, descriptions, model, fingerprint)

    def rows_schema(self) -> pa.Schema:
        """The columns of this range's rows."""
        return embedding_rows(self.model.width())

    def embed(self, journal: Journal, progress: Progress, device: Device) -> Metadata:
        """Embed every description that the journal lacks."""
        clock = time.monotonic
        started = clock()
        embedder = self.model.load(device)
        load_seconds = clock() - started
        progress.start()
        model_seconds = 0.0
        missing = pa.array(sorted(journal.missing_ids), pa.string())
        try:
            for batch in self.descriptions.iter_batches(
                ["property_id", "ordinal", "status", "description"], batch_rows=ROWS_TOGETHER
            ):
                wanted = batch.filter(pc.is_in(batch["property_id"], value_set=missing))
                before = clock()
                rows = self.rows(wanted, embedder, device)
                model_seconds += clock() - before
                journal.submit(rows)
                progress.advance(rows.num_rows)
        finally:
            embedder.close()
        journal.flush()
        return {
            "device": dg.MetadataValue.text(f"{device.id} ({device.name})"),
            "properties/s": dg.MetadataValue.float(round(progress.rate, 3)),
            "seconds in model": dg.MetadataValue.float(round(model_seconds, 3)),
            "seconds waiting for commit": dg.MetadataValue.float(round(journal.commit_wait_seconds, 3)),
            "seconds loading model": dg.MetadataValue.float(round(load_seconds, 3)),
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
            pa.array([self.fingerprint.digest] * count, pa.string()),
            pa.array([device.id] * count, pa.string()),
            pa.array([datetime.now(UTC)] * count, schema.field("embedded_at").type),
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def check(self, file: Path) -> list[CheckOutcome]:
        """The checks of this range on a file."""
        return check_embeddings(file, self.ids, self.rows_schema(), self.descriptions.path)

    def for_people(self, file: Path) -> Metadata:
        """Counts of a finished file."""
        statuses: Counter[str] = Counter()
        for batch in PartitionRows(file).iter_batches(["status"]):
            statuses.update(batch["status"].to_pylist())
        return {
            "expected": dg.MetadataValue.int(len(self.ids)),
            "ok": dg.MetadataValue.int(statuses[OK]),
            "failed": dg.MetadataValue.int(statuses.total() - statuses[OK]),
        }

"""The rows that are handed on: what is published of a partition, its vectors, and where its images are.

``published_table.py`` reads them, ``exported_images.py`` knows where images are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.partition import CONFIDENCE, INPUTS
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_engine.schema import confidence_type, description_text
from vlm_results.exported_images import ExportedImages
from vlm_results.guarantee import RAW, Guarantee
from vlm_results.joined_rows import (
    SETS,
    columns_of,
    further_records,
    further_sets,
    joined,
    set_facts,
    shown_version,
)
from vlm_results.published_table import DescribedRows, Mask, answer_digest, matching_rows, read_described

_COLUMNS: Final = (
    "property_id", "ordinal", "status", "description", CONFIDENCE, "error_kind", "error", "model",
    "model_revision", "described_at", "images_used", "images_failed", INPUTS,
)  # fmt: skip

LATER_COLUMNS: Final = {
    "described_at": pa.timestamp("us", tz="UTC"),
    "images_used": pa.list_(pa.string()),
    "images_failed": pa.list_(
        pa.struct([("uri", pa.string()), ("kind", pa.string()), ("error", pa.string())])
    ),
}
"""Columns that files of earlier versions may lack: null there."""

_EXPORTED: Final = (
    "property_id", "ordinal", "status", "description", RAW, CONFIDENCE, "text", "answer", "error_kind",
    "error", "model", "model_revision", "described_at", "image_names", "image_uris", "images_used",
    "images_failed", "embedding", "embedding_model", SETS,
)  # fmt: skip


@dataclass(frozen=True)
class ChosenRows:
    """The rows for which a condition held.

    versions: of each partition, what its shown rows were made from before the condition was looked at.
    """

    mask: Mask
    versions: Mapping[str, str]

    @classmethod
    def by_condition(
        cls, settings: Settings, catalog: Catalog, records: Mapping[str, PublishedRecord], where: str
    ) -> Self:
        """Look for which rows it holds. records: of the descriptions. Raises CommandError, PublishedError."""
        guarantee = Guarantee.read(settings)
        versions = {
            key: shown_version(settings, guarantee, record, further_records(settings, key))
            for key, record in records.items()
        }
        return cls(matching_rows(settings, catalog, where), versions)

    def count(self, key: str) -> int:
        """How many rows of a partition were chosen."""
        return int(self._mask_of(key).sum())

    def digest(self, key: str) -> str:
        """A digest of which rows of a partition were chosen."""
        return hashlib.sha256(self._mask_of(key).tobytes()).hexdigest()

    def _mask_of(self, key: str) -> Mask:
        bounds = PropertyRange.from_key(key)
        return self.mask[bounds.start : bounds.stop]

    def refuse_others(self, settings: Settings, key: str, read: DescribedRows) -> None:
        """Raise CommandError where the rows that were read are not those that the condition looked at."""
        now = shown_version(settings, Guarantee.read(settings), read.described, read.further_records)
        if now != self.versions[key]:
            raise CommandError(
                f"Partition {key} changed after --where was looked at: which of its rows to export is not"
                " known. Nothing is lost. Do it again: the files that are written stay."
            )


@dataclass(frozen=True)
class ExportedRows:
    """What the rows of partitions are made from.

    chosen: those of a condition; None: all. width: of the vectors; None: each partition has its own.
    """

    settings: Settings
    catalog: Catalog
    images: ExportedImages
    guarantee: Guarantee
    chosen: ChosenRows | None = None
    width: int | None = None

    def sources(
        self,
        key: str,
        described: PublishedRecord,
        embedded: PublishedRecord | None,
        further: Mapping[str, PublishedRecord],
    ) -> dict[str, object]:
        """What the rows of a partition come from: digests, and where the images are; and which were chosen.

        further: of the further question sets that have published it, by their names.
        """
        shown = self.guarantee.version_of(described)
        sets = {asked.name: str(columns_of(asked)) for asked in further_sets(self.settings)}
        for name, record in further.items():
            sets[name] = record.sha256 + self.guarantee.version_of(record)
        for asked in further_sets(self.settings):
            sets[asked.name] += " ".join(asked.fills)
        return {
            **({"guarantee": shown} if shown else {}),
            # A condition may look at other partitions: it chooses others of the same rows.
            **({"chosen": self.chosen.digest(key)} if self.chosen is not None else {}),
            **({"sets": {name: digest_of(made_of) for name, made_of in sets.items()}} if sets else {}),
            "listed": self.catalog.slice_digest(PropertyRange.from_key(key)),
            "described": described.sha256,
            "embedded": None if embedded is None else embedded.sha256,
            "image_roots": self.images.roots,
        }

    def read(self, key: str) -> tuple[pa.Table, DescribedRows]:
        """The rows of a partition, its images by their names; and what they were made from.

        Raises CommandError, PublishedError.
        """
        read = read_described(self.settings, key, _COLUMNS)
        rows, vectors, further = read.rows, read.vectors, read.further
        if self.chosen is not None:
            self.chosen.refuse_others(self.settings, key, read)
            chosen = pa.array(self.chosen.mask[rows["ordinal"].to_numpy()])
            rows = rows.filter(chosen)
            further = tuple(replace(of_set, rows=of_set.rows.filter(chosen)) for of_set in further)
        sure = confidence_type(rows.schema.field("description").type)
        for name, type_ in {**LATER_COLUMNS, CONFIDENCE: sure}.items():
            if name not in rows.schema.names:
                rows = rows.append_column(name, pa.nulls(rows.num_rows, type_))
        # Of the descriptions alone: vectors are made from this text, and verdicts are on this answer.
        texts = [
            None if description is None else description_text(description)
            for description in rows["description"].to_pylist()
        ]
        rows = rows.append_column("text", pa.array(texts, pa.string()))
        rows = rows.append_column("answer", _answers(rows))
        if further:
            answers = {of_set.name: _answers(of_set.rows) for of_set in further}
            facts = set_facts(rows, further, answers)
            rows = joined(rows, further).append_column(SETS, facts)
        rows = rows.combine_chunks()
        listed = self.catalog.slice(PropertyRange.from_key(key))
        positions = pc.index_in(rows["ordinal"], value_set=listed["ordinal"].combine_chunks())
        rows = rows.append_column("image_names", listed["image_uris"].take(positions))
        if vectors is None:
            type_ = pa.list_(pa.float32(), self.width or 1)
            columns = [pa.nulls(rows.num_rows, type_), pa.nulls(rows.num_rows, pa.string())]
        else:
            type_ = vectors.schema.field("embedding").type
            if self.width is not None and type_ != pa.list_(pa.float32(), self.width):
                raise CommandError(
                    f"The vectors of {key} are {type_}, others {pa.list_(pa.float32(), self.width)}:"
                    " materialize property_embeddings of those that are stale, or choose others with --where."
                )
            positions = pc.index_in(rows["ordinal"], value_set=vectors["ordinal"].combine_chunks())
            columns = [
                vectors[name].combine_chunks().take(positions.combine_chunks())
                for name in ("embedding", "model")
            ]
        rows = rows.append_column("embedding", columns[0]).append_column("embedding_model", columns[1])
        return in_order(rows).replace_schema_metadata(None), read


def _answers(rows: pa.Table) -> pa.Array:
    """The digest of each answer, and of what decided it; null where there is none."""
    decided = rows.select([name for name in (INPUTS, "description", RAW) if name in rows.schema.names])
    answers = [
        None if row["description"] is None else answer_digest({INPUTS: None, **row})
        for row in decided.to_pylist()
    ]
    return pa.array(answers, pa.string())


def in_order(table: pa.Table) -> pa.Table:
    """The exported columns of a table, in their order: files of several versions have several orders."""
    return table.select([name for name in _EXPORTED if name in table.schema.names])

"""Rows of descriptions as people count them: how many are ok, which failed and why, on which device, when.

Here are the metadata that a record keeps of a file's rows, reading them back, and naming failed rows of
published files and of a journal, without a lock. Whether the rows are complete is in ``row_counts.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_assets.assets.fingerprint import TEXTS
from vlm_assets.assets.partition import FAILED, NOT_ASKED, OK
from vlm_durable.files.layout import AssetFolders, PartitionPaths
from vlm_durable.journal.journal_errors import SegmentUnreadableError
from vlm_durable.journal.segments import segment_paths, verified_rows
from vlm_durable.state.rate import Stretch
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_durable.wording import counted
from vlm_engine.schema import description_text

COUNTED = "counted"
"""Key in the published record's metadata: its rows by outcome, and the stretches in which they were made.

It names no property, so that nothing of a withdrawn one stays in the records of earlier versions.
"""

FIRST = 5
"""How many failed properties are named."""

STRETCH_SECONDS = 600
"""Rows of one device are counted in stretches of ten minutes at most, so that a record stays small."""

_COLUMNS = ["property_id", "ordinal", "status", "error_kind", "error"]

_COUNT = """
    SELECT device, histogram(coalesce(error_kind, status, 'none')),
        min(epoch(described_at)), max(epoch(described_at))
    FROM read_parquet($file, hive_partitioning=false)
    GROUP BY device, status = 'not_asked', floor(epoch(described_at) / $stretch)
    ORDER BY 3
"""


@dataclass(frozen=True)
class FailedRow:
    """One property that could not be described, and why."""

    property_id: str
    kind: str
    error: str

    def sentence(self) -> str:
        """The property and the reason, for people."""
        return f"{self.property_id}: {self.kind}: {self.error}"


@dataclass(frozen=True)
class FailedRows:
    """The failed rows among ``rows``. kinds: their number by kind. first: those of the lowest ordinals."""

    rows: int
    kinds: Mapping[str, int]
    first: tuple[FailedRow, ...]

    @property
    def failed(self) -> int:
        """How many have failed."""
        return sum(self.kinds.values())

    def sentence(self) -> str:
        """How many failed, of which kinds, and the first of them with the reason."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        message = f"{self.failed} of {counted(self.rows, 'properties')} failed" + (
            f" ({kinds})" if kinds else ""
        )
        return message + (f". First: {self.first[0].sentence()}" if self.first else "")


@dataclass(frozen=True)
class PublishedRows:
    """The rows of one published file of descriptions. failed: by kind. not_asked: left out by ``where``.

    began: when the run that published it was launched, in unix seconds; None if it does not say.
    """

    ok: int
    failed: Mapping[str, int]
    stretches: tuple[Stretch, ...]
    began: float | None = None
    not_asked: int = 0

    @classmethod
    def from_record(cls, record: PublishedRecord) -> Self | None:
        """The rows by their record; None where the record does not count them."""
        counts: dict[str, Any] | None = record.metadata.get(COUNTED)
        if counts is None:
            return None
        failed = dict(counts["kinds"])
        stretches = tuple(Stretch(**stretch) for stretch in counts["stretches"])
        ok, not_asked = failed.pop(OK, 0), failed.pop(NOT_ASKED, 0)
        return cls(ok, failed, stretches, record.metadata.get("began"), not_asked)

    @property
    def asked(self) -> int:
        """How many properties were asked."""
        return self.ok + sum(self.failed.values())


def record_metadata(rows: PartitionRows) -> dict[str, Any]:
    """What the published record keeps of a file: a digest of the texts to embed, and its counts."""
    return {TEXTS: texts_digest(rows), COUNTED: row_counts(rows.path)}


def texts_digest(rows: PartitionRows) -> str:
    """A digest of what embeddings are made from: each property's id, with the text of its description.

    The published record keeps it under ``TEXTS``. The same texts always have the same digest.
    """
    digest = hashlib.sha256()
    for batch in rows.iter_batches(["property_id", "description"]):
        for property_id, description in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            text = None if description is None else description_text(description)
            digest.update(f"{json.dumps([property_id, text])}\n".encode())
    return digest.hexdigest()[:16]


def row_counts(file: Path) -> dict[str, Any]:
    """The counts of a file of descriptions that its record keeps under ``COUNTED``."""
    import duckdb

    kinds: Counter[str] = Counter()
    stretches = []
    with duckdb.connect() as connection:
        parameters = {"file": str(file), "stretch": STRETCH_SECONDS}
        for device, of_kind, first, last in connection.execute(_COUNT, parameters).fetchall():
            kinds.update(of_kind)
            if NOT_ASKED in of_kind:
                continue  # No device made them.
            stretches.append(asdict(Stretch(device, first, last, sum(of_kind.values()))))
    return {"kinds": dict(kinds.most_common()), "stretches": stretches}


def read_published_rows(asset: AssetFolders, keys: Collection[str]) -> dict[str, PublishedRows]:
    """The rows of these partitions, by key; without those that are unpublished or whose record is damaged."""
    published, rows_of = PublishedPartitions(asset), {}
    for key in keys:
        try:
            record = published.record(key)
        except RecordDamagedError:
            continue
        rows = None if record is None else PublishedRows.from_record(record)
        if rows is not None:
            rows_of[key] = rows
    return rows_of


def first_failed(asset: AssetFolders, published: Mapping[str, PublishedRows]) -> tuple[FailedRow, ...]:
    """The first failed properties of published files, from as few files as have them.

    A file that does not read is left out: its state says so.
    """
    failed_rows: list[FailedRow] = []
    for key in sorted(key for key, rows in published.items() if rows.failed):
        if len(failed_rows) >= FIRST:
            break
        try:
            table = pq.read_table(
                asset.partition(key).published,
                columns=_COLUMNS,
                partitioning=None,
                filters=[("status", "=", FAILED)],
            )
        except (OSError, pa.ArrowException):
            continue
        failed_rows += _named(table.to_pylist())
    return tuple(failed_rows[:FIRST])


def unpublished_failures(paths: PartitionPaths) -> FailedRows:
    """The failed rows of a partition's latest journal. A segment that does not read is left out."""
    journals = [(path.stat().st_mtime_ns, path) for path in paths.journals.glob("*") if path.is_dir()]
    last: dict[str, dict[str, Any]] = {}
    for path in segment_paths(max(journals)[1]) if journals else []:
        try:
            table = verified_rows(path)
        except SegmentUnreadableError:
            continue
        names = [name for name in _COLUMNS if name in table.schema.names]
        # A later segment's row takes the place of a failed one.
        last |= {row["property_id"]: row for row in table.select(names).to_pylist()}
    failed = [row for row in last.values() if row.get("status") == FAILED]
    kinds = Counter(str(row.get("error_kind")) for row in failed)
    return FailedRows(len(last), dict(kinds.most_common()), tuple(_named(failed)))


def _named(failed: Collection[Mapping[str, Any]]) -> list[FailedRow]:
    """The first of these failed rows."""
    first = sorted(failed, key=lambda row: row["ordinal"])[:FIRST]
    return [FailedRow(row["property_id"], str(row.get("error_kind")), str(row.get("error"))) for row in first]

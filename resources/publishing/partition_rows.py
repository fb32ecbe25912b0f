"""A lazy handle on the rows of one partition's file: nothing is read until rows or columns are asked for.

Every read verifies the page checksums: a flipped bit raises instead of coming back as another value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from resources.publishing.record import PublishedRecord

ID_COLUMN = "property_id"
BATCH_ROWS = 1024
"""Rows of a row group, and of a batch that is read: what is in memory at a time."""


@dataclass(frozen=True)
class PartitionRows:
    """The rows of one file, to be read by column and in batches.

    ``record`` says what was published, and is None for a staged file. ``path`` serves DuckDB:
    ``duckdb.read_parquet(str(rows.path))``.
    """

    path: Path
    record: PublishedRecord | None = None
    columns: tuple[str, ...] | None = None

    @property
    def schema(self) -> pa.Schema:
        """The file's Arrow schema, from its footer."""
        return pq.read_schema(self.path)

    @property
    def num_rows(self) -> int:
        """The file's row count, from its footer."""
        return int(pq.read_metadata(self.path).num_rows)

    def to_table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows, with these columns only (all of the handle's by default), in the file's order."""
        with self._open() as file:
            return file.read(columns=self._chosen(columns), use_threads=False)

    def iter_batches(
        self, columns: Sequence[str] | None = None, *, batch_rows: int = BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """The rows in batches, in the file's order; one row group is in memory at a time."""
        with self._open() as file:
            yield from file.iter_batches(batch_rows, columns=self._chosen(columns), use_threads=False)

    def ids(self) -> list[str]:
        """The ids, in the file's order, repeated ones repeated."""
        column: list[str] = self.to_table([ID_COLUMN]).column(ID_COLUMN).to_pylist()
        return column

    def dataset(self) -> Any:
        """The file as a ``pyarrow.dataset.Dataset``, for filters that are pushed down."""
        options = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
        return pads.dataset(self.path, format=pads.ParquetFileFormat(default_fragment_scan_options=options))

    def _chosen(self, columns: Sequence[str] | None) -> list[str] | None:
        chosen = columns if columns is not None else self.columns
        return None if chosen is None else list(chosen)

    def _open(self) -> Any:
        # Buffering ahead would keep every row group that was read until the file is closed.
        return pq.ParquetFile(self.path, page_checksum_verification=True, pre_buffer=False)

"""A partition's next file, written and read back but not yet published.

What lives here: streaming rows into a temporary parquet file. What does not: reading it back and comparing
its ids (``verification.py``), whether and how it is published (``published.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from resources.publishing.partition_rows import BATCH_ROWS, PartitionRows
from resources.publishing.publishing_errors import DigestMismatchError, WrongIdSetError, WrongSchemaError
from resources.publishing.verification import IdSet, judge
from resources.storage import files
from resources.storage.layout import AssetFolders


@dataclass
class StagedFile:
    """A complete parquet file under a temporary name in the staging folder, verified by reading it back.

    It lives until it is published or discarded; what a killed process leaves behind is removed by the next
    stage of the same partition. ``sequence`` is that of the version it would replace (0: none).
    ``notes`` are sentences about what an earlier interruption had left and how it was settled.
    """

    key: str
    path: Path
    asset: AssetFolders
    rows: int
    bytes: int
    sha256: str
    key_set_digest: str
    ids: IdSet
    schema: pa.Schema
    fingerprint: str
    metadata: Mapping[str, Any]
    sequence: int
    notes: tuple[str, ...]
    in_use: InUseMark = field(repr=False)

    def read(self) -> PartitionRows:
        """The staged rows, lazily: what the checks look at."""
        return PartitionRows(self.path)

    def refuse_unfit(self) -> None:
        """Raise WrongIdSetError or DigestMismatchError where this file must not be published."""
        if not self.ids.fits:
            raise WrongIdSetError(
                f"partition {self.key} is not published, because its ids are not the expected ones: "
                f"{self.ids.sentence()}. {self.asset.partition(self.key).published} stays as it was. "
                "Materialize the partition again; if it repeats, compare the catalogue's slice with the "
                "journal."
            )
        if damage := judge(self.path, self, deep=True):
            raise DigestMismatchError(
                f"partition {self.key} is not published, because it changed after it was read back: "
                f"{damage[1]} The published file stays as it was. Materialize the partition again, and look "
                "at the disk's health."
            )

    def discard(self) -> None:
        """Remove the temporary file. Publishing does this too; doing it twice does no harm."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let go of the mark that says that this process still needs the temporary file."""
        self.in_use.release()

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.discard()


def write_rows(sink: files.TemporaryFile, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> int:
    """Stream batches of any size into parquet, in row groups of 1,024 rows. Returns the number of rows.

    Row groups do not follow the batches, so that the same rows give the same bytes however they came.
    Raises WrongSchemaError for a batch with other columns, DurableWriteError where the disk fails.
    """
    # Numbers of a vector do not repeat: a dictionary of them made files 1.3 times as large, and zstd, which
    # saves 9%, took two thirds of the time of a scan.
    vectors = {field.name for field in schema if pa.types.is_fixed_size_list(field.type)}
    dictionary = [name for name in schema.names if name not in vectors] if vectors else True
    compression = (
        {name: "none" if name in vectors else "zstd" for name in schema.names} if vectors else "zstd"
    )
    writer = pq.ParquetWriter(
        sink, schema, compression=compression, write_page_checksum=True, use_dictionary=dictionary
    )
    rows = 0
    try:
        for group in _row_groups(batches, schema):
            writer.write_table(group, row_group_size=BATCH_ROWS)
            rows += group.num_rows
        writer.close()
    except BaseException:
        # Closing what cannot be written raises once more, and would again when it is collected.
        with contextlib.suppress(Exception):
            writer.close()
        writer.is_open = False
        raise
    return rows


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if not batch.schema.equals(schema):
            raise WrongSchemaError(
                f"a batch has the columns {_columns(batch.schema)} where the partition's file has "
                f"{_columns(schema)}: nothing was published. Build every batch with the schema handed to "
                "stage()."
            )
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS:
            table = pa.Table.from_batches(waiting, schema)
            whole = rows - rows % BATCH_ROWS
            for start in range(0, whole, BATCH_ROWS):
                yield table.slice(start, BATCH_ROWS)
            waiting, rows = table.slice(whole).to_batches(), rows - whole
    if rows:
        yield pa.Table.from_batches(waiting, schema)


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{one.name}: {one.type}" for one in schema)


class InUseMark:
    """A lock on a temporary file that a living process still needs: without it the file is abandoned.

    The operating system frees it when the process dies, however it dies.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    @staticmethod
    def remove_if_abandoned(path: Path) -> bool:
        """Remove a temporary file that no living process holds. The caller holds the partition's lock."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

"""The one verification: is this file what it should be, in rows, ids and digest?

Used when a file is staged and published, at every verify, by the audit and by the drift sensor. It changes
nothing: putting things right is in ``published.py`` and ``partition_files.py``. Findings have a kind for
machines and a sentence for people.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from resources.journal.identity import key_set_digest
from resources.publishing.partition_rows import ID_COLUMN, PartitionRows
from resources.storage import files

_SHOWN = 5

PUT_BACK = (
    "`vlm-assets repair`, or materializing that partition, puts its second copy back, without a device."
)
"""What to do about a published file that is not what its record says."""

PUBLISHED_FILE = "published_file"
"""The check under which Dagster shows what a verification said of a published file."""


class Expected(Protocol):
    """What a file must be: a published record, or a file that was just staged. sha256: of all its bytes."""

    @property
    def rows(self) -> int:
        """Rows in the file."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def sha256(self) -> str:
        """Digest of all its bytes, in hex."""


class FindingKind(StrEnum):
    """What is wrong with a partition's files."""

    NOT_PUBLISHED = "not_published"
    MISSING = "missing"
    TRUNCATED = "truncated"
    DIGEST_DIFFERS = "digest_differs"
    ROWS_DIFFER = "rows_differ"
    UNREADABLE = "unreadable"
    FOREIGN_FILE = "foreign_file"
    RECORD_DAMAGED = "record_damaged"
    BACKUP_MISSING = "backup_missing"
    BACKUP_DIFFERS = "backup_differs"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and the sentence that says what, where and what to do."""

    kind: FindingKind
    sentence: str


def judge(path: Path, record: Expected, *, deep: bool) -> Finding | None:
    """What is wrong with one file, or None. Without ``deep``: its size and its footer's row count only."""
    try:
        size = path.stat().st_size
        sha256 = files.sha256_of(path) if deep and size == record.bytes else None
    except FileNotFoundError:
        return Finding(FindingKind.MISSING, f"{path} is missing ({record.rows} rows were published).")
    except OSError as error:
        return Finding(FindingKind.UNREADABLE, f"{path} cannot be read: {error.strerror or error}.")
    if sha256 == record.sha256:
        return None
    try:
        rows = int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        if size < record.bytes:
            said = f"{path} is truncated: it has {size} bytes of {record.bytes}."
            return Finding(FindingKind.TRUNCATED, said)
        said = f"{path} is not readable parquet: {str(error).splitlines()[0]}."
        return Finding(FindingKind.UNREADABLE, said)
    if rows != record.rows:
        return Finding(FindingKind.ROWS_DIFFER, f"{path} has {rows} rows where {record.rows} were published.")
    if size != record.bytes or sha256 is not None:
        found = f"digest {sha256[:12]}" if sha256 else f"{size} bytes"
        wanted = f"digest {record.sha256[:12]}" if sha256 else f"{record.bytes} bytes"
        return Finding(FindingKind.DIGEST_DIFFERS, f"{path} has {found} where {wanted} was published.")
    return None


def is_whole(path: Path, record: Expected | None) -> bool:
    """Whether a file is, to the byte, what was recorded. One that is missing or does not read is not.

    Raises OSError where it could not be looked at for another reason (rights): that says nothing of the file.
    """
    if record is None:
        return False
    try:
        return path.stat().st_size == record.bytes and files.sha256_of(path) == record.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


@dataclass(frozen=True)
class IdSet:
    """The ids of a file against the expected ones: each number, and the first few ids of each kind."""

    expected: int
    found: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    nulls: int = 0

    @property
    def fits(self) -> bool:
        """Whether the file holds every expected id once and nothing else."""
        return not (self.missing or self.unexpected or self.repeated or self.nulls)

    def sentence(self) -> str:
        """Expected, found, and the first offending ids of each kind."""
        parts = [f"{self.expected} ids expected, {self.found} rows found"]
        for name, ids in (
            ("missing", self.missing),
            ("not expected", self.unexpected),
            ("more than once", self.repeated),
        ):
            if ids:
                shown = ", ".join(repr(one) for one in ids[:_SHOWN])
                parts.append(f"{len(ids)} {name}: {shown}{', …' if len(ids) > _SHOWN else ''}")
        if self.nulls:
            parts.append(f"{self.nulls} without an id")
        return "; ".join(parts)


def read_back(path: Path, *, rows: int, expected_ids: Collection[str]) -> tuple[IdSet, str]:
    """Decode a file fully, page checksums verified, and compare its ids. Returns them and their digest.

    Ids are all that stays in memory. Raises DurableWriteError where the file cannot be decoded or holds
    another number of rows than were written.
    """
    found: set[str] = set()
    repeated: dict[str, None] = {}
    count = nulls = 0
    try:
        for batch in PartitionRows(path).iter_batches():
            count += batch.num_rows
            for one in batch.column(ID_COLUMN).to_pylist():
                if one is None:
                    nulls += 1
                elif one in found:
                    repeated[one] = None
                else:
                    found.add(one)
    except (OSError, pa.ArrowException) as error:
        raise files.DurableWriteError(errno.EIO, f"{path} cannot be read back: {error}") from error
    if count != rows:
        raise files.DurableWriteError(errno.EIO, f"{path} reads back {count} rows where {rows} were written")
    expected = expected_ids if isinstance(expected_ids, Set) else frozenset(expected_ids)
    ids = IdSet(
        expected=len(expected),
        found=count,
        missing=tuple(sorted(one for one in expected if one not in found)),
        unexpected=tuple(sorted(one for one in found if one not in expected)),
        repeated=tuple(repeated),
        nulls=nulls,
    )
    return ids, key_set_digest(found)

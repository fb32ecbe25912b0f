"""Inspecting a journal without opening it: which committed rows are there, and which are missing.

For status, repair and the audit. It takes no lock and changes nothing. Opening a journal, which verifies and
recovers it, is in ``recovery.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_durable.files.files import sha256_of
from vlm_durable.journal.commits import newest_manifest
from vlm_durable.journal.high_water_mark import HighWaterMark, read_marks
from vlm_durable.journal.segments import SEGMENT_NAME
from vlm_durable.wording import counted


@dataclass(frozen=True)
class JournalInspection:
    """The journal of one generation.

    rows: committed rows on disk. promised: committed rows by its high-water mark and manifest. troubles:
    sentences about segments that are missing or damaged.
    """

    generation: str
    rows: int
    promised: int
    troubles: tuple[str, ...] = ()

    @property
    def lost_rows(self) -> int:
        """Committed rows that are not on disk."""
        return max(0, self.promised - self.rows)


def inspect_journals(journals: Path, marks: Path, key: str, *, deep: bool) -> list[JournalInspection]:
    """The journals of a partition's generations with unfinished work.

    journals, marks: the partition's folders of journals and of high-water marks. deep: also hash every
    segment; otherwise their sizes are compared. Raises FormatVersionError for a newer program's journal.
    """
    # Marks before manifests: a commit writes the manifest first, so no mark promises a later manifest's rows.
    marks_by_generation = {mark.generation: mark for mark in read_marks(marks, key)}
    folders = {path.name for path in journals.iterdir() if path.is_dir()} if journals.is_dir() else set()
    unfinished = {name for name, mark in marks_by_generation.items() if not mark.retired}
    return [
        _inspect(journals / name, marks_by_generation.get(name), deep=deep)
        for name in sorted(unfinished | (folders - marks_by_generation.keys()))
    ]


def _inspect(directory: Path, mark: HighWaterMark | None, *, deep: bool) -> JournalInspection:
    head = newest_manifest(directory)
    given_up = {*(head.given_up if head else ()), *(mark.given_up if mark else ())}
    listed = {record.name: record for record in head.segments} if head else {}
    rows = 0
    troubles: list[str] = []
    for name, record in listed.items():
        if name in given_up:
            continue
        trouble = _trouble(directory / name, record.size, record.sha256 if deep else None)
        if trouble is None:
            rows += record.rows - record.superseding
        else:
            troubles.append(f"segment {name} ({counted(record.rows, 'rows')}) {trouble}")
    promised = max(mark.rows if mark else 0, head.rows if head else 0)
    if rows < promised:
        # The newest manifest may be damaged or behind: the next start adopts segments that no manifest lists.
        for path in _unlisted(directory, listed.keys()):
            adoptable_rows = _rows_of(path, deep=deep)
            rows += adoptable_rows or 0
            if adoptable_rows is None:
                troubles.append(f"segment {path.name} does not verify")
    if not directory.is_dir() and promised:
        troubles.append(f"{directory} is not there")
    return JournalInspection(directory.name, rows, promised, tuple(troubles))


def _trouble(path: Path, size: int, sha256: str | None) -> str | None:
    try:
        if path.stat().st_size != size:
            return "has another size"
        if sha256 is not None and sha256_of(path) != sha256:
            return "is not what was committed: its SHA-256 differs"
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def _unlisted(directory: Path, listed: Collection[str]) -> Iterator[Path]:
    if directory.is_dir():
        for path in sorted(directory.iterdir()):
            if SEGMENT_NAME.fullmatch(path.name) and path.name not in listed:
                yield path


def _rows_of(path: Path, *, deep: bool) -> int | None:
    """The rows of a segment that no manifest lists; None where it does not verify."""
    match = SEGMENT_NAME.fullmatch(path.name)
    try:
        if deep and match is not None and not sha256_of(path).startswith(match["sha256"]):
            return None
        return int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError, MemoryError, pa.ArrowException):
        return None

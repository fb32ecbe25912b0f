"""The version mark: the newest version of a file that was ever durable here, kept apart from that file.

A file that was put back to an older version is whole, and its digest fits. Only a note beside it can tell
that a newer version existed. The mark is never the truth about the data: a mark that is behind is raised.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, sealed

FORMAT = 2
"""1 did not hold the id of what a partition belongs to."""

UNKNOWN_STORE = ""
"""It takes the place of the last store: a mark that could not be read may have named any."""


@dataclass(frozen=True)
class VersionMark:
    """The newest version of one file.

    ``name`` is the file's: ``ASSET/KEY``. ``sequence`` counts its versions from 1. ``digest`` is that of the
    version's content; the id of its origin and a colon may stand before it. ``marked_at`` is UTC, ISO 8601.
    ``content``: the values for writing the file's record anew, where the file has a record, and under "store"
    the last store that had the file.
    """

    name: str
    sequence: int
    digest: str
    marked_at: str
    content: Mapping[str, Any] | None = None

    @classmethod
    def now(cls, name: str, sequence: int, digest: str) -> VersionMark:
        """A mark for a version that is durable now."""
        return cls(name, sequence, digest, datetime.now(UTC).isoformat(timespec="milliseconds"))

    @property
    def origin(self) -> str:
        """The id of what the version belongs to; "" where there is none."""
        return self.digest.rpartition(":")[0]

    @property
    def store(self) -> str | None:
        """The last store that had the file; UNKNOWN_STORE where only a mark that is lost could tell."""
        return self.content.get("store") if self.content is not None else None

    def noting(self, store: str | None) -> VersionMark:
        """This mark with ``store`` as the last store that had the file."""
        return (
            self if store == self.store else replace(self, content={**(self.content or {}), "store": store})
        )


@dataclass(frozen=True)
class VersionMarkReading:
    """The marks of one file in the two copies, highest first, and the damaged copies."""

    marks: tuple[VersionMark, ...]
    damaged: tuple[Path, ...]

    @property
    def mark(self) -> VersionMark | None:
        """The highest mark."""
        return self.marks[0] if self.marks else None

    @property
    def is_unreadable(self) -> bool:
        """Whether there was a mark, and neither copy is readable: that is not the same as no mark."""
        return bool(self.damaged) and not self.marks


class MarkComparison(StrEnum):
    """How a version that verifies compares with its mark."""

    CURRENT = "current"
    """It is the marked version."""
    NEWER = "newer"
    """The mark is behind: a process was killed before it marked, or ``.state`` is an older copy."""
    OLDER = "older"
    """A newer version was durable here: this older one was put back."""
    OTHER = "other"
    """It has the marked version's sequence number, and is another version."""


def compare_with_mark(mark: VersionMark | None, sequence: int, digest: str) -> MarkComparison:
    """Compare a version with the mark. Without a mark every version is a newer one."""
    if mark is None or sequence > mark.sequence:
        return MarkComparison.NEWER
    if sequence < mark.sequence:
        return MarkComparison.OLDER
    return MarkComparison.CURRENT if digest == mark.digest else MarkComparison.OTHER


def mark_copies(path: Path) -> tuple[Path, Path]:
    """The two copies of a mark: ``path`` itself and one beside it."""
    return path, path.with_name(f"{path.stem}.copy{path.suffix}")


class VersionMarkFile:
    """The mark of one versioned object, in its two copies. Who may write that object may write it.

    A mark of another object or of another origin counts as damaged: its file is in the wrong place. Every
    method raises OSError, and FormatVersionError where a newer version of this program wrote a copy.
    """

    def __init__(self, paths: PartitionPaths) -> None:
        self.name = f"{paths.asset.name}/{paths.key}"
        self.copies = mark_copies(paths.version_mark)
        self._asset = paths.asset

    def read(self) -> VersionMarkReading:
        """Read both copies. Raises OSError where neither has a mark and one could not be read."""
        return self._read(self._asset.origin)

    def raise_to(self, mark: VersionMark) -> bool:
        """Write ``mark``, durably, unless the mark there has the same or a higher number.

        The store in the earlier mark stays, unless this mark names another. Returns whether anything was
        written.
        """
        reading = self._read(mark.origin)
        if compare_with_mark(reading.mark, mark.sequence, mark.digest) is not MarkComparison.NEWER:
            mark = reading.mark or mark
        return self._write_copies(mark, reading)

    def write(self, mark: VersionMark) -> None:
        """As ``raise_to``, but replace the mark of another version with the same number.

        Two machines may give the same number, and one of them takes over what the other published.
        """
        reading = self._read(mark.origin)
        before = reading.mark
        self._write_copies(
            before if before is not None and before.sequence > mark.sequence else mark, reading
        )

    def forget(self) -> None:
        """Have it name no version, durably: the object counts as never published.

        A number stays, so that none is given twice.
        """
        reading = self.read()
        unknown = VersionMark.now(self.name, self.next_sequence(), "")
        mark = unknown if reading.is_unreadable else reading.mark
        if mark is not None:
            self.write(replace(mark, digest=f"{mark.origin}:" if mark.origin else "", content=None))

    def next_sequence(self, *sequences: int) -> int:
        """The number of the next version, above these. No number is ever given twice.

        Where the mark cannot be read, nothing tells which were given: the seconds since 1970 are more.
        """
        reading = self.read()
        marked = int(time.time()) if reading.is_unreadable else 0
        return max((*sequences, marked, *(mark.sequence for mark in reading.marks))) + 1

    def last_store(self) -> str | None:
        """The last store that had the object; UNKNOWN_STORE where the mark cannot tell."""
        reading = self.read()
        if reading.is_unreadable:
            return UNKNOWN_STORE
        return reading.mark.store if reading.mark is not None else None

    def note_store(self, store: str) -> None:
        """Note that a store has the object, beside the version that is marked."""
        mark = self.read().mark
        if mark is not None and mark.store != store:
            self.write(mark.noting(store))

    def _read(self, origin: str) -> VersionMarkReading:
        readings, errors = list[tuple[Path, VersionMark | None]](), list[OSError]()
        for copy in self.copies:
            try:
                mark = VersionMark(**read_sealed(copy, format_=FORMAT))
                is_own = mark.name == self.name and may_be_same_origin(mark.origin, origin)
                readings.append((copy, mark if is_own else None))
            except FileNotFoundError:
                continue
            except (BrokenSealError, TypeError, OSError) as error:
                readings.append((copy, None))
                errors += [error] if isinstance(error, OSError) else []
        if errors and not any(mark for _, mark in readings):
            raise errors[0]
        marks = sorted((mark for _, mark in readings if mark is not None), key=lambda mark: -mark.sequence)
        damaged = tuple(copy for copy, mark in readings if mark is None)
        return VersionMarkReading(tuple(marks), damaged)

    def _write_copies(self, mark: VersionMark, before: VersionMarkReading) -> bool:
        """Write the copies that differ, one after the other: a write that is torn leaves the other copy."""
        if mark.store is None and before.is_unreadable:
            mark = mark.noting(UNKNOWN_STORE)
        elif mark.store is None and before.mark is not None:
            mark = mark.noting(before.mark.store)
        data = sealed(asdict(mark), format_=FORMAT)
        behind = [copy for copy in self.copies if not _holds(copy, data)]
        if behind:
            # ``.state`` may be on another device than the rest: it has a staging folder of its own.
            for folder in (self._asset.version_marks, self._asset.marks_staging):
                make_directory(folder)
        for copy in behind:
            write_replacing(copy, data, self._asset.marks_staging)
        return bool(behind)


def may_be_same_origin(first: str, second: str) -> bool:
    """Whether two origin ids do not contradict each other: they are equal, or one is unknown."""
    return not first or not second or first == second


def _holds(copy: Path, data: bytes) -> bool:
    try:
        return copy.read_bytes() == data
    except OSError:
        return False

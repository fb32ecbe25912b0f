"""The version mark: the newest version of a file that was ever durable here, kept apart from that file.

A file that was put back to an older version is whole, and its digest fits. Only a note beside it can tell
that a newer version existed. The mark is never the truth about the data: a mark that is behind is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, sealed

FORMAT = 2
"""1 did not hold the id of what a partition belongs to."""


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
        """The last store that had the file."""
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


def read_version_mark(path: Path, *, name: str, origin: str = "") -> VersionMarkReading:
    """Read both copies. A mark of another name counts as damaged: its file is in the wrong place.

    origin: a mark of another origin counts as damaged too; "": any origin is accepted.

    Raises OSError where neither copy has a mark and one could not be read: there may be one. Raises
    FormatVersionError where a newer version of this program wrote a copy.
    """
    readings, errors = list[tuple[Path, VersionMark | None]](), list[OSError]()
    for copy in mark_copies(path):
        try:
            readings += _read_copy(copy, name, origin)
        except OSError as error:
            readings.append((copy, None))
            errors.append(error)
    if errors and not any(mark for _, mark in readings):
        raise errors[0]
    marks = sorted((mark for _, mark in readings if mark is not None), key=lambda mark: -mark.sequence)
    damaged = tuple(copy for copy, mark in readings if mark is None)
    return VersionMarkReading(tuple(marks), damaged)


def raise_version_mark(path: Path, mark: VersionMark, staging: Path | None = None) -> bool:
    """Write ``mark`` into both copies, durably, unless the mark there has the same or a higher number.

    The store in the earlier mark stays, unless this mark names another. A mark of another origin does not
    count: its file is in the wrong place. staging: the folder of temporary files; that of ``path`` unless
    given. Returns whether anything was written. Raises OSError, FormatVersionError. Only for the one process
    that may write the marked file.
    """
    before = _standing_mark(path, mark)
    if (
        before is not None
        and compare_with_mark(before, mark.sequence, mark.digest) is not MarkComparison.NEWER
    ):
        mark = before
    return _write_copies(path, _with_store(mark, before), staging)


def write_version_mark(path: Path, mark: VersionMark, staging: Path | None = None) -> None:
    """As ``raise_version_mark``, but replace the mark of another version with the same number.

    Two machines may give one number each, and one of them takes over the version that the other published.
    """
    before = _standing_mark(path, mark)
    if before is not None and before.sequence > mark.sequence:
        mark = before
    _write_copies(path, _with_store(mark, before), staging)


def _with_store(mark: VersionMark, before: VersionMark | None) -> VersionMark:
    return mark if mark.store is not None or before is None else mark.noting(before.store)


def _standing_mark(path: Path, mark: VersionMark) -> VersionMark | None:
    marks = read_version_mark(path, name=mark.name).marks
    return next((before for before in marks if may_be_same_origin(before.origin, mark.origin)), None)


def may_be_same_origin(first: str, second: str) -> bool:
    """Whether two origin ids do not contradict each other: they are equal, or one is unknown."""
    return not first or not second or first == second


def _read_copy(copy: Path, name: str, origin: str) -> list[tuple[Path, VersionMark | None]]:
    try:
        mark = VersionMark(**read_sealed(copy, format_=FORMAT))
    except FileNotFoundError:
        return []
    except (BrokenSealError, TypeError):
        return [(copy, None)]
    is_own = mark.name == name and may_be_same_origin(mark.origin, origin)
    return [(copy, mark if is_own else None)]


def _write_copies(path: Path, mark: VersionMark, staging: Path | None) -> bool:
    """Write the copies that differ, one after the other: a write that is torn leaves the other copy."""
    data = sealed(asdict(mark), format_=FORMAT)
    behind = [copy for copy in mark_copies(path) if not _holds(copy, data)]
    if behind:
        for folder in filter(None, (path.parent, staging)):
            make_directory(folder)
    for copy in behind:
        write_replacing(copy, data, staging)
    return bool(behind)


def _holds(copy: Path, data: bytes) -> bool:
    try:
        return copy.read_bytes() == data
    except OSError:
        return False

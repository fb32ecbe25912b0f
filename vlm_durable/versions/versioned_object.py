"""One versioned object of a home: its lock, its record in two copies, its version mark, what it moves aside.

Published partitions, the catalogue and trained models are such objects. Each knows what its files are, and
when an older version was put back. In a store, ``fenced_object.py`` is the counterpart. Every method that
writes wants the lock held.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.files.lock_files import LockFile, acquire_lock
from vlm_durable.versions.version_mark import VersionMarkFile

Record = TypeVar("Record")

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,149}")
"""No dot in a key: KEY.copy.json and KEY.0.parquet would be files of two keys."""


class PublishedError(Exception):
    """Something about a published object is wrong, or was refused. Nothing was lost by it."""


class RecordDamagedError(PublishedError):
    """Neither copy of an object's record can be read; or this copy cannot."""


@dataclass(frozen=True)
class RecordCopy(Generic[Record]):
    """One copy of a record. content: None where it is missing or cannot be read.

    record: None where it is missing or damaged. damage: why it is not whole; None where it is, or is missing.
    """

    path: Path
    content: bytes | None
    record: Record | None
    damage: RecordDamagedError | OSError | None


def unfit_key(key: str) -> str | None:
    """Why no object can have this key; None where one can."""
    if _KEY.fullmatch(key):
        return None
    return f"{key!r} cannot be a file name: use up to 150 letters, digits, '-' and '_' (ASCII)"


class VersionedObject(Generic[Record]):
    """One versioned object. ``Record`` is what its record is read as. Raises PublishedError: unusable key."""

    def __init__(self, paths: PartitionPaths) -> None:
        if problem := unfit_key(paths.key):
            raise PublishedError(f"the key {problem}")
        self.paths = paths
        self.key = paths.key
        self.asset = paths.asset.name
        self.staging = paths.asset.staging
        self.marks_staging = paths.asset.marks_staging
        self.mark = VersionMarkFile(paths)
        self.record_paths = [paths.record, paths.record_copy]

    @property
    def quarantine(self) -> Path:
        """The folder for files of it that do not verify."""
        return self.paths.quarantine

    def parsed(self, content: bytes) -> Record:
        """Read a record from bytes. Raises RecordDamagedError where they are no record of this object."""
        raise NotImplementedError

    def lock(self, seconds: float) -> LockFile | None:
        """Make its folders and take its lock, which a dead process frees; None where another one keeps it."""
        asset = self.paths.asset
        for folder in (asset.published, asset.versions, asset.staging, asset.locks):
            files.make_directory(folder)
        return acquire_lock(self.paths.publication_lock, seconds=seconds)

    def copies(self) -> list[RecordCopy[Record]]:
        """Both copies of the record as they stand. Needs no lock. Raises FormatVersionError."""
        copies: list[RecordCopy[Record]] = []
        for path in self.record_paths:
            content = record = damage = None
            try:
                content = path.read_bytes()
                if copies and copies[0].content == content:
                    record, damage = copies[0].record, copies[0].damage
                else:
                    record = self.parsed(content)
            except FileNotFoundError:
                pass
            except (RecordDamagedError, OSError) as error:
                damage = error
            copies.append(RecordCopy(path, content, record, damage))
        return copies

    def whole_records(self) -> list[Record]:
        """The copies of the record that can be read. Raises RecordDamagedError where each one is damaged.

        Raises OSError where one cannot be read for another reason than damage (rights): nothing is known.
        """
        copies = self.copies()
        for copy in copies:
            if isinstance(copy.damage, OSError) and copy.damage.errno != errno.EIO:
                raise copy.damage
        whole = [copy.record for copy in copies if copy.record is not None]
        damage = next((copy.damage for copy in copies if copy.damage is not None), None)
        if damage is not None and not whole:
            record, record_copy = self.record_paths
            raise RecordDamagedError(
                f"{damage}. Neither {record} nor its copy {record_copy} is whole. The partition's file is"
                f" left as it is; {command('repair')} says what it would do."
            )
        return whole

    def write_record(self, path: Path, content: bytes) -> None:
        """Write one copy of the record, durably."""
        files.write_replacing(path, content, self.staging)

    def settle_record(self, content: bytes) -> None:
        """Write both copies. The copy first: it stands beside the backups and makes their renames durable."""
        for path in reversed(self.record_paths):
            self.write_record(path, content)

    def move_aside(self, path: Path, notes: list[str]) -> None:
        """Move one file into the quarantine."""
        notes.append(f"{path} was moved to {files.set_aside(path, self.quarantine)}.")

    def keep_aside(self, path: Path, notes: list[str]) -> None:
        """Keep a file in the quarantine that the caller is about to replace."""
        aside = files.set_aside(path, self.quarantine, keep=True)
        notes.append(f"What stood at {path} was kept as {aside}.")

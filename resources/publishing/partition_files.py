"""The files of one partition: its record, what its files must be, and the steps from version to version.

What lives here: the record in its two copies, the comparison of a file with it, the lock, the order in which
a publication changes the disk, and how one that was interrupted is finished or taken back. What does not:
where the files lie (``resources.storage.layout``), what may be published and what people are told
(``resources.publishing.published``). Every method that writes wants the lock held.

The order holds at every line: the published name has the whole old file or the whole new one; the record on
disk names both while they are being exchanged; a backup is dropped only after everything newer was read back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from resources.storage import files
from resources.storage.layout import VERSION_NUMBERS, AssetFolders
from resources.storage.lock_files import is_held, taken
from resources.storage.sealed_json import FormatVersionError, refuse_newer_format, seal, unseal

FORMAT = 1

LOCK_SECONDS = 60.0
"""To wait for another process that is publishing the same partition."""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,149}")

PUT_BACK = (
    "`vlm-assets repair`, or materializing that partition, puts its second copy back, without a device."
)
"""What to do about a published file that is not what its record says."""

PUBLISHED_FILE = "published_file"
"""The check under which Dagster shows what a verification said of a published file."""


class PublishedError(Exception):
    """Something about a partition's published file is wrong, or was refused. Nothing was lost by it."""


class PartitionBusyError(PublishedError):
    """Another process is publishing or restoring this partition and has not finished in time."""


class NotPublishedError(PublishedError):
    """The partition has no published file."""


class FileDamagedError(PublishedError):
    """A file is not, to the byte, what its record says."""


class RecordDamagedError(PublishedError):
    """Neither copy of a partition's record can be read."""


class CannotRestoreError(PublishedError):
    """Neither the published file nor its second copy is what the record says."""


@dataclass(frozen=True)
class PublishedRecord:
    """One published version of a partition.

    ``sequence`` counts publications of this partition from 1 and gives their order, whatever the clock
    says. ``sha256`` is over the whole file, ``key_set_digest`` over its ids
    (``resources.journal.segments``). ``published_at`` is UTC, ISO 8601. ``metadata`` is what the asset
    wanted remembered, as JSON values.
    """

    key: str
    sequence: int
    sha256: str
    bytes: int
    rows: int
    key_set_digest: str
    fingerprint: str
    published_at: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingPublication:
    """A publication under way: the version that is to be published and the versions to be kept before it."""

    record: PublishedRecord
    previous: tuple[PublishedRecord, ...]


@dataclass(frozen=True)
class PartitionVersions:
    """All that a partition's record says: the published version, those before it, and one under way."""

    key: str
    published: PublishedRecord | None = None
    previous: tuple[PublishedRecord, ...] = ()
    pending: PendingPublication | None = None

    @property
    def sequence(self) -> int:
        """The sequence number of the published version, 0 where there is none."""
        return self.published.sequence if self.published else 0

    def to_bytes(self) -> bytes:
        """The manifest as it stands on disk: JSON with the SHA-256 of its content."""
        return seal(json.dumps({"format": FORMAT, **asdict(self)}, indent=2).encode())

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> PartitionVersions:
        """Read a manifest. Raises RecordDamagedError where it is not, to the byte, what was written.

        A record of a newer version is not damaged and must not be moved away: it raises FormatVersionError.
        """
        try:
            content = unseal(data)
            refuse_newer_format(content["format"], FORMAT, Path(f"the record of partition {key}"))
            if content["key"] != key:
                raise ValueError(f"it is for partition {content['key']}")
            pending = content["pending"]
            return cls(
                key=key,
                published=PublishedRecord(**content["published"]) if content["published"] else None,
                previous=_records(content["previous"]),
                pending=PendingPublication(
                    PublishedRecord(**pending["record"]), _records(pending["previous"])
                )
                if pending
                else None,
            )
        except FormatVersionError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise RecordDamagedError(f"the record of partition {key} cannot be read: {error}") from error


def _records(contents: list[dict[str, Any]]) -> tuple[PublishedRecord, ...]:
    return tuple(PublishedRecord(**one) for one in contents)


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


def judge(path: Path, record: PublishedRecord, *, deep: bool) -> Finding | None:
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


class PartitionFiles:
    """The files of one partition of an asset. Raises PublishedError for an unusable key."""

    def __init__(self, asset: AssetFolders, key: str) -> None:
        # No dot either: KEY.0.parquet would be two keys' file.
        if not _KEY.fullmatch(key):
            raise PublishedError(
                f"partition key {key!r} cannot be a file name: use up to 150 letters, digits, '-' and '_' "
                "(ASCII)"
            )
        self.key = key
        self.paths = asset.partition(key)
        self.staging = asset.staging
        self.published = self.paths.published
        self.record_path = self.paths.record
        self.record_copy = self.paths.record_copy

    @property
    def quarantine(self) -> Path:
        """Where files of it go that do not verify."""
        return self.paths.quarantine

    def slot(self, number: int) -> Path:
        """The path of backup 0, 1 or 2."""
        return self.paths.version(number)

    @contextlib.contextmanager
    def locked(self, wait_seconds: float) -> Iterator[None]:
        """Hold the partition's lock, which a dead process frees. Raises PartitionBusyError after the wait."""
        locks = self.paths.publication_lock.parent
        for folder in (self.published.parent, self.record_path.parent, self.staging, locks):
            files.make_directory(folder)
        lock = taken(self.paths.publication_lock, seconds=wait_seconds)
        if lock is None:
            raise PartitionBusyError(
                f"partition {self.key} in {self.published.parent} is being published or restored by another "
                f"process, which did not finish within {wait_seconds:.0f} s. Nothing was changed: wait for "
                "that run, or end it, and try again."
            )
        try:
            yield
        finally:
            lock.close()

    @staticmethod
    def holds(path: Path, record: PublishedRecord | None) -> bool:
        """Whether a file is, to the byte, what was recorded. One that is missing or does not read is not.

        Raises OSError where it could not be looked at for another reason (rights): that says nothing of it.
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

    def peek(self) -> PublishedRecord | None:
        """The record of the file that readers see, without writing anything. Needs no lock."""
        manifest = self._first_readable()
        if manifest is None:
            return None
        if manifest.pending and self.holds(self.published, manifest.pending.record):
            return manifest.pending.record
        return manifest.published

    def settle(self) -> tuple[PartitionVersions, list[str]]:
        """The manifest, after what an interruption left was finished, taken back or removed, without loss.

        Also says what was done. Raises RecordDamagedError where neither copy of the record can be read.
        """
        repairs: list[str] = []
        manifest = self._load(repairs)
        if manifest.pending:
            manifest = self._finish_or_take_back(manifest, manifest.pending, repairs)
        self._remove_abandoned()
        return manifest, repairs

    def put_in_place(
        self, temporary: Path, record: PublishedRecord, manifest: PartitionVersions, notes: list[str]
    ) -> None:
        """Publish a durable temporary file as the version of ``record``, after that of ``manifest``."""
        kept = self._verified_versions(manifest, notes)
        copy = self._copy(temporary, self.slot(0), record)
        pending = PendingPublication(record, tuple(kept[:2]))
        # The record before its copy, and after it when all is done: a settled one is never ahead of its copy.
        exchange = replace(manifest, pending=pending).to_bytes()
        self._write_record(self.record_path, exchange)
        self._write_record(self.record_copy, exchange)
        self.keep_aside_unless(manifest.published, notes)
        files.publish_replacing(temporary, self.published)
        self._complete(pending, copy, notes)

    def restore_published(self, record: PublishedRecord, notes: list[str]) -> None:
        """Put a copy of the second copy, which must verify, under the published name."""
        copy = self._copy(self.slot(0), self.published, record)
        self.keep_aside_unless(record, notes)
        files.publish_replacing(copy, self.published)

    def restore_backup(self, record: PublishedRecord, notes: list[str]) -> None:
        """Make the second copy anew from the published file, which must verify."""
        copy = self._copy(self.published, self.slot(0), record)
        if self.slot(0).exists():
            self.move_aside(self.slot(0), notes)
        files.publish_replacing(copy, self.slot(0))
        notes.append(f"Its second copy {self.slot(0)} was made anew.")

    def move_aside(self, path: Path, notes: list[str]) -> None:
        """Move one file into the quarantine."""
        aside = files.set_aside(path, self.quarantine)
        notes.append(f"{path} was moved to {aside}.")

    def keep_aside_unless(self, record: PublishedRecord | None, notes: list[str]) -> None:
        """Before the published name is taken over: keep a file that no verified backup holds."""
        if self.published.exists() and not self.holds(self.published, record):
            aside = files.set_aside(self.published, self.quarantine, keep=True)
            notes.append(f"What stood at {self.published} was kept as {aside}.")

    def _copy(self, source: Path, target: Path, record: PublishedRecord) -> Path:
        copy, sha256 = files.copy_temporary(source, target, self.staging)
        if sha256 != record.sha256:
            copy.unlink()
            raise FileDamagedError(
                f"{source} changed while it was copied: its digest is {sha256[:12]} where "
                f"{record.sha256[:12]} was expected. Nothing was replaced; look at the disk's health and try "
                "again."
            )
        return copy

    def _verified_versions(self, manifest: PartitionVersions, notes: list[str]) -> list[PublishedRecord]:
        """The versions that really exist as backups, newest first; what does not verify goes aside."""
        current = manifest.published
        if current and not self.holds(self.slot(0), current) and self.holds(self.published, current):
            self.restore_backup(current, notes)
        recorded = dict(zip(VERSION_NUMBERS, (current, *manifest.previous), strict=False))
        verified = []
        for number in VERSION_NUMBERS:
            version = recorded.get(number)
            if version and self.holds(self.slot(number), version):
                verified.append(version)
            elif self.slot(number).exists():
                self.move_aside(self.slot(number), notes)
        return verified

    def _complete(self, pending: PendingPublication, copy: Path | None, notes: list[str]) -> None:
        """After the published name has the new file: rotate the backups, then write both records.

        Every step can be repeated: what stands where it should is left alone.
        """
        kept = [
            version
            for number, version in reversed(list(enumerate(pending.previous, start=1)))
            if self._rotate(number, version, notes)
        ]
        if not self.holds(self.slot(0), pending.record):
            copy = copy or self._copy(self.published, self.slot(0), pending.record)
            files.publish_replacing(copy, self.slot(0))
        self._write_settled(PartitionVersions(self.key, pending.record, tuple(reversed(kept))))

    def _write_settled(self, manifest: PartitionVersions) -> None:
        # The copy first. It stands beside the backups: writing it makes their renames durable too.
        self._write_record(self.record_copy, manifest.to_bytes())
        self._write_record(self.record_path, manifest.to_bytes())

    def _write_record(self, path: Path, data: bytes) -> None:
        files.write_replacing(path, data, self.staging)

    def _rotate(self, number: int, version: PublishedRecord, notes: list[str]) -> bool:
        """Bring a version to its backup slot from a newer one. The slots are filled oldest first."""
        for source in range(number, -1, -1):
            if self.holds(self.slot(source), version):
                if source != number:
                    files.publish_replacing(self.slot(source), self.slot(number))
                return True
        notes.append(f"The earlier version {version.sequence} of partition {self.key} is no longer there.")
        return False

    def _finish_or_take_back(
        self, manifest: PartitionVersions, pending: PendingPublication, repairs: list[str]
    ) -> PartitionVersions:
        record = pending.record
        if not self.holds(self.published, record):
            whole = self._another(record, manifest.published)
            if whole is None:
                back = replace(manifest, pending=None)
                self._write_settled(back)
                repairs.append(
                    f"A publication of partition {self.key} had been interrupted before its file was in "
                    "place: it was taken back, and the version before it stands."
                )
                return back
            copy = self._copy(whole, self.published, record)
            self.keep_aside_unless(manifest.published, repairs)
            files.publish_replacing(copy, self.published)
        # The rename that we see may be that of a process killed before it could make it durable.
        files.sync_directory(self.published.parent)
        self._complete(pending, None, repairs)
        repairs.append(
            f"A publication of partition {self.key} had been interrupted after its file was in place: its "
            "backups and its record were completed."
        )
        return self._load(repairs)

    def _another(self, record: PublishedRecord, before: PublishedRecord | None) -> Path | None:
        """Another whole file of the version under way, where going back to the one before is not possible."""
        if self.holds(self.slot(0), record):
            return self.slot(0)
        stands = self.holds(self.published, before) if before else not self.published.exists()
        if stands:
            return None
        unfinished = self.staging.glob(f".{self.slot(0).name}.*{files.TEMPORARY_SUFFIX}")
        return next((path for path in unfinished if self.holds(path, record)), None)

    def _remove_abandoned(self) -> None:
        # A process that still needs one has locked it, while it held this partition's lock.
        for path in self.staging.glob(f".{self.key}.*{files.TEMPORARY_SUFFIX}"):
            if is_held(path) is False:
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> PartitionVersions | RecordDamagedError | None:
        try:
            return PartitionVersions.from_bytes(path.read_bytes(), key=self.key)
        except FileNotFoundError:
            return None
        except RecordDamagedError as error:
            return error
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return RecordDamagedError(f"the record {path} cannot be read: {error.strerror}")

    def _first_readable(self) -> PartitionVersions | None:
        found = [self._read(path) for path in (self.record_path, self.record_copy)]
        for one in found:
            if isinstance(one, PartitionVersions):
                return one
        for one in found:
            if isinstance(one, RecordDamagedError):
                raise RecordDamagedError(
                    f"{one}. Neither {self.record_path} nor its copy {self.record_copy} is whole. The "
                    f"partition's file is left as it is; `vlm-assets repair` moves all its files to "
                    f"{self.quarantine} and has it materialized anew."
                )
        return None

    def _load(self, repairs: list[str]) -> PartitionVersions:
        manifest = self._first_readable()
        if manifest is None:
            return PartitionVersions(self.key)
        # While a publication is under way the copy may be behind, or ahead; settling it writes both.
        wanted = [self.record_path] if manifest.pending else self.record_paths
        for path in wanted:
            if self._read(path) != manifest:
                if path.exists():
                    self.move_aside(path, repairs)
                self._write_record(path, manifest.to_bytes())
                repairs.append(
                    f"The record {path} was missing or damaged and was written anew from its copy."
                )
        return manifest

    @property
    def record_paths(self) -> list[Path]:
        """The record and its copy."""
        return [self.record_path, self.record_copy]

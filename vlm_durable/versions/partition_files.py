"""The files of one partition: its record, what its files must be, and the steps from version to version.

Every method that writes wants the lock held (``versioned_object``).

The order holds at every line: the published name has the whole old file or the whole new one; the record on
disk names both while they are being exchanged; a backup is dropped only after everything newer was read back.

The newest version counts, not the first record that reads. The two copies of the record name it, and so does
the version mark, which lies apart in ``.state`` and has the newest record too.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.files.layout import VERSION_NUMBERS, AssetFolders
from vlm_durable.files.lock_files import is_held
from vlm_durable.files.sealed_json import FormatVersionError, seal, unsealed
from vlm_durable.versions.findings import Finding, FindingKind, restore_step
from vlm_durable.versions.version_mark import (
    MarkComparison,
    VersionMark,
    VersionMarkReading,
    compare_with_mark,
    may_be_same_origin,
)
from vlm_durable.versions.versioned_object import PublishedError, RecordDamagedError, VersionedObject
from vlm_durable.wording import counted

FORMAT = 3
"""1 did not name the asset, 2 did not name what the partition belongs to."""

Fetch = Callable[["PublishedRecord"], bytes | None]
"""Gives the file of a version from elsewhere, such as a store: bytes with its SHA-256, or None."""

LOCK_SECONDS = 60.0
"""How long to wait for another process that is publishing the same partition."""


PUBLISHED_FILE = "published_file"
"""The check under which Dagster shows what a verification said of a published file."""


class PartitionBusyError(PublishedError):
    """Another process is publishing or restoring this partition and has not finished in time."""


class NotPublishedError(PublishedError):
    """The partition has no published file."""


class FileDamagedError(PublishedError):
    """A file is not, to the byte, what its record says."""


class CannotRestoreError(PublishedError):
    """Neither the published file nor its second copy is what the record says."""


class PutBackError(PublishedError):
    """An older version stands, and the newest one is nowhere here. Nothing was changed; a person decides."""


@dataclass(frozen=True)
class PublishedRecord:
    """One published version of a partition.

    ``sequence`` counts publications of this partition from 1 and gives their order, whatever the clock
    says. ``sha256`` is over the whole file, ``key_set_digest`` over its ids
    (``vlm_durable.journal.segments``). ``published_at`` is UTC, ISO 8601. ``metadata`` are JSON values that
    the asset stores with it. ``origin`` is the id of what the partition belongs to
    (``AssetFolders.origin``); "" in records of earlier formats.
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
    origin: str = ""

    @property
    def content(self) -> str:
        """What its file is, for people."""
        return f"{counted(self.rows, 'rows')}, digest {self.sha256[:12]}"

    @property
    def version(self) -> str:
        """The text that a version mark holds beside the number: the origin's id, and the digest."""
        return f"{self.origin}:{self.sha256}" if self.origin else self.sha256


@dataclass(frozen=True)
class PendingPublication:
    """A publication under way: the version that is to be published and the versions to be kept before it."""

    record: PublishedRecord
    previous: tuple[PublishedRecord, ...]


@dataclass(frozen=True)
class PartitionVersions:
    """A partition's record: the published version, the versions before it, and one under way."""

    key: str
    published: PublishedRecord | None = None
    previous: tuple[PublishedRecord, ...] = ()
    pending: PendingPublication | None = None

    @property
    def sequence(self) -> int:
        """The sequence number of the published version, 0 where there is none."""
        return self.published.sequence if self.published else 0

    @property
    def latest(self) -> PublishedRecord | None:
        """The version under way, or else the published one."""
        return self.pending.record if self.pending else self.published

    @property
    def versions(self) -> tuple[PublishedRecord, ...]:
        """Every version that the record names, the one under way first."""
        pending = (self.pending.record, *self.pending.previous) if self.pending else ()
        return (*pending, *([self.published] if self.published else []), *self.previous)

    @property
    def latest_sequence(self) -> int:
        """The sequence number of ``latest``, 0 where there is none."""
        return self.latest.sequence if self.latest else 0

    def to_bytes(self, asset: str) -> bytes:
        """The record as it stands on disk: JSON with the SHA-256 of its content."""
        return seal(json.dumps({"format": FORMAT, "asset": asset, **asdict(self)}, indent=2).encode())

    @classmethod
    def from_bytes(cls, data: bytes, *, asset: str, key: str, origin: str = "") -> PartitionVersions:
        """Read a record. Raises RecordDamagedError where it is not, to the byte, what was written.

        A record of another partition, asset or ``origin`` counts as damaged: its file is in the wrong place;
        "": any origin is accepted. A newer program's record is not damaged and must not be moved away: it
        raises FormatVersionError.
        """
        try:
            content = unsealed(data, f"the record of partition {key}", format_=FORMAT)
            if content["key"] != key:
                raise ValueError(f"it is for partition {content['key']}")
            # Format 1 did not name the asset.
            if content["format"] > 1 and content["asset"] != asset:
                raise ValueError(f"it is for a partition of {content['asset']}")
            pending = content["pending"]
            record = cls(
                key=key,
                published=PublishedRecord(**content["published"]) if content["published"] else None,
                previous=_records(content["previous"]),
                pending=PendingPublication(
                    PublishedRecord(**pending["record"]), _records(pending["previous"])
                )
                if pending
                else None,
            )
            for version in record.versions:
                if not may_be_same_origin(version.origin, origin):
                    raise ValueError(
                        f"it is another home's, whose catalogue is {version.origin}, not {origin}"
                    )
        except FormatVersionError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise RecordDamagedError(f"the record of partition {key} cannot be read: {error}") from error
        return record


def _records(contents: list[dict[str, Any]]) -> tuple[PublishedRecord, ...]:
    return tuple(PublishedRecord(**content) for content in contents)


def judge(path: Path, record: PublishedRecord, *, deep: bool, asset: str = "") -> Finding | None:
    """Compare one file with its record; None where it fits. Without ``deep``: only size and row count.

    asset: the name of the asset that it is of.
    """

    def finding(kind: FindingKind, sentence: str) -> Finding:
        return Finding(kind, asset, record.key, sentence, restore_step(), str(path))

    try:
        size = path.stat().st_size
        sha256 = files.sha256_of(path) if deep and size == record.bytes else None
    except FileNotFoundError:
        published = counted(record.rows, "rows were", "row was")
        return finding(FindingKind.MISSING, f"{path} is missing ({published} published).")
    except OSError as error:
        return finding(FindingKind.UNREADABLE, f"{path} cannot be read: {error.strerror or error}.")
    if sha256 == record.sha256:
        return None
    try:
        rows = int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        if path.is_file() and size < record.bytes:
            sentence = f"{path} is truncated: it has {size} bytes of {record.bytes}."
            return finding(FindingKind.TRUNCATED, sentence)
        sentence = f"{path} is not readable parquet: {str(error).splitlines()[0]}."
        return finding(FindingKind.UNREADABLE, sentence)
    if rows != record.rows:
        sentence = f"{path} has {counted(rows, 'rows')} where {record.rows} were published."
        return finding(FindingKind.ROWS_DIFFER, sentence)
    if size != record.bytes or sha256 is not None:
        actual = f"digest {sha256[:12]}" if sha256 else f"{size} bytes"
        expected = f"digest {record.sha256[:12]}" if sha256 else f"{record.bytes} bytes"
        return finding(FindingKind.DIGEST_DIFFERS, f"{path} has {actual} where {expected} was published.")
    return None


class PartitionFiles(VersionedObject[PartitionVersions]):
    """The files of one partition of an asset. Raises PublishedError for an unusable key."""

    def __init__(self, asset: AssetFolders, key: str) -> None:
        super().__init__(asset.partition(key))
        self.published = self.paths.published
        self.record_path, self.record_copy = self.record_paths

    def slot(self, number: int) -> Path:
        """The path of backup 0, 1 or 2."""
        return self.paths.version(number)

    @contextlib.contextmanager
    def locked(self, wait_seconds: float) -> Iterator[None]:
        """Hold the partition's lock, which a dead process frees. Raises PartitionBusyError after the wait."""
        lock = self.lock(wait_seconds)
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
        """Whether a file is, to the byte, the recorded version. A missing or unreadable file is not.

        Raises OSError where it cannot be read for another reason (rights): then nothing is known about it.
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
        versions = highest(self.whole_records())
        if versions is None:
            return None
        if versions.pending and self.holds(self.published, versions.pending.record):
            return versions.pending.record
        return versions.published

    def marked(self) -> PartitionVersions | None:
        """The newest version that was ever durable here, and those before it; None where no mark says so."""
        return self._marked(self.mark.read())

    def _marked(self, reading: VersionMarkReading) -> PartitionVersions | None:
        content = reading.mark.content if reading.mark is not None else None
        if content is None or content.get("published") is None:
            return None
        published, previous = content["published"], content["previous"]
        return PartitionVersions(self.key, PublishedRecord(**published), _records(previous))

    def put_back(
        self, records: Sequence[PartitionVersions]
    ) -> tuple[PublishedRecord | None, PartitionVersions | None]:
        """Detect files that were put back to an older version. Returns (newest version, older record).

        The newest version: where not every copy of the record names it. The older record: one whose file
        stands. (None, None) where records and mark agree, or a publication was merely interrupted. Raises
        PutBackError, RecordDamagedError where the mark cannot be read and the files do not make up for it.
        """
        reading = self.mark.read()
        if reading.is_unreadable:
            self._refuse_doubt(records)
        versions, marked = highest(records), self._marked(reading)
        latest = versions.latest if versions is not None else None
        newest: PublishedRecord | None = None
        if marked is not None and (latest is None or self._is_before(latest, marked)):
            newest = marked.published
        elif versions is not None and versions.pending is not None:
            # A version under way that was marked was durable once: it is not to be taken back.
            was_durable = marked is not None and marked.published == latest
            newest = latest if was_durable and not self.holds(self.published, latest) else None
        elif versions is not None and (
            any(record.latest_sequence < versions.sequence for record in records)
            or self._is_without_file(versions, marked)
        ):
            newest = latest
        if newest is None:
            return None, None
        for record in (*records, *([marked] if marked is not None else [])):
            version = record.published
            if version is not None and version.sha256 != newest.sha256 and self._stands(version):
                return newest, record
        return newest, None

    def _refuse_doubt(self, records: Sequence[PartitionVersions]) -> None:
        """Without a readable mark, trust two equal copies of the record with their file, and nothing else."""
        versions = highest(records)
        where = " and ".join(map(str, self.mark.copies))
        if versions is None or not any(map(self._is_standing, records)):
            of_record = "its record" if versions is None else "a file that its record stands for"
            raise RecordDamagedError(
                f"partition {self.key}: neither {of_record} nor its version mark ({where}) can be read as"
                f" this home's. What is there is left as it is; {command('repair')} says what it would do."
            )
        is_alike = all(copy.record == versions for copy in self.copies())
        if is_alike and versions.pending is None:
            return
        raise PutBackError(
            f"Neither copy of the version mark of partition {self.key} of {self.asset} can be read as this"
            f" home's ({where}), and its files do not agree: version {versions.sequence} may be an older one"
            " that was put back."
            f" Nothing was changed. Put {self.published} and its record back from a backup, or accept what"
            f" stands there: {command('repair', '--accept-version', self.key)}."
        )

    def whole_file(self, record: PublishedRecord) -> Path | None:
        """Find a file of this partition that is that version, to the byte; None where there is none."""
        names = [f".{path.name}." for path in (self.published, self.slot(0))]
        staged = [path for name in names for path in self.staging.glob(f"{name}*{files.TEMPORARY_SUFFIX}")]
        places = (self.published, *map(self.slot, VERSION_NUMBERS), *staged)
        return next((path for path in places if self.holds(path, record)), None)

    def settle(self, fetch: Fetch | None = None) -> tuple[PartitionVersions, list[str]]:
        """Finish, take back or remove what an interruption left, without loss.

        Returns the partition's versions, and sentences about what was done. fetch: called for the bytes of
        the newest version where no file here is that version. Raises PutBackError where an older version
        stands and the newest one is nowhere, and RecordDamagedError where neither copy of the record can be
        read and nothing else holds its content.
        """
        repairs: list[str] = []
        versions = self._newest(fetch, repairs)
        if versions.pending:
            versions = self._finish_or_take_back(versions, versions.pending, repairs)
        if versions.published is not None:
            self._mark_at_least(versions, repairs)
        self._remove_abandoned()
        return versions, repairs

    def accept(self, notes: list[str]) -> PublishedRecord:
        """Let the older version that stands here count as the newest: a person gives up the newer ones.

        It gets a new number, so that neither a mark nor another machine ever goes back. Raises PublishedError
        where no older version stands.
        """
        records = self.whole_records()
        try:
            newest, older = self.put_back(records)
        except PutBackError:
            newest, older = None, next((record for record in records if self._is_standing(record)), None)
        if older is None or (newest is not None and self.whole_file(newest) is not None):
            raise PublishedError(
                f"partition {self.key} of {self.asset} was not put back to an older version: there is nothing"
                " to accept. Nothing was changed."
            )
        for copy in self.copies():
            if copy.path.exists() and copy.record != older:
                self.move_aside(copy.path, notes)
        return self.renumber(older, self.mark.next_sequence(*(record.latest_sequence for record in records)))

    def _is_without_file(self, versions: PartitionVersions, marked: PartitionVersions | None) -> bool:
        """Whether the marked version stands, and the newer one of both records does not: another home's?"""
        return (
            marked is not None
            and versions.sequence > marked.sequence
            and not self._is_standing(versions)
            and self._is_standing(marked)
        )

    def _is_standing(self, record: PartitionVersions) -> bool:
        return record.published is not None and self._stands(record.published)

    def renumber(self, versions: PartitionVersions, sequence: int) -> PublishedRecord:
        """Give the published version another, higher number."""
        assert versions.published is not None and sequence > versions.sequence
        record = replace(versions.published, sequence=sequence)
        settled = PartitionVersions(self.key, record, versions.previous)
        # The mark first: one that is behind its record would say that .state was put back.
        self.mark.raise_to(self._mark(settled))
        self.settle_record(settled.to_bytes(self.asset))
        return record

    def put_in_place(
        self, temporary: Path, record: PublishedRecord, versions: PartitionVersions, notes: list[str]
    ) -> None:
        """Publish a durable temporary file as the version of ``record``, after those in ``versions``."""
        kept = self._verified_versions(versions, notes)
        copy = self._copy(temporary, self.slot(0), record)
        pending = PendingPublication(record, tuple(kept[:2]))
        # The record before its copy, and after it when all is done: a settled one is never ahead of its copy.
        exchange = replace(versions, pending=pending).to_bytes(self.asset)
        self.write_record(self.record_path, exchange)
        self.write_record(self.record_copy, exchange)
        self.keep_aside_unless(versions.published, notes)
        files.publish_replacing(temporary, self.published)
        self._complete(pending, copy, notes)

    def restore_published(self, record: PublishedRecord, notes: list[str]) -> None:
        """Put a copy of the second copy, which must verify, under the published name."""
        copy = self._copy(self.slot(0), self.published, record)
        self.keep_aside_unless(record, notes)
        files.publish_replacing(copy, self.published)

    def restore_fetched(self, content: bytes, record: PublishedRecord, notes: list[str]) -> None:
        """Publish the bytes of the recorded version that were fetched, and make the second copy anew."""
        temporary = files.write_temporary(self.published, content, self.staging)
        self.keep_aside_unless(None, notes)
        files.publish_replacing(temporary, self.published)
        self.restore_backup(record, notes)

    def restore_backup(self, record: PublishedRecord, notes: list[str]) -> None:
        """Make the second copy anew from the published file, which must verify."""
        copy = self._copy(self.published, self.slot(0), record)
        if self.slot(0).exists():
            self.move_aside(self.slot(0), notes)
        files.publish_replacing(copy, self.slot(0))
        notes.append(f"Its second copy {self.slot(0)} was made anew.")

    def keep_aside_unless(self, record: PublishedRecord | None, notes: list[str]) -> None:
        """Keep the published file in the quarantine, unless it is the version of ``record``.

        For callers that are about to replace it.
        """
        if self.published.exists() and not self.holds(self.published, record):
            self.keep_aside(self.published, notes)

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

    def _verified_versions(self, versions: PartitionVersions, notes: list[str]) -> list[PublishedRecord]:
        """The versions whose backups verify, newest first; other backup files go into the quarantine."""
        current = versions.published
        if current and not self.holds(self.slot(0), current) and self.holds(self.published, current):
            self.restore_backup(current, notes)
        recorded = dict(zip(VERSION_NUMBERS, (current, *versions.previous), strict=False))
        verified = []
        for number in VERSION_NUMBERS:
            version = recorded.get(number)
            if version and self.holds(self.slot(number), version):
                verified.append(version)
            elif self.slot(number).exists():
                self.move_aside(self.slot(number), notes)
        return verified

    def _complete(self, pending: PendingPublication, copy: Path | None, notes: list[str]) -> None:
        """Finish, once the published name has the file: mark it, rotate the backups, then write both records.

        Every step can be repeated: a file that is in its place is left alone.
        """
        # The mark first: the record is never settled for a version that the mark does not know of. A version
        # from another machine may have the number of one made here.
        published = PartitionVersions(self.key, pending.record, pending.previous)
        self.mark.write(self._mark(published))
        kept = [
            version
            for number, version in reversed(list(enumerate(pending.previous, start=1)))
            if self._rotate(number, version, notes)
        ]
        if not self.holds(self.slot(0), pending.record):
            copy = copy or self._copy(self.published, self.slot(0), pending.record)
            files.publish_replacing(copy, self.slot(0))
        settled = PartitionVersions(self.key, pending.record, tuple(reversed(kept)))
        self.settle_record(settled.to_bytes(self.asset))

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
        self, versions: PartitionVersions, pending: PendingPublication, repairs: list[str]
    ) -> PartitionVersions:
        record = pending.record
        if not self.holds(self.published, record):
            whole = self._another(record, versions.published)
            if whole is None:
                back = replace(versions, pending=None)
                self.settle_record(back.to_bytes(self.asset))
                repairs.append(
                    f"A publication of partition {self.key} had been interrupted before its file was in "
                    "place: it was taken back, and the version before it stands."
                )
                return back
            copy = self._copy(whole, self.published, record)
            self.keep_aside_unless(versions.published, repairs)
            files.publish_replacing(copy, self.published)
        # The rename that we see may be that of a process killed before it could make it durable.
        files.sync_directory(self.published.parent)
        self._complete(pending, None, repairs)
        repairs.append(
            f"A publication of partition {self.key} had been interrupted after its file was in place: its "
            "backups and its record were completed."
        )
        return self._settled()

    def _another(self, record: PublishedRecord, before: PublishedRecord | None) -> Path | None:
        """Another whole file of the version under way, where the version before it cannot be restored."""
        if self.holds(self.slot(0), record):
            return self.slot(0)
        stands = self.holds(self.published, before) if before else not self.published.exists()
        if stands:
            return None
        unfinished = self.staging.glob(f".{self.slot(0).name}.*{files.TEMPORARY_SUFFIX}")
        return next((path for path in unfinished if self.holds(path, record)), None)

    def _remove_abandoned(self) -> None:
        # A process that still needs its temporary file locked it, while it held this partition's lock.
        for path in self.staging.glob(f".{self.key}.*{files.TEMPORARY_SUFFIX}"):
            if is_held(path) is False:
                path.unlink(missing_ok=True)
        for path in self.marks_staging.glob(f".{self.key}.*{files.TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)

    def parsed(self, content: bytes) -> PartitionVersions:
        """Read a record from bytes. Raises RecordDamagedError where they are no record of this partition.

        A record of an earlier format does not name its home, and is read as this home's.
        """
        origin = self.paths.asset.origin
        return PartitionVersions.from_bytes(content, asset=self.asset, key=self.key, origin=origin)

    def _settled(self) -> PartitionVersions:
        return highest(self.whole_records()) or PartitionVersions(self.key)

    def _newest(self, fetch: Fetch | None, repairs: list[str]) -> PartitionVersions:
        """The newest version that anything here knows of; both copies of the record name it then."""
        damage: RecordDamagedError | None = None
        try:
            records = self.whole_records()
        except RecordDamagedError as error:
            records, damage = [], error
        newest, older = self.put_back(records)
        if newest is None:
            versions = highest(records)
            if versions is not None:
                return self._with_both_records(versions, repairs)
            if damage is not None:
                raise damage
            return PartitionVersions(self.key)
        place = self.whole_file(newest)
        if place is None and fetch is not None and (content := fetch(newest)) is not None:
            place = files.write_temporary(self.published, content, self.staging)
        if place is not None:
            return self._roll_forward(newest, place, records, repairs)
        if older is not None:
            raise PutBackError(put_back_finding(self, newest, older.published).text)
        if damage is not None:
            raise damage
        if not records:
            # Record and files vanished: the journal's high-water mark says that rows were published once.
            return PartitionVersions(self.key)
        versions = PartitionVersions(self.key, newest, self._standing_backups(newest, records))
        self.settle_record(versions.to_bytes(self.asset))
        return versions

    def _is_before(self, version: PublishedRecord, marked: PartitionVersions) -> bool:
        comparison = compare_with_mark(self._mark(marked), version.sequence, version.version)
        return comparison in (MarkComparison.OLDER, MarkComparison.OTHER)

    def _stands(self, version: PublishedRecord) -> bool:
        return self.holds(self.published, version) or self.holds(self.slot(0), version)

    def _earlier(
        self, newest: PublishedRecord, records: Sequence[PartitionVersions]
    ) -> list[PublishedRecord]:
        """The versions before the newest that any record or the mark names, newest first."""
        marked = self.marked()
        named = {
            version.sha256: version
            for record in (*records, *([marked] if marked else []))
            for version in (record.published, *record.previous)
            if version is not None and version.sequence < newest.sequence
        }
        return sorted(named.values(), key=lambda version: -version.sequence)

    def _standing_backups(
        self, newest: PublishedRecord, records: Sequence[PartitionVersions]
    ) -> tuple[PublishedRecord, ...]:
        kept: list[PublishedRecord] = []
        earlier = self._earlier(newest, records)
        for number in VERSION_NUMBERS[1:]:
            version = next(
                (candidate for candidate in earlier if self.holds(self.slot(number), candidate)), None
            )
            if version is None:
                break
            kept.append(version)
        return tuple(kept)

    def _roll_forward(
        self, newest: PublishedRecord, place: Path, records: Sequence[PartitionVersions], repairs: list[str]
    ) -> PartitionVersions:
        """Write the newest version's records anew; ``place`` is a whole file of it.

        Every step can be repeated: the mark, or the newer copy of the record, names that version throughout.
        """
        earlier = self._earlier(newest, records)
        for number in VERSION_NUMBERS:
            path = self.slot(number)
            if path.exists() and not any(self.holds(path, version) for version in (newest, *earlier)):
                self.move_aside(path, repairs)
        kept = [
            version for version in earlier if any(self.holds(self.slot(n), version) for n in VERSION_NUMBERS)
        ]
        if not self.holds(self.published, newest):
            copy = self._copy(place, self.published, newest)
            self.keep_aside_unless(
                next((version for version in kept if self.holds(self.published, version)), None), repairs
            )
            files.publish_replacing(copy, self.published)
            repairs.append(f"{self.published} was put back from {place}.")
        files.sync_directory(self.published.parent)
        for record in self.copies():
            if record.damage is not None:
                self.move_aside(record.path, repairs)
        self._complete(PendingPublication(newest, tuple(kept[:2])), None, repairs)
        repairs.append(
            f"What the record of partition {self.key} said was lost or older than its version"
            f" {newest.sequence} (published {newest.published_at}), which is whole: it was written anew."
        )
        return self._settled()

    def _with_both_records(self, versions: PartitionVersions, repairs: list[str]) -> PartitionVersions:
        # While a publication is under way, the copy may be behind or ahead; settling writes both.
        for copy in self.copies()[: 1 if versions.pending else 2]:
            if copy.record != versions:
                if copy.path.exists():
                    self.move_aside(copy.path, repairs)
                self.write_record(copy.path, versions.to_bytes(self.asset))
                repairs.append(
                    f"The record {copy.path} was missing or damaged and was written anew from its copy."
                )
        return versions

    def _mark(self, versions: PartitionVersions) -> VersionMark:
        record = versions.published
        assert record is not None
        content = {
            "published": asdict(record),
            "previous": [asdict(version) for version in versions.previous],
        }
        return VersionMark(self.mark.name, record.sequence, record.version, record.published_at, content)

    def _mark_at_least(self, versions: PartitionVersions, repairs: list[str]) -> None:
        """Raise the mark to this version at least: a restored ``.state`` may be behind."""
        reading = self.mark.read()
        is_written = self.mark.raise_to(self._mark(versions))
        if reading.is_unreadable:
            repairs.append(
                f"The version mark of partition {self.key} could not be read as this home's. Both copies of"
                f" its record and its file agree on version {versions.sequence}: the mark was written anew."
            )
        elif is_written and reading.mark is not None and reading.mark.sequence < versions.sequence:
            repairs.append(
                f"The version mark of partition {self.key} was behind, at version {reading.mark.sequence}: it"
                f" was raised to {versions.sequence}. Was .state put back from a backup?"
            )


def highest(records: Sequence[PartitionVersions]) -> PartitionVersions | None:
    """The record of the newest version; the first of two that name the same version."""
    return max(records, key=lambda record: record.latest_sequence, default=None)


def put_back_finding(
    partition: PartitionFiles, newest: PublishedRecord, older: PublishedRecord | None
) -> Finding:
    """What is wrong with a partition that was put back, what is safe, and what to do."""
    stands = f"version {older.sequence} (published {older.published_at})" if older else "an older version"
    return Finding(
        FindingKind.PUT_BACK,
        partition.asset,
        partition.key,
        f"Partition {partition.key} of {partition.asset} was put back: {stands} stands there, and version"
        f" {newest.sequence} (published {newest.published_at}, digest {newest.sha256[:12]}), which was here,"
        " is in none of its files. Nothing was changed.",
        f"Put that file back from a backup as {partition.published}, or accept what stands there:"
        f" {command('repair', '--accept-version', partition.key)}. A run stops until then.",
        str(partition.published),
    )

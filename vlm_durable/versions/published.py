"""The published partitions of one asset: one parquet file a partition, its backups and its record.

A file is staged (written and read back), published, verified, restored and read here. The order of the steps
on disk is in ``partition_files.py``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlm_durable.files import files
from vlm_durable.files.layout import VERSION_NUMBERS, AssetFolders
from vlm_durable.files.lock_files import LockFile
from vlm_durable.versions.findings import Finding, FindingKind, worst
from vlm_durable.versions.partition_files import (
    LOCK_SECONDS,
    CannotRestoreError,
    Fetch,
    FileDamagedError,
    NotPublishedError,
    PartitionBusyError,
    PartitionFiles,
    PartitionVersions,
    PublishedRecord,
    PutBackError,
    judge,
    put_back_finding,
)
from vlm_durable.versions.partition_findings import finding_of, of_copies, read_record, without_record
from vlm_durable.versions.partition_rows import PartitionRows, read_back, write_rows
from vlm_durable.versions.versioned_object import PublishedError, RecordDamagedError
from vlm_durable.wording import counted


@dataclass
class StagedFile:
    """A complete parquet file under a temporary name in the staging folder, verified by reading it back.

    It lives until it is published or discarded; the next stage of the same partition removes a killed
    process's file. ``record`` is the record that it would be published with; its time is set by the
    publication. ``wrong_ids``: a sentence about what is wrong with its ids; None where nothing is. ``notes``
    are sentences about an earlier interruption and how it was settled.
    """

    record: PublishedRecord
    path: Path
    asset: AssetFolders
    wrong_ids: str | None
    notes: tuple[str, ...]
    in_use: LockFile = field(repr=False)
    """The lock on the temporary file, held while this process needs it."""

    def remember(self, metadata: Mapping[str, Any]) -> None:
        """Add JSON values to the record's metadata."""
        self.record = replace(self.record, metadata={**self.record.metadata, **_as_read(metadata)})

    def refuse_unfit(self) -> None:
        """Raise PublishedError where this file must not be published."""
        key = self.record.key
        if self.wrong_ids is not None:
            raise PublishedError(
                f"partition {key} is not published, because its ids are not the expected ones: "
                f"{self.wrong_ids}. {self.asset.partition(key).published} stays as it was. "
                "Materialize the partition again; if it repeats, compare the catalogue's slice with the "
                "journal."
            )
        if damage := judge(self.path, self.record, deep=True):
            raise FileDamagedError(
                f"partition {key} is not published, because it changed after it was read back: "
                f"{damage.sentence} The published file stays as it was. Materialize the partition again, and "
                "look at the disk's health."
            )

    def discard(self) -> None:
        """Remove the temporary file. Publishing does this too; doing it twice does no harm."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock that keeps the temporary file for this process."""
        self.in_use.close()

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.discard()


@dataclass(frozen=True)
class Publication:
    """The outcome of publishing or restoring. ``changed`` is False where nothing had to change.

    ``notes`` are sentences about damaged files and interrupted publications, and where files were put.
    """

    record: PublishedRecord
    changed: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """What was found about one partition. record: of its published file; None where it has none.

    repairs: sentences about repairs, without loss, during the check.
    """

    key: str
    record: PublishedRecord | None
    findings: tuple[Finding, ...] = ()
    repairs: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the published file and its backups fit the record."""
        return not self.findings

    @property
    def worst(self) -> Finding | None:
        """The finding to name first; None where nothing is wrong."""
        return worst(self.findings)

    @property
    def expected(self) -> str:
        """What the published file should be."""
        if self.record is not None:
            return f"the file that was published last, {self.record.content}"
        return "a file with its record" if self.findings else "nothing published yet"

    @property
    def actual(self) -> str:
        """What the published file is."""
        if (finding := self.worst) is not None:
            return finding.sentence
        return f"{self.record.content}, to the byte." if self.record is not None else "nothing."

    def sentence(self) -> str:
        """All findings and repairs, for people."""
        content = self.record.content if self.record else "nothing"
        state = " ".join(finding.text for finding in self.findings) or (
            f"Partition {self.key} is what its record says: {content}."
        )
        return " ".join((state, *self.repairs))


class PublishedPartitions:
    """The published partitions of one asset.

    ``lock_seconds`` is how long to wait for another process that is publishing the same partition.
    """

    def __init__(self, asset: AssetFolders, *, lock_seconds: float = LOCK_SECONDS) -> None:
        self.asset = asset
        self._lock_seconds = lock_seconds

    def path(self, key: str) -> Path:
        """The path of the partition's file, which may not exist yet."""
        return PartitionFiles(self.asset, key).published

    def keys(self) -> list[str]:
        """The keys of the parquet files that readers see now, recorded or not, sorted."""
        return self.asset.published_keys()

    def record(self, key: str) -> PublishedRecord | None:
        """The record of the published version; None where nothing is published. Writes nothing.

        Raises RecordDamagedError where the record and its copy are both unreadable: that is not 'nothing'.
        """
        return PartitionFiles(self.asset, key).peek()

    def settled(self, key: str) -> PublishedRecord | None:
        """The record of the newest version, after interrupted publications were settled.

        Raises PutBackError where an older version stands and the newest one is nowhere, RecordDamagedError.
        """
        partition = PartitionFiles(self.asset, key)
        with partition.locked(self._lock_seconds):
            versions, _ = partition.settle()
        return versions.published

    def stage(
        self,
        key: str,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema,
        *,
        expected_ids: Collection[str],
        fingerprint: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> StagedFile:
        """Write the partition's next file under a temporary name, make it durable and read it back fully.

        One row group is in memory at a time, and the ids. ``publish`` refuses wrong ids. ``metadata`` (JSON
        values) goes into the record. Raises DurableWriteError, PublishedError; nothing is left behind then.
        """
        partition, remembered = PartitionFiles(self.asset, key), _as_read(metadata or {})
        with contextlib.ExitStack() as undo:
            with partition.locked(self._lock_seconds):
                versions, repairs = partition.settle()
                sequence = partition.mark.next_sequence(versions.sequence)
                sink = files.TemporaryFile(partition.published, partition.staging)
                undo.callback(sink.discard)
                in_use = LockFile(sink.path, create=False)
                undo.callback(in_use.close)
                in_use.try_lock()
            rows = write_rows(sink, batches, schema)
            sha256 = sink.seal()
            wrong_ids, digest = read_back(sink.path, rows=rows, expected_ids=expected_ids)
            undo.pop_all()
        record = PublishedRecord(
            key=key,
            sequence=sequence,
            sha256=sha256,
            bytes=sink.size,
            rows=rows,
            key_set_digest=digest,
            fingerprint=fingerprint,
            published_at="",
            metadata=remembered,
            origin=self.asset.origin,
        )
        return StagedFile(record, sink.path, self.asset, wrong_ids, tuple(repairs), in_use)

    def publish(self, staged: StagedFile) -> Publication:
        """Make the staged file the published one, with a verified second copy and two versions before it.

        When it returns, the file and its second copy were both read back and are durable. A file identical to
        the published one changes nothing. Raises PublishedError or OSError; before the last step on disk
        the old file stays, after it the new one, never a part of either.
        """
        if staged.asset != self.asset:
            raise PublishedError(
                f"partition {staged.record.key} was staged for {staged.asset.published} and cannot be "
                f"published in {self.asset.published}"
            )
        staged.refuse_unfit()
        partition = PartitionFiles(self.asset, staged.record.key)
        with partition.locked(self._lock_seconds):
            versions, repairs = partition.settle()
            notes = [*staged.notes, *repairs]
            current = versions.published
            if current and current.sha256 == staged.record.sha256:
                # The same version: nothing is rotated, but its damaged files are written anew.
                if not partition.holds(partition.published, current):
                    partition.keep_aside_unless(current, notes)
                    files.publish_replacing(staged.path, partition.published)
                    notes.append(f"{partition.published} was missing or damaged and was written anew.")
                if not partition.holds(partition.slot(0), current):
                    partition.restore_backup(current, notes)
                staged.discard()
                return Publication(current, changed=False, notes=tuple(notes))
            if partition.mark.next_sequence(versions.sequence) != staged.record.sequence:
                raise PublishedError(
                    f"partition {partition.key} is not published: version {versions.sequence} was published "
                    f"by another process after this file was staged to be version {staged.record.sequence}. "
                    "The published file stays. Materialize the partition again: a complete one is verified "
                    "and left alone."
                )
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            record = replace(staged.record, published_at=now)
            partition.put_in_place(staged.path, record, versions, notes)
        staged.release()
        return Publication(record, changed=True, notes=tuple(notes))

    def verify(self, key: str) -> Verification:
        """Compare every byte of the partition's files with its record.

        An interrupted publication is finished or taken back first. Never raises for damage on disk.
        """
        partition = PartitionFiles(self.asset, key)
        repairs: list[str] = []
        try:
            if partition.record_path.parent.is_dir():
                try:
                    with partition.locked(0.0):
                        versions, repairs = partition.settle()
                        return _compare(partition, versions, repairs)
                except PartitionBusyError:
                    record = partition.peek()
            else:
                record = partition.peek()
            # A publisher is at work and moves the backups: only the file that readers see is judged.
            return _compare(partition, PartitionVersions(key, record), repairs, backups=False)
        except RecordDamagedError as error:
            return Verification(key, None, (finding_of(partition, FindingKind.RECORD, f"{error}"),))
        except PutBackError as error:
            finding = finding_of(partition, FindingKind.PUT_BACK, f"{error}")
            return Verification(key, partition.peek(), (finding,))

    def restore(self, key: str, fetch: Fetch | None = None) -> Publication:
        """Restore a damaged or lost published file from its verified second copy, or the copy from the file.

        A record that is lost or older than the newest file is restored too. Damaged files go to
        ``.quarantine``. fetch: called for the file where neither is whole. Raises CannotRestoreError where no
        whole file is found, PutBackError, NotPublishedError, RecordDamagedError.
        """
        partition = PartitionFiles(self.asset, key)
        with partition.locked(self._lock_seconds):
            versions, notes = partition.settle(fetch)
            record = versions.published
            if record is None:
                raise NotPublishedError(
                    f"partition {key} has no record in {self.asset.published}: nothing to restore"
                )
            file_whole = partition.holds(partition.published, record)
            copy_whole = partition.holds(partition.slot(0), record)
            if not file_whole and not copy_whole:
                content = fetch(record) if fetch is not None else None
                if content is not None:
                    partition.restore_fetched(content, record, notes)
                    return Publication(record, changed=True, notes=tuple(notes))
                raise CannotRestoreError(
                    f"neither {partition.published} nor its second copy {partition.slot(0)} is what the "
                    f"record says (digest {record.sha256[:12]}, {record.bytes} bytes). Nothing was changed. "
                    f"Earlier versions: {self._earlier(partition, versions) or 'none'}. Recompute the "
                    "partition, or copy one of these by hand."
                )
            if not file_whole:
                partition.restore_published(record, notes)
                notes.append(f"{partition.published} was restored from {partition.slot(0)}.")
            elif not copy_whole:
                partition.restore_backup(record, notes)
        return Publication(record, changed=not (file_whole and copy_whole), notes=tuple(notes))

    def refuse_put_back(self, key: str) -> None:
        """Raise PutBackError where an older version stands: nothing may be made from it. Writes nothing."""
        partition = PartitionFiles(self.asset, key)
        newest, older = partition.put_back(partition.whole_records())
        if newest is not None and older is not None and partition.whole_file(newest) is None:
            raise PutBackError(put_back_finding(partition, newest, older.published).text)

    def read(self, key: str) -> PartitionRows:
        """A lazy handle on the published rows. Raises NotPublishedError, FileDamagedError.

        Only size and row count are compared here; page checksums are verified as rows are read.
        """
        partition = PartitionFiles(self.asset, key)
        record = partition.peek()
        if record is None:
            raise NotPublishedError(
                f"partition {key} is not published in {self.asset.published}. Materialize it first."
            )
        damage = judge(partition.published, record, deep=False)
        if damage:
            raise FileDamagedError(f"Partition {key}: {damage.text}")
        return PartitionRows(partition.published, record)

    def read_earlier(self, key: str, notes: list[str]) -> Iterator[PartitionRows]:
        """The rows of the versions before the published one that are whole, newest first.

        Raises PublishedError, OSError. An interrupted publication is settled first, and noted.
        """
        partition = PartitionFiles(self.asset, key)
        with partition.locked(self._lock_seconds):
            versions, repairs = partition.settle()
        notes += repairs
        for number, version in enumerate(versions.previous, start=1):
            if partition.holds(partition.slot(number), version):
                yield PartitionRows(partition.slot(number), version)

    def accept_older(self, key: str) -> tuple[str, ...]:
        """Let the older version that stands count as the newest: a person gives up the later versions.

        Returns sentences about what was done. Raises PublishedError where no version was put back.
        """
        partition = PartitionFiles(self.asset, key)
        notes: list[str] = []
        with partition.locked(self._lock_seconds):
            record = partition.accept(notes)
        return (
            f"The version of {key} of {self.asset.name} that was published {record.published_at} counts as"
            f" the newest from now on, as version {record.sequence}: no number is given twice.",
            *notes,
        )

    def set_aside(self, key: str) -> tuple[str, ...]:
        """Move every file of a partition into ``.quarantine``: it then counts as never published.

        For a person who accepts that its record is lost. Returns sentences: which file was moved where.
        """
        partition = PartitionFiles(self.asset, key)
        notes: list[str] = []
        with partition.locked(self._lock_seconds):
            for path in (partition.published, *map(partition.slot, VERSION_NUMBERS), *partition.record_paths):
                if path.exists():
                    partition.move_aside(path, notes)
            # Last, and not into the quarantine: .state may be on another device.
            partition.mark.forget()
        return tuple(notes)

    def _earlier(self, partition: PartitionFiles, versions: PartitionVersions) -> str:
        return ", ".join(
            f"{partition.slot(number)} (version {version.sequence}, {counted(version.rows, 'rows')})"
            for number, version in enumerate(versions.previous, start=1)
            if partition.holds(partition.slot(number), version)
        )


def _as_read(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as the record's reader will get it: tuples become lists. Raises TypeError for other values."""
    read: dict[str, Any] = json.loads(json.dumps(dict(metadata)))
    return read


def _compare(
    partition: PartitionFiles,
    versions: PartitionVersions,
    repairs: list[str],
    *,
    backups: bool = True,
) -> Verification:
    """Compare a partition's file, and its backups, with the record."""
    record = versions.published
    findings: list[Finding] = []
    if record is not None:
        damage = judge(partition.published, record, deep=True, asset=partition.asset)
        findings += [damage] if damage else []
        findings += of_copies(partition, (record, *versions.previous), deep=True) if backups else []
    else:
        marked = partition.marked()
        lost = without_record(partition, read_record(partition), marked.published if marked else None)
        sentence = f"Partition {partition.key} is not published in {partition.published.parent}."
        findings.append(lost or finding_of(partition, FindingKind.NOT_PUBLISHED, sentence))
    return Verification(partition.key, record, tuple(findings), tuple(repairs))

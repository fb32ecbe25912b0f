"""What is wrong with a partition's record, its copies and its folder, found without a lock or a change."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlm_durable.commands import command
from vlm_durable.files.layout import VERSION_NUMBERS, AssetFolders
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.versions.findings import Finding, FindingKind, restore_step
from vlm_durable.versions.partition_files import (
    PartitionFiles,
    PartitionVersions,
    PublishedRecord,
    highest,
    judge,
)
from vlm_durable.wording import counted


@dataclass(frozen=True)
class RecordReading:
    """The record as it stands: its content, and the copies of it that are not whole.

    records: the copies that can be read; newest: the one of the newest version. unsettled: a change of the
    record is under way or was interrupted, and both copies are whole.
    """

    records: tuple[PartitionVersions, ...]
    newest: PartitionVersions | None
    content: tuple[bytes | None, ...] = field(repr=False)
    damaged: tuple[str, ...]
    unsettled: bool


def read_record(partition: PartitionFiles) -> RecordReading:
    """Read a partition's record without settling or locking anything."""
    copies = partition.copies()
    records = {copy.path: copy.record for copy in copies if copy.record is not None}
    damaged = [
        f"{copy.path} is missing" if copy.damage is None else f"{copy.path}: {copy.damage}"
        for copy in copies
        if copy.record is None
    ]
    newest = highest(tuple(records.values()))
    unsettled = False
    for path, record in records.items():
        if newest is None or record == newest:
            unsettled = unsettled or record.pending is not None
        elif record.pending or record.published == newest.published:
            unsettled = True
        elif not newest.pending:
            damaged.append(f"{path} says another version than the other copy")
    return RecordReading(
        tuple(records.values()), newest, tuple(copy.content for copy in copies), tuple(damaged), unsettled
    )


def finding_of(files: PartitionFiles, kind: FindingKind, sentence: str, next_step: str = "") -> Finding:
    """A finding about a partition's published file."""
    return Finding(kind, files.asset, files.key, sentence, next_step, str(files.published))


def of_record(
    files: PartitionFiles, reading: RecordReading, versions: PartitionVersions
) -> Iterator[Finding]:
    """What is wrong with a record that can be read. versions: those of its newest copy."""
    if reading.unsettled:
        sentence = "A publication is under way or was interrupted."
        step = f"The next start of it, or {command('repair')}, settles it."
        yield finding_of(files, FindingKind.PENDING, sentence, step)
    if reading.damaged and not versions.pending:
        sentence = f"{'; '.join(reading.damaged)}. The other copy is whole."
        yield finding_of(files, FindingKind.RECORD_COPY, sentence, restore_step())


def record_behind(files: PartitionFiles, newest: PublishedRecord, place: Path) -> Finding:
    """The finding about a record that is lost or older than a file of the partition. place: of that file."""
    sentence = (
        f"What its record says is lost or older than version {newest.sequence} (published"
        f" {newest.published_at}), and {place} is that version, to the byte."
    )
    return finding_of(files, FindingKind.RECORD_BEHIND, sentence, restore_step())


def without_record(
    files: PartitionFiles, reading: RecordReading, newest: PublishedRecord | None
) -> Finding | None:
    """What is wrong with a partition whose record names no published file; None where nothing is.

    newest: the newest version that the mark names, of which no file is whole.
    """
    if reading.newest is None:
        if any(path.exists() for path in files.record_paths):
            sentence = f"Neither copy of its record reads: {'; '.join(reading.damaged)}."
            step = f"The partition's file is left as it is; {command('repair')} says what it would do."
            return finding_of(files, FindingKind.RECORD, sentence, step)
        if files.published.exists():
            sentence = f"{files.published} has no record: it was not published here."
            step = "Move it away, or materialize the partition, which keeps it in .quarantine."
            return finding_of(files, FindingKind.UNRECORDED, sentence, step)
    marks = read_marks(files.paths.high_water_marks, files.key)
    retired = next((mark.rows for mark in marks if mark.retired), None)
    rows = newest.rows if newest is not None else retired
    if rows is None:
        return None
    sentence = (
        f"{counted(rows, 'rows were', 'row was')} published once, says its mark, and neither its record nor"
        " its file is there."
    )
    return finding_of(files, FindingKind.VANISHED, sentence, f"{command('repair')} computes them again.")


def of_copies(files: PartitionFiles, versions: Sequence[PublishedRecord], *, deep: bool) -> Iterator[Finding]:
    """What is wrong with the second copy and the earlier versions. versions: the published one first.

    deep: every byte is read; else only sizes are compared.
    """
    for number, version in zip(VERSION_NUMBERS, versions, strict=False):
        path = files.slot(number)
        if not deep and size_of(path) == version.bytes:
            continue
        finding = judge(path, version, deep=deep)
        if finding is not None and number:
            sentence = f"Earlier version: {finding.sentence}"
            step = "The next publication leaves it out."
            yield finding_of(files, FindingKind.EARLIER_VERSION, sentence, step)
        elif finding is not None:
            sentence, step = f"Second copy: {finding.sentence}", f"{command('repair')} makes it anew."
            yield finding_of(files, FindingKind.SECOND_COPY, sentence, step)


def stray_files(asset: AssetFolders, keys: Collection[str]) -> Iterator[Finding]:
    """Parquet files in an asset's folder that are no partition of the catalogue. Raises OSError.

    keys: of the catalogue. A file with a record was published: then the catalogue is wrong, not the file.
    """
    listed, recorded = frozenset(keys), asset.recorded_keys()
    for key in asset.published_keys():
        path = asset.partition(key).published
        if key in listed or key.startswith("."):  # Readers of *.parquet do not read the latter.
            continue
        if key in recorded:
            sentence = (
                f"{path} was published, and the catalogue does not list its range: the catalogue is an older"
                " version."
            )
            step = (
                "Leave the file where it is. Ingest your listings again, which gives its properties the same"
                f" numbers, or put the newer catalogue back: {command('repair', '--catalog', 'FILE')}."
            )
            yield Finding(FindingKind.UNLISTED, asset.name, None, sentence, step, str(path))
        else:
            sentence = (
                f"{path} is no partition of the catalogue, but whoever reads {asset.published}/*.parquet"
                " reads it too."
            )
            step = f"Move it elsewhere; {command('repair')} moves it into .quarantine."
            yield Finding(FindingKind.FOREIGN_FILE, asset.name, None, sentence, step, str(path))


def size_of(path: Path) -> int | None:
    """The size of a file in bytes; None where there is none that can be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return None

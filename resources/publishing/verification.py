"""A look at a partition's files against their record: kinds of findings for machines, sentences for people.

What lives here: comparing, which changes nothing. What does not: putting things right
(``resources.publishing.published``, ``resources.publishing.partition_files``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from resources.publishing.partition_files import PartitionFiles
from resources.publishing.record import PartitionManifest, PublishedRecord
from resources.storage import files

PUT_BACK = (
    "`vlm-assets repair`, or materializing that partition, puts its second copy back, without a device."
)
"""What to do about a published file that is not what its record says."""


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


@dataclass(frozen=True)
class Verification:
    """The state of one partition. ``repairs`` are what was put right, without loss, while looking."""

    key: str
    record: PublishedRecord | None
    findings: tuple[Finding, ...]
    repairs: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the published file and its backups are what the record says."""
        return not self.findings

    def sentence(self) -> str:
        """Everything found, for people."""
        state = " ".join(one.sentence for one in self.findings) or (
            f"Partition {self.key} is what its record says: {self.record.rows if self.record else 0} rows, "
            f"digest {self.record.sha256[:12] if self.record else ''}."
        )
        return " ".join((state, *self.repairs))


def compare(
    partition: PartitionFiles,
    manifest: PartitionManifest,
    repairs: list[str],
    *,
    deep: bool,
    backups: bool = True,
) -> Verification:
    """Compare a partition's file, and its backups, with the record. ``deep`` reads every byte."""
    record = manifest.published
    findings: list[Finding] = []
    if record is None:
        if partition.published.exists():
            sentence = (
                f"{partition.published} has no record: it was not published here. Move it away, or "
                "materialize the partition, which keeps it in .quarantine."
            )
            findings.append(Finding(FindingKind.FOREIGN_FILE, sentence))
        else:
            sentence = f"Partition {partition.key} is not published in {partition.published.parent}."
            findings.append(Finding(FindingKind.NOT_PUBLISHED, sentence))
    else:
        judged = judge(partition.published, record, deep=deep)
        if judged:
            kind, what = judged
            findings.append(Finding(kind, f"Partition {partition.key}: {what} {PUT_BACK}"))
        if backups:
            for number, version in enumerate((record, *manifest.previous)):
                judged = judge(partition.slot(number), version, deep=deep)
                if judged:
                    missing = judged[0] is FindingKind.MISSING
                    kind = FindingKind.BACKUP_MISSING if missing else FindingKind.BACKUP_DIFFERS
                    advice = (
                        "`vlm-assets repair` makes it anew."
                        if number == 0
                        else "The next publication leaves it out."
                    )
                    findings.append(
                        Finding(kind, f"Backup {number} of partition {partition.key}: {judged[1]} {advice}")
                    )
    return Verification(partition.key, record, tuple(findings), tuple(repairs))


def judge(path: Path, record: PublishedRecord, *, deep: bool) -> tuple[FindingKind, str] | None:
    """What is wrong with one file, or None. Without ``deep``: its size and its footer's row count only."""
    try:
        size = path.stat().st_size
        sha256 = files.sha256_of(path) if deep and size == record.bytes else None
    except FileNotFoundError:
        return FindingKind.MISSING, f"{path} is missing ({record.rows} rows were published)."
    except OSError as error:
        return FindingKind.UNREADABLE, f"{path} cannot be read: {error.strerror or error}."
    if sha256 == record.sha256:
        return None
    try:
        rows = int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        if size < record.bytes:
            return (
                FindingKind.TRUNCATED,
                f"{path} is truncated: it has {size} bytes of {record.bytes}.",
            )
        return FindingKind.UNREADABLE, f"{path} is not readable parquet: {str(error).splitlines()[0]}."
    if rows != record.rows:
        return FindingKind.ROWS_DIFFER, f"{path} has {rows} rows where {record.rows} were published."
    if size != record.bytes or sha256 is not None:
        found = f"digest {sha256[:12]}" if sha256 else f"{size} bytes"
        wanted = f"digest {record.sha256[:12]}" if sha256 else f"{record.bytes} bytes"
        return FindingKind.DIGEST_DIFFERS, f"{path} has {found} where {wanted} was published."
    return None

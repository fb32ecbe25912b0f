"""What would put a dataset right: restored in place where a whole copy is there, else computed again.

It follows from an audit. ``services/repairing.py`` does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vlm_assets.assets.fingerprint import TEXTS
from vlm_assets.assets.partition_state import State
from vlm_assets.config.settings import Settings
from vlm_assets.services.home_audit import Audit, PartitionAudit
from vlm_assets.services.progress import doing_each
from vlm_durable.commands import command
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.versions.findings import OF_THE_FILE, Finding, FindingKind
from vlm_durable.versions.partition_files import PartitionFiles, PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import OlderInStoreError, StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted


class Remedy(StrEnum):
    """What repair does about a finding."""

    RESTORE = "restore"
    """From the whole copy of the two; a publication that was interrupted is settled."""
    FILL_STORE = "put back into the store"
    """From a whole file of this machine."""
    SET_ASIDE = "set aside"
    """Moved into the quarantine: a file that readers must not read."""
    COMPUTE = "compute again"
    RETRY_FAILED = "try the failed properties again"
    RESUME = "compute what is missing"
    BY_HAND = "by hand"


COMPUTING = frozenset({Remedy.COMPUTE, Remedy.RETRY_FAILED, Remedy.RESUME})

_OF_THE_ROWS = frozenset({FindingKind.COLUMNS, FindingKind.IDS, FindingKind.MIXED})
_OF_THE_FILES = (
    OF_THE_FILE | _OF_THE_ROWS | {FindingKind.SECOND_COPY, FindingKind.RECORD_COPY, FindingKind.PENDING}
)
_WARNINGS_TO_REPAIR = (FindingKind.PENDING, FindingKind.PUT_BACK)
"""Warnings that a repair lists: it puts them right, or a person decides."""


@dataclass(frozen=True)
class Repair:
    """One thing to put right. why: what was found. key: None for a file that is no partition's.

    forgets: its files are moved into the quarantine first, since no record says what they must be.
    """

    asset: str
    key: str | None
    remedy: Remedy
    why: tuple[str, ...]
    path: Path | None = None
    forgets: bool = False

    def sentence(self) -> str:
        """What would be done, and why."""
        aside = " after moving its files into the quarantine" if self.forgets else ""
        return f"{self.asset} {self.key or ''}: {self.remedy.value}{aside}. {' '.join(self.why)}"


def find_repairs(settings: Settings, audited: Audit, *, failed: bool = False) -> list[Repair]:
    """What would put right what an audit found, first what needs no device; reads suspect files fully.

    failed: properties that ended as failed are tried again too.
    """
    descriptions, embeddings = audited.assets
    by_partition: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    repairs: list[Repair] = []
    for finding in audited.findings:
        if finding.key is not None:
            by_partition[finding.asset, finding.key].append(finding)
        elif finding.kind is FindingKind.STORE:
            repairs.append(Repair(finding.asset, None, Remedy.FILL_STORE, (finding.sentence,)))
        elif finding.kind is FindingKind.FOREIGN_FILE and finding.path:
            path = Path(finding.path)
            remedy = Remedy.SET_ASIDE if path.is_file() else Remedy.BY_HAND
            repairs.append(Repair(finding.asset, None, remedy, (finding.sentence,), path))
        elif finding.kind in (FindingKind.UNLISTED, FindingKind.WITHDRAWN):
            repairs.append(Repair(finding.asset, None, Remedy.BY_HAND, (finding.text,)))
    for (asset, key), findings in doing_each("reading the files of wrong partitions", by_partition.items()):
        folders = settings.layout.asset(asset)
        repairs += _of_partition(PartitionFiles(folders, key), findings, settings.mirror)
    repairs = _without_consequences(repairs, settings, descriptions, embeddings)
    repairs += _refused(audited)
    if failed:
        computed = {
            repair.key for repair in repairs if repair.asset == descriptions and repair.remedy in COMPUTING
        }
        repairs += [
            _failed_again(partition)
            for partition in audited.partitions
            if partition.asset == descriptions and partition.counts.failed and partition.key not in computed
        ]
    return sorted(repairs, key=lambda repair: (repair.remedy in COMPUTING, repair.asset, repair.key or ""))


def _failed_again(partition: PartitionAudit) -> Repair:
    """Try failed properties again. A stale partition would be described anew as a whole: a person asks."""
    why = f"{counted(partition.counts.failed, 'properties')} failed."
    if partition.state is State.STALE:
        anew = (
            f"{why} It is stale: a run would make it anew with the settings and the catalogue of now."
            f" {command('run', partition.key)} does that for this partition, {command('run', '--stale')} for"
            " all that are stale."
        )
        return Repair(partition.asset, partition.key, Remedy.BY_HAND, (anew,))
    return Repair(partition.asset, partition.key, Remedy.RETRY_FAILED, (why,))


def _of_partition(files_: PartitionFiles, findings: Sequence[Finding], store: Mirror) -> Iterator[Repair]:
    stored = StoredPartitions(files_.paths.asset, store)
    kinds = {finding.kind for finding in findings}
    listed = [
        finding
        for finding in findings
        if finding.kind is not FindingKind.STORE
        and (not finding.kind.is_warning or finding.kind in _WARNINGS_TO_REPAIR)
    ]

    def repair(remedy: Remedy, *more: str, forgets: bool = False) -> Repair:
        # What a person does is in the findings; what is done here is the remedy.
        why = (finding.text if remedy is Remedy.BY_HAND else finding.sentence for finding in listed)
        return Repair(files_.asset, files_.key, remedy, (*why, *more), forgets=forgets)

    if FindingKind.JOURNAL in kinds:
        yield repair(Remedy.BY_HAND)
    elif FindingKind.RECORD_BEHIND in kinds:
        yield repair(Remedy.RESTORE)
    elif FindingKind.PUT_BACK in kinds:
        # A store may have the newest version still.
        yield repair(Remedy.RESTORE if store.keeps_copies else Remedy.BY_HAND)
    elif FindingKind.RECORD in kinds:
        yield repair(Remedy.COMPUTE, forgets=True)
    elif kinds & {FindingKind.VANISHED, FindingKind.UNRECORDED}:
        # A generation that was published once is closed: what is computed now is another one.
        closed = any(mark.retired for mark in read_marks(files_.paths.high_water_marks, files_.key))
        yield repair(Remedy.COMPUTE if closed else Remedy.RESUME)
    elif kinds & _OF_THE_FILES:
        record = files_.peek()
        whole = files_.holds(files_.published, record)
        copy_whole = files_.holds(files_.slot(0), record)
        if FindingKind.PENDING in kinds or (copy_whole if not whole else not kinds & _OF_THE_ROWS):
            yield repair(Remedy.RESTORE)
        elif not whole and record is not None and _may_have(stored, record):
            yield repair(Remedy.RESTORE, "Neither the file nor its second copy is whole; the store has it.")
        else:
            yield repair(
                Remedy.COMPUTE, *([] if whole else ["Neither the file nor its second copy is whole."])
            )
    elif FindingKind.DESCRIPTIONS_DIFFER in kinds:
        yield repair(Remedy.COMPUTE)
    elif FindingKind.STORE_JOURNAL in kinds:
        yield repair(Remedy.BY_HAND)
    if FindingKind.STORE in kinds:
        sentences = tuple(finding.sentence for finding in findings if finding.kind is FindingKind.STORE)
        yield Repair(files_.asset, files_.key, Remedy.FILL_STORE, sentences)


def _may_have(stored: StoredPartitions, record: PublishedRecord) -> bool:
    """Whether the store has a version's file. One that does not answer may have it."""
    try:
        return stored.has(record)
    except StoreError:
        return True


def _without_consequences(
    repairs: Sequence[Repair], settings: Settings, descriptions: str, embeddings: str
) -> list[Repair]:
    """Leave out sound embeddings that only look wrong beside descriptions that will be restored.

    Where descriptions are computed again, their embeddings follow in the same run anyway.
    """
    restored = {
        repair.key for repair in repairs if repair.asset == descriptions and repair.remedy is Remedy.RESTORE
    }
    kept = []
    for repair in repairs:
        if (
            repair.asset == embeddings
            and repair.remedy is Remedy.COMPUTE
            and repair.key
            and repair.key in restored
        ):
            embedded = PartitionFiles(settings.embeddings, repair.key)
            record = embedded.peek()
            described = PartitionFiles(settings.descriptions, repair.key).peek()
            made_from = record.metadata.get("parts", {}).get(TEXTS) if record is not None else None
            descends = described is not None and made_from == described.metadata.get(TEXTS)
            if record is not None and descends and embedded.holds(embedded.published, record):
                continue
        kept.append(repair)
    return kept


def _refused(audited: Audit) -> Iterator[Repair]:
    """Partitions whose rows are all committed, and which a check kept from being published."""
    descriptions, _ = audited.assets
    for partition in audited.partitions:
        if partition.state is State.REFUSED:
            # The failed rows of descriptions are what can come out otherwise; of embeddings, any.
            remedy = Remedy.RETRY_FAILED if partition.asset == descriptions else Remedy.COMPUTE
            why = (
                f"Committed and not published: {counted(partition.counts.expected, 'rows')}. A check refused."
            )
            yield Repair(partition.asset, partition.key, remedy, (why,))


def older_versions(
    settings: Settings, key: str
) -> Iterator[tuple[PublishedPartitions | StoredPartitions, str]]:
    """Where an older version of a partition stands, here or in the store, with a sentence for each place.

    Raises PublishedError, StoreError, OSError.
    """
    for asset in (settings.descriptions, settings.embeddings):
        published = PublishedPartitions(asset)
        verification = published.verify(key)
        if not verification.ok:
            stored = StoredPartitions(asset, settings.mirror)
            try:
                stored.pull(key)
            except OlderInStoreError as error:
                yield stored, str(error)
                continue
            except PublishedError:
                pass  # What stands here is the newer one, or all that there is.
            verification = published.verify(key)
        findings = {finding.kind: finding.text for finding in verification.findings}
        if FindingKind.PUT_BACK in findings:
            yield published, findings[FindingKind.PUT_BACK]

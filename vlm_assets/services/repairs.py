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
from vlm_assets.assets.partition_state import Kind, Problem, State
from vlm_assets.config.settings import Settings
from vlm_assets.services.home_audit import Audit, PartitionAudit
from vlm_assets.services.progress import doing_each
from vlm_durable.commands import command
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.versions.partition_files import PartitionFiles, PublishedRecord
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.wording import counted


class Way(StrEnum):
    """How a thing is put right."""

    RESTORE = "restore"
    """From the whole copy of the two; a publication that was interrupted is settled."""
    PUT_BACK = "put back into the store"
    """From a whole file of this machine."""
    SET_ASIDE = "set aside"
    """Moved into the quarantine: a file that readers must not read."""
    COMPUTE = "compute again"
    RETRY_FAILED = "try the failed properties again"
    RESUME = "compute what is missing"
    BY_HAND = "by hand"


COMPUTING = frozenset({Way.COMPUTE, Way.RETRY_FAILED, Way.RESUME})

_OF_THE_FILES = frozenset(
    {Kind.FILE, Kind.SECOND_COPY, Kind.RECORD_COPY, Kind.COLUMNS, Kind.IDS, Kind.MIXED, Kind.PENDING}
)
_WARNINGS_TO_REPAIR = (Kind.PENDING, Kind.PUT_BACK)
"""Warnings that a repair lists: it puts them right, or a person decides."""

_OF_THE_ROWS = frozenset({Kind.COLUMNS, Kind.IDS, Kind.MIXED})


@dataclass(frozen=True)
class Repair:
    """One thing to put right. why: what was found. key: None for a file that is no partition's.

    forgets: its files are moved into the quarantine first, since no record says what they must be.
    """

    asset: str
    key: str | None
    way: Way
    why: tuple[str, ...]
    path: Path | None = None
    forgets: bool = False

    def sentence(self) -> str:
        """What would be done, and why."""
        aside = " after moving its files into the quarantine" if self.forgets else ""
        return f"{self.asset} {self.key or ''}: {self.way.value}{aside}. {' '.join(self.why)}"


def find_repairs(settings: Settings, audited: Audit, *, failed: bool = False) -> list[Repair]:
    """What would put right what an audit found, first what needs no device; reads suspect files fully.

    failed: properties that ended as failed are tried again too.
    """
    descriptions, embeddings = audited.assets
    by_partition: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    repairs: list[Repair] = []
    for problem in audited.problems:
        if problem.key is not None:
            by_partition[problem.asset, problem.key].append(problem)
        elif problem.kind is Kind.STORE:
            repairs.append(Repair(problem.asset, None, Way.PUT_BACK, (problem.sentence,)))
        elif problem.kind is Kind.FOREIGN_FILE and problem.path:
            path = Path(problem.path)
            way = Way.SET_ASIDE if path.is_file() else Way.BY_HAND
            repairs.append(Repair(problem.asset, None, way, (problem.sentence,), path))
        elif problem.kind in (Kind.UNLISTED, Kind.WITHDRAWN):
            repairs.append(Repair(problem.asset, None, Way.BY_HAND, (problem.sentence,)))
    for (asset, key), problems in doing_each("reading the files of wrong partitions", by_partition.items()):
        folders = settings.layout.asset(asset)
        stored = StoredPartitions(folders, settings.store) if settings.store is not None else None
        repairs += _of_partition(PartitionFiles(folders, key), asset, problems, stored)
    repairs = _without_consequences(repairs, settings, descriptions, embeddings)
    repairs += _refused(audited)
    if failed:
        computed = {
            repair.key for repair in repairs if repair.asset == descriptions and repair.way in COMPUTING
        }
        repairs += [
            _failed_again(partition)
            for partition in audited.partitions
            if partition.asset == descriptions and partition.counts.failed and partition.key not in computed
        ]
    return sorted(repairs, key=lambda repair: (repair.way in COMPUTING, repair.asset, repair.key or ""))


def _failed_again(partition: PartitionAudit) -> Repair:
    """Try failed properties again. A stale partition would be described anew as a whole: a person asks."""
    why = f"{counted(partition.counts.failed, 'properties')} failed."
    if partition.state is State.STALE:
        anew = (
            f"{why} It is stale: a run would make it anew with the settings and the catalogue of now."
            f" {command('run', partition.key)} does that for this partition, {command('run', '--stale')} for"
            " all that are stale."
        )
        return Repair(partition.asset, partition.key, Way.BY_HAND, (anew,))
    return Repair(partition.asset, partition.key, Way.RETRY_FAILED, (why,))


def _of_partition(
    files_: PartitionFiles, asset: str, problems: Sequence[Problem], stored: StoredPartitions | None
) -> Iterator[Repair]:
    kinds = {problem.kind for problem in problems}
    why = tuple(
        problem.sentence
        for problem in problems
        if problem.kind is not Kind.STORE
        and (not problem.kind.is_warning or problem.kind in _WARNINGS_TO_REPAIR)
    )
    if Kind.JOURNAL in kinds:
        yield Repair(asset, files_.key, Way.BY_HAND, why)
    elif Kind.RECORD_BEHIND in kinds:
        yield Repair(asset, files_.key, Way.RESTORE, why)
    elif Kind.PUT_BACK in kinds:
        # A store may have the newest version still.
        yield Repair(asset, files_.key, Way.BY_HAND if stored is None else Way.RESTORE, why)
    elif Kind.RECORD in kinds:
        yield Repair(asset, files_.key, Way.COMPUTE, why, forgets=True)
    elif kinds & {Kind.VANISHED, Kind.UNRECORDED}:
        # A generation that was published once is closed: what is computed now is another one.
        closed = any(mark.retired for mark in read_marks(files_.paths.high_water_marks, files_.key))
        yield Repair(asset, files_.key, Way.COMPUTE if closed else Way.RESUME, why)
    elif kinds & _OF_THE_FILES:
        record = files_.peek()
        whole = files_.holds(files_.published, record)
        copy_whole = files_.holds(files_.slot(0), record)
        if Kind.PENDING in kinds or (copy_whole if not whole else not kinds & _OF_THE_ROWS):
            yield Repair(asset, files_.key, Way.RESTORE, why)
        elif not whole and record is not None and stored is not None and _may_have(stored, record):
            in_store = "Neither the file nor its second copy is whole; the store has it."
            yield Repair(asset, files_.key, Way.RESTORE, (*why, in_store))
        else:
            lost = () if whole else ("Neither the file nor its second copy is whole.",)
            yield Repair(asset, files_.key, Way.COMPUTE, (*why, *lost))
    elif Kind.DESCRIPTIONS_DIFFER in kinds:
        yield Repair(asset, files_.key, Way.COMPUTE, why)
    elif Kind.STORE_JOURNAL in kinds:
        yield Repair(asset, files_.key, Way.BY_HAND, why)
    if Kind.STORE in kinds:
        sentences = tuple(problem.sentence for problem in problems if problem.kind is Kind.STORE)
        yield Repair(asset, files_.key, Way.PUT_BACK, sentences)


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
        repair.key for repair in repairs if repair.asset == descriptions and repair.way is Way.RESTORE
    }
    kept = []
    for repair in repairs:
        if repair.asset == embeddings and repair.way is Way.COMPUTE and repair.key and repair.key in restored:
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
            way = Way.RETRY_FAILED if partition.asset == descriptions else Way.COMPUTE
            why = (
                f"Committed and not published: {counted(partition.counts.expected, 'rows')}. A check refused."
            )
            yield Repair(partition.asset, partition.key, way, (why,))

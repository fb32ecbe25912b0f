"""What would put a dataset right after an audit, and doing it.

A file is restored in place where a whole copy is there. What must be computed again is launched in the
running Dagster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from vlm_assets.assets.fingerprint import KEEP, TEXTS
from vlm_assets.assets.partition_state import State
from vlm_assets.config.extensions import installed
from vlm_assets.config.question_sets import config_of_runs
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.home_audit import Audit, PartitionAudit
from vlm_assets.services.kept_assets import kept_assets
from vlm_assets.services.progress import doing_each
from vlm_assets.services.store_looks import store_looks
from vlm_assets.webserver.api import LAUNCHED_BY, DagsterApi
from vlm_assets.webserver.home import running_address
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.ranges import EMBEDDINGS
from vlm_catalog.stored_catalog import put_back_catalog
from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.journal.journal_errors import sample
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.state.workers import Workers
from vlm_durable.versions.findings import OF_THE_FILE, Finding, FindingKind
from vlm_durable.versions.partition_files import PartitionFiles, PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import OlderInStoreError, StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted


class Remedy(StrEnum):
    """What repair does about a finding."""

    RESTORE = "restore"
    """Restore from the whole copy of the two; a publication that was interrupted is settled."""
    FILL_STORE = "put back into the store"
    """Upload a whole file of this machine."""
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
    """One thing to put right. why: what was found, for people. key: None for a file that is no partition's.

    forgets: its files are moved into the quarantine first, since no record says what they must be. findings:
    those of the audit that it puts right; failed and refused rows are none.
    """

    asset: str
    key: str | None
    remedy: Remedy
    why: tuple[str, ...]
    path: Path | None = None
    forgets: bool = False
    findings: tuple[Finding, ...] = ()

    def sentence(self) -> str:
        """What would be done, and why."""
        aside = " after moving its files into the quarantine" if self.forgets else ""
        return f"{self.asset} {self.key or ''}: {self.remedy.value}{aside}. {' '.join(self.why)}"


def find_repairs(settings: Settings, audited: Audit, *, failed: bool = False) -> list[Repair]:
    """What would put right what an audit found, first what needs no device; reads suspect files fully.

    failed: properties that ended as failed are tried again too.
    """
    embeddings = settings.embeddings.name
    by_partition: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    of_extensions = {asset for extension in installed() for asset in extension.assets}
    repairs: list[Repair] = []
    for finding in audited.findings:
        if finding.key is not None:
            by_partition[finding.asset, finding.key].append(finding)
        elif finding.kind is FindingKind.STORE:
            repairs.append(
                Repair(finding.asset, None, Remedy.FILL_STORE, (finding.sentence,), findings=(finding,))
            )
        elif finding.kind is FindingKind.FOREIGN_FILE and finding.path:
            path = Path(finding.path)
            remedy = Remedy.SET_ASIDE if path.is_file() else Remedy.BY_HAND
            repairs.append(
                Repair(finding.asset, None, remedy, (finding.sentence,), path, findings=(finding,))
            )
        elif finding.kind in (FindingKind.UNLISTED, FindingKind.WITHDRAWN) or finding.asset in of_extensions:
            repairs.append(Repair(finding.asset, None, Remedy.BY_HAND, (finding.text,), findings=(finding,)))
    for (asset, key), findings in doing_each("reading the files of wrong partitions", by_partition.items()):
        folders = settings.layout.asset(asset)
        repairs += _of_partition(PartitionFiles(folders, key), findings, settings.mirror)
    repairs = _without_consequences(repairs, settings)
    repairs += _refused(audited, embeddings)
    repairs = [
        _by_hand(repair, settings)
        if repair.remedy in COMPUTING and repair.asset not in settings.computed_assets
        else repair
        for repair in repairs
    ]
    if failed:
        named = {folders.name for folders in settings.partitioned_assets}
        computed = {(repair.asset, repair.key) for repair in repairs if repair.remedy in COMPUTING}
        repairs += [
            _failed_again(partition)
            for partition in audited.partitions
            if partition.asset in named - {embeddings}
            and partition.counts.failed
            and (partition.asset, partition.key) not in computed
        ]
    return sorted(repairs, key=lambda repair: (repair.remedy in COMPUTING, repair.asset, repair.key or ""))


def _by_hand(repair: Repair, settings: Settings) -> Repair:
    """The same, where no run makes the asset: a person says first how it is computed."""
    if repair.asset == settings.embeddings.name:
        why = f"Nothing computes it without an embedding model: set {PREFIX}EMBEDDING_MODEL first."
    else:
        why = f"No settings name its question set: put that back into the file of {PREFIX}QUESTIONS first."
    return replace(repair, remedy=Remedy.BY_HAND, why=(*repair.why, why), forgets=False)


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
        return Repair(files_.asset, files_.key, remedy, (*why, *more), None, forgets, tuple(listed))

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
        # A question set keeps what it answered to the same answers.
        yield repair(Remedy.COMPUTE if files_.asset == EMBEDDINGS else Remedy.RESUME)
    elif FindingKind.STORE_JOURNAL in kinds:
        yield repair(Remedy.BY_HAND)
    if FindingKind.STORE in kinds:
        of_store = tuple(finding for finding in findings if finding.kind is FindingKind.STORE)
        sentences = tuple(finding.sentence for finding in of_store)
        yield Repair(files_.asset, files_.key, Remedy.FILL_STORE, sentences, findings=of_store)


def _may_have(stored: StoredPartitions, record: PublishedRecord) -> bool:
    """Whether the store has a version's file. One that does not answer may have it."""
    try:
        return stored.has(record)
    except StoreError:
        return True


def _without_consequences(repairs: Sequence[Repair], settings: Settings) -> list[Repair]:
    """Leave out sound embeddings that only look wrong beside descriptions that will be restored.

    Where descriptions are computed again, their embeddings follow in the same run anyway.
    """
    restored = {
        repair.key
        for repair in repairs
        if repair.asset == settings.descriptions.name and repair.remedy is Remedy.RESTORE
    }
    kept = []
    for repair in repairs:
        if (
            repair.asset == settings.embeddings.name
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


def _refused(audited: Audit, embeddings: str) -> Iterator[Repair]:
    """Partitions whose rows are all committed, and which a check kept from being published."""
    for partition in audited.partitions:
        if partition.state is State.REFUSED:
            # The failed rows of descriptions are what can come out otherwise; of embeddings, any.
            remedy = Remedy.COMPUTE if partition.asset == embeddings else Remedy.RETRY_FAILED
            why = (
                f"Committed and not published: {counted(partition.counts.expected, 'rows')}. A check refused."
            )
            yield Repair(partition.asset, partition.key, remedy, (why,))


def older_versions(
    settings: Settings, key: str
) -> Iterator[tuple[PublishedPartitions | StoredPartitions, str]]:
    """The older versions of a partition, here or in the store, with a sentence for the place of each.

    Raises PublishedError, StoreError, OSError.
    """
    for asset in kept_assets(settings, settings.mirror):
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


_RUN_OPTIONS = {Remedy.COMPUTE: "recompute", Remedy.RETRY_FAILED: "retry_failed"}


def carry_out(
    settings: Settings, repairs: Sequence[Repair], report: Callable[[str], None], *, newest_here: bool
) -> bool:
    """Do the repairs; returns whether all are done.

    report: called with each sentence about what was done, and what was not. newest_here: as in ``put_right``.
    Raises DagsterApiError.
    """
    # Also those that wait for a device: they hold their journals.
    running = {worker.partition for worker in Workers(control_state(settings)).living()}
    for key in sorted({repair.key for repair in repairs if repair.key in running}):
        report(f"{key} is left to the run that works on it now; look again when it has ended.")
    free = [repair for repair in repairs if repair.key not in running]
    at_once = [repair for repair in free if repair.remedy not in COMPUTING or repair.forgets]
    all_put_right = _put_all_right(settings, at_once, report, newest_here)
    all_launched = _launch(settings, [repair for repair in free if repair.remedy in COMPUTING], report)
    return all_put_right and all_launched and len(free) == len(repairs)


def _put_all_right(
    settings: Settings, repairs: Sequence[Repair], report: Callable[[str], None], newest_here: bool
) -> bool:
    all_done = True
    for repair in doing_each("putting right", repairs):
        try:
            for sentence in put_right(settings, repair, newest_here=newest_here):
                report(sentence)
        except (PublishedError, CatalogError, StoreError, OSError) as error:
            all_done = False
            report(f"Not repaired: {repair.asset} {repair.key or repair.path}: {error}")
        if repair.remedy is Remedy.BY_HAND:
            all_done = False
    return all_done


def _launch(settings: Settings, repairs: Sequence[Repair], report: Callable[[str], None]) -> bool:
    """Have the running Dagster compute what must be computed; returns whether it does."""
    if not repairs:
        return True
    groups = recomputations(repairs, settings.computed_assets)
    address = running_address(settings.dagster_home)
    if address is None:
        keys = sample({key for group in groups for key in group.keys})
        report(
            f"Not computed, for no Dagster runs on this home: {keys}. {command('serve')}, then repair again."
        )
        return False
    for group in groups:
        backfill = DagsterApi(address, settings.dagster_home).launch_backfill(
            group.assets,
            group.keys,
            title=f"repair: {counted(len(group.keys), 'partitions')}",
            tags={LAUNCHED_BY: "repair"},
            run_config=group.run_config(settings),
        )
        report(
            f"Launched backfill {backfill} of {counted(len(group.keys), 'partitions')}"
            f" ({', '.join(group.assets)}):"
            f" {address}/runs/b/{backfill}"
        )
    return True


def put_right(settings: Settings, repair: Repair, *, newest_here: bool = False) -> list[str]:
    """Do the part of a repair that needs no device; says what was done.

    Nothing is deleted: what is damaged or foreign goes into the quarantine. newest_here: a person says that
    no other machine has anything newer than what a store lost. Raises PublishedError, OSError, CatalogError,
    StoreError.
    """
    asset = settings.layout.asset(repair.asset)
    stored = StoredPartitions(asset, settings.mirror)
    if repair.remedy is Remedy.FILL_STORE:
        if repair.key is None:
            return put_back_catalog(settings.home, settings.mirror, newest_here=newest_here)
        done = stored.put_back(repair.key, newest_here=newest_here)
        store_looks(settings, [asset])[repair.asset].forget(repair.key)
        return [*done] or [f"Partition {repair.key} of {repair.asset} is whole in {settings.mirror}."]
    if repair.remedy is Remedy.SET_ASIDE and repair.path is not None:
        return [f"{repair.path} was moved to {files.set_aside(repair.path, asset.quarantine)}."]
    if repair.key is None:
        return []
    published = PublishedPartitions(asset)
    if repair.forgets:
        return list(published.set_aside(repair.key))
    if repair.remedy is Remedy.RESTORE:
        restoration = published.restore(repair.key, stored.content_of)
        return [*restoration.notes] or [f"Partition {repair.key} of {repair.asset} is whole."]
    return []


@dataclass(frozen=True)
class Recomputation:
    """Partitions that are materialized alike. remedies: by asset, upstream first."""

    remedies: Mapping[str, Remedy]
    keys: tuple[str, ...]

    @property
    def assets(self) -> tuple[str, ...]:
        """The assets that are materialized together."""
        return tuple(self.remedies)

    def run_config(self, settings: Settings) -> dict[str, object]:
        """The run config of each partition's run; empty where finished work is kept as always."""
        options = {
            asset: _RUN_OPTIONS[remedy] for asset, remedy in self.remedies.items() if remedy in _RUN_OPTIONS
        }
        if not options:
            return {}
        # Settings may change until the run begins: then its partition waits for a person.
        kept: dict[str, object] = {} if Remedy.COMPUTE in self.remedies.values() else {"stale": KEEP}
        of_assets = {asset: {option: True, **kept} for asset, option in options.items()}
        return config_of_runs(settings, of_assets)


def recomputations(repairs: Iterable[Repair], assets: Sequence[str]) -> list[Recomputation]:
    """Group repairs that compute by what is done to each partition.

    assets: those that runs make. New descriptions always take their embeddings with them.
    """
    of_key: dict[str, dict[str, Remedy]] = defaultdict(dict)
    for repair in repairs:
        if repair.remedy in COMPUTING and repair.key is not None:
            of_key[repair.key][repair.asset] = repair.remedy
    groups: dict[tuple[tuple[str, Remedy], ...], list[str]] = defaultdict(list)
    for key, remedies in sorted(of_key.items()):
        if assets[0] in remedies:
            remedies = dict.fromkeys(assets, Remedy.RESUME) | remedies
        if chosen := tuple((asset, remedies[asset]) for asset in assets if asset in remedies):
            groups[chosen].append(key)
    return [Recomputation(dict(remedies), tuple(keys)) for remedies, keys in groups.items()]

"""What the store holds of work under way and of the catalogue: for audit and prune.

What is published there is looked at by ``store_looks.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from vlm_assets.config.extensions import StoredLeftover
from vlm_assets.config.settings import Settings
from vlm_catalog.ranges import CATALOG
from vlm_catalog.stored_catalog import stored_catalog_trouble
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.mirror.stored_journal import HEAD, HeadDamagedError, StoredJournal, stored_journals
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.partition_files import PartitionFiles
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted

_STARTED_THERE = "The machine that computed them puts them back when the partition is started there."


def store_findings(settings: Settings, assets: Sequence[AssetFolders], *, deep: bool) -> Iterator[Finding]:
    """What is wrong with the store's catalogue and committed rows, or worth knowing; nothing without a store.

    deep: the catalogue is read to the byte. Raises StoreError.
    """
    store = settings.mirror
    if trouble := stored_catalog_trouble(settings.home, store, deep=deep):
        step = f"{command('repair')} says what it would do."
        yield Finding(FindingKind.STORE, CATALOG, None, trouble, step, str(store))
    for asset in assets:
        published = {
            name.rpartition("/")[2].removesuffix(".parquet") for name, _ in store.names(f"{asset.name}/")
        }
        yield from _journal_findings(asset, store, published)


def store_leftovers(assets: Sequence[AssetFolders], store: Mirror) -> list[StoredLeftover]:
    """Journals in the store whose rows are published, or were given up here. Raises StoreError."""
    leftovers = []
    for asset in assets:
        for (key, generation), sizes in stored_journals(asset, store).items():
            rest = {name: size for name, size in sizes.items() if name != HEAD}
            if rest and _may_go(asset, store, key, generation):
                leftovers.append(StoredLeftover(asset.name, key, generation, len(rest), sum(rest.values())))
    return leftovers


def remove_leftovers(settings: Settings, leftovers: Sequence[StoredLeftover]) -> Iterator[str]:
    """Remove them from the store, each looked at again right before. Raises StoreError."""
    store = settings.mirror
    for leftover in leftovers:
        asset = settings.layout.asset(leftover.asset)
        if _may_go(asset, store, leftover.key, leftover.generation):
            journal = StoredJournal(asset.partition(leftover.key), leftover.generation, store)
            journal.read_manifest()
            journal.close()
            yield f"Removed {counted(leftover.objects, 'objects')} below {journal.where.removesuffix(HEAD)}."


def _journal_findings(asset: AssetFolders, store: Mirror, published: Collection[str]) -> Iterator[Finding]:
    for (key, generation), sizes in stored_journals(asset, store).items():
        if key in published and not sizes.keys() - {HEAD}:
            continue  # Closed, as each published partition's is.
        journal = StoredJournal(asset.partition(key), generation, store)
        where = journal.where

        def finding(
            kind: FindingKind, sentence: str, step: str = "", *, key: str = key, where: str = where
        ) -> Finding:
            return Finding(kind, asset.name, key, sentence, step, where)

        try:
            manifest = journal.read_manifest()
        except HeadDamagedError as error:
            yield finding(FindingKind.STORE_JOURNAL, str(error))
            continue
        if sizes.keys() - {HEAD} and _is_closed(asset, store, key, generation):
            sentence = f"{where} was closed, and objects are left below it."
            yield finding(FindingKind.STORE_LEFTOVER, sentence, f"{command('prune')} removes them.")
        elif journal.head is None:
            sentence = (
                f"{where} is not there, and {counted(len(sizes), 'segments are', 'segment is')}:"
                " did a lifecycle rule or a person remove it?"
            )
            yield finding(FindingKind.STORE_JOURNAL, sentence, _STARTED_THERE)
        elif (
            lost := [segment for segment in manifest.segments if not journal.holds(segment)]
            if manifest
            else []
        ):
            rows = sum(segment.rows for segment in lost)
            sentence = (
                f"{counted(len(lost), 'segments')} ({counted(rows, 'rows')}) that {where} lists are"
                f" not there, or other bytes are, such as {lost[0].name}."
            )
            yield finding(FindingKind.STORE_JOURNAL, sentence, _STARTED_THERE)


def _may_go(asset: AssetFolders, store: Mirror, key: str, generation: str) -> bool:
    """Whether a journal is closed, and its partition was not put back here: its rows may be nowhere else."""
    partition = PartitionFiles(asset, key)
    try:
        newest, _ = partition.put_back(partition.whole_records())
    except PublishedError:
        return False
    return newest is None and _is_closed(asset, store, key, generation)


def _is_closed(asset: AssetFolders, store: Mirror, key: str, generation: str) -> bool:
    """Whether no start goes on with a journal: its rows are published and there, or were given up here.

    Where it cannot be told, the journal stays.
    """
    paths = asset.partition(key)
    try:
        manifest = StoredJournal(paths, generation, store).read_manifest()
    except HeadDamagedError:
        return False
    if manifest is None:
        return False
    if manifest.retired:
        return True
    mark = read_mark(paths.high_water_mark(generation), key=key, generation=generation).mark
    if mark is not None and mark.retired:
        return True
    stored = StoredPartitions(asset, store)
    try:
        record = stored.published(key)
        published = record is not None and record.metadata.get("generation") == generation
        return published and stored.trouble(key) is None
    except PublishedError:
        return False

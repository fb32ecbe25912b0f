"""What the store holds of work under way and of the catalogue: for audit and prune.

What is published there is looked at by ``store_looks.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from vlm_assets.assets.partition_state import Kind, Problem
from vlm_assets.catalog.stored_catalog import CATALOG, stored_catalog_trouble
from vlm_assets.config.extensions import StoredLeftover
from vlm_assets.config.settings import Settings
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.mirror.stored_journal import HEAD, HeadDamagedError, StoredJournal, stored_journals
from vlm_durable.versions.partition_files import PartitionFiles, PublishedError
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.wording import counted


def store_problems(settings: Settings, *, deep: bool) -> Iterator[Problem]:
    """What is wrong with the store's catalogue and committed rows, or worth knowing; nothing without a store.

    deep: the catalogue is read to the byte. Raises StoreError.
    """
    if (store := settings.store) is None:
        return
    if trouble := stored_catalog_trouble(settings.home, store, deep=deep):
        yield Problem(Kind.STORE, CATALOG, None, trouble, str(store))
    for asset in (settings.descriptions, settings.embeddings):
        published = {
            name.rpartition("/")[2].removesuffix(".parquet") for name, _ in store.names(f"{asset.name}/")
        }
        yield from _journal_problems(asset, store, published)


def store_leftovers(settings: Settings) -> list[StoredLeftover]:
    """Journals in the store whose rows are published, or were given up here. Raises StoreError."""
    if (store := settings.store) is None:
        return []
    leftovers = []
    for asset in (settings.descriptions, settings.embeddings):
        for (key, generation), sizes in stored_journals(asset, store).items():
            rest = {name: size for name, size in sizes.items() if name != HEAD}
            if rest and _may_go(asset, store, key, generation):
                leftovers.append(StoredLeftover(asset.name, key, generation, len(rest), sum(rest.values())))
    return leftovers


def remove_leftovers(settings: Settings, leftovers: Sequence[StoredLeftover]) -> Iterator[str]:
    """Remove them from the store, each looked at again right before. Raises StoreError."""
    if (store := settings.store) is None:
        return
    for leftover in leftovers:
        asset = settings.layout.asset(leftover.asset)
        if _may_go(asset, store, leftover.key, leftover.generation):
            journal = StoredJournal(asset.partition(leftover.key), leftover.generation, store)
            journal.read_manifest()
            journal.close()
            yield f"Removed {counted(leftover.objects, 'objects')} below {journal.where.removesuffix(HEAD)}."


def _journal_problems(asset: AssetFolders, store: S3Folder, published: Collection[str]) -> Iterator[Problem]:
    for (key, generation), sizes in stored_journals(asset, store).items():
        if key in published and not sizes.keys() - {HEAD}:
            continue  # Closed, as each published partition's is.
        journal = StoredJournal(asset.partition(key), generation, store)
        try:
            manifest = journal.read_manifest()
        except HeadDamagedError as error:
            yield Problem(Kind.STORE_JOURNAL, asset.name, key, str(error), journal.where)
            continue
        if sizes.keys() - {HEAD} and _is_closed(asset, store, key, generation):
            sentence = (
                f"{journal.where} was closed, and objects are left below it. {command('prune')} removes them."
            )
            yield Problem(Kind.STORE_LEFTOVER, asset.name, key, sentence, journal.where)
        elif journal.head is None:
            sentence = (
                f"{journal.where} is not there, and {counted(len(sizes), 'segments are', 'segment is')}:"
                " did a lifecycle rule or a"
                " person remove it? The machine that has the rows puts it back when the partition is started"
                " there."
            )
            yield Problem(Kind.STORE_JOURNAL, asset.name, key, sentence, journal.where)
        elif (
            lost := [segment for segment in manifest.segments if not journal.holds(segment)]
            if manifest
            else []
        ):
            rows = sum(segment.rows for segment in lost)
            sentence = (
                f"{counted(len(lost), 'segments')} ({counted(rows, 'rows')}) that {journal.where} lists are"
                " not there, or other"
                f" bytes are, such as {lost[0].name}. The machine that computed them puts them back when the"
                " partition is started there."
            )
            yield Problem(Kind.STORE_JOURNAL, asset.name, key, sentence, journal.where)


def _may_go(asset: AssetFolders, store: S3Folder, key: str, generation: str) -> bool:
    """Whether a journal is closed, and its partition was not put back here: its rows may be nowhere else."""
    partition = PartitionFiles(asset, key)
    try:
        newest, _ = partition.put_back(partition.whole_records())
    except PublishedError:
        return False
    return newest is None and _is_closed(asset, store, key, generation)


def _is_closed(asset: AssetFolders, store: S3Folder, key: str, generation: str) -> bool:
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

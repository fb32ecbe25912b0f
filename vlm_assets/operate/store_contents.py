"""What the store holds of work under way and of the catalogue: for audit and prune.

What is published there is looked at by ``store_looks.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from resources.journal.high_water_mark import read_mark
from resources.publishing.partition_files import PublishedError
from resources.publishing.stored import StoredPartitions
from resources.storage.layout import AssetFolders
from resources.storage.sealed_json import FormatVersionError
from resources.store.bucket import ListedObject, S3Folder
from resources.store.stored_journal import HEAD, HeadDamagedError, StoredJournal
from resources.training.training_plan import TrainingError
from resources.training.training_store import StoredModel
from vlm_assets.assets.partition_state import Kind, Problem
from vlm_assets.catalog.stored_catalog import CATALOG, stored_catalog_trouble
from vlm_assets.config.settings import Settings

DESCRIPTION_MODEL = "description_model"
"""The asset of trained models, named here for commands that do without Dagster."""


@dataclass(frozen=True)
class StoredLeftover:
    """What is in the store of a journal that nobody goes on with. objects: without its head.

    key: of a training, its variant.
    """

    asset: str
    key: str
    generation: str
    objects: int
    bytes: int


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
    """Journals in the store whose rows are published, or were given up here, and superseded trainings.

    Raises StoreError.
    """
    if (store := settings.store) is None:
        return []
    found = []
    for asset in (settings.descriptions, settings.embeddings):
        for (key, generation), sizes in _journals(asset, store).items():
            rest = {name: size for name, size in sizes.items() if name != HEAD}
            if rest and _is_closed(asset, store, key, generation):
                found.append(StoredLeftover(asset.name, key, generation, len(rest), sum(rest.values())))
    trainings = settings.layout.asset(DESCRIPTION_MODEL)
    for key, generation in _journals(trainings, store):
        if copies := _superseded(trainings, store, key, generation):
            size = sum(one.size for one in copies)
            found.append(StoredLeftover(trainings.name, key, generation, len(copies), size))
    return found


def remove_leftovers(settings: Settings, leftovers: Sequence[StoredLeftover]) -> Iterator[str]:
    """Remove them from the store, each looked at again right before. Raises StoreError."""
    if (store := settings.store) is None:
        return
    for one in leftovers:
        asset = settings.layout.asset(one.asset)
        if one.asset == DESCRIPTION_MODEL:
            copies = _superseded(asset, store, one.key, one.generation)
            for copy in copies:
                store.delete(copy.name)
            yield f"Removed {len(copies)} objects of an earlier training of {one.key} from {store}."
        elif _is_closed(asset, store, one.key, one.generation):
            journal = StoredJournal(asset.partition(one.key), one.generation, store)
            journal.look()
            journal.close()
            yield f"Removed {one.objects} objects below {journal.where.removesuffix(HEAD)}."


def _journal_problems(asset: AssetFolders, store: S3Folder, published: Collection[str]) -> Iterator[Problem]:
    for (key, generation), sizes in _journals(asset, store).items():
        if key in published and not sizes.keys() - {HEAD}:
            continue  # Closed, as each published partition's is.
        journal = StoredJournal(asset.partition(key), generation, store)
        try:
            manifest = journal.look()
        except HeadDamagedError as error:
            yield Problem(Kind.STORE_JOURNAL, asset.name, key, str(error), journal.where)
            continue
        if sizes.keys() - {HEAD} and _is_closed(asset, store, key, generation):
            sentence = (
                f"{journal.where} was closed, and objects are left below it. `vlm-assets prune` removes them."
            )
            yield Problem(Kind.STORE_LEFTOVER, asset.name, key, sentence, journal.where)
        elif journal.head is None:
            sentence = (
                f"{journal.where} is not there, and {len(sizes)} segments are: did a lifecycle rule or a"
                " person remove it? The machine that has the rows puts it back when the partition is started"
                " there."
            )
            yield Problem(Kind.STORE_JOURNAL, asset.name, key, sentence, journal.where)
        elif lost := [one for one in manifest.segments if not journal.holds(one)] if manifest else []:
            rows = sum(one.rows for one in lost)
            sentence = (
                f"{len(lost)} segments ({rows} rows) that {journal.where} lists are not there, or other"
                f" bytes are, such as {lost[0].name}. The machine that computed them puts them back when the"
                " partition is started there."
            )
            yield Problem(Kind.STORE_JOURNAL, asset.name, key, sentence, journal.where)


def _journals(asset: AssetFolders, store: S3Folder) -> dict[tuple[str, str], dict[str, int]]:
    """The objects of each journal, by partition and generation."""
    below = f"{asset.journals.relative_to(asset.home.root)}/"
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, size in store.names(below):
        key, generation, rest = (*name.removeprefix(below).split("/", 2), "", "")[:3]
        if rest:
            found[key, generation][rest] = size
    return found


def _superseded(trainings: AssetFolders, store: S3Folder, key: str, generation: str) -> list[ListedObject]:
    """The copied checkpoints of a training, where a later one of its variant was published after them all.

    The published training's own checkpoint stays: it can make the model again.
    """
    root = trainings.home.root
    record = str(trainings.partition(key).record.relative_to(root))
    try:
        theirs, at = StoredModel(store, record=record, folder=key).record()
    except (TrainingError, FormatVersionError):
        return []
    if theirs is None or at is None or theirs.get("pending") or theirs["fingerprint"] == generation:
        return []
    copies = list(store.listed(f"{trainings.partition(key).journal(generation).relative_to(root)}/"))
    return copies if all(one.modified < at.modified for one in copies) else []


def _is_closed(asset: AssetFolders, store: S3Folder, key: str, generation: str) -> bool:
    """Whether no start goes on with a journal: its rows are published and there, or were given up here.

    Where it cannot be told, the journal stays.
    """
    paths = asset.partition(key)
    try:
        manifest = StoredJournal(paths, generation, store).look()
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

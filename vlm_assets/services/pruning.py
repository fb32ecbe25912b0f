"""What takes space and is needed no more: earlier versions, superseded journals, quarantine, leftovers.

It is removed only beside a published file and a second copy that are both whole to the byte, read again right
before.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from vlm_assets.assets.stored_settings import accept_settings
from vlm_assets.config.extensions import StoredLeftover, installed
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import PREFIX, Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.kept_assets import assets_in_store, kept_assets
from vlm_assets.services.progress import doing, doing_each
from vlm_assets.services.store_contents import remove_leftovers, store_leftovers
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import SET_PREFIX, InvalidRangeError, PropertyRange
from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.files.layout import AssetFolders
from vlm_durable.journal.high_water_mark import read_mark
from vlm_durable.journal.setting_aside import discard
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror
from vlm_durable.mirror.stored_journal import stored_journals
from vlm_durable.state.tables import drift_snapshots
from vlm_durable.state.workers import Workers
from vlm_durable.versions.partition_files import PartitionFiles, PublishedRecord
from vlm_durable.versions.partition_findings import read_record
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError

_AFTER = re.compile(r".*-after-([0-9]+)")

EARLIER_SLOTS = (1, 2)
LOCK_SECONDS = 10.0


class RemovalKind(StrEnum):
    """Kinds of what may go."""

    EARLIER_VERSION = "earlier version"
    JOURNAL = "superseded journal"
    QUARANTINED = "quarantined file"
    TEMPORARY = "abandoned temporary file"


@dataclass(frozen=True)
class Removal:
    """One thing that may go, and why. needs: partitions that must be whole for it to be removed."""

    asset: str
    kind: RemovalKind
    path: Path
    bytes: int
    why: str
    needs: tuple[str, ...]


@dataclass
class Removable:
    """What may go, and what stays for a reason that a person should know."""

    removals: list[Removal] = field(default_factory=list)
    in_store: list[StoredLeftover] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """How much it would free."""
        here = sum(removal.bytes for removal in self.removals)
        return here + sum(leftover.bytes for leftover in self.in_store)


def find_removable(settings: Settings, catalog: Catalog, keys: Sequence[str] | None = None) -> Removable:
    """Find what may go; changes nothing. Reads every byte of the partitions that have something to go.

    keys: partitions to look at; all, and what extensions keep in the store, unless given. Raises StoreError.
    """
    removable = Removable()
    is_whole = keys is None
    keys = [range_.key for range_ in catalog.ranges] if keys is None else keys
    for asset in kept_assets(settings):
        reasons: dict[str, str | None] = {}
        for removal in _candidates(asset, keys):
            unread = [key for key in removal.needs if key not in reasons]
            for number, key in enumerate(unread):
                if len(unread) > 1:
                    doing(f"reading every byte of {asset.name}, partitions", number, len(unread))
                reasons[key] = _not_whole(PartitionFiles(asset, key))
            reason = next((why for key in removal.needs if (why := reasons[key]) is not None), None)
            if reason is None:
                removable.removals.append(removal)
            else:
                removable.kept.append(f"{removal.path} stays: {reason}")
    doing("looking at what the store holds")
    removable.in_store = [
        leftover
        for leftover in store_leftovers(assets_in_store(settings), settings.mirror)
        if leftover.key in keys
    ]
    if is_whole:
        for extension in installed():
            removable.in_store += extension.stored_leftovers(settings)
    return removable


def _candidates(asset: AssetFolders, keys: Sequence[str]) -> Iterator[Removal]:
    temporary = defaultdict(list)
    for path in sorted(asset.staging.glob(f".*{files.TEMPORARY_SUFFIX}")):
        temporary[path.name.split(".")[1]].append(path)
    for key in doing_each(f"looking at the partitions of {asset.name}", keys):
        paths = asset.partition(key)
        partition = PartitionFiles(asset, key)
        versions = read_record(partition).newest
        record = versions.published if versions else None
        for number in EARLIER_SLOTS:
            path = partition.slot(number)
            if path.is_file():
                why = f"no version of {key} that is known"
                if versions is not None and len(versions.previous) >= number:
                    why = f"version {versions.previous[number - 1].sequence} of {key}"
                yield Removal(asset.name, RemovalKind.EARLIER_VERSION, path, _size(path), why, (key,))
        if record is not None:
            for journal in sorted(paths.journals.glob("*")):
                mark = paths.high_water_mark(journal.name)
                if journal.is_dir() and is_superseded(journal, record, mark):
                    why = (
                        f"{key} was published after it, as version {record.sequence} of generation"
                        f" {record.metadata.get('generation')}"
                    )
                    yield Removal(asset.name, RemovalKind.JOURNAL, journal, _size(journal), why, (key,))
        for path in temporary[key]:
            why = f"left by a process that was killed at {key}, unless one is at it now"
            yield Removal(asset.name, RemovalKind.TEMPORARY, path, _size(path), why, (key,))
    for path in sorted(asset.quarantine.rglob("*")):
        if path.is_file():
            owner = _owner(asset, path)
            why = f"set aside from {owner}" if owner else "set aside; all partitions are whole"
            needs = (owner,) if owner else tuple(keys)
            yield Removal(asset.name, RemovalKind.QUARANTINED, path, _size(path), why, needs)


def _owner(asset: AssetFolders, path: Path) -> str | None:
    """The partition that a file was set aside from, whether the catalogue lists it or not; None: nobody's."""
    with suppress(InvalidRangeError):
        return PropertyRange.from_key(path.relative_to(asset.quarantine).parts[0]).key
    return None


def is_superseded(journal: Path, record: PublishedRecord, high_water_mark: Path) -> bool:
    """Whether a published version came after everything in a journal, so that no start goes on with it.

    Work under way on a next version is never that. Where it cannot be told, the journal stays.
    """
    generation = journal.name
    if generation == record.metadata.get("generation"):
        return True
    mark = read_mark(high_water_mark, key=record.key, generation=generation).mark
    if mark is not None and mark.retired:
        return True
    after = _AFTER.fullmatch(generation)
    if after and int(after[1]) >= record.sequence:
        return False
    published = datetime.fromisoformat(record.published_at)
    newest = max(
        (path.stat().st_mtime for path in (journal, *journal.rglob("*")) if path.name != "writer.lock"),
        default=0.0,
    )
    # A clock that was ahead when it was published says nothing about what came first.
    return published <= datetime.now(UTC) and datetime.fromtimestamp(newest, UTC) < published


def remove(settings: Settings, removals: list[Removal]) -> Iterator[str]:
    """Remove what a plan listed, a partition at a time, each verified again under its lock; says what went.

    Earlier versions go from the store too. Raises PublishedError, JournalError, StoreError or OSError, with
    everything not yet said still there.
    """
    whole: dict[tuple[str, str], bool] = {}
    by_partition: dict[tuple[str, str], list[Removal]] = defaultdict(list)
    for removal in removals:
        if removal.kind is not RemovalKind.QUARANTINED:
            by_partition[removal.asset, removal.needs[0]].append(removal)
            continue
        asset = settings.layout.asset(removal.asset)
        for number, key in enumerate(removal.needs):
            if (removal.asset, key) not in whole:
                doing(f"reading every byte of {asset.name}, partitions", number, len(removal.needs))
                whole[removal.asset, key] = _not_whole(PartitionFiles(asset, key)) is None
        if all(whole[removal.asset, key] for key in removal.needs):
            removal.path.unlink(missing_ok=True)
            yield f"Removed {removal.path}."
        else:
            yield f"Kept {removal.path}: a partition that it may belong to is no longer whole."
    in_store = assets_in_store(settings)
    for (name, key), beside in doing_each("removing what is beside partitions", by_partition.items()):
        asset = settings.layout.asset(name)
        stored = StoredPartitions(asset, settings.mirror if asset in in_store else NO_MIRROR)
        removes_earlier = any(removal.kind is RemovalKind.EARLIER_VERSION for removal in beside)
        if removes_earlier:
            # First: by its earlier versions the store's version is known as one that came before.
            stored.push(key)
        yield from _remove_of_partition(PartitionFiles(asset, key), beside)
        if removes_earlier:
            yield from stored.forget_earlier(key)


def _remove_of_partition(partition: PartitionFiles, removals: list[Removal]) -> Iterator[str]:
    with partition.locked(LOCK_SECONDS):
        try:
            # This also removes what killed processes left, and finishes an interrupted publication.
            versions, notes = partition.settle()
        except PublishedError as error:
            yield f"Kept all of {partition.key}: {error}"
            return
        yield from notes
        record = versions.published
        reason = _not_whole(partition, record)
        if record is None or reason is not None:
            yield f"Kept all of {partition.key}: {reason}"
            return
        earlier_paths = [removal.path for removal in removals if removal.kind is RemovalKind.EARLIER_VERSION]
        if earlier_paths:
            # The record never names what is not there.
            settled = replace(versions, previous=()).to_bytes(partition.asset)
            files.write_replacing(partition.record_copy, settled, partition.staging)
            files.write_replacing(partition.record_path, settled, partition.staging)
        for path in earlier_paths:
            path.unlink(missing_ok=True)
            yield f"Removed {path}."
        if earlier_paths:
            files.sync_directory(earlier_paths[0].parent)
        for removal in removals:
            path = removal.path
            mark = partition.paths.high_water_mark(path.name)
            if removal.kind is RemovalKind.JOURNAL and is_superseded(path, record, mark):
                is_gone = discard(path, key=partition.key, generation=path.name, high_water_mark=mark)
                yield f"Removed {path}." if is_gone else f"Kept {path}: no manifest in it reads."
            elif removal.kind is RemovalKind.TEMPORARY:
                yield f"Kept {path}: a process needs it." if path.exists() else f"Removed {path}."


def _not_whole(partition: PartitionFiles, record: PublishedRecord | None = None) -> str | None:
    """Why nothing beside a partition may go, reading both copies to the last byte; None where it may."""
    if record is None:
        reading = read_record(partition)
        versions = reading.newest
        if versions is None or versions.published is None:
            return f"partition {partition.key} is not published."
        if versions.pending is not None:
            return f"a publication of partition {partition.key} is under way or was interrupted."
        try:
            newest, _ = partition.put_back(reading.records)
        except PublishedError as error:
            return str(error)
        if newest is not None:
            return (
                f"version {newest.sequence} of partition {partition.key} (published {newest.published_at})"
                f" was here, and an older one stands: {command('repair')} first."
            )
        record = versions.published
    for path in (partition.published, partition.slot(0)):
        if not partition.holds(path, record):
            return f"{path} is not what was published: {command('repair')} first."
    return None


def remove_stored(settings: Settings, leftovers: Sequence[StoredLeftover]) -> Iterator[str]:
    """Remove them from the store, each by whoever its asset belongs to. Raises StoreError."""
    extensions = {asset: extension for extension in installed() for asset in extension.assets}
    for leftover in leftovers:
        if leftover.asset in extensions:
            yield extensions[leftover.asset].remove_leftover(settings, leftover)
    of_core = [leftover for leftover in leftovers if leftover.asset not in extensions]
    yield from remove_leftovers(settings, of_core)


def removed_set(settings: Settings, name: str) -> AssetFolders:
    """The asset of a question set whose files may be deleted. Raises CommandError, StoreError, OSError."""
    asset = settings.layout.asset(SET_PREFIX + name)
    if asset in settings.partitioned_assets:
        raise CommandError(
            f"{asset.name} is made with the settings of now. Nothing was changed. Take the set {name} out of"
            f" the file of {PREFIX}QUESTIONS first, on all machines that share the store."
        )
    if asset not in kept_assets(settings, settings.mirror):
        raise CommandError(f"There are no files of a question set {name!r}. Nothing was changed.")
    if any(worker.asset == asset.name for worker in Workers(control_state(settings)).living()):
        raise CommandError(
            f"A run works on {asset.name}. Nothing was changed. Wait for it, then do it again."
        )
    return asset


def delete_set(settings: Settings, asset: AssetFolders) -> Iterator[str]:
    """Delete all files of a question set, in the store first; says what went.

    Killed anywhere, it is finished by doing it again. Raises StoreError, OSError.
    """
    store = settings.mirror
    accept_settings(store, [asset.name])
    if objects := _objects_of(asset, store):
        for name in doing_each(f"deleting {asset.name} from the store", objects):
            store.delete(name)
        yield f"Deleted the objects of {asset.name} from {store}."
    for folder in asset.folders:
        if folder.is_dir():
            shutil.rmtree(folder)
            files.sync_directory(folder.parent)
            yield f"Deleted {folder}."
    # What was seen of them says nothing about a set that begins anew under the name.
    seen = drift_snapshots.c.asset.in_([asset.name, f"{asset.name} in {store}"])
    control_state(settings).beat(lambda connection: connection.execute(drift_snapshots.delete().where(seen)))


def _objects_of(asset: AssetFolders, store: Mirror) -> list[str]:
    """The names of an asset's objects in the store; those by which the store knows it come last."""
    root = asset.home.root
    published, journals, listed = (
        [name for name, _ in store.names(f"{folder.relative_to(root)}/")]
        for folder in (asset.published, asset.journals, asset.versions)
    )
    # SeaweedFS lists nothing in a folder .versions: what may be there is deleted by its name.
    keys = {Path(name).stem for name in published} | {key for key, _ in stored_journals(asset, store)}
    partitions = map(asset.partition, sorted(keys))
    paths = [path for each in partitions for path in (each.record, *map(each.version, EARLIER_SLOTS))]
    versions = dict.fromkeys([*listed, *(str(path.relative_to(root)) for path in paths)])
    return [*versions, *published, *journals]


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size

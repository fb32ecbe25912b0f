"""Withdrawing properties for good: from the catalogue, published files, earlier versions and journals.

Each step may be repeated. What is to be done is written down first, so that a withdrawal that was cut short
is finished by starting it again. A property leaves a tombstone in its place: a row of the catalogue with the
same ordinal, no images and a digest for an id, and a failed row of the kind ``withdrawn`` in each file. So
ordinals stay, every count adds up, and an ingest of the same listing knows that it was withdrawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_assets.assets.fingerprint import TEXTS
from vlm_assets.assets.learned_labels import forget_kept
from vlm_assets.config.extensions import installed, left_by_missing
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.kept_assets import assets_in_store, kept_assets
from vlm_assets.services.progress import doing, doing_each
from vlm_assets.services.pruning import find_removable, remove
from vlm_assets.services.withdrawn_rows import withdraw_journals, withdraw_published, withdraw_stored
from vlm_catalog.catalog import Catalog, CatalogError
from vlm_catalog.catalog_copies import backup_paths, catalog_path, publish_catalog, quarantine
from vlm_catalog.catalog_file import (
    SCHEMA,
    CatalogWriter,
    inputs_digest,
    is_tombstone,
    withdrawal_note,
)
from vlm_catalog.ingest import only_ingest
from vlm_catalog.ranges import PropertyRange
from vlm_catalog.stored_catalog import extend_catalog, pull_catalog
from vlm_catalog.withdrawn_ids import (
    WithdrawnIds,
    lost_list,
    read_withdrawn,
    save_withdrawn,
    share_withdrawn,
)
from vlm_durable.commands import command
from vlm_durable.files.files import TEMPORARY_SUFFIX, sync_directory
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.files.sealed_json import read_sealed, write_sealed
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.mirror.stored_journal import pull_others
from vlm_durable.state.nodes import Nodes
from vlm_durable.state.tables import quality_summaries
from vlm_durable.state.withdrawing import begin_withdrawal, end_withdrawal
from vlm_durable.state.workers import Workers
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.wording import counted

_ABOUT = "A withdrawal under way. It is removed when all is done; the command withdraw finishes it."


@dataclass(frozen=True)
class Withdrawal:
    """What is to be withdrawn.

    tombstones: by the id of each property. slices: of each partition of theirs, the digest of its rows of the
    catalogue before. texts: of each, the digest of its published texts before, where there are any.
    """

    tombstones: Mapping[str, str]
    slices: Mapping[str, str]
    texts: Mapping[str, str]

    @property
    def keys(self) -> list[str]:
        """The partitions, in order."""
        return sorted(self.slices)


def prepare_withdrawal(settings: Settings, ids: Collection[str]) -> Withdrawal:
    """Find the partitions of these properties; changes nothing but that the home has a list of withdrawn ids.

    Raises CommandError, CatalogError, StoreError, OSError.
    """
    _refuse_without_extensions(settings)
    catalog = Catalog.open(settings.home)
    requested_ids, catalogued_ids = frozenset(ids), set[str]()
    slices, texts = {}, {}
    published = PublishedPartitions(settings.descriptions)
    for number, (range_, table) in enumerate(catalog.slices(with_tail=True)):
        doing("looking for the properties in partitions", number, len(catalog.ranges))
        ids_of_range = requested_ids.intersection(table["property_id"].to_pylist())
        catalogued_ids |= ids_of_range
        if ids_of_range and range_ != catalog.tail:
            slices[range_.key] = catalog.slice_digest(range_)
            record = published.record(range_.key)
            if record is not None:
                texts[range_.key] = str(record.metadata.get(TEXTS))
    if unknown := sorted(requested_ids - catalogued_ids):
        raise CatalogError(
            f"{catalog.path} does not have {len(unknown)} of these {counted(len(requested_ids), 'ids')},"
            f" such as {', '.join(map(repr, unknown[:3]))}. Nothing was changed. Ids are compared exactly,"
            " blanks and case too: take them out of the file, then do it again."
        )
    withdrawn = share_withdrawn(settings.home, settings.mirror)
    if withdrawn is None:
        withdrawn = begin_list(settings)
    withdrawn = withdrawn.changed(requested_ids, withdrawn=True)
    tombstones = {property_id: withdrawn.tombstone(property_id) for property_id in sorted(requested_ids)}
    return Withdrawal(tombstones, slices, texts)


def begin_list(settings: Settings, *, accepts_loss: bool = False) -> WithdrawnIds:
    """Begin the list of withdrawn ids. accepts_loss: there was one, and nobody can say any more of which ids.

    Raises WithdrawnListError, CatalogError, StoreError, OSError.
    """
    catalog = Catalog.open(settings.home)
    tombstones = {property_id for property_id in _ids(catalog) if is_tombstone(property_id)}
    if tombstones and not accepts_loss:
        raise lost_list(settings.home, len(tombstones))
    save_withdrawn(settings.home, WithdrawnIds.new().with_tombstones(tombstones))
    withdrawn = share_withdrawn(settings.home, settings.mirror)
    assert withdrawn is not None
    return withdrawn


def returned_ids(settings: Settings, catalog: Catalog) -> list[str]:
    """Withdrawn properties that are in the catalogue all the same, in its order. Raises CatalogError."""
    withdrawn = read_withdrawn(settings.home)
    if withdrawn is None:
        return []
    return [property_id for property_id in _ids(catalog) if property_id in withdrawn]


def undo_withdrawal(settings: Settings, ids: Collection[str]) -> None:
    """Take ids off the list of withdrawn ids: the next ingest that lists them takes them in again.

    Raises CommandError with nothing changed; CatalogError, StoreError, OSError.
    """
    if pending_withdrawal(settings) is not None:
        raise CommandError(f"A withdrawal was cut short. Finish it first: {command('withdraw')}.")
    withdrawn = share_withdrawn(settings.home, settings.mirror)
    if unknown := [property_id for property_id in ids if withdrawn is None or property_id not in withdrawn]:
        raise CommandError(
            f"{unknown[0]!r} is not withdrawn. Nothing was changed. Ids are compared exactly, blanks and case"
            " too."
        )
    assert withdrawn is not None
    save_withdrawn(settings.home, withdrawn.changed(ids, withdrawn=False))
    share_withdrawn(settings.home, settings.mirror)


def _ids(catalog: Catalog) -> Iterator[str]:
    for _, table in catalog.slices(with_tail=True):
        yield from table["property_id"].to_pylist()


def pending_withdrawal(settings: Settings) -> Withdrawal | None:
    """A withdrawal that was cut short; None where there is none. Raises BrokenSealError, OSError."""
    try:
        note = read_sealed(withdrawal_note(settings.state_directory))
    except FileNotFoundError:
        return None
    return Withdrawal(note["tombstones"], note["slices"], note["texts"])


def withdraw(settings: Settings, withdrawal: Withdrawal) -> Iterator[str]:
    """Withdraw, and say what was removed. Killed anywhere, it is finished by doing it again.

    Raises CommandError or BrokenSealError with nothing changed; PublishedError, JournalError, CatalogError,
    ModelLoadError or OSError with everything not yet said still to do.
    """
    _refuse_without_extensions(settings)
    lock = acquire_lock(settings.state_directory / "withdrawal.lock")
    if lock is None:
        raise CommandError(
            "Another process withdraws properties now. Nothing was changed. Wait for it, then do it again."
        )
    with contextlib.closing(lock):
        pending = pending_withdrawal(settings)
        if pending is not None and pending != withdrawal:
            # Its note is all that says which properties it has begun to remove.
            raise CommandError(
                "Another withdrawal was cut short. Nothing was changed. Finish that one first:"
                f" {command('withdraw')}."
            )
        if pending is None and _slices(Catalog.open(settings.home), withdrawal.keys) != withdrawal.slices:
            raise CommandError(
                "The catalogue changed since this withdrawal was prepared. Nothing was changed. Do it again."
            )
        yield from _withdraw(settings, withdrawal, goes_on=pending is not None)


def _slices(catalog: Catalog, keys: Iterable[str]) -> dict[str, str]:
    return {key: catalog.slice_digest(PropertyRange.from_key(key)) for key in keys}


def _withdraw(settings: Settings, withdrawal: Withdrawal, *, goes_on: bool) -> Iterator[str]:
    """The steps. goes_on: this withdrawal was cut short before."""
    note = withdrawal_note(settings.state_directory)
    state = control_state(settings)
    write_sealed(note, {"about": _ABOUT, **asdict(withdrawal)})
    # First: a run that begins later on any machine asks for it, and one that began before is seen below.
    begin_withdrawal(state, withdrawal.keys)
    doing("waiting until every node knows of the withdrawal")
    Nodes(state).wait_for_beats()
    if busy := _at_work(settings, withdrawal):
        if not goes_on:
            end_withdrawal(state)
            note.unlink()
            sync_directory(note.parent)
        raise CommandError(
            f"A run works on {', '.join(busy[:3])}. Nothing was changed. Wait for it, or"
            f" {command('devices', 'pause')}, then do it again."
        )
    withdrawn = share_withdrawn(settings.home, settings.mirror)
    if withdrawn is None:
        raise CommandError(
            f"The list of withdrawn ids is gone. Begin one: {command('withdraw', '--new-list')}."
        )
    # Before the catalogue: from now on no ingest takes them in, whatever catalogue it meets.
    save_withdrawn(settings.home, withdrawn.changed(withdrawal.tombstones, withdrawn=True))
    share_withdrawn(settings.home, settings.mirror)
    doing("removing the properties from the catalogue and its copies")
    for path in _replace_by_tombstones(settings.home, withdrawal.tombstones, settings.mirror):
        yield f"Removed {counted(len(withdrawal.tombstones), 'properties')} from {path}."
    store, catalog = settings.mirror, Catalog.open(settings.home)
    in_store, assets = assets_in_store(settings), kept_assets(settings, store)
    for key in doing_each("removing the properties from partitions", withdrawal.keys):
        # First this home gets all that the store has of the partition.
        for asset in in_store:
            yield from StoredPartitions(asset, store).pull(key)
            yield from pull_others(asset.partition(key), "", store)
        yield from withdraw_published(
            assets,
            catalog,
            key,
            withdrawal.tombstones,
            slice_before=withdrawal.slices[key],
            texts_before=withdrawal.texts.get(key, ""),
        )
        yield from withdraw_journals(settings, assets, catalog, key)
        # Before earlier versions go here: by them the store's version is known as one that came before.
        yield from withdraw_stored(in_store, store, key)
    _forget_summaries(settings, withdrawal.keys)
    for extension in installed():
        yield from extension.forget(settings, withdrawal.tombstones, withdrawal.keys)
    # After the models' folders, of which a run that begins may keep a copy.
    yield from forget_kept(settings, withdrawal.tombstones)
    removable = find_removable(settings, catalog, keys=withdrawal.keys)
    yield from removable.kept
    yield from remove(settings, removable.removals)
    if store.keeps_copies:
        for asset in in_store:
            for key in doing_each(
                f"removing earlier versions of {asset.name} from the store", withdrawal.keys
            ):
                StoredPartitions(asset, store).forget_earlier(key)
    end_withdrawal(state)
    # Of a start that was killed while it wrote the note.
    leftovers = note.parent.glob(f".{note.name}.*{TEMPORARY_SUFFIX}")
    for path in (*leftovers, note):
        path.unlink(missing_ok=True)
    sync_directory(note.parent)


def _replace_by_tombstones(home: Path, tombstones: Mapping[str, str], store: Mirror) -> Iterator[Path]:
    """Take these properties out of the catalogue and its copies; gives each file that had them.

    tombstones: by the id of each. The store's catalogue goes first. Safe to repeat. Raises CatalogError,
    IngestBusyError, StoreError, OSError.
    """
    with only_ingest(home, "withdrawing properties"):
        in_store = pull_catalog(home, store)
        catalog = Catalog.open(home)
        if _has_any(catalog_path(home), tombstones):
            writer = CatalogWriter()
            for range_, table in catalog.slices(with_tail=True):
                rows = _with_tombstones(table, tombstones)
                if catalog.header.tail is not None and range_ == catalog.tail:
                    writer.add_tail(range_, rows, since=catalog.header.tail.since)
                else:
                    writer.add(range_, rows)
            data = writer.finish(replace(catalog.header, sequence=catalog.header.sequence + 1))
            extend_catalog(home, data, store=store, over=in_store)
            yield catalog_path(home)
        for path in backup_paths(home):
            if path.exists() and _has_any(path, tombstones):
                # Published once more, it is its own previous version.
                publish_catalog(home, catalog_path(home).read_bytes())
                yield path
        for path in sorted(quarantine(home).glob("*")):
            if path.is_file():
                path.unlink()
                yield path


def _has_any(path: Path, ids: Collection[str]) -> bool:
    """Whether a file has a row of these properties; one that does not read may have."""
    try:
        listed_ids = pq.read_table(path, columns=["property_id"])["property_id"]
    except (OSError, pa.ArrowException):
        return True
    return any(property_id in ids for property_id in listed_ids.to_pylist())


def _with_tombstones(table: pa.Table, tombstones: Mapping[str, str]) -> pa.Table:
    gone = {"image_uris": [], "image_bytes": [], "inputs_digest": inputs_digest((), ())}
    rows = [
        {**row, **gone, "property_id": tombstones[row["property_id"]]}
        if row["property_id"] in tombstones
        else row
        for row in table.to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _refuse_without_extensions(settings: Settings) -> None:
    for distribution, path in left_by_missing(settings.layout):
        raise CommandError(
            f"{path} is of {distribution}, which is not installed here, so what it keeps of these properties"
            f" would stay. Nothing was changed. Install {distribution} beside vlm-assets, in the same way,"
            " then do it again."
        )


def _forget_summaries(settings: Settings, keys: Collection[str]) -> None:
    """Remove what is kept of what partitions say: it may name properties that are withdrawn."""
    table = quality_summaries
    control_state(settings).beat(
        lambda connection: connection.execute(table.delete().where(table.c.key.in_(list(keys))))
    )


def _at_work(settings: Settings, withdrawal: Withdrawal) -> list[str]:
    """What runs work on now that may write down what is to be withdrawn."""
    living = Workers(control_state(settings)).living()
    busy = {worker.partition for worker in living if worker.partition in withdrawal.keys}
    for extension in installed():
        busy |= extension.busy_with(settings, withdrawal.tombstones, living)
    return sorted(busy)

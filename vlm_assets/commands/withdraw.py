"""Withdrawing properties for good: from the catalogue, published files, earlier versions and journals.

Each step may be repeated. What is to be done is written down first, so that a withdrawal that was cut short
is finished by starting it again. A property leaves a tombstone in its place: a row of the catalogue with the
same ordinal, no images and a digest for an id, and a failed row of the kind ``withdrawn`` in each file. So
ordinals stay, every count adds up, and an ingest of the same listing knows that it was withdrawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from vlm_assets.assets.fingerprint import CATALOGUE_SLICE, TEXTS, Fingerprint, digest_of
from vlm_assets.assets.partition import INPUTS, Partition, adopt_rows, generation_of
from vlm_assets.assets.property_descriptions import DescriptionWork
from vlm_assets.assets.published_rows import remembered
from vlm_assets.catalog.catalog import Catalog, CatalogError
from vlm_assets.catalog.catalog_copies import backup_paths, catalog_path, publish_catalog, quarantine
from vlm_assets.catalog.catalog_file import (
    SCHEMA,
    WITHDRAWN,
    CatalogWriter,
    inputs_digest,
    is_tombstone,
    withdrawal_note,
)
from vlm_assets.catalog.ingest import only_ingest
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.catalog.stored_catalog import extend_catalog, pull_catalog
from vlm_assets.catalog.withdrawn_ids import (
    WithdrawnIds,
    lost_list,
    read_withdrawn,
    save_withdrawn,
    share_withdrawn,
)
from vlm_assets.commands.prune import plan_prune, remove
from vlm_assets.commands.terminal import Home, Yes, agreed, app, chosen_settings, say
from vlm_assets.config.extensions import installed
from vlm_assets.config.resource_settings import build_vision_language_model, control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing, doing_each
from vlm_durable.commands import command
from vlm_durable.files.files import sync_directory
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.sealed_json import (
    read_sealed,
    write_sealed,
)
from vlm_durable.journal.discarding import discard
from vlm_durable.journal.high_water_mark import read_marks, slots
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.mirror.stored_journal import (
    HeadDamagedError,
    StoredJournal,
    pull_others,
    stored_generations,
)
from vlm_durable.state.nodes import Nodes
from vlm_durable.state.withdrawing import begin_withdrawal, end_withdrawal
from vlm_durable.state.workers import Workers
from vlm_durable.versions.partition_rows import PartitionRows
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


def plan_withdrawal(settings: Settings, ids: Collection[str]) -> Withdrawal:
    """Find the partitions of these properties; changes nothing but that the home has a list of withdrawn ids.

    Raises CatalogError, StoreError, OSError.
    """
    catalog = Catalog.open(settings.home)
    wanted, found = frozenset(ids), set[str]()
    slices, texts = {}, {}
    published = PublishedPartitions(settings.descriptions)
    for number, (one, table) in enumerate(catalog.slices(with_tail=True)):
        doing("looking for the properties in partitions", number, len(catalog.ranges))
        here = wanted.intersection(table["property_id"].to_pylist())
        found |= here
        if here and one != catalog.tail:
            slices[one.key] = catalog.slice_digest(one)
            record = published.record(one.key)
            if record is not None:
                texts[one.key] = str(record.metadata.get(TEXTS))
    if unknown := sorted(wanted - found):
        raise CatalogError(
            f"{catalog.path} does not have {len(unknown)} of these {counted(len(wanted), 'ids')}, such as"
            f" {', '.join(map(repr, unknown[:3]))}. Nothing was changed. Ids are compared exactly, blanks and"
            " case too: take them out of the file, then do it again."
        )
    withdrawn = share_withdrawn(settings.home, settings.store)
    if withdrawn is None:
        withdrawn = begin_list(settings)
    withdrawn = withdrawn.changed(wanted, withdrawn=True)
    return Withdrawal({one: withdrawn.tombstone(one) for one in sorted(wanted)}, slices, texts)


def begin_list(settings: Settings, *, accepts_loss: bool = False) -> WithdrawnIds:
    """Begin the list of withdrawn ids. accepts_loss: there was one, and nobody can say any more of which ids.

    Raises WithdrawnListError, CatalogError, StoreError, OSError.
    """
    tombstones = {one for one in _ids(Catalog.open(settings.home)) if is_tombstone(one)}
    if tombstones and not accepts_loss:
        raise lost_list(settings.home, len(tombstones))
    save_withdrawn(settings.home, WithdrawnIds.new().with_tombstones(tombstones))
    withdrawn = share_withdrawn(settings.home, settings.store)
    assert withdrawn is not None
    return withdrawn


def returned_ids(settings: Settings, catalog: Catalog) -> list[str]:
    """Withdrawn properties that are in the catalogue all the same, in its order. Raises CatalogError."""
    withdrawn = read_withdrawn(settings.home)
    return [] if withdrawn is None else [one for one in _ids(catalog) if one in withdrawn]


def undo_withdrawal(settings: Settings, ids: Collection[str]) -> None:
    """Take ids off the list of withdrawn ids: the next ingest that lists them takes them in again.

    Raises CommandError with nothing changed; CatalogError, StoreError, OSError.
    """
    if pending_withdrawal(settings) is not None:
        raise CommandError(f"A withdrawal was cut short. Finish it first: {command('withdraw')}.")
    withdrawn = share_withdrawn(settings.home, settings.store)
    if unknown := [one for one in ids if withdrawn is None or one not in withdrawn]:
        raise CommandError(
            f"{unknown[0]!r} is not withdrawn. Nothing was changed. Ids are compared exactly, blanks and case"
            " too."
        )
    assert withdrawn is not None
    save_withdrawn(settings.home, withdrawn.changed(ids, withdrawn=False))
    share_withdrawn(settings.home, settings.store)


def _ids(catalog: Catalog) -> Iterator[str]:
    for _, table in catalog.slices(with_tail=True):
        yield from table["property_id"].to_pylist()


def pending_withdrawal(settings: Settings) -> Withdrawal | None:
    """A withdrawal that was cut short; None where there is none. Raises BrokenSealError, OSError."""
    try:
        found = read_sealed(withdrawal_note(settings.state_directory))
    except FileNotFoundError:
        return None
    return Withdrawal(found["tombstones"], found["slices"], found["texts"])


def withdraw(settings: Settings, wanted: Withdrawal) -> Iterator[str]:
    """Withdraw, and say what was removed. Killed anywhere, it is finished by doing it again.

    Raises CommandError with nothing changed; PublishedError, JournalError, CatalogError,
    ModelLoadError or OSError with everything not yet said still to do.
    """
    note = withdrawal_note(settings.state_directory)
    goes_on = note.exists()
    state = control_state(settings)
    write_sealed(note, {"about": _ABOUT, **asdict(wanted)})
    # First: a run that begins later on any machine asks for it, and one that began before is seen below.
    begin_withdrawal(state, wanted.keys)
    doing("waiting until every node knows of the withdrawal")
    Nodes(state).wait_for_beats()
    if busy := _at_work(settings, wanted):
        if not goes_on:
            end_withdrawal(state)
            note.unlink()
            sync_directory(note.parent)
        raise CommandError(
            f"A run works on {', '.join(busy[:3])}. Nothing was changed. Wait for it, or {command('pause')},"
            " then do it again."
        )
    withdrawn = share_withdrawn(settings.home, settings.store)
    if withdrawn is None:
        raise CommandError(
            f"The list of withdrawn ids is gone. Begin one: {command('withdraw', '--new-list')}."
        )
    # Before the catalogue: from now on no ingest takes them in, whatever catalogue it meets.
    save_withdrawn(settings.home, withdrawn.changed(wanted.tombstones, withdrawn=True))
    share_withdrawn(settings.home, settings.store)
    doing("removing the properties from the catalogue and its copies")
    for path in replace_by_tombstones(settings.home, wanted.tombstones, settings.store):
        yield f"Removed {counted(len(wanted.tombstones), 'properties')} from {path}."
    if (store := settings.store) is not None:
        # This home holds all that the store has of these partitions.
        for key in doing_each("fetching what the store has of partitions", wanted.keys):
            for asset in (settings.descriptions, settings.embeddings):
                yield from StoredPartitions(asset, store).pull(key)
                yield from pull_others(asset.partition(key), "", store)
    catalog = Catalog.open(settings.home)
    for key in doing_each("removing the properties from partitions", wanted.keys):
        yield from _withdraw_published(settings, catalog, key, wanted)
        yield from _withdraw_journals(settings, catalog, key)
        # Before earlier versions go here: by them the store's version is known as one that came before.
        yield from _withdraw_stored(settings, key)
    for extension in installed():
        yield from extension.forget(settings, wanted.tombstones, wanted.keys)
    plan = plan_prune(settings, catalog, keys=wanted.keys)
    yield from plan.kept
    yield from remove(settings, plan.removals)
    if store is not None:
        for asset in (settings.descriptions, settings.embeddings):
            for key in doing_each(f"removing earlier versions of {asset.name} from the store", wanted.keys):
                StoredPartitions(asset, store).forget_earlier(key)
    end_withdrawal(state)
    note.unlink(missing_ok=True)
    sync_directory(note.parent)


def _at_work(settings: Settings, wanted: Withdrawal) -> list[str]:
    """What runs work on now that may write down what is to be withdrawn."""
    living = Workers(control_state(settings)).living()
    busy = {worker.partition for worker in living if worker.partition in wanted.keys}
    return sorted(busy.union(*(one.busy_with(settings, wanted.tombstones, living) for one in installed())))


def _withdraw_stored(settings: Settings, key: str) -> Iterator[str]:
    """Have the store hold what is published here now, and no journal that may hold the properties."""
    if (store := settings.store) is None:
        return
    for asset in (settings.descriptions, settings.embeddings):
        StoredPartitions(asset, store).push(key)
        paths = asset.partition(key)
        for generation in stored_generations(paths, store):
            journal = StoredJournal(paths, generation, store)
            try:
                journal.read_manifest()
            except HeadDamagedError:
                journal.close()  # It may hold anything; what could be fetched of it was.
                continue
            if not paths.journal(generation).is_dir():  # Else it holds the rows of the others alone.
                journal.close()
    yield f"Removed their rows of {key} from {store}."


def _withdraw_published(settings: Settings, catalog: Catalog, key: str, wanted: Withdrawal) -> Iterator[str]:
    one = PropertyRange.from_key(key)
    ids = catalog.slice(one)["property_id"].to_pylist()
    changes = {CATALOGUE_SLICE: (wanted.slices[key], catalog.slice_digest(one))}
    if _rewrite(settings.descriptions, key, wanted.tombstones, ids, changes):
        yield f"Removed their rows from {settings.descriptions.partition(key).published}."
    record = PublishedPartitions(settings.descriptions).record(key)
    if record is not None:
        changes = {TEXTS: (wanted.texts.get(key, ""), str(record.metadata.get(TEXTS)))}
        if _rewrite(settings.embeddings, key, wanted.tombstones, ids, changes):
            yield f"Removed their rows from {settings.embeddings.partition(key).published}."


def _rewrite(
    asset: AssetFolders,
    key: str,
    tombstones: Mapping[str, str],
    ids: Collection[str],
    changes: Mapping[str, tuple[str, str]],
) -> bool:
    """Publish a partition without these properties' rows. changes: parts of its fingerprint, from and to.

    A part that is not what it was before stays, so that what was stale stays so.
    """
    published = PublishedPartitions(asset)
    # First, a publication that was cut short is finished or taken back, and damage is put right.
    if not published.verify(key).ok and published.record(key) is not None:
        published.restore(key)
    record = published.record(key)
    if record is None:
        return False
    rows = published.read(key)
    found = pa.chunked_array([batch["property_id"] for batch in rows.iter_batches(["property_id"])])
    if not any(one in tombstones for one in found.to_pylist()):
        return False
    parts = dict(record.metadata["parts"])
    parts |= {name: after for name, (before, after) in changes.items() if parts.get(name) == before}
    fingerprint = Fingerprint(parts).digest
    batches = (_without(batch, tombstones, parts, fingerprint) for batch in rows.iter_batches())
    metadata = {**record.metadata, "parts": parts, "generation": fingerprint}
    staged = published.stage(
        key, batches, rows.schema, expected_ids=ids, fingerprint=fingerprint, metadata=metadata
    )
    with staged:
        if TEXTS in record.metadata:
            staged.remember(remembered(PartitionRows(staged.path)))
        published.publish(staged)
    return True


def _without(
    batch: pa.RecordBatch, tombstones: Mapping[str, str], parts: Mapping[str, str], fingerprint: str
) -> pa.RecordBatch:
    position = batch.schema.get_field_index("fingerprint")
    batch = batch.set_column(position, batch.schema.field(position), pa.array([fingerprint] * batch.num_rows))
    if not any(one in tombstones for one in batch["property_id"].to_pylist()):
        return batch
    rows = [
        _tombstone(row, tombstones[row["property_id"]], parts, batch.schema)
        if row["property_id"] in tombstones
        else row
        for row in batch.to_pylist()
    ]
    return pa.RecordBatch.from_pylist(rows, schema=batch.schema)


def _tombstone(
    row: Mapping[str, Any], property_id: str, parts: Mapping[str, str], schema: pa.Schema
) -> dict[str, Any]:
    """The row that stays: where it is, what made it, and nothing of the property."""
    meaning = {name: part for name, part in parts.items() if name not in (CATALOGUE_SLICE, TEXTS)}
    inputs = {"text": None} if TEXTS in parts else {"images": inputs_digest((), ())}
    kept = ("ordinal", "model", "model_revision", "fingerprint", "device", "described_at", "embedded_at")
    said = {
        "property_id": property_id,
        "status": "failed",
        "error_kind": WITHDRAWN,
        "error": "it was withdrawn",
        "tries": 1,
        INPUTS: digest_of({**inputs, **meaning}),
    }
    return {field.name: said.get(field.name, _nothing(field.type)) for field in schema} | {
        name: row[name] for name in kept if name in row
    }


def _nothing(kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return []
    return 0 if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None


def _withdraw_journals(settings: Settings, catalog: Catalog, key: str) -> Iterator[str]:
    """Take the rows of the others over into a new journal, then remove those that may hold the properties."""
    for asset in (settings.descriptions, settings.embeddings):
        standing = sorted(path for path in asset.partition(key).journals.glob("*") if path.is_dir())
        kept = None
        if standing and asset == settings.descriptions:
            kept = _adopt(settings, catalog, key)
        for path in standing:
            if path.name == kept:
                continue
            mark = asset.partition(key).high_water_mark(path.name)
            if discard(path, key=key, generation=path.name, high_water_mark=mark):
                yield f"Removed {path}."
            else:
                yield f"Kept {path}: no manifest in it reads. Delete it by hand."
        paths = asset.partition(key)
        if PublishedPartitions(asset).record(key) is not None:
            continue
        # Nobody is to miss the rows of journals that were never published and are gone.
        for left in read_marks(paths.high_water_marks, key):
            if not paths.journal(left.generation).exists():
                for slot in slots(paths.high_water_mark(left.generation)):
                    slot.unlink(missing_ok=True)


def _adopt(settings: Settings, catalog: Catalog, key: str) -> str:
    """Open the journal of what is wanted now, with all finished rows in it; gives its generation."""
    wanted = PropertyRange.from_key(key)
    work = DescriptionWork.for_range(settings, catalog, wanted, build_vision_language_model(settings))
    partition = Partition(settings, settings.descriptions.name, key, work.ids, work.fingerprint)
    published = PublishedPartitions(settings.descriptions)
    record = published.record(key)
    generation = generation_of(partition, record, None)
    if record is None or record.fingerprint != work.fingerprint.digest:
        with partition.open_journal(generation, work.rows_schema()) as journal:
            adopt_rows(journal, partition, work.inputs, published, failed_too=False)
    return generation


def replace_by_tombstones(
    home: Path, tombstones: Mapping[str, str], store: S3Folder | None = None
) -> Iterator[Path]:
    """Take these properties out of the catalogue and its copies; gives each file that had them.

    tombstones: by the id of each. The store's catalogue goes first. Safe to repeat. Raises CatalogError,
    IngestBusyError, StoreError, OSError.
    """
    with only_ingest(home, "withdrawing properties"):
        there = pull_catalog(home, store)
        catalog = Catalog.open(home)
        if _has_any(catalog_path(home), tombstones):
            writer = CatalogWriter()
            for one, table in catalog.slices(with_tail=True):
                rows = _with_tombstones(table, tombstones)
                if catalog.header.tail is not None and one == catalog.tail:
                    writer.add_tail(one, rows, since=catalog.header.tail.since)
                else:
                    writer.add(one, rows)
            data = writer.finish(replace(catalog.header, sequence=catalog.header.sequence + 1))
            extend_catalog(home, data, store=store, over=there)
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
        found = pq.read_table(path, columns=["property_id"])["property_id"]
    except (OSError, pa.ArrowException):
        return True
    return any(one in ids for one in found.to_pylist())


def _with_tombstones(table: pa.Table, tombstones: Mapping[str, str]) -> pa.Table:
    gone = {"image_uris": [], "image_bytes": [], "inputs_digest": inputs_digest((), ())}
    rows = [
        {**row, **gone, "property_id": tombstones[row["property_id"]]}
        if row["property_id"] in tombstones
        else row
        for row in table.to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


_EXAMPLES = """\b
vlm-assets withdraw --ids ids.txt   one id a line
vlm-assets withdraw                 go on with one that was cut short; withdraw again what came back
vlm-assets withdraw --undo ID       let an ingest take this property in again"""


@app.command("withdraw", epilog=_EXAMPLES)
def withdraw_command(
    ids: Annotated[
        Path | None, typer.Option("--ids", help="A text file with one property id a line.", exists=True)
    ] = None,
    undo: Annotated[
        list[str] | None,
        typer.Option("--undo", metavar="ID", help="Take this id off the list of withdrawn ids."),
    ] = None,
    new_list: Annotated[
        bool,
        typer.Option("--new-list", help="Begin the list of withdrawn ids anew, after both copies were lost."),
    ] = False,
    home: Home = None,
    yes: Yes = False,
) -> None:
    """Remove properties for good, from files, versions and journals.

    Takes them out of the catalogue, published files, earlier versions and journals, and keeps them out.
    Their images, your listing and Dagster's own history are not touched.
    If it is cut short, the same command goes on. Exit code 0 if all is removed, 1 if not.
    """
    current = chosen_settings(home)
    doing("looking for what is to be removed")
    if undo:
        undo_withdrawal(current, undo)
        say(
            f"{counted(len(undo), 'ids are', 'id is')} off the list. The next ingest that lists them gives"
            " them new numbers."
        )
        raise typer.Exit(0)
    if new_list:
        is_there = share_withdrawn(current.home, current.store) is not None
        if not is_there:
            begin_list(current, accepts_loss=True)
        say("The list is there already." if is_there else "A new list of withdrawn ids was begun.")
        raise typer.Exit(0)
    wanted = pending_withdrawal(current)
    if wanted is not None:
        say("A withdrawal was cut short. It is finished first.", fg="yellow")
    else:
        named = [line for line in ids.read_text().splitlines() if line] if ids is not None else []
        if ids is None:
            named = returned_ids(current, Catalog.open(current.home))
            if not named:
                say(
                    f"There is no withdrawal to go on with. Name the ids:"
                    f" {command('withdraw', '--ids', 'FILE')}."
                )
                raise typer.Exit(0)
            say(
                f"{counted(len(named), 'properties')} that were withdrawn are in the catalogue again.",
                fg="yellow",
            )
        wanted = plan_withdrawal(current, named)
        where = f" of {counted(len(wanted.keys), 'partitions')}" if wanted.keys else ""
        if not agreed(f"Remove {counted(len(wanted.tombstones), 'properties')}{where} for good?", yes):
            raise typer.Exit(1)
    for sentence in withdraw(current, wanted):
        say(sentence)
    say(
        f"{counted(len(wanted.tombstones), 'properties are', 'property is')} withdrawn. Take them out of"
        " your listing too; an ingest of"
        " it does not bring them back."
    )

"""Taking the rows of withdrawn properties out of one partition: published files, journals and the store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.assets.fingerprint import CATALOGUE_SLICE, TEXTS, Fingerprint, digest_of, row_parts
from vlm_assets.assets.partition import INPUTS, Partition, adopt_rows, generation_of
from vlm_assets.assets.published_rows import record_metadata
from vlm_assets.config.question_sets import QuestionSet, question_sets
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_assets.config.where import WhereError
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import WITHDRAWN, inputs_digest
from vlm_catalog.ranges import PropertyRange
from vlm_durable.files.layout import AssetFolders
from vlm_durable.journal.high_water_mark import read_marks, slots
from vlm_durable.journal.setting_aside import discard
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.mirror.stored_journal import HeadDamagedError, StoredJournal, stored_generations
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError


def withdraw_stored(assets: Sequence[AssetFolders], store: Mirror, key: str) -> Iterator[str]:
    """Have the store hold what is published here now, and no journal that may hold the properties."""
    if not store.keeps_copies:
        return
    for asset in assets:
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


def withdraw_published(
    assets: Sequence[AssetFolders],
    catalog: Catalog,
    key: str,
    tombstones: Mapping[str, str],
    *,
    slice_before: str,
    texts_before: str,
) -> Iterator[str]:
    """Publish descriptions, embeddings and question sets anew without these properties, and say so.

    assets: as ``kept_assets`` gives them, in its order. tombstones: by the id of each. slice_before,
    texts_before: digests of the partition's rows of the catalogue, and of its published texts, from before
    the withdrawal.
    """
    range_ = PropertyRange.from_key(key)
    ids = catalog.slice(range_)["property_id"].to_pylist()
    changes = {CATALOGUE_SLICE: (slice_before, catalog.slice_digest(range_))}
    descriptions, embeddings, *sets = assets
    for asset in (descriptions, *sets):
        if _rewrite(asset, key, tombstones, ids, changes):
            yield f"Removed their rows from {asset.partition(key).published}."
    record = PublishedPartitions(descriptions).record(key)
    if record is not None:
        changes = {TEXTS: (texts_before, str(record.metadata.get(TEXTS)))}
        if _rewrite(embeddings, key, tombstones, ids, changes):
            yield f"Removed their rows from {embeddings.partition(key).published}."


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
    published_ids = pa.chunked_array([batch["property_id"] for batch in rows.iter_batches(["property_id"])])
    if not any(property_id in tombstones for property_id in published_ids.to_pylist()):
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
            staged.remember(record_metadata(PartitionRows(staged.path)))
        published.publish(staged)
    return True


def _without(
    batch: pa.RecordBatch, tombstones: Mapping[str, str], parts: Mapping[str, str], fingerprint: str
) -> pa.RecordBatch:
    position = batch.schema.get_field_index("fingerprint")
    batch = batch.set_column(position, batch.schema.field(position), pa.array([fingerprint] * batch.num_rows))
    if not any(property_id in tombstones for property_id in batch["property_id"].to_pylist()):
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
    inputs = {"text": None} if TEXTS in parts else {"images": inputs_digest((), ())}
    kept = ("ordinal", "model", "model_revision", "fingerprint", "device", "described_at", "embedded_at")
    written = {
        "property_id": property_id,
        "status": "failed",
        "error_kind": WITHDRAWN,
        "error": "it was withdrawn",
        "tries": 1,
        INPUTS: digest_of({**inputs, **row_parts(parts)}),
    }
    return {field.name: written.get(field.name, _nothing(field.type)) for field in schema} | {
        name: row[name] for name in kept if name in row
    }


def _nothing(kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return []
    return 0 if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None


def withdraw_journals(
    settings: Settings, assets: Sequence[AssetFolders], catalog: Catalog, key: str
) -> Iterator[str]:
    """Copy the other properties' rows into a new journal, then remove journals that may hold these.

    Of embeddings, and of a question set that no settings name, nothing is copied: of the latter nobody knows
    what is asked.
    """
    asked_by_asset = {asked.asset: asked for asked in question_sets(settings)}
    for asset in assets:
        journals = sorted(path for path in asset.partition(key).journals.glob("*") if path.is_dir())
        new_generation = None
        if journals and (asked := asked_by_asset.get(asset)) is not None:
            new_generation = _adopt(asked, catalog, key)
        for path in journals:
            if path.name == new_generation:
                continue
            mark_path = asset.partition(key).high_water_mark(path.name)
            if discard(path, key=key, generation=path.name, high_water_mark=mark_path):
                is_removed_set = asset not in settings.partitioned_assets
                others = " with all its rows: no settings name its question set" if is_removed_set else ""
                yield f"Removed {path}{others}."
            else:
                yield f"Kept {path}: no manifest in it reads. Delete it by hand."
        paths = asset.partition(key)
        if PublishedPartitions(asset).record(key) is not None:
            continue
        # Nobody is to miss the rows of journals that were never published and are gone.
        for mark in read_marks(paths.high_water_marks, key):
            if not paths.journal(mark.generation).exists():
                for slot in slots(paths.high_water_mark(mark.generation)):
                    slot.unlink(missing_ok=True)


def _adopt(asked: QuestionSet, catalog: Catalog, key: str) -> str:
    """Open the journal that a run would open now, with all finished rows in it; gives its generation.

    Where the answers that the set's condition looks at cannot be read, it is that of a set that asks all: a
    run takes from it what fits.
    """
    settings, range_ = asked.settings, PropertyRange.from_key(key)
    model = build_vision_language_model(settings)
    try:
        work = DescriptionWork.for_range(settings, catalog, range_, model)
    except (PublishedError, WhereError):
        work = DescriptionWork.for_range(settings.of_all(), catalog, range_, model)
    partition = Partition(settings, asked.asset.name, key, work.ids, work.fingerprint)
    published = PublishedPartitions(asked.asset)
    record = published.record(key)
    generation = generation_of(partition, record, None)
    if record is None or record.fingerprint != work.fingerprint.digest:
        with partition.open_journal(generation, work.rows_schema()) as journal:
            adopt_rows(journal, partition, work.inputs, published, failed_too=False)
    return generation

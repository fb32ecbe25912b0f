"""Journals that cannot be opened without giving committed rows up, and a person who gives them up.

``vlm_durable/journal/recovery.py`` notices and records such a loss.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.journal.journal_errors import JournalLossError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.mirror.stored_journal import Copying, HeadDamagedError, StoredJournal, stored_generations
from vlm_durable.versions.partition_files import NotPublishedError, PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from vlm_assets.assets.partition import Partition


@dataclass(frozen=True)
class Loss:
    """A journal that cannot be opened without giving rows up; ``error`` says which, and where to look."""

    partition: Partition
    generation: str
    schema: pa.Schema
    error: JournalLossError | HeadDamagedError

    @property
    def lost_rows(self) -> int | None:
        """Committed rows that would have to be computed again; None where nobody can tell."""
        if isinstance(self.error, HeadDamagedError):
            return None
        return max(0, self.error.promised_rows - self.error.restorable_rows)


def find_losses(
    settings: Settings, catalog: Catalog, key: str, *, report: Callable[[str], None] = lambda sentence: None
) -> list[Loss]:
    """The losses of a partition, of either asset, under the settings of now; of the store too, if one is set.

    report: called with what was fetched from the store, and what is missing there.

    Raises CatalogError, InvalidRangeError, ModelLoadError, JournalError, StoreError.
    """
    store = settings.mirror
    for asset in settings.partitioned_assets:
        for sentence in StoredPartitions(asset, store).pull(key):
            report(sentence)
    losses: list[Loss] = []
    for partition, schema in _partitions(settings, catalog, PropertyRange.from_key(key)):
        record = PublishedPartitions(partition.paths.asset).record(key)
        damaged = dict(_damaged_heads(partition, record, store, report))
        losses += [Loss(partition, generation, schema, error) for generation, error in damaged.items()]
        for generation in _generations(partition, record):
            if generation in damaged:
                continue
            try:
                partition.open_journal(generation, schema).close()
            except JournalLossError as error:
                losses.append(Loss(partition, generation, schema, error))
    return losses


def _damaged_heads(
    partition: Partition, record: PublishedRecord | None, store: Mirror, report: Callable[[str], None]
) -> Iterator[tuple[str, HeadDamagedError]]:
    """Fetch what the store has of a partition's work; gives the generations of which nobody can tell."""
    published = record.metadata.get("generation") if record is not None else None
    for generation in stored_generations(partition.paths, store):
        if generation == published or not generation.startswith(partition.fingerprint.digest):
            continue
        try:
            for sentence in StoredJournal(partition.paths, generation, store).pull():
                report(sentence)
        except HeadDamagedError as error:
            yield generation, error


def accept_loss(loss: Loss, store: Mirror) -> str:
    """Record that a person gives the rows up, and open the journal with what is left; says what that is.

    Returns when the store has it too: whichever machine starts the partition goes on with what is left.
    """
    rows = "rows that nobody can count" if loss.lost_rows is None else counted(loss.lost_rows, "rows")
    acceptance = f"{getpass.getuser()} accepted the loss of {rows} in a repair"
    with ExitStack() as stack:
        stored = StoredJournal(loss.partition.paths, loss.generation, store)
        stored.pull(accept_missing=True)
        copying = stack.enter_context(Copying(stored, most_bytes=0))
        journal = stack.enter_context(
            loss.partition.open_journal(loss.generation, loss.schema, accept_loss=acceptance)
        )
        copying.begin(journal)
        copying.flush()
        return journal.recovery.sentence()


def _partitions(
    settings: Settings, catalog: Catalog, range_: PropertyRange
) -> Iterator[tuple[Partition, pa.Schema]]:
    """The partition of each asset with the columns of its rows, where what it is made of can be read."""
    from vlm_assets.assets.description_work import DescriptionWork
    from vlm_assets.assets.partition import Partition
    from vlm_assets.assets.property_embeddings import EmbeddingWork
    from vlm_assets.config.where import WhereError

    for asked in question_sets(settings):
        model = build_vision_language_model(asked.settings)
        try:
            described = DescriptionWork.for_range(asked.settings, catalog, range_, model)
        except (PublishedError, WhereError):
            continue  # Of what its condition looks at.
        yield (
            Partition(settings, asked.asset.name, range_.key, described.ids, described.fingerprint),
            described.rows_schema(),
        )
    try:
        rows = PublishedPartitions(settings.descriptions).read(range_.key)
    except NotPublishedError:
        return
    if settings.embedding_model is None:
        return
    embedded = EmbeddingWork.for_range(catalog, range_, rows, build_text_embedding_model(settings))
    yield (
        Partition(settings, settings.embeddings.name, range_.key, embedded.ids, embedded.fingerprint),
        embedded.rows_schema(),
    )


def _generations(partition: Partition, record: PublishedRecord | None) -> Iterator[str]:
    """Generations of these settings that a start could open, from what is on disk."""
    digest = partition.fingerprint.digest
    marks = {mark.generation: mark for mark in read_marks(partition.paths.high_water_marks, partition.key)}
    journals = partition.paths.journals
    for generation in sorted({*marks, *(path.name for path in journals.glob("*") if path.is_dir())}):
        mark = marks.get(generation)
        # What was published and closed is never opened again while something is published.
        closed = record is not None and (
            record.metadata.get("generation") == generation or (mark is not None and mark.retired)
        )
        if generation.startswith(digest) and not closed:
            yield generation

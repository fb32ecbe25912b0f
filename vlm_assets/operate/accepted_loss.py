"""After a JournalLossError: exactly what is lost, and writing down that a person gives it up.

What lives here: finding the journals that a start would refuse, and opening them with the person's word.
What does not: how a loss is noticed and recorded (``resources/journal/recovery.py``).
"""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from resources.journal.errors import JournalLossError
from resources.journal.high_water_mark import read_marks
from resources.publishing.errors import NotPublishedError
from resources.publishing.published import PublishedPartitions
from resources.publishing.record import PublishedRecord
from vlm_assets.assets import property_descriptions, property_embeddings
from vlm_assets.assets.partition import Partition
from vlm_assets.assets.property_descriptions import DescriptionWork
from vlm_assets.assets.property_embeddings import EmbeddingWork
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.resource_settings import build_text_embedding_model, build_vision_language_model
from vlm_assets.settings import Settings


@dataclass(frozen=True)
class Loss:
    """A journal that cannot be opened without giving rows up; ``error`` says which, and where to look."""

    partition: Partition
    generation: str
    schema: pa.Schema
    error: JournalLossError

    @property
    def lost_rows(self) -> int:
        """Committed rows that would have to be computed again."""
        return max(0, self.error.promised_rows - self.error.restorable_rows)


def find_losses(settings: Settings, catalog: Catalog, key: str) -> list[Loss]:
    """The losses of a partition, of either asset, under the settings of now.

    Raises CatalogError, InvalidRangeError, ModelLoadError, JournalError.
    """
    losses = []
    for partition, schema in _partitions(settings, catalog, PropertyRange.from_key(key)):
        for generation in _generations(partition, PublishedPartitions(partition.paths.asset).record(key)):
            try:
                partition.open_journal(generation, schema).close()
            except JournalLossError as error:
                losses.append(Loss(partition, generation, schema, error))
    return losses


def accept(loss: Loss) -> str:
    """Record that a person gives the rows up, and open the journal with what is left; says what that is."""
    said = (
        f"{getpass.getuser()} accepted the loss of {loss.lost_rows} rows with vlm-assets repair --accept-loss"
    )
    with loss.partition.open_journal(loss.generation, loss.schema, accept_loss=said) as journal:
        return journal.recovery.sentence()


def _partitions(
    settings: Settings, catalog: Catalog, wanted: PropertyRange
) -> Iterator[tuple[Partition, pa.Schema]]:
    """The partition of each asset with the columns of its rows; embeddings only where they can be made."""
    described = DescriptionWork.of(settings, catalog, wanted, build_vision_language_model(settings))
    yield (
        Partition.at_home(
            settings, property_descriptions.ASSET, wanted.key, described.ids, described.fingerprint
        ),
        described.rows_schema(),
    )
    try:
        rows = PublishedPartitions(settings.descriptions).read(wanted.key)
    except NotPublishedError:
        return
    embedded = EmbeddingWork.of(catalog, wanted, rows, build_text_embedding_model(settings))
    yield (
        Partition.at_home(
            settings, property_embeddings.ASSET, wanted.key, embedded.ids, embedded.fingerprint
        ),
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

"""A catalogue that a person names as the true one: checked, compared with what is known, and put in place.

An older version gets a new number and so becomes the newest: marks, copies and other machines take it over
as they do every change, and nothing ever goes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_catalog.catalog_copies import (
    known_versions,
    note_store,
    recorded_catalogs,
    replace_catalog,
    trouble_of,
)
from vlm_catalog.catalog_file import (
    UNREADABLE,
    CatalogError,
    CatalogHeader,
    CatalogWriter,
    stream_rows,
    verify_file,
)
from vlm_catalog.ingest import only_ingest
from vlm_catalog.ranges import range_assets
from vlm_catalog.stored_catalog import CATALOG_NAME, MOST_BYTES, put_catalog
from vlm_durable.files.layout import Home
from vlm_durable.mirror.bucket import S3Folder, StoredObject
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror
from vlm_durable.wording import counted


@dataclass(frozen=True)
class ChosenCatalog:
    """A whole catalogue, and what is known of newer ones.

    newest: the highest sequence number. trouble: why it was not believed, other than for its number.
    """

    place: str
    header: CatalogHeader
    newest: int
    trouble: str | None
    unlisted: tuple[str, ...]
    data: bytes = field(repr=False)
    over: StoredObject | None = field(repr=False)

    def sentences(self) -> list[str]:
        """What a person must know before it is put in place."""
        sentences = [
            f"{self.place} is whole: ingest {self.header.sequence}, with"
            f" {counted(self.header.rows, 'properties')}."
        ]
        if self.header.sequence < self.newest:
            sentences.append(
                f"It is an older version: the newest that is known of is ingest {self.newest}. Properties and"
                " changes that came later are not in it: ingest your listings again afterwards."
            )
        elif self.trouble is not None:
            sentences.append(f"Until now it is not believed: it {self.trouble}.")
        if self.unlisted:
            sentences.append(
                f"Published, and not in it: {', '.join(self.unlisted[:5])}"
                + (f" and {len(self.unlisted) - 5} more" if len(self.unlisted) > 5 else "")
                + ". These files stay where they are, and the next ingest gives their properties the same"
                " numbers."
            )
        return sentences


def check_catalog(home: Path, place: str, store: Mirror = NO_MIRROR) -> ChosenCatalog:
    """Read a file or an object wholly and compare it with what is known here; changes nothing.

    Raises CatalogError, StoreError.
    """
    data = _bytes_of(place)
    header = _verified(place, data)
    versions = known_versions(home)
    if (over := store.head(CATALOG_NAME)) is not None:
        try:
            stored = _verified(store.address(CATALOG_NAME), store.get(CATALOG_NAME, most=MOST_BYTES))
        except CatalogError:
            pass  # The store's catalogue cannot be read: it is the one to replace.
        else:
            versions[stored.catalog_id] = max(stored.sequence, versions.get(stored.catalog_id, 0))
    if not versions:
        # The catalogue and its marks are gone: what was published still says whose it is.
        versions = dict.fromkeys(recorded_catalogs(home), 0)
    if versions and header.catalog_id not in versions:
        raise CatalogError(
            f"{place} is the catalogue of another home ({header.catalog_id}); this home's is"
            f" {' or '.join(versions)}. Nothing was changed."
        )
    newest = versions.get(header.catalog_id, 0)
    keys = {property_range.key for property_range in header.ranges}
    published = {key for asset in range_assets(Home(home)) for key in asset.recorded_keys()}
    unlisted = tuple(sorted(published - keys))
    return ChosenCatalog(place, header, newest, trouble_of(home, header), unlisted, data, over)


def put_in_place(home: Path, chosen: ChosenCatalog, store: Mirror = NO_MIRROR) -> CatalogHeader:
    """Make it the catalogue of this home and of its store, under a new number if it is not the newest.

    Files that stand there go into the quarantine. Raises IngestBusyError, StoreError, OSError; CatalogError
    where this home knows of a newer one than the person was told of, with nothing changed.
    """
    header, data = chosen.header, chosen.data
    with only_ingest(home, "putting a catalogue in place"):
        newest = known_versions(home).get(header.catalog_id, 0)
        if newest > chosen.newest:
            raise CatalogError(
                f"The catalogue of {home} was changed since {chosen.place} was checked: it is ingest {newest}"
                " now. Nothing was changed, here or in the store. Do the same again: it says what is new."
            )
        if header.sequence < chosen.newest or trouble_of(home, header) is not None:
            header = replace(header, sequence=max(chosen.newest, header.sequence) + 1)
            data = _renumbered(data, header)
            header = _verified(f"{chosen.place}, renumbered,", data)
        put_catalog(store, data, over=chosen.over)
        replace_catalog(home, data, chosen=header)
        note_store(home, store)
    return header


def _bytes_of(place: str) -> bytes:
    try:
        if place.startswith("s3://"):
            folder, _, name = place.rpartition("/")
            return S3Folder.parse(folder).get(name, most=MOST_BYTES)
        return Path(place).read_bytes()
    except (OSError, ValueError) as error:
        raise CatalogError(f"{place} cannot be read: {error}. Nothing was changed.") from error


def _verified(place: str, data: bytes) -> CatalogHeader:
    try:
        return verify_file(pa.BufferReader(data))
    except UNREADABLE as error:
        raise CatalogError(f"{place} is no whole catalogue: {error}. Nothing was changed.") from error


def _renumbered(data: bytes, header: CatalogHeader) -> bytes:
    writer = CatalogWriter()
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        for property_range, rows in stream_rows(file, header):
            if header.tail is not None and property_range == header.tail.range:
                writer.add_tail(property_range, rows, since=header.tail.since)
            else:
                writer.add(property_range, rows)
    return writer.finish(header)

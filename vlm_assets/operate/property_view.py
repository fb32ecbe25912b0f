"""One property for a person: its images, description, error and attempts, and where each of these lies.

What lives here: reading them and putting them into lines. What does not: printing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from resources.journal.segments import SEGMENT_NAME
from resources.publishing.errors import NotPublishedError
from resources.publishing.published import PublishedPartitions
from vlm_assets.catalog.catalog import Catalog, CatalogError, CatalogRow
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.settings import Settings


class UnknownPropertyError(CatalogError):
    """An id that the catalogue does not have."""


def view_property(settings: Settings, catalog: Catalog, property_id: str) -> Iterator[str]:
    """Lines about one property. Raises UnknownPropertyError, PublishedError."""
    known = catalog.find(property_id)
    if known is None:
        raise UnknownPropertyError(
            f"{catalog.path} has no property {property_id!r}. Ids are compared exactly, blanks and case too."
        )
    if known.range == catalog.tail:
        yield (
            f"{property_id}: ordinal {known.ordinal}, in no partition yet. {catalog.waiting} properties wait"
            " until they fill one; `vlm-assets run --missing` does not wait."
        )
        yield from _images(catalog, known)
        return
    yield f"{property_id}: ordinal {known.ordinal}, partition {known.range.key}"
    yield from _images(catalog, known)
    descriptions = PublishedPartitions(settings.descriptions)
    try:
        table = descriptions.read(known.range.key).to_table()
    except NotPublishedError as error:
        yield f"Not published: {error}"
    else:
        rows: list[dict[str, Any]] = table.filter(pc.equal(table["property_id"], property_id)).to_pylist()
        for row in rows:
            yield from _row(row)
        yield f"Lies in {descriptions.path(known.range.key)}"
    yield from _unpublished(settings.descriptions.partition(known.range.key).journals, property_id)


def _unpublished(journals: Path, property_id: str) -> Iterator[str]:
    """What stands in the work under way, or in what a check refused; the latest last. Changes nothing."""
    segments = []
    for path in journals.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # published in this moment
            if SEGMENT_NAME.fullmatch(path.name):
                segments.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(segments):
        wanted = [("property_id", "=", property_id)]
        try:
            table = pq.read_table(path, filters=wanted, partitioning=None, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            yield f"{path} does not read: {error}"
            continue
        for row in table.to_pylist():
            yield f"Committed and not published, in {path}:"
            yield from _row(row)


def _images(catalog: Catalog, known: CatalogRow) -> Iterator[str]:
    yield f"{len(known.image_uris)} images under {catalog.image_root}:"
    for uri, size in zip(known.image_uris, known.image_bytes, strict=True):
        try:
            there = catalog.image_path(uri).is_file()
        except InvalidImagePathError as error:
            yield f"  {uri}: refused, {error}"
            continue
        catalogued = "not readable when catalogued" if size is None else f"{size} bytes when catalogued"
        yield f"  {uri}: {'there' if there else 'not there now'}, {catalogued}"


def _row(row: dict[str, Any]) -> Iterator[str]:
    yield f"Status {row['status']} after {row['attempts']} attempts, {row['images_seen']} images seen"
    if row["error_kind"] is not None:
        yield f"Error {row['error_kind']}: {row['error']}"
    if row["raw_text"] is not None:
        yield f"The model said: {row['raw_text']}"
    for name, value in (row["description"] or {}).items():
        yield f"  {name}: {value}"
    for failure in row["images_failed"]:
        yield f"Image left out ({failure['kind']}): {failure['error']}"
    yield (
        f"By {row['model']} ({row['model_revision'][:19]}) on {row['device']} in {row['seconds']:.2f} s,"
        f" {row['described_at']:%Y-%m-%d %H:%M} UTC, fingerprint {row['fingerprint']}"
    )

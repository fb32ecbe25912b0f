"""One property: its images, its rows with description, errors and attempts, and the files that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from resources.journal.segments import SEGMENT_NAME
from resources.publishing.partition_files import NotPublishedError
from resources.publishing.published import PublishedPartitions
from vlm_assets.catalog.catalog import Catalog, CatalogError, CatalogRow
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.config.settings import Settings
from vlm_assets.operate.terminal import AsJson, Home, app, chosen_settings, say, say_as_json, visible_line

Row = Mapping[str, Any]
"""A row of a partition's file."""


@dataclass(frozen=True)
class ListedImage:
    """An image of the catalogue. bytes: its size when catalogued, None if it was not readable then."""

    uri: str
    bytes: int | None
    there: bool
    refused: str | None = None


@dataclass(frozen=True)
class CommittedRow:
    """A row of work that is not published. trouble: why the file does not read; then there is no row."""

    path: str
    row: Row | None
    trouble: str | None = None


@dataclass(frozen=True)
class PropertyView:
    """What is known of one property. partition: None while it waits for a partition to fill.

    published: its rows in ``file`` (one, or the audit says more). not_published: why there is no file.
    """

    property_id: str
    ordinal: int
    partition: str | None
    image_root: str
    images: Sequence[ListedImage]
    file: str | None = None
    published: Sequence[Row] = ()
    not_published: str | None = None
    committed: Sequence[CommittedRow] = ()

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, but for times."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Everything in words."""
        where = "in no partition yet" if self.partition is None else f"partition {self.partition}"
        yield f"{self.property_id}: ordinal {self.ordinal}, {where}"
        yield f"{len(self.images)} images under {self.image_root}:"
        for image in self.images:
            if image.refused is not None:
                yield f"  {image.uri}: refused, {image.refused}"
                continue
            size = "not readable" if image.bytes is None else f"{image.bytes} bytes"
            yield f"  {image.uri}: {'there' if image.there else 'not there now'}, {size} when catalogued"
        if self.not_published is not None:
            yield f"Not published: {self.not_published}"
        for row in self.published:
            yield from _row_lines(row)
        if self.file is not None:
            yield f"File: {self.file}"
        for one in self.committed:
            if one.row is None:
                yield f"{one.path} does not read: {one.trouble}"
            else:
                yield f"Committed and not published, in {one.path}:"
                yield from _row_lines(one.row)


def read_property(settings: Settings, catalog: Catalog, property_id: str) -> PropertyView:
    """Read everything about one property. Raises CatalogError, PublishedError."""
    known = catalog.find(property_id)
    if known is None:
        raise CatalogError(
            f"{catalog.path} has no property {property_id!r}. Ids are compared exactly, blanks and case too."
        )
    view = PropertyView(
        property_id, known.ordinal, known.range.key, catalog.image_root, tuple(_images(catalog, known))
    )
    if known.range == catalog.tail:
        waits = (
            f"{catalog.waiting} properties wait until they fill a partition;"
            " `vlm-assets run --missing` does not wait."
        )
        return replace(view, partition=None, not_published=waits)
    committed = tuple(_committed(settings.descriptions.partition(known.range.key).journals, property_id))
    view = replace(view, committed=committed)
    descriptions = PublishedPartitions(settings.descriptions)
    try:
        table = descriptions.read(known.range.key).to_table()
    except NotPublishedError as error:
        return replace(view, not_published=str(error))
    rows = table.filter(pc.equal(table["property_id"], property_id)).to_pylist()
    return replace(view, published=rows, file=str(descriptions.path(known.range.key)))


def _committed(journals: Path, property_id: str) -> Iterator[CommittedRow]:
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
            yield CommittedRow(str(path), None, str(error))
            continue
        for row in table.to_pylist():
            yield CommittedRow(str(path), row)


def _images(catalog: Catalog, known: CatalogRow) -> Iterator[ListedImage]:
    for uri, size in zip(known.image_uris, known.image_bytes, strict=True):
        try:
            yield ListedImage(uri, size, catalog.images.size(uri) is not None)
        except InvalidImagePathError as error:
            yield ListedImage(uri, size, there=False, refused=str(error))


def _row_lines(row: Row) -> Iterator[str]:
    yield f"Status {row['status']} after {row['attempts']} attempts, {row['images_seen']} images seen"
    if row["error_kind"] is not None:
        yield f"Error {row['error_kind']}: {row['error']}"
    if row["raw_text"] is not None:
        yield f"The model said: {row['raw_text']}"
    for name, value in (row["description"] or {}).items():
        yield f"  {name}: {value}"
    for failure in row["images_failed"]:
        yield f"Image left out ({failure['kind']}): {failure['error']}"
    if row["images_not_used"]:
        left_out = ", ".join(row["images_not_used"])
        yield f"Not shown to the model ({row['images_not_used_reason']}): {left_out}"
    yield (
        f"By {row['model']} ({row['model_revision'][:19]}) on {row['device']} in {row['seconds']:.2f} s,"
        f" {row['described_at']:%Y-%m-%d %H:%M} UTC, fingerprint {row['fingerprint']}"
    )


_EXAMPLES = """\b
vlm-assets show ALDERNEY-00001
vlm-assets show ' 007' --json"""


@app.command("show", epilog=_EXAMPLES)
def show_command(
    property_id: Annotated[str, typer.Argument(help="The property's id, as in the catalogue.")],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show one property: images, description, errors, files.

    Also its errors and attempts, and the files that hold them.
    """
    current = chosen_settings(home)
    found = read_property(current, Catalog.open(current.home), property_id)
    if as_json:
        say_as_json(found.as_json())
        return
    for line in found.lines():
        say(visible_line(line))

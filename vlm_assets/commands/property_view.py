"""One property: its images, its rows with description, errors and attempts, and the files that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from vlm_assets.catalog.catalog import Catalog, CatalogError, CatalogRow
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.commands.html_page import Card, page, thumbnails, write_page
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json, visible_line
from vlm_assets.config.settings import Settings
from vlm_durable.commands import command
from vlm_durable.journal.segments import SEGMENT_NAME
from vlm_durable.versions.partition_files import NotPublishedError
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted

Values = dict[str, Any]


def read_property(settings: Settings, catalog: Catalog, property_id: str) -> Values:
    """Read everything about one property, as ``--json`` writes it. Raises CatalogError, PublishedError.

    partition: None while it waits for a partition to fill. published: its rows in ``file`` (one, or the audit
    says more); not_published: why there is none. committed: rows of work that is not published, each with the
    ``path`` of its file; ``trouble``: why that does not read, and then the row is None. bytes: of an image
    when it was catalogued, None where it was not readable then.
    """
    known = catalog.find(property_id)
    if known is None:
        raise CatalogError(
            f"{catalog.path} has no property {property_id!r}. Ids are compared exactly, blanks and case too."
        )
    key = None if known.range == catalog.tail else known.range.key
    found: Values = {
        "property_id": property_id,
        "ordinal": known.ordinal,
        "partition": key,
        "image_root": catalog.image_root,
        "images": list(_images(catalog, known)),
        "file": None,
        "published": [],
        "not_published": None,
        "committed": [],
    }
    if key is None:
        return found | {
            "not_published": f"{counted(catalog.waiting, 'properties wait', 'property waits')} until a"
            f" partition is full; {command('run', '--missing')} does not wait."
        }
    found["committed"] = list(_committed(settings.descriptions.partition(key).journals, property_id))
    descriptions = PublishedPartitions(settings.descriptions)
    try:
        table = descriptions.read(key).to_table()
    except NotPublishedError as error:
        return found | {"not_published": str(error)}
    rows = table.filter(pc.equal(table["property_id"], property_id)).to_pylist()
    return found | {"published": rows, "file": str(descriptions.path(key))}


def lines(found: Values) -> Iterator[str]:
    """What ``read_property`` gave, in words."""
    where = "in no partition yet" if found["partition"] is None else f"partition {found['partition']}"
    yield f"{found['property_id']}: ordinal {found['ordinal']}, {where}"
    yield f"{counted(len(found['images']), 'images')} under {found['image_root']}:"
    for image in found["images"]:
        if image["refused"] is not None:
            yield f"  {image['uri']}: refused, {image['refused']}"
            continue
        size = "not readable" if image["bytes"] is None else f"{image['bytes']} bytes"
        yield f"  {image['uri']}: {'there' if image['there'] else 'not there now'}, {size} when catalogued"
    if found["not_published"] is not None:
        yield f"Not published: {found['not_published']}"
    for row in found["published"]:
        yield from _row_lines(row)
    if found["file"] is not None:
        yield f"File: {found['file']}"
    for one in found["committed"]:
        if one["row"] is None:
            yield f"{one['path']} does not read: {one['trouble']}"
        else:
            yield f"Committed and not published, in {one['path']}:"
            yield from _row_lines(one["row"])


def _committed(journals: Path, property_id: str) -> Iterator[Values]:
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
            yield {"path": str(path), "row": None, "trouble": str(error)}
            continue
        for row in table.to_pylist():
            yield {"path": str(path), "row": row, "trouble": None}


def _images(catalog: Catalog, known: CatalogRow) -> Iterator[Values]:
    for uri, size in zip(known.image_uris, known.image_bytes, strict=True):
        there, refused = False, None
        try:
            there = catalog.images.size(uri) is not None
        except InvalidImagePathError as error:
            refused = str(error)
        yield {"uri": uri, "bytes": size, "there": there, "refused": refused}


def _images_seen(row: Mapping[str, Any]) -> str:
    """How many of its images the model saw."""
    listed = row["images_seen"] + len(row["images_failed"]) + len(row["images_not_used"] or ())
    return f"{row['images_seen']} of {counted(listed, 'images')} seen"


def _row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    yield (f"Status {row['status']} after {counted(row['attempts'], 'attempts')}, {_images_seen(row)}")
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


_PAGE_IMAGES: Final = 60
_PAGE_HEIGHT: Final = 320


def _card(found: Values, catalog: Catalog) -> Card:
    """Of a page: its images beside its answer, and everything that ``lines`` says of it."""
    uris = [image["uri"] for image in found["images"]]
    (files,) = thumbnails(catalog, [uris[:_PAGE_IMAGES]], height=_PAGE_HEIGHT)
    answers = {
        name: value for row in found["published"] for name, value in (row["description"] or {}).items()
    }
    # The answer stands alone; what is known of each image stands at the image.
    said = [line for line in lines(found) if not line.startswith("  ")]
    return Card(
        "", "", files, {**answers, "about it": "\n".join(said)}, uris=uris[:_PAGE_IMAGES], of=len(uris)
    )


_EXAMPLES = """\b
vlm-assets show HARLECH-00001
vlm-assets show HARLECH-00001 --html property.html
vlm-assets show ' 007' --json"""


@app.command("show", epilog=_EXAMPLES)
def show_command(
    property_id: Annotated[str, typer.Argument(help="The property's id, as in the catalogue.")],
    home: Home = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one property: images, description, errors, files.

    Also its errors and attempts, and the files that hold them.
    """
    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    found = read_property(current, catalog, property_id)
    if html is not None:
        write_page(html, page(property_id, [_card(found, catalog)]))
    if as_json:
        say_as_json(found)
        return
    for line in lines(found):
        say(visible_line(line))
    if html is not None:
        say(f"Page: {html}")

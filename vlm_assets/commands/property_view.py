"""A property: its images, its rows with description, errors and attempts, and the files that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from vlm_assets.assets.partition import CONFIDENCE, NOT_ASKED
from vlm_assets.commands.html_page import Card, ModelValue, page, thumbnails, write_page
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json, visible_line
from vlm_assets.config.filled_fields import field_sources
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog, CatalogError, CatalogRow
from vlm_catalog.image_root import InvalidImagePathError
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.journal.segments import SEGMENT_NAME
from vlm_durable.versions.partition_files import NotPublishedError
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted

Values = dict[str, Any]


def read_property(settings: Settings, catalog: Catalog, property_id: str) -> Values:
    """Read everything about a property, as ``--json`` writes it. Raises CatalogError, PublishedError.

    partition: None while the property waits for a partition to fill. published: its rows in ``file``, one or
    the audit says more. not_published: why there is none. committed: rows of work that is not published, each
    with the ``path`` of its file. If the file cannot be read, ``trouble`` says why, and the row is None.
    sets: for each further question set the last four of the same, and ``filled``: the fields that show its
    answer in place of that of the sets above it.
    bytes: the size of an image when it was catalogued; None if it could not be read.
    """
    catalogued = catalog.find(property_id)
    if catalogued is None:
        raise CatalogError(
            f"{catalog.path} has no property {property_id!r}. Ids are compared exactly, blanks and case too."
        )
    key = None if catalogued.range == catalog.tail else catalogued.range.key
    waits = (
        f"{counted(catalog.waiting, 'properties wait', 'property waits')} until a"
        f" partition is full; {command('run', '--missing')} does not wait."
    )
    first, *further = question_sets(settings)
    described = _rows_of(first.asset, key, property_id, waits)
    of_sets = {asked.name: _rows_of(asked.asset, key, property_id, waits) for asked in further}
    rows_of = {asked: of_sets.get(asked.name, described) for asked in question_sets(settings)}
    sources = field_sources(
        (asked.name, pq.read_schema(rows["file"]).field("description").type, asked.fills)
        for asked, rows in rows_of.items()
        if rows["file"] is not None
    )
    answers = {asked.name: row["description"] for asked, rows in rows_of.items() for row in rows["published"]}
    fillers = {name: of_field.filler(answers) for name, of_field in sources.items()}
    for name, of_set in of_sets.items():
        of_set["filled"] = sorted(field for field, filler in fillers.items() if filler == name)
    return {
        "property_id": property_id,
        "ordinal": catalogued.ordinal,
        "partition": key,
        "image_root": catalog.image_root,
        "images": list(_images(catalog, catalogued)),
        **described,
        "sets": of_sets,
    }


def _rows_of(asset: AssetFolders, key: str | None, property_id: str, waits: str) -> Values:
    """The rows of a property in one question set. waits: why a property has none that is in no partition."""
    if key is None:
        return {"file": None, "published": [], "not_published": waits, "committed": []}
    # The work under way first: what is published in this moment is then in one of the two.
    committed = list(_committed(asset.partition(key).journals, property_id))
    published = PublishedPartitions(asset)
    try:
        table = published.read(key).to_table()
    except NotPublishedError as error:
        return {"file": None, "published": [], "not_published": str(error), "committed": committed}
    rows = table.filter(pc.equal(table["property_id"], property_id)).to_pylist()
    return {
        "file": str(published.path(key)),
        "published": rows,
        "not_published": None,
        "committed": committed,
    }


def lines(values: Values) -> Iterator[str]:
    """The values of ``read_property``, in words."""
    where = "in no partition yet" if values["partition"] is None else f"partition {values['partition']}"
    yield f"{values['property_id']}: ordinal {values['ordinal']}, {where}"
    yield f"{counted(len(values['images']), 'images')} under {values['image_root']}:"
    for image in values["images"]:
        if image["refused"] is not None:
            yield f"  {image['uri']}: refused, {image['refused']}"
            continue
        size = "not readable" if image["bytes"] is None else f"{image['bytes']} bytes"
        yield f"  {image['uri']}: {'there' if image['there'] else 'not there now'}, {size} when catalogued"
    yield from _lines_of_set(values)
    for name, of_set in values["sets"].items():
        yield f"Question set {name}:"
        yield from _lines_of_set(of_set)


def _lines_of_set(of_set: Values) -> Iterator[str]:
    if of_set["not_published"] is not None:
        yield f"Not published: {of_set['not_published']}"
    for row in of_set["published"]:
        yield from _row_lines(row)
    if of_set.get("filled"):
        yield f"Shown in place of the answers of the sets above it: {', '.join(of_set['filled'])}"
    if of_set["file"] is not None:
        yield f"File: {of_set['file']}"
    for committed in of_set["committed"]:
        if committed["row"] is None:
            yield f"{committed['path']} does not read: {committed['trouble']}"
        else:
            yield f"Committed and not published, in {committed['path']}:"
            yield from _row_lines(committed["row"])


def _committed(journals: Path, property_id: str) -> Iterator[Values]:
    """The rows in work under way, or in work that a check refused; the latest last. Changes nothing."""
    segments = []
    for path in journals.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # published in this moment
            if SEGMENT_NAME.fullmatch(path.name):
                segments.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(segments):
        filters = [("property_id", "=", property_id)]
        try:
            table = pq.read_table(path, filters=filters, partitioning=None, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            yield {"path": str(path), "row": None, "trouble": str(error)}
            continue
        for row in table.to_pylist():
            yield {"path": str(path), "row": row, "trouble": None}


def _images(catalog: Catalog, catalogued: CatalogRow) -> Iterator[Values]:
    for uri, size in zip(catalogued.image_uris, catalogued.image_bytes, strict=True):
        exists, refused = False, None
        try:
            exists = catalog.images.size(uri) is not None
        except InvalidImagePathError as error:
            refused = str(error)
        yield {"uri": uri, "bytes": size, "there": exists, "refused": refused}


def _row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    if row["status"] == NOT_ASKED:
        yield f"Not asked: its where leaves it out, fingerprint {row['fingerprint']}"
        return
    listed = row["images_seen"] + len(row["images_failed"]) + len(row["images_not_used"] or ())
    seen = f"{row['images_seen']} of {counted(listed, 'images')} seen"
    yield f"Status {row['status']} after {counted(row['attempts'], 'attempts')}, {seen}"
    if row["error_kind"] is not None:
        yield f"Error {row['error_kind']}: {row['error']}"
    if row["raw_text"] is not None:
        yield f"The model said: {row['raw_text']}"
    for name, value in (row["description"] or {}).items():
        sure = (row.get(CONFIDENCE) or {}).get(name)
        yield f"  {name}: {value}" + (f" (confidence {sure:.2f})" if isinstance(sure, float) else "")
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


def _card(values: Values, catalog: Catalog) -> Card:
    """The card of a property: its images beside its answer, and the lines about it."""
    uris = [image["uri"] for image in values["images"]]
    (files,) = thumbnails(catalog, [uris[:_PAGE_IMAGES]], height=_PAGE_HEIGHT)
    answers: dict[str, ModelValue] = {}
    for of_set in (values, *values["sets"].values()):
        for row in of_set["published"]:
            for name, value in (row["description"] or {}).items():
                if name not in answers or name in of_set["filled"]:
                    answers[name] = ModelValue(value, (row.get(CONFIDENCE) or {}).get(name))
    # Without the indented lines: the answer and the images are shown by themselves.
    about = "\n".join(line for line in lines(values) if not line.startswith("  "))
    return Card(
        "", "", files, {**answers, "about it": about}, uris=uris[:_PAGE_IMAGES], image_count=len(uris)
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
    values = read_property(current, catalog, property_id)
    if html is not None:
        write_page(html, page(property_id, [_card(values, catalog)]))
    if as_json:
        say_as_json(values)
        return
    for line in lines(values):
        say(visible_line(line))
    if html is not None:
        say(f"Page: {html}")

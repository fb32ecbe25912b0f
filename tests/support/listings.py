"""Listings of properties, whose images mostly do not exist."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vlm_catalog.catalog import Catalog
from vlm_catalog.listing import (
    DETECTED,
    IngestRequest,
    Listing,
    Problems,
    ReadingOptions,
    open_listing,
)


def write_listing(path: Path, images: Mapping[str, Sequence[str]]) -> Path:
    """Write a JSONL listing, a line a property: the images of each id."""
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps({"property_id": name, "images": list(of)}) for name, of in images.items()]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def list_properties(folder: Path, count: int, name: str = "listing.jsonl") -> Path:
    """Write a listing of ``count`` properties of two images that do not exist."""
    return write_listing(folder / name, {f"id {i}": [f"{i}a.jpg", f"{i}b.jpg"] for i in range(count)})


def share_images(listing: Path, name: str, ids: Iterable[str], images: int) -> Path:
    """Write a listing beside another: each id has the first images of that one's first property."""
    first, *_ = read_source(listing).values()
    return write_listing(listing.with_name(name), dict.fromkeys(ids, first[:images]))


def open_source(source: Path, options: ReadingOptions = DETECTED) -> tuple[Listing, Problems]:
    """Begin to read a listing or a folder tree; gives what is wrong with it too."""
    problems = Problems(source, IngestRequest(source, options=options))
    root = source if source.is_dir() else source.parent
    # The pool is only asked while a folder tree is read; it ends with the process.
    pool = ThreadPoolExecutor(2)
    return open_listing(source, image_root=str(root), pool=pool, problems=problems, options=options), problems


def images_of(listing: Listing) -> dict[str, list[str]]:
    """Read a listing to its end: each id with its images, in the order of reading."""
    images: dict[str, list[str]] = {}
    for record in listing.records:
        images.setdefault(record.property_id, []).extend(record.images)
    return images


def read_source(source: Path, options: ReadingOptions = DETECTED) -> dict[str, list[str]]:
    """The images of each id of a sound source. Raises ListingError."""
    listing, problems = open_source(source, options)
    images = images_of(listing)
    problems.refuse()
    return images


def catalogued(home: Path) -> dict[str, list[str]]:
    """The images of each id of a catalogue, in its order, every row verified."""
    tables = [table for _, table in Catalog.open(home).slices(with_tail=True)]
    return {row["property_id"]: row["image_uris"] for table in tables for row in table.to_pylist()}

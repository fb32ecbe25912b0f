"""Search: properties whose descriptions are near to a text, or to another property, by published vectors.

``published_table.py`` has the conditions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import typer

from resources.devices.find import Device
from resources.publishing.partition_files import PublishedRecord
from resources.publishing.partition_rows import PartitionRows
from resources.publishing.published import PublishedPartitions
from vlm_assets.assets.fingerprint import embedding_parts
from vlm_assets.catalog.catalog import Catalog, CatalogError
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings
from vlm_assets.operate.html_page import Card, page, thumbnails, write_page
from vlm_assets.operate.published_table import Mask, chosen, published_records
from vlm_assets.operate.terminal import (
    AsJson,
    CommandError,
    Home,
    Where,
    app,
    chosen_settings,
    say,
    say_as_json,
    visible_line,
)

BATCH_ROWS: Final = 8192
"""Vectors in memory at a time, for each core."""

_THUMBNAILS: Final = 4
_HEIGHT: Final = 120

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Hit:
    """A property that was found. score: the cosine of the angle, 1 for the same direction."""

    property_id: str
    ordinal: int
    score: float


@dataclass(frozen=True)
class Found:
    """Hits, best first. left_out: partitions embedded by another model than the settings name now."""

    hits: tuple[Hit, ...]
    scanned: int
    left_out: tuple[str, ...]


def search(
    settings: Settings,
    catalog: Catalog,
    *,
    text: str | None = None,
    like: str | None = None,
    mask: Mask | None = None,
    limit: int = 20,
) -> Found:
    """Find the properties nearest to a text, to a property, or to the middle of both.

    mask: of each ordinal, whether it may be found. Raises CommandError,
    CatalogError, ModelLoadError, PublishedError.
    """
    records, left_out = comparable(settings, catalog)
    wanted: list[Vector] = []
    if like is not None:
        wanted.append(_vector_of(settings, catalog, records, like))
    if text is not None:
        wanted.append(embed_text(settings, text))
    if not wanted:
        raise CommandError("Give a text, or a property with --like.")
    query = np.sum([one / max(float(np.linalg.norm(one)), 1e-12) for one in wanted], axis=0)
    query = (query / max(float(np.linalg.norm(query)), 1e-12)).astype(np.float32)
    ranges = {one.key: one for one in catalog.ranges}
    keys = [key for key in records if mask is None or bool(mask[ranges[key].start : ranges[key].stop].any())]
    partitions = PublishedPartitions(settings.embeddings)
    # One more, for the property itself is among its neighbours.
    found, scanned = scan(keys, partitions.read, query, mask=mask, most=limit + (like is not None))
    names = _names(catalog, [ordinal for _, ordinal in found])
    hits = [Hit(names[ordinal], ordinal, score) for score, ordinal in found if names[ordinal] != like]
    return Found(tuple(hits[:limit]), scanned, tuple(left_out))


def scan(
    keys: Sequence[str],
    read: Callable[[str], PartitionRows],
    query: Vector,
    *,
    mask: Mask | None = None,
    most: int = 20,
) -> tuple[list[tuple[float, int]], int]:
    """The nearest rows of all partitions, best first, as score and ordinal; and how many were looked at.

    query: of length 1. A block of rows a core is in memory at a time.
    """
    found: list[tuple[float, int]] = []
    scanned = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for nearest, rows in threads.map(lambda key: _nearest(read(key), query, mask, most), keys):
            scanned += rows
            found = sorted([*found, *nearest], reverse=True)[:most]
    return found, scanned


def comparable(settings: Settings, catalog: Catalog) -> tuple[dict[str, PublishedRecord], list[str]]:
    """Published partitions whose vectors come from the embedding model of the settings, and the others."""
    records = published_records(settings.embeddings, catalog)
    if not records:
        raise CommandError("No vector is published yet: `vlm-assets run`.")
    now = embedding_parts(build_text_embedding_model(settings))
    same, other = {}, []
    for key, record in records.items():
        parts = record.metadata.get("parts", {})
        if all(parts.get(name) == value for name, value in now.items()):
            same[key] = record
        else:
            other.append(key)
    if not same:
        raise CommandError(
            "No partition was embedded by the embedding model that the settings name now: set the one that"
            " did it, or materialize property_embeddings."
        )
    return same, other


def embed_text(settings: Settings, text: str) -> Vector:
    """The vector of a text, on the CPU: a search takes no device from a run."""
    device = Device("cpu-search", "cpu", "search", None, "")
    embedder = build_text_embedding_model(settings).load(device)
    try:
        return np.asarray(embedder.embed([text])[0], dtype=np.float32)
    except ValueError as error:
        raise CommandError(f"{text!r} cannot be searched for: {error}.") from error
    finally:
        embedder.close()


def _vector_of(
    settings: Settings, catalog: Catalog, records: dict[str, PublishedRecord], property_id: str
) -> Vector:
    known = catalog.find(property_id)
    if known is None:
        raise CatalogError(
            f"{catalog.path} has no property {property_id!r}. Ids are compared exactly, blanks and case too."
        )
    if known.range.key in records:
        rows = PublishedPartitions(settings.embeddings).read(known.range.key)
        for batch in rows.iter_batches(["ordinal", "embedding"]):
            at = pc.index(batch["ordinal"], known.ordinal).as_py()
            if at >= 0 and batch["embedding"][at].is_valid:
                return np.asarray(batch["embedding"][at].as_py(), dtype=np.float32)
    raise CommandError(f"{property_id!r} has no vector of the present embedding model: `vlm-assets show ID`.")


def _nearest(
    rows: PartitionRows, query: Vector, mask: Mask | None, most: int
) -> tuple[list[tuple[float, int]], int]:
    """The nearest rows of one partition, as score and ordinal; and how many were looked at."""
    best: list[tuple[float, int]] = []
    scanned = 0
    for batch in rows.iter_batches(["ordinal", "embedding"], batch_rows=BATCH_ROWS):
        ordinals, scores = batch_scores(batch, query)
        if mask is not None:
            chosen = mask[np.clip(ordinals, 0, len(mask) - 1)]
            ordinals, scores = ordinals[chosen], scores[chosen]
        scanned += len(scores)
        count = min(most, len(scores))
        if count:
            first = np.argpartition(-scores, count - 1)[:count]
            best += [(float(scores[at]), int(ordinals[at])) for at in first]
    return sorted(best, reverse=True)[:most], scanned


def _names(catalog: Catalog, ordinals: Sequence[int]) -> dict[int, str]:
    found = {}
    for ordinal in ordinals:
        wanted = catalog.range_of(ordinal)
        found[ordinal] = catalog.slice(wanted)["property_id"][ordinal - wanted.start].as_py()
    return found


def batch_scores(batch: pa.RecordBatch, query: Vector) -> tuple[npt.NDArray[np.int64], Vector]:
    """Ordinals and cosines of the rows that have a vector; a vector without a direction has -1."""
    column, ordinals = batch["embedding"], batch["ordinal"]
    if column.null_count:
        ordinals = ordinals.filter(pc.is_valid(column))
    # Flattened, the null rows are left out.
    vectors = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, len(query))
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = (vectors @ query) / np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return ordinals.to_numpy(), np.nan_to_num(scores, nan=-1.0)


def cards(settings: Settings, catalog: Catalog, hits: Sequence[Hit]) -> list[Card]:
    """What a page shows of each: its first images and its description."""
    ordinals = [hit.ordinal for hit in hits]
    images = thumbnails(catalog, (uris[:_THUMBNAILS] for uris in catalog.images_of(ordinals)), height=_HEIGHT)
    return [
        Card(
            hit.property_id,
            f"{hit.score:.3f}",
            shown,
            _description(settings, catalog.range_of(hit.ordinal).key, hit.ordinal),
        )
        for hit, shown in zip(hits, images, strict=True)
    ]


def image_paths(catalog: Catalog, hits: Sequence[Hit]) -> list[str]:
    """The first image of each, for a table."""
    found = []
    for uris in catalog.images_of([hit.ordinal for hit in hits]):
        try:
            found.append(str(catalog.image_path(uris[0])) if uris else "")
        except InvalidImagePathError:
            found.append("")
    return found


def _description(settings: Settings, key: str, ordinal: int) -> dict[str, object]:
    published = PublishedPartitions(settings.descriptions)
    if published.record(key) is None:
        return {}
    for batch in published.read(key).iter_batches(["ordinal", "description"]):
        at = pc.index(batch["ordinal"], ordinal).as_py()
        if at >= 0:
            return dict(batch["description"][at].as_py() or {})
    return {}


_EXAMPLES = """\b
vlm-assets search "stone cottage with a pool"
vlm-assets search "stone cottage" --where "floors <= 2" --html found.html
vlm-assets search --like ALDERNEY-00001 --limit 5 --json"""


@app.command("search", epilog=_EXAMPLES)
def search_command(
    text: Annotated[str | None, typer.Argument(help="What to look for, in words.")] = None,
    home: Home = None,
    where: Where = None,
    like: Annotated[str | None, typer.Option(metavar="ID", help="Neighbours of this property.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Properties to find, at most.")] = 20,
    html: Annotated[Path | None, typer.Option(help="Write a page with images to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find properties that are near to a text or to another property.

    Stands on the published vectors.
    Takes no device. With a text and --like, what is near to both.
    """
    if text is None and like is None:
        raise typer.BadParameter("Give a text, or --like ID.")

    current = chosen_settings(home)
    catalog = Catalog.open(current.home)
    mask = None if where is None else chosen(current, catalog, where)
    found = search(current, catalog, text=text, like=like, mask=mask, limit=limit)
    title = " ".join([*([text] if text else []), *([f"like {like}"] if like else [])])
    if html is not None:
        write_page(html, page(title, cards(current, catalog, found.hits)))
    if as_json:
        say_as_json([{"property_id": one.property_id, "score": one.score} for one in found.hits])
        return
    for hit, path in zip(found.hits, image_paths(catalog, found.hits), strict=True):
        say(f"{hit.score:.3f}  {visible_line(hit.property_id)}  {visible_line(path)}")
    say(f"{len(found.hits)} of {found.scanned:,} properties with a vector.")
    if found.left_out:
        say(
            f"{len(found.left_out)} partitions were embedded by another model than the settings name, and"
            f" were not searched: {found.left_out[0]} is the first."
        )
    if html is not None:
        say(f"Page: {html}")

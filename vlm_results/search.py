"""Search: properties whose descriptions answer a text by words and by vectors, or are near to another's.

What lives here: the vectors, and how both orders become one (reciprocal rank fusion). What does not: the
words (``word_index.py``), the conditions (``published_table.py``).
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import typer

from vlm_assets.assets.fingerprint import embedding_parts
from vlm_assets.catalog.catalog import Catalog, CatalogError
from vlm_assets.catalog.image_root import InvalidImagePathError
from vlm_assets.commands.html_page import Card, page, thumbnails, write_page
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json, visible_line
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_assets.services.request_vector import embed_text
from vlm_durable.commands import command
from vlm_durable.versions.partition_files import PublishedError, PublishedRecord
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_engine.model_source import NO_EMBEDDER
from vlm_results.published_table import Mask, Where, chosen, readable_records
from vlm_results.word_index import find_words

BATCH_ROWS: Final = 8192
"""Vectors in memory at a time, for each core."""

_THUMBNAILS: Final = 4
_HEIGHT: Final = 120
_LINE: Final = 110

Vector = npt.NDArray[np.float32]


_RANK_OFFSET: Final = 60
"""Of reciprocal rank fusion (Cormack, Clarke and Buettcher, 2009): how little the first ranks stand out."""

_DEPTH, _LEAST_DEPTH = 5, 200
"""Rows of each order for each hit that is asked for, and at least: second in both is often the best."""


@dataclass(frozen=True)
class Hit:
    """A property that was found.

    score: for a text, from 0 to 1, which is first by words and by vectors; else the cosine of the angle.
    """

    property_id: str
    ordinal: int
    score: float


@dataclass(frozen=True)
class Found:
    """Hits, best first.

    scanned: rows looked at. left_out: partitions embedded by another model than the settings name now.
    unread: why a partition was not searched. notes: what of the search could not be done at all.
    """

    hits: tuple[Hit, ...]
    scanned: int
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


Ranking = Sequence[tuple[float, int]]
"""Score and ordinal, best first."""


@dataclass(frozen=True)
class _Request:
    """A text, the id of a property, or both; which ordinals may be found, and how many rows at most."""

    text: str | None
    like: str | None
    mask: Mask | None
    most: int


@dataclass(frozen=True)
class _Order:
    """Rows by words or by vectors. unread: why a partition was not read, by its key."""

    ranked: Ranking
    scanned: int
    unread: Mapping[str, str]


@dataclass(frozen=True)
class _Vectors:
    """What is published of the present embedding model. left_out: partitions of another."""

    records: Mapping[str, PublishedRecord]
    left_out: tuple[str, ...]
    unread: Mapping[str, str]


def search(
    settings: Settings,
    catalog: Catalog,
    *,
    text: str | None = None,
    like: str | None = None,
    mask: Mask | None = None,
    limit: int = 20,
    by: Collection[str] = ("words", "vectors"),
) -> Found:
    """Find the properties that answer a text, are near to a property, or both.

    mask: of each ordinal, whether it may be found. by: the orders that count; a benchmark takes one away.
    Raises CommandError, CatalogError, ModelLoadError, PublishedError, OSError.
    """
    if text is None and like is None:
        raise CommandError("Give a text, or a property with --like.")
    doing("looking at what is published")
    most = max(_DEPTH * limit, _LEAST_DEPTH) + (like is not None) if text is not None else limit + 1
    request = _Request(text, like, mask, most)
    by_words = text is not None and "words" in by
    vectors, notes = None, []
    if "vectors" in by:
        try:
            vectors = _comparable_vectors(settings, catalog)
        except NoVectorsError as error:
            if like is not None or not by_words:
                raise
            notes.append(f"Searched by words alone. {error}")
    # Side by side: SQLite and numpy let other threads run. The words stay in this thread, so that Ctrl-C ends
    # the building of their index, which takes minutes.
    with ThreadPoolExecutor(1) as beside:
        nearest = beside.submit(_near, settings, catalog, request, vectors) if vectors else None
        words = _by_words(settings, catalog, request, every=nearest is not None) if by_words else None
        near = nearest.result() if nearest else None
    orders = [order for order in (words, near) if order is not None]
    ranked = orders[0].ranked if text is None else fused([order.ranked for order in orders])
    best = ranked[: limit + (like is not None)]
    names = _names(catalog, [ordinal for _, ordinal in best])
    hits = [Hit(names[ordinal], ordinal, score) for score, ordinal in best if names[ordinal] != like]
    unread = {key: sentence for order in reversed(orders) for key, sentence in order.unread.items()}
    return Found(
        tuple(hits[:limit]),
        max(order.scanned for order in orders),
        vectors.left_out if vectors else (),
        tuple(unread.values()),
        tuple(notes),
    )


def fused(orders: Sequence[Ranking]) -> list[tuple[float, int]]:
    """One order of several, by reciprocal ranks; 1 is first in each. Equal scores share a rank."""
    scores: dict[int, float] = defaultdict(float)
    counted_orders = [order for order in orders if order]
    for order in counted_orders:
        rank, last = 0, float("nan")
        for place, (score, ordinal) in enumerate(order, start=1):
            if score != last:
                rank, last = place, score
            scores[ordinal] += (_RANK_OFFSET + 1) / (_RANK_OFFSET + rank) / len(counted_orders)
    return sorted(((score, ordinal) for ordinal, score in scores.items()), key=lambda one: (-one[0], one[1]))


class NoVectorsError(CommandError):
    """There is nothing to compare a vector with."""


def _by_words(settings: Settings, catalog: Catalog, request: _Request, *, every: bool) -> _Order:
    """The rows that have words of the text.

    every: only rows that have all of them. Beside vectors a row that has one word of four must not count as
    much as the nearest vector, and ranks do not tell them apart (Bruch, Gai and Ingber, 2023).
    """
    described, damaged = readable_records(settings.descriptions, catalog)
    words = find_words(
        settings.descriptions,
        described,
        request.text or "",
        mask=request.mask,
        most=request.most,
        every=every,
    )
    return _Order(words.ranked, words.rows, {**damaged, **words.unread})


def _comparable_vectors(settings: Settings, catalog: Catalog) -> _Vectors:
    """What a vector can be compared with. Raises NoVectorsError."""
    if settings.embedding_model is None:
        raise NoVectorsError(NO_EMBEDDER)
    published, damaged = readable_records(settings.embeddings, catalog)
    records, left_out = comparable(settings, published)
    return _Vectors(records, tuple(left_out), damaged)


def _near(settings: Settings, catalog: Catalog, request: _Request, vectors: _Vectors) -> _Order:
    """The rows nearest to a text, to a property, or to the middle of both."""
    parts: list[Vector] = []
    if request.like is not None:
        parts.append(_vector_of(settings, catalog, vectors.records, request.like))
    if request.text is not None:
        doing("loading the model that embeds texts")
        try:
            parts.append(embed_text(settings, request.text))
        except ValueError as error:
            raise CommandError(f"{request.text!r} cannot be searched for: {error}.") from error
    query = np.sum([part / max(float(np.linalg.norm(part)), 1e-12) for part in parts], axis=0)
    query = (query / max(float(np.linalg.norm(query)), 1e-12)).astype(np.float32)
    ranges, mask = {one.key: one for one in catalog.ranges}, request.mask
    keys = [
        key
        for key in vectors.records
        if mask is None or bool(mask[ranges[key].start : ranges[key].stop].any())
    ]
    read, unread = PublishedPartitions(settings.embeddings).read, dict(vectors.unread)
    ranked, scanned = scan(keys, read, query, mask=mask, most=request.most, unread=unread)
    return _Order(ranked, scanned, unread)


def scan(
    keys: Sequence[str],
    read: Callable[[str], PartitionRows],
    query: Vector,
    *,
    mask: Mask | None = None,
    most: int = 20,
    unread: dict[str, str] | None = None,
) -> tuple[list[tuple[float, int]], int]:
    """The nearest rows of all partitions, best first, as score and ordinal; and how many were looked at.

    query: of length 1. A block of rows a core is in memory at a time. unread: takes why a partition could not
    be read; without it, that is raised.
    """
    best: list[tuple[float, int]] = []
    scanned = 0

    def nearest(key: str) -> tuple[list[tuple[float, int]], int]:
        least = best[-1][0] if len(best) == most else -np.inf
        try:
            return _nearest(read(key), query, mask, most, least)
        except (PublishedError, OSError, pa.ArrowException) as error:
            if unread is None:
                raise
            unread.setdefault(key, str(error))
            return [], 0

    with _kept_memory(), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for done, (rows, looked_at) in enumerate(threads.map(nearest, keys), start=1):
            doing("comparing with the vectors of partitions", done, len(keys))
            scanned += looked_at
            if rows:
                best = sorted([*best, *rows], reverse=True)[:most]
    return best, scanned


@contextlib.contextmanager
def _kept_memory() -> Iterator[None]:
    """Let pyarrow keep what it frees for as long as a scan takes.

    The system's allocator gives every block back, and getting it again took a quarter of a scan's CPU: 1.1
    million page faults over 2.1 GB.
    """
    before = pa.default_memory_pool()
    if "mimalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.mimalloc_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def comparable(
    settings: Settings, records: Mapping[str, PublishedRecord]
) -> tuple[dict[str, PublishedRecord], list[str]]:
    """The partitions whose vectors come from the embedding model of the settings, and the others."""
    if not records:
        raise NoVectorsError(f"No vector is published yet: {command('run')}.")
    now = embedding_parts(build_text_embedding_model(settings))
    same, other = {}, []
    for key, record in records.items():
        parts = record.metadata.get("parts", {})
        if all(parts.get(name) == value for name, value in now.items()):
            same[key] = record
        else:
            other.append(key)
    if not same:
        raise NoVectorsError(
            "No partition was embedded by the embedding model that the settings name now: set the one that"
            " did it, or materialize property_embeddings."
        )
    return same, other


def _vector_of(
    settings: Settings, catalog: Catalog, records: Mapping[str, PublishedRecord], property_id: str
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
    raise CommandError(
        f"{property_id!r} has no vector of the present embedding model: {command('show', 'ID')}."
    )


def _nearest(
    rows: PartitionRows, query: Vector, mask: Mask | None, most: int, least: float
) -> tuple[list[tuple[float, int]], int]:
    """The nearest rows of one partition, as score and ordinal; and how many were looked at.

    least: the score that a row must have, for others have it already.
    """
    best: list[tuple[float, int]] = []
    scanned = 0
    for batch in rows.iter_batches(["ordinal", "embedding"], batch_rows=BATCH_ROWS):
        ordinals, scores = batch_scores(batch, query)
        if mask is not None:
            chosen = mask[np.clip(ordinals, 0, len(mask) - 1)]
            ordinals, scores = ordinals[chosen], scores[chosen]
        scanned += len(scores)
        enough = scores >= least
        if not enough.all():
            ordinals, scores = ordinals[enough], scores[enough]
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
    """What a page shows of each: its first images and how many it has, and its description."""
    images = catalog.images_of([hit.ordinal for hit in hits])
    made = thumbnails(catalog, (uris[:_THUMBNAILS] for uris in images), height=_HEIGHT)
    descriptions = descriptions_of(settings, catalog, hits)
    return [
        Card(
            hit.property_id,
            f"{hit.score:.3f}",
            files,
            descriptions.get(hit.ordinal, {}),
            uris=uris[:_THUMBNAILS],
            of=len(uris),
        )
        for hit, files, uris in zip(hits, made, images, strict=True)
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


def descriptions_of(
    settings: Settings, catalog: Catalog, hits: Sequence[Hit]
) -> dict[int, dict[str, object]]:
    """The published descriptions of these, by ordinal; one that cannot be read is left out."""
    ordinals = defaultdict[str, list[int]](list)
    for hit in hits:
        ordinals[catalog.range_of(hit.ordinal).key].append(hit.ordinal)
    published = PublishedPartitions(settings.descriptions)
    descriptions: dict[int, dict[str, object]] = {}
    for key, of_key in ordinals.items():
        with contextlib.suppress(PublishedError, OSError, pa.ArrowException):
            for batch in published.read(key).iter_batches(["ordinal", "description"]):
                rows = batch.filter(pc.is_in(batch["ordinal"], pa.array(of_key, pa.int64())))
                descriptions |= {row["ordinal"]: dict(row["description"] or {}) for row in rows.to_pylist()}
    return descriptions


def line_of(description: Mapping[str, object]) -> str:
    """A line of a description: its longest text, or where it has no sentence, all of its values."""
    texts = [value for value in description.values() if isinstance(value, str)]
    longest = max(texts, key=len, default="")
    if " " not in longest:
        longest = ", ".join(f"{name} {value}" for name, value in description.items() if value is not None)
    return shorten(longest, _LINE, placeholder=" ...")


_EXAMPLES = """\b
vlm-assets search "stone cottage with a fireplace"
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
    """Find properties that answer a text or are near to another property.

    By the words of the published descriptions and by their vectors, together.
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
    descriptions = descriptions_of(current, catalog, found.hits)
    for hit, path in zip(found.hits, image_paths(catalog, found.hits), strict=True):
        say(f"{hit.score:.3f}  {visible_line(hit.property_id)}  {visible_line(path)}")
        say(f"       {visible_line(line_of(descriptions.get(hit.ordinal, {})))}")
    say(f"{len(found.hits)} of {counted(found.scanned, 'properties')} with a description.")
    for note in (*found.notes, *found.unread):
        say(note, fg="yellow")
    if found.left_out:
        say(
            f"{counted(len(found.left_out), 'partitions were', 'partition was')} embedded by another model"
            " than the settings name, and"
            f" were not searched: {found.left_out[0]} is the first."
        )
    if html is not None:
        say(f"Page: {html}")

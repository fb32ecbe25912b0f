"""Search: properties whose descriptions answer a text by words and by vectors, or are near to a property.

The search by vectors is here, and how both rankings become one (reciprocal rank fusion). The search by words
is in ``word_index.py``, conditions are in ``published_table.py``.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import typer

from vlm_assets.assets.fingerprint import embedding_parts
from vlm_assets.commands.html_page import Card, page, thumbnails, write_page
from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json, visible_line
from vlm_assets.config.resource_settings import build_text_embedding_model
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_assets.services.request_vector import embed_text
from vlm_catalog.catalog import Catalog, CatalogError
from vlm_catalog.image_root import InvalidImagePathError
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_engine.model_source import NO_EMBEDDER
from vlm_results.guarantee import Guarantee
from vlm_results.published_table import Mask, Where, matching_rows, read_rows, readable_records
from vlm_results.word_index import RankedRows, Ranking, find_words

BATCH_ROWS: Final = 8192
"""Vectors in memory at a time, for each core."""

_THUMBNAILS: Final = 4
_HEIGHT: Final = 120
_LINE: Final = 110

Vector = npt.NDArray[np.float32]

_RANK_OFFSET: Final = 60
"""The constant of reciprocal rank fusion (Cormack, Clarke and Buettcher, 2009): the larger, the less the
first ranks count."""

_DEPTH, _LEAST_DEPTH = 5, 200
"""Rows of each ranking for each requested hit, and at least. The second in both is often the best hit."""


@dataclass(frozen=True)
class Hit:
    """A property that answers a search.

    score: for a text, from 0 to 1 (first by words and by vectors); else the cosine of the angle.
    """

    property_id: str
    ordinal: int
    score: float


@dataclass(frozen=True)
class SearchResult:
    """Hits, best first.

    scanned: rows compared. left_out: partitions embedded by another model than that of the settings.
    unread: why a partition was not searched. notes: which part of the search could not be done.
    """

    hits: tuple[Hit, ...]
    scanned: int
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Request:
    """A text, the id of a property, or both. mask: ordinals that may be hits. most: how many rows at most."""

    text: str | None
    like: str | None
    mask: Mask | None
    most: int


@dataclass(frozen=True)
class _Vectors:
    """Partitions with vectors of the embedding model of the settings. left_out: those of another model."""

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
) -> SearchResult:
    """Find the properties that answer a text, are near to a property, or both.

    mask: for each ordinal, whether it may be a hit. by: the rankings that count; a benchmark leaves one out.
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
    # Both run at once: SQLite and numpy let other threads run. The words stay in this thread, so that Ctrl-C
    # ends the building of their index, which takes minutes.
    rankings: list[RankedRows] = []
    with ThreadPoolExecutor(1) as thread:
        nearest = thread.submit(_by_vectors, settings, catalog, request, vectors) if vectors else None
        if by_words:
            # Beside vectors a row that has one word of four must not count as much as the nearest vector, and
            # ranks do not distinguish them (Bruch, Gai and Ingber, 2023).
            every = nearest is not None
            described, damaged = readable_records(settings.descriptions, catalog)
            words = find_words(settings, described, text or "", mask=mask, most=most, every=every)
            rankings.append(replace(words, unread={**damaged, **words.unread}))
        if nearest is not None:
            rankings.append(nearest.result())
    ranked = rankings[0].ranked if text is None else fused([ranking.ranked for ranking in rankings])
    best = ranked[: limit + (like is not None)]
    ids = _property_ids(catalog, [ordinal for _, ordinal in best])
    hits = [Hit(ids[ordinal], ordinal, score) for score, ordinal in best if ids[ordinal] != like]
    unread = {key: sentence for ranking in reversed(rankings) for key, sentence in ranking.unread.items()}
    return SearchResult(
        tuple(hits[:limit]),
        max(ranking.rows for ranking in rankings),
        vectors.left_out if vectors else (),
        tuple(unread.values()),
        tuple(notes),
    )


def fused(rankings: Sequence[Ranking]) -> list[tuple[float, int]]:
    """Combine rankings by reciprocal ranks. A row that is first in each has 1. Equal scores share a rank."""
    scores: dict[int, float] = defaultdict(float)
    rankings = [ranking for ranking in rankings if ranking]
    for ranking in rankings:
        rank, last = 0, float("nan")
        for place, (score, ordinal) in enumerate(ranking, start=1):
            if score != last:
                rank, last = place, score
            scores[ordinal] += (_RANK_OFFSET + 1) / (_RANK_OFFSET + rank) / len(rankings)
    ranked = [(score, ordinal) for ordinal, score in scores.items()]
    return sorted(ranked, key=lambda row: (-row[0], row[1]))


class NoVectorsError(CommandError):
    """There is nothing to compare a vector with."""


def _comparable_vectors(settings: Settings, catalog: Catalog) -> _Vectors:
    """The vectors that a request can be compared with. Raises NoVectorsError."""
    if settings.embedding_model is None:
        raise NoVectorsError(NO_EMBEDDER)
    published, damaged = readable_records(settings.embeddings, catalog)
    records, left_out = comparable(settings, published)
    return _Vectors(records, tuple(left_out), damaged)


def _by_vectors(settings: Settings, catalog: Catalog, request: _Request, vectors: _Vectors) -> RankedRows:
    """Rank the rows nearest to a text, to a property, or to the middle of both."""
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
    mask, keys = request.mask, list(vectors.records)
    if mask is not None:
        keys = [
            bounds.key
            for bounds in map(PropertyRange.from_key, keys)
            if mask[bounds.start : bounds.stop].any()
        ]
    read, unread = PublishedPartitions(settings.embeddings).read, dict(vectors.unread)
    ranked, scanned = scan(keys, read, query, mask=mask, most=request.most, unread=unread)
    return RankedRows(ranked, scanned, unread)


def scan(
    keys: Sequence[str],
    read: Callable[[str], PartitionRows],
    query: Vector,
    *,
    mask: Mask | None = None,
    most: int = 20,
    unread: dict[str, str] | None = None,
) -> tuple[list[tuple[float, int]], int]:
    """The nearest rows of all partitions, best first, as score and ordinal; and how many rows were compared.

    query: a vector of length 1. Each core has a block of rows in memory at a time. unread: gets why a
    partition could not be read, by its key; without it, the error is raised.
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
        for done, (rows, compared) in enumerate(threads.map(nearest, keys), start=1):
            doing("comparing with the vectors of partitions", done, len(keys))
            scanned += compared
            if rows:
                best = sorted([*best, *rows], reverse=True)[:most]
    return best, scanned


@contextlib.contextmanager
def _kept_memory() -> Iterator[None]:
    """Let pyarrow keep freed memory for as long as a scan takes.

    The system's allocator gives every block back. Getting the blocks again took a quarter of a scan's CPU:
    1.1 million page faults over 2.1 GB.
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
    """The partitions with vectors of the settings' embedding model, and the keys of the others."""
    if not records:
        raise NoVectorsError(f"No vector is published yet: {command('run')}.")
    expected = embedding_parts(build_text_embedding_model(settings))
    same, other = {}, []
    for key, record in records.items():
        parts = record.metadata.get("parts", {})
        if all(parts.get(name) == value for name, value in expected.items()):
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
    row = catalog.find(property_id)
    if row is None:
        raise CatalogError(
            f"{catalog.path} has no property {property_id!r}. Ids are compared exactly, blanks and case too."
        )
    if row.range.key in records:
        vectors = PublishedPartitions(settings.embeddings).read(row.range.key)
        for batch in vectors.iter_batches(["ordinal", "embedding"]):
            position = pc.index(batch["ordinal"], row.ordinal).as_py()
            if position >= 0 and batch["embedding"][position].is_valid:
                return np.asarray(batch["embedding"][position].as_py(), dtype=np.float32)
    raise CommandError(
        f"{property_id!r} has no vector of the present embedding model: {command('show', 'ID')}."
    )


def _nearest(
    rows: PartitionRows, query: Vector, mask: Mask | None, most: int, least: float
) -> tuple[list[tuple[float, int]], int]:
    """The nearest rows of a partition, as score and ordinal; and how many rows were compared.

    least: the lowest score that counts, because rows of other partitions have it already.
    """
    best: list[tuple[float, int]] = []
    scanned = 0
    for batch in rows.iter_batches(["ordinal", "embedding"], batch_rows=BATCH_ROWS):
        ordinals, scores = batch_scores(batch, query)
        if mask is not None:
            allowed = mask[np.clip(ordinals, 0, len(mask) - 1)]
            ordinals, scores = ordinals[allowed], scores[allowed]
        scanned += len(scores)
        enough = scores >= least
        if not enough.all():
            ordinals, scores = ordinals[enough], scores[enough]
        count = min(most, len(scores))
        if count:
            first = np.argpartition(-scores, count - 1)[:count]
            best += zip(scores[first].tolist(), ordinals[first].tolist(), strict=True)
    return sorted(best, reverse=True)[:most], scanned


def _property_ids(catalog: Catalog, ordinals: Sequence[int]) -> dict[int, str]:
    ids = {}
    for ordinal in ordinals:
        bounds = catalog.range_of(ordinal)
        ids[ordinal] = catalog.slice(bounds)["property_id"][ordinal - bounds.start].as_py()
    return ids


def batch_scores(batch: pa.RecordBatch, query: Vector) -> tuple[npt.NDArray[np.int64], Vector]:
    """Ordinals and cosines of the rows that have a vector; a vector without a direction has -1."""
    column, ordinals = batch["embedding"], batch["ordinal"]
    if column.null_count:
        ordinals = ordinals.filter(pc.is_valid(column))
    # Flattening leaves the null rows out.
    vectors = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, len(query))
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = (vectors @ query) / np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return ordinals.to_numpy(), np.nan_to_num(scores, nan=-1.0)


def cards(settings: Settings, catalog: Catalog, hits: Sequence[Hit]) -> list[Card]:
    """A card for each hit: its first images, how many it has, and its description."""
    uris_of_hits = catalog.images_of([hit.ordinal for hit in hits])
    images = thumbnails(catalog, (uris[:_THUMBNAILS] for uris in uris_of_hits), height=_HEIGHT)
    descriptions = descriptions_of(settings, catalog, hits)
    return [
        Card(
            hit.property_id,
            f"{hit.score:.3f}",
            files,
            descriptions.get(hit.ordinal, {}),
            uris=uris[:_THUMBNAILS],
            image_count=len(uris),
        )
        for hit, files, uris in zip(hits, images, uris_of_hits, strict=True)
    ]


def image_paths(catalog: Catalog, hits: Sequence[Hit]) -> list[str]:
    """The path of each hit's first image; empty if it has none, or none that may be shown."""
    paths = []
    for uris in catalog.images_of([hit.ordinal for hit in hits]):
        try:
            paths.append(str(catalog.image_path(uris[0])) if uris else "")
        except InvalidImagePathError:
            paths.append("")
    return paths


def descriptions_of(
    settings: Settings, catalog: Catalog, hits: Sequence[Hit]
) -> dict[int, dict[str, object]]:
    """The published descriptions of the hits, by ordinal. Descriptions that cannot be read are left out."""
    guarantee = Guarantee.read(settings)
    descriptions: dict[int, dict[str, object]] = {}
    for bounds, group in groupby(sorted(hit.ordinal for hit in hits), catalog.range_of):
        with contextlib.suppress(PublishedError, OSError, pa.ArrowException):
            chosen = pa.array(list(group), pa.int64())
            rows = read_rows(settings, guarantee, bounds.key, ["ordinal", "description"], ordinals=chosen)
            descriptions |= {row["ordinal"]: dict(row["description"] or {}) for row in rows.to_pylist()}
    return descriptions


def line_of(description: Mapping[str, object]) -> str:
    """A description in a line: its longest text, or all of its values if no text is a sentence."""
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
    mask = None if where is None else matching_rows(current, catalog, where)
    result = search(current, catalog, text=text, like=like, mask=mask, limit=limit)
    hits = result.hits
    if html is not None:
        title = " ".join([*([text] if text else []), *([f"like {like}"] if like else [])])
        write_page(html, page(title, cards(current, catalog, hits)))
    if as_json:
        say_as_json([{"property_id": hit.property_id, "score": hit.score} for hit in hits])
        return
    descriptions = descriptions_of(current, catalog, hits)
    for hit, path in zip(hits, image_paths(catalog, hits), strict=True):
        say(f"{hit.score:.3f}  {visible_line(hit.property_id)}  {visible_line(path)}")
        say(f"       {visible_line(line_of(descriptions.get(hit.ordinal, {})))}")
    say(f"{len(hits)} of {counted(result.scanned, 'properties')} with a description.")
    for note in (*result.notes, *result.unread):
        say(note, fg="yellow")
    if result.left_out:
        say(
            f"{counted(len(result.left_out), 'partitions were', 'partition was')} embedded by another model"
            " than the settings name, and"
            f" were not searched: {result.left_out[0]} is the first."
        )
    if html is not None:
        say(f"Page: {html}")

"""The words of all descriptions, in an index of SQLite's FTS5 beside the parquet files.

What lives here: the index, and how it follows what is published. It is never truth: a search brings it up to
date by the digests of the published records, and one that is lost or damaged is built anew. What does not:
vectors, and how both are joined (``search.py``).
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from vlm_assets.assets.partition import OK
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.services.progress import doing
from vlm_durable.files.files import make_directory
from vlm_durable.files.layout import AssetFolders, Home
from vlm_durable.files.lock_files import locked
from vlm_durable.versions.partition_files import PublishedError, PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_results.published_table import Mask

_FORMAT: Final = 1
"""Raised where the same description would have other words."""

_PARTITIONS_TOGETHER: Final = 50
"""Partitions committed at a time: a kill costs as many."""

_COMMON: Final = 0.5
"""Share of the rows above which a word tells none from another. BM25 gives it no weight."""

_EMPTY: Final = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was",
    "will", "with",
))  # fmt: skip
"""Lucene's English stop words, without "no" and "not", which ask for something else.

Where descriptions have no sentence, an "a" of a request is in none of them.
"""

_NOTHING: Final = frozenset({"none", "no", "unknown", "n/a"})
"""Values that say that something is not there."""

_TABLES: Final = """
CREATE TABLE partitions (key TEXT PRIMARY KEY, sha256 TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(text, tokenize='porter unicode61 remove_diacritics 2');
"""


@dataclass(frozen=True)
class Words:
    """What was found. ranked: score and ordinal, best first; higher is better. unread: why, by partition."""

    ranked: tuple[tuple[float, int], ...]
    rows: int
    unread: Mapping[str, str]


def find_words(
    asset: AssetFolders,
    records: Mapping[str, PublishedRecord],
    text: str,
    *,
    mask: Mask | None = None,
    most: int,
    every: bool = False,
) -> Words:
    """Bring the index of these descriptions up to date and find the rows that have words of the text.

    every: only rows that have all of its words. A word that most rows have is passed over in any case.
    Raises OSError, where the index can be neither read nor written.
    """
    with _locked(asset.home):
        try:
            return _find(asset, records, text, mask, most, every)
        except sqlite3.DatabaseError:
            # Damaged, or of an earlier version. Nothing of it is needed.
            _remove(asset.home)
        try:
            return _find(asset, records, text, mask, most, every)
        except sqlite3.DatabaseError as error:
            raise OSError(f"{asset.home.word_index} cannot be written: {error}") from error


def forget_words(home: Home) -> None:
    """Remove the index: it may hold the words of what is withdrawn. Raises OSError."""
    with _locked(home):
        _remove(home)


def words_of(description: Mapping[str, Any]) -> str:
    """The words that say what is there: values, and the names of what is true, counted or chosen."""
    return " ".join(_words(description))


def _words(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for field, part in value.items():
            yield from _words(part, field)
    elif isinstance(value, list):
        for part in value:
            yield from _words(part, name)
    elif isinstance(value, bool):
        if value:
            yield name.removeprefix("has_").removeprefix("is_").replace("_", " ")
    elif isinstance(value, int | float):
        yield f"{value:g} {name}"
    elif isinstance(value, str) and value.lower() not in _NOTHING:
        yield value.replace("_", " ")


@contextlib.contextmanager
def _locked(home: Home) -> Iterator[None]:
    """One search at a time uses the index: whoever removes a damaged one has nobody's journal beside it."""
    make_directory(home.word_index.parent)
    with locked(home.word_index.with_suffix(".lock")):
        yield


def _remove(home: Home) -> None:
    # The journal last: without it, the rest of a file could be taken for whole.
    for suffix in ("", "-journal", "-wal", "-shm"):
        Path(f"{home.word_index}{suffix}").unlink(missing_ok=True)


def _find(
    asset: AssetFolders,
    records: Mapping[str, PublishedRecord],
    text: str,
    mask: Mask | None,
    most: int,
    every: bool,
) -> Words:
    with contextlib.closing(sqlite3.connect(asset.home.word_index, isolation_level=None)) as connection:
        asset.home.word_index.chmod(0o600)
        if connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("of another version")
            connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={_FORMAT}; COMMIT")
        unread = _follow(connection, asset, records)
        rows = connection.execute("SELECT count(*) FROM words_docsize").fetchone()[0]
        return Words(tuple(_ranked(connection, text, rows, mask, most, every)), rows, unread)


def _follow(
    connection: sqlite3.Connection, asset: AssetFolders, records: Mapping[str, PublishedRecord]
) -> dict[str, str]:
    """Bring the index up to date; gives the partitions that do not read, and why."""
    indexed = dict(connection.execute("SELECT key, sha256 FROM partitions"))
    gone = [key for key in indexed if key not in records]
    changed = [key for key, record in records.items() if indexed.get(key) != record.sha256]
    published, unread = PublishedPartitions(asset), {}
    work = [*gone, *changed]
    for start in range(0, len(work), _PARTITIONS_TOGETHER):
        if len(work) > _PARTITIONS_TOGETHER:
            doing("reading words of partitions", start, len(work))
        connection.execute("BEGIN IMMEDIATE")
        for key in work[start : start + _PARTITIONS_TOGETHER]:
            if key in indexed:
                of_key = PropertyRange.from_key(key)
                connection.execute(
                    "DELETE FROM words WHERE rowid >= ? AND rowid < ?", (of_key.start, of_key.stop)
                )
                connection.execute("DELETE FROM partitions WHERE key = ?", (key,))
            if key not in records:
                continue
            try:
                # All of them before the first is written: a partition is whole or is not in the index.
                rows = list(_rows(published, key))
            except (PublishedError, OSError, pa.ArrowException) as error:
                unread[key] = str(error)
                continue
            connection.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", rows)
            connection.execute("INSERT INTO partitions VALUES (?, ?)", (key, records[key].sha256))
        connection.execute("COMMIT")
    return unread


def _rows(published: PublishedPartitions, key: str) -> Iterator[tuple[int, str]]:
    for batch in published.read(key).iter_batches(["ordinal", "status", "description"]):
        columns = (batch[name].to_pylist() for name in ("ordinal", "status", "description"))
        for ordinal, status, description in zip(*columns, strict=True):
            if status == OK:
                yield ordinal, words_of(description)


def _ranked(
    connection: sqlite3.Connection, text: str, rows: int, mask: Mask | None, most: int, every: bool
) -> Iterator[tuple[float, int]]:
    words = [word for word in dict.fromkeys(re.findall(r"\w+", text.lower())) if word not in _EMPTY]
    counts = {f'"{word}"': _count(connection, f'"{word}"', rows) for word in words}
    telling = [term for term, count in counts.items() if 0 < count <= rows * _COMMON]
    if not telling or (every and not all(counts.values())):
        return
    connection.create_function("chosen", 1, lambda ordinal: mask is None or bool(mask[ordinal]))
    condition = "" if mask is None else "AND chosen(rowid)"
    query = f"SELECT -rank, rowid FROM words WHERE words MATCH ? {condition} ORDER BY rank LIMIT ?"  # noqa: S608 - no words of others
    yield from connection.execute(query, ((" AND " if every else " OR ").join(telling), most))


def _count(connection: sqlite3.Connection, term: str, rows: int) -> int:
    """In how many rows a word stands; looking ends when there are too many."""
    query = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
    return int(connection.execute(query, (term, int(rows * _COMMON) + 1)).fetchone()[0])

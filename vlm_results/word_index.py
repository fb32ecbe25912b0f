"""The words of all descriptions, in an index of SQLite's FTS5 beside the parquet files.

The index can always be rebuilt: a search brings it up to date by the digests of the published records, and a
lost or damaged index is built again. Vectors, and how both are joined, are in ``search.py``.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing
from vlm_catalog.ranges import PropertyRange
from vlm_durable.files.files import make_directory
from vlm_durable.files.layout import Home
from vlm_durable.files.lock_files import locked
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.versioned_object import PublishedError, RecordDamagedError
from vlm_results.guarantee import Guarantee
from vlm_results.joined_rows import further_records, shown_version
from vlm_results.published_table import Mask, read_rows

_FORMAT: Final = 1
"""Raise this number when the same description gets other words."""

_PARTITIONS_TOGETHER: Final = 50
"""Partitions committed at a time: a kill loses so many."""

_COMMON: Final = 0.5
"""A word in a larger share of the rows than this is passed over. BM25 gives it no weight."""

_EMPTY: Final = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was",
    "will", "with",
))  # fmt: skip
"""Lucene's English stop words, without "no" and "not", which ask for something else.

If descriptions have no sentences, none of them holds the "a" of a request.
"""

_NUMBERS: Final = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TERMS: Final[Mapping[str, str]] = {
    "one": '"1"',  # The stem of "one" is "on", which most sentences have.
    **{word: f'("{word}" OR "{number}")' for number, word in enumerate(_NUMBERS, start=2)},
    **{str(number): f'("{word}" OR "{number}")' for number, word in enumerate(_NUMBERS, start=2)},
}
"""What is looked for instead of a word. People write small numbers as words, and descriptions hold digits."""

_LEAST_PART: Final = 4
"""Letters of a part of a compound word, such as "fire" of a fireplace or "bath" of a bathtub."""

_NOTHING: Final = frozenset({"none", "no", "unknown", "n/a"})
"""Values that say that something is absent."""

_TABLES: Final = """
CREATE TABLE partitions (key TEXT PRIMARY KEY, sha256 TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(text, tokenize='porter unicode61 remove_diacritics 2');
"""


Ranking = Sequence[tuple[float, int]]
"""Score and ordinal, best first; a higher score is better."""


@dataclass(frozen=True)
class RankedRows:
    """Rows ranked by words or by vectors. rows: how many were compared.

    unread: why a partition could not be read, by its key.
    """

    ranked: Ranking
    rows: int
    unread: Mapping[str, str]


def find_words(
    settings: Settings,
    records: Mapping[str, PublishedRecord],
    text: str,
    *,
    mask: Mask | None = None,
    most: int,
    every: bool = False,
) -> RankedRows:
    """Bring the index of these descriptions up to date and find the rows that have words of the text.

    every: only rows that have all of its words. Words that most rows have are passed over in any case.
    Raises OSError if the index can be neither read nor written.
    """
    home = settings.descriptions.home
    with _locked(home):
        try:
            return _find(settings, records, text, mask, most, every)
        except sqlite3.DatabaseError:
            # It is damaged or of an earlier version, and can be built again.
            _remove(home)
        try:
            return _find(settings, records, text, mask, most, every)
        except sqlite3.DatabaseError as error:
            raise OSError(f"{home.word_index} cannot be written: {error}") from error


def forget_words(home: Home) -> None:
    """Remove the index: it may hold words of withdrawn properties. Raises OSError."""
    with _locked(home):
        _remove(home)


def words_of(description: Mapping[str, Any]) -> str:
    """The words of a description: its values, and the names of fields that are true or a number."""
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
    """Let one search at a time use the index: no other uses the journal of an index that is removed."""
    make_directory(home.word_index.parent)
    with locked(home.word_index.with_suffix(".lock")):
        yield


def _remove(home: Home) -> None:
    # The index first: without its journal, a torn index could be taken for a whole one.
    for suffix in ("", "-journal", "-wal", "-shm"):
        Path(f"{home.word_index}{suffix}").unlink(missing_ok=True)


def _find(
    settings: Settings,
    records: Mapping[str, PublishedRecord],
    text: str,
    mask: Mask | None,
    most: int,
    every: bool,
) -> RankedRows:
    index = settings.descriptions.home.word_index
    with contextlib.closing(sqlite3.connect(index, isolation_level=None)) as connection:
        index.chmod(0o600)
        if connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("of another version")
            connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={_FORMAT}; COMMIT")
        unread = _follow(connection, settings, records)
        rows = connection.execute("SELECT count(*) FROM words_docsize").fetchone()[0]
        return RankedRows(tuple(_ranked(connection, text, rows, mask, most, every)), rows, unread)


def _follow(
    connection: sqlite3.Connection, settings: Settings, records: Mapping[str, PublishedRecord]
) -> dict[str, str]:
    """Bring the index up to date. Returns why a partition cannot be read, by its key."""
    guarantee = Guarantee.read(settings)
    # The column has the digests of the files, and of the thresholds below which their answers have no words.
    versions, unread = dict[str, str](), dict[str, str]()
    for key, record in records.items():
        try:
            versions[key] = shown_version(settings, guarantee, record, further_records(settings, key))
        except RecordDamagedError as error:
            unread[key] = str(error)
    indexed = dict(connection.execute("SELECT key, sha256 FROM partitions"))
    removed = [key for key in indexed if key not in versions]
    changed = [key for key, version in versions.items() if indexed.get(key) != version]
    work = [*removed, *changed]
    for start in range(0, len(work), _PARTITIONS_TOGETHER):
        if len(work) > _PARTITIONS_TOGETHER:
            doing("reading words of partitions", start, len(work))
        connection.execute("BEGIN IMMEDIATE")
        for key in work[start : start + _PARTITIONS_TOGETHER]:
            if key in indexed:
                bounds = PropertyRange.from_key(key)
                connection.execute(
                    "DELETE FROM words WHERE rowid >= ? AND rowid < ?", (bounds.start, bounds.stop)
                )
                connection.execute("DELETE FROM partitions WHERE key = ?", (key,))
            if key not in versions:
                continue
            try:
                # Read all rows before the first is written: the index has a whole partition or nothing of it.
                rows = list(_rows(settings, guarantee, key))
            except (PublishedError, OSError, pa.ArrowException) as error:
                unread[key] = str(error)
                continue
            connection.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", rows)
            connection.execute("INSERT INTO partitions VALUES (?, ?)", (key, versions[key]))
        connection.execute("COMMIT")
    return unread


def _rows(settings: Settings, guarantee: Guarantee, key: str) -> Iterator[tuple[int, str]]:
    names = ("ordinal", "description")
    rows = read_rows(settings, guarantee, key, names)
    for ordinal, description in zip(*(rows[name].to_pylist() for name in names), strict=True):
        if description is not None:
            yield ordinal, words_of(description)


def _ranked(
    connection: sqlite3.Connection, text: str, rows: int, mask: Mask | None, most: int, every: bool
) -> Iterator[tuple[float, int]]:
    words = [word for word in dict.fromkeys(re.findall(r"\w+", text.lower())) if word not in _EMPTY]
    counts = {
        term: _count(connection, term, rows) for term in (_TERMS.get(word, f'"{word}"') for word in words)
    }
    if not every:
        unknown = [word for word in words if counts.get(f'"{word}"') == 0]
        for word in unknown:
            for term in _parts(word, is_alone=len(unknown) == len(words)):
                if count := _count(connection, term, rows):
                    counts[term] = count
                    break
    terms = [term for term, count in counts.items() if 0 < count <= rows * _COMMON]
    if not terms or (every and not all(counts.values())):
        return
    connection.create_function("chosen", 1, lambda ordinal: mask is None or bool(mask[ordinal]))
    condition = "" if mask is None else "AND chosen(rowid)"
    query = f"SELECT -rank, rowid FROM words WHERE words MATCH ? {condition} ORDER BY rank LIMIT ?"  # noqa: S608 - the condition is one of two constants
    yield from connection.execute(query, ((" AND " if every else " OR ").join(terms), most))


def _parts(word: str, *, is_alone: bool) -> Iterator[str]:
    """What to look for instead of a word that no row has: words that it begins, and its longest part.

    is_alone: no other word of the request is known. Then a part says too little: a greenhouse is no house.
    """
    if not word.isalpha() or len(word) < _LEAST_PART:
        return
    yield f'"{word}" *'
    for length in () if is_alone else range(len(word) - 1, _LEAST_PART - 1, -1):
        yield f'"{word[:length]}"'
        yield f'"{word[-length:]}"'


def _count(connection: sqlite3.Connection, term: str, rows: int) -> int:
    """The number of rows with a word. Counting ends when there are too many."""
    query = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
    return int(connection.execute(query, (term, int(rows * _COMMON) + 1)).fetchone()[0])

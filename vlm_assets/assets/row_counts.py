"""Count the rows of files against the expected ids: every id once, with a status, and no other.

A materialization counts its staged file (``checks.py``), the audit of all published files at once
(``vlm_assets/services/home_audit.py``). Ids are compared as sets and never as positions. DuckDB does it,
memory bounded. What does not live here: whether a file is what was published (``partition_state.py``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS

if TYPE_CHECKING:
    import duckdb

MEMORY = "1GB"
"""What DuckDB may hold at a time; the rest it keeps in a temporary folder."""

_FILES_TOGETHER = 256
"""Files that DuckDB reads at a time."""

FIRST = 5
"""How many offending ids a partition names."""

COLUMNS: Mapping[str, pa.DataType] = {
    "property_id": pa.string(),
    "ordinal": pa.int64(),
    "status": pa.string(),
    "fingerprint": pa.string(),
}


@dataclass(frozen=True)
class RowsFile:
    """A file of one partition of one asset. fingerprint: the one that its rows must carry; None: any."""

    asset: str
    key: str
    path: Path
    fingerprint: str | None = None


@dataclass(frozen=True)
class RowCounts:
    """The rows of one partition: rows = expected - not_yet - missing + foreign + duplicate, always.

    expected: ids of the catalogue. not_yet: those of a partition that is not published. missing and
    foreign: distinct ids. duplicate: rows beyond the first of their id. unsettled: rows neither ok nor
    failed nor not asked. misnumbered: expected ids with another ordinal than the catalogue's. mixed: rows of
    another fingerprint than the record's. unlike: ids whose embeddings do not match their descriptions.
    """

    expected: int = 0
    rows: int = 0
    ok: int = 0
    failed: int = 0
    not_asked: int = 0
    missing: int = 0
    duplicate: int = 0
    foreign: int = 0
    not_yet: int = 0
    unsettled: int = 0
    misnumbered: int = 0
    mixed: int = 0
    unlike: int = 0
    first_ids: tuple[str, ...] = ()

    @property
    def conserved(self) -> bool:
        """Whether the file has every expected id once, ok, failed or not asked, and no other id."""
        return not (self.missing or self.duplicate or self.foreign or self.unsettled or self.misnumbered)

    def __add__(self, other: RowCounts) -> RowCounts:
        names = (name for name in self.__dataclass_fields__ if name != "first_ids")
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass
class Counted:
    """Counts by asset and key, and the files whose rows cannot be counted, with the reason."""

    counts: dict[tuple[str, str], RowCounts] = field(default_factory=dict)
    uncounted: dict[tuple[str, str], str] = field(default_factory=dict)


def count_rows(
    expected: Iterable[pa.Table],
    files: Sequence[RowsFile],
    *,
    vectors: bool = True,
    advance: Callable[[int, int], None] = lambda done, files: None,
) -> Counted:
    """Count the rows of all these files.

    expected: the ids of their partitions, as key, ordinal (null: any) and property_id. Of a partition with
    files of both assets, the embeddings must match the descriptions. vectors: compare vectors with statuses
    too. advance: called with how many of the files were read.
    """
    counted = Counted()
    with _database() as connection:
        connection.execute("CREATE TABLE expected(key VARCHAR, ordinal BIGINT, property_id VARCHAR)")
        for batch in expected:
            connection.register("batch", batch)
            connection.execute("INSERT INTO expected SELECT * FROM batch")
        connection.execute(
            "CREATE TABLE actual(asset VARCHAR, key VARCHAR, property_id VARCHAR, ordinal BIGINT,"
            " status VARCHAR, mixed BOOLEAN, vector BOOLEAN)"
        )
        connection.execute(
            "CREATE TABLE files(asset VARCHAR, key VARCHAR, path VARCHAR, fingerprint VARCHAR)"
        )
        done = 0
        for asset in dict.fromkeys(file.asset for file in files):
            of_asset = [file for file in files if file.asset == asset]
            for start in range(0, len(of_asset), _FILES_TOGETHER):
                group = of_asset[start : start + _FILES_TOGETHER]
                advance(done, len(files))
                _load(connection, group, counted, vectors=vectors and asset == EMBEDDINGS)
                done += len(group)
        unlike = _unlike(connection)
        for asset, key, *numbers, first_ids in connection.execute(_CONSERVATION).fetchall():
            differing, first = unlike.get((asset, key), (0, ()))
            counts = RowCounts(*numbers)
            counted.counts[asset, key] = replace(
                counts, unlike=differing, first_ids=(*first_ids, *first)[:FIRST]
            )
    return counted


_CONSERVATION = f"""
    WITH ids AS (
        SELECT asset, key, property_id, count(*) AS n,
            count(*) FILTER (status = 'ok') AS ok,
            count(*) FILTER (status = 'failed') AS failed,
            count(*) FILTER (status = 'not_asked') AS not_asked,
            min(ordinal) AS lowest, max(ordinal) AS highest, count(ordinal) AS numbered,
            count(*) FILTER (mixed) AS mixed
        FROM actual GROUP BY ALL
    ), listed AS (
        SELECT files.asset, expected.* FROM expected JOIN files USING (key)
    ), both_sides AS (
        SELECT coalesce(l.asset, i.asset) AS asset, coalesce(l.key, i.key) AS key,
            coalesce(l.property_id, i.property_id, '(no id)') AS property_id,
            l.key IS NOT NULL AS is_expected, i.key IS NOT NULL AS is_present,
            coalesce(n, 0) AS n, coalesce(ok, 0) AS ok, coalesce(failed, 0) AS failed,
            coalesce(not_asked, 0) AS not_asked, coalesce(i.ok + i.failed + i.not_asked, 0) AS settled,
            coalesce(mixed, 0) AS mixed,
            is_expected AND is_present
                AND (numbered < n OR lowest <> l.ordinal OR highest <> l.ordinal) AS misnumbered
        FROM listed l FULL JOIN ids i
            ON l.asset = i.asset AND l.key = i.key AND l.property_id = i.property_id
    )
    SELECT asset, key,
        count(*) FILTER (is_expected), sum(n)::BIGINT, sum(ok)::BIGINT, sum(failed)::BIGINT,
        sum(not_asked)::BIGINT,
        count(*) FILTER (NOT is_present), sum(greatest(n - 1, 0))::BIGINT, count(*) FILTER (NOT is_expected),
        0, sum(n - settled)::BIGINT, count(*) FILTER (misnumbered), sum(mixed)::BIGINT,
        coalesce(min(property_id, {FIRST}) FILTER (
            NOT is_present OR NOT is_expected OR n > 1 OR n > settled OR misnumbered OR mixed > 0), [])
    FROM both_sides GROUP BY asset, key
"""  # noqa: S608 - built of our own constants


@contextmanager
def _database() -> Iterator[duckdb.DuckDBPyConnection]:
    import duckdb  # Not where definitions load: they import this module too.

    with (
        tempfile.TemporaryDirectory(prefix="vlm-assets-rows-") as overflow,
        duckdb.connect(
            config={"memory_limit": MEMORY, "temp_directory": overflow, "preserve_insertion_order": False}
        ) as connection,
    ):
        yield connection


def _load(
    connection: duckdb.DuckDBPyConnection, files: Sequence[RowsFile], counted: Counted, *, vectors: bool
) -> None:
    """Load the rows of these files; a file that cannot be read is left out and named in ``uncounted``."""
    import duckdb

    columns = {**COLUMNS, "embedding": None} if vectors else COLUMNS
    readable = []
    for file in files:
        if (reason := _lacking(file.path, columns)) is None:
            readable.append(file)
        else:
            counted.uncounted[file.asset, file.key] = reason
    vector = "embedding IS NOT NULL" if vectors else "NULL"
    query = f"""
        INSERT INTO actual
        SELECT f.asset, f.key, property_id, ordinal, status,
            f.fingerprint IS NOT NULL AND r.fingerprint IS DISTINCT FROM f.fingerprint, {vector}
        FROM read_parquet($paths, union_by_name=true, filename=true, hive_partitioning=false) r
        JOIN batch f ON r.filename = f.path
    """  # noqa: S608 - built of our own constants

    def take_in(group: Sequence[RowsFile]) -> None:
        """Take it in within one transaction: all of it or nothing."""
        connection.begin()
        try:
            rows = [(file.asset, file.key, str(file.path), file.fingerprint) for file in group]
            columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
            names = ["asset", "key", "path", "fingerprint"]
            connection.register("batch", pa.table(columns, names=names))
            connection.execute("INSERT INTO files SELECT * FROM batch")
            connection.execute(query, {"paths": [str(file.path) for file in group]})
            connection.commit()
        except duckdb.Error:
            connection.rollback()
            raise

    try:
        if readable:
            take_in(readable)
    except duckdb.Error:
        for file in readable:
            try:
                take_in([file])
            except duckdb.Error as error:
                counted.uncounted[file.asset, file.key] = str(error).splitlines()[0]


def _lacking(path: Path, columns: Mapping[str, pa.DataType | None]) -> str | None:
    """Why the columns of a file cannot be counted, or None."""
    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        return str(error).splitlines()[0]
    for name, type_ in columns.items():
        if name not in schema.names:
            return f"column {name} is not there"
        if type_ is not None and schema.field(name).type != type_:
            return f"column {name} is {schema.field(name).type} where {type_} belongs"
    return None


def _unlike(connection: duckdb.DuckDBPyConnection) -> dict[tuple[str, str], tuple[int, tuple[str, ...]]]:
    """How many ids differ from the descriptions, by embeddings partition, if the files of both were read."""
    differing = connection.execute(
        f"""
        WITH both_read AS (
            SELECT d.key FROM files d JOIN files e USING (key)
            WHERE d.asset = $descriptions AND e.asset = $embeddings
        ), described AS (
            SELECT * FROM actual SEMI JOIN both_read USING (key) WHERE asset = $descriptions
        ), embedded AS (
            SELECT * FROM actual SEMI JOIN both_read USING (key) WHERE asset = $embeddings
        )
        SELECT coalesce(d.key, e.key), count(DISTINCT coalesce(d.property_id, e.property_id, '(no id)')),
            min(coalesce(d.property_id, e.property_id, '(no id)'), {FIRST})
        FROM described d FULL JOIN embedded e ON d.key = e.key AND d.property_id = e.property_id
            AND d.ordinal = e.ordinal AND d.status = e.status
        WHERE d.key IS NULL OR e.key IS NULL OR (e.status = 'ok') <> e.vector
        GROUP BY 1
        """,  # noqa: S608 - built of our own constants
        {"descriptions": DESCRIPTIONS, "embeddings": EMBEDDINGS},
    ).fetchall()
    return {(EMBEDDINGS, key): (count, tuple(dict.fromkeys(first))) for key, count, first in differing}

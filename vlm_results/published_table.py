"""The published rows: read with their vectors, and as a table for a person's SQL, fields as columns.

The SQL runs where only these rows can be read, no file can be written, and no network can be reached.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory, gettempdir
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import typer

from vlm_assets.assets.fingerprint import TEXTS, digest_of
from vlm_assets.assets.partition import CONFIDENCE, INPUTS
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.settings import Settings
from vlm_assets.config.where import quoted
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.versions.partition_files import NotPublishedError, PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_engine.schema import confidence_type
from vlm_results.guarantee import RAW, Guarantee, promised_shares, shown_rows
from vlm_results.joined_rows import (
    SET_COLUMNS,
    SETS,
    FurtherRows,
    beside,
    columns_of,
    further_records,
    further_sets,
    joined,
    set_facts,
)

if TYPE_CHECKING:
    import duckdb

NAME = "properties"
"""The view that a person's SQL may name."""

MEMORY = "1GB"

SECONDS = 120.0
"""A person's condition over all rows is ended after this time."""

Where = Annotated[
    str | None,
    typer.Option(
        metavar="SQL",
        help='Only properties for which this holds, such as "floors <= 2" or "confidence.has_pool > 0.9".'
        f" Ended after {SECONDS:g} s.",
    ),
]

_COLUMNS = ("property_id", "ordinal", "status", "error_kind", "error", "images_seen", "model", "fingerprint")
"""Columns of a row that conditions may name, beside the fields of the description."""

_VIEW = (*_COLUMNS, "description", CONFIDENCE, SETS, RAW)

_ATTEMPTS = 3

Mask = npt.NDArray[np.bool_]


def published_records(asset: AssetFolders, catalog: Catalog) -> dict[str, PublishedRecord]:
    """The records of the catalogue's partitions that are published, in the catalogue's order.

    Raises RecordDamagedError, which says what to do: a record that cannot be read is not a missing record.
    """
    records, unread = readable_records(asset, catalog)
    if unread:
        raise RecordDamagedError(next(iter(unread.values())))
    return records


def readable_records(
    asset: AssetFolders, catalog: Catalog
) -> tuple[dict[str, PublishedRecord], dict[str, str]]:
    """The records that can be read, in the catalogue's order; and for each that cannot, what to do."""
    published = PublishedPartitions(asset)
    keys = set(published.keys())
    records, unread = {}, {}
    for key in (catalog_range.key for catalog_range in catalog.ranges):
        if key not in keys:
            continue
        try:
            record = published.record(key)
        except RecordDamagedError as error:
            unread[key] = f"{error} {command('repair')} puts it right."
            continue
        if record is not None:
            records[key] = record
    return records, unread


def last_publication(assets: Iterable[AssetFolders]) -> float:
    """When a file of these assets was last published, new or in place of another; 0 if none is."""
    published = (asset.published for asset in assets if asset.published_keys())
    return max((folder.stat().st_mtime for folder in published), default=0.0)


def lacking_rows(settings: Settings, catalog: Catalog, rows: Mapping[str, int]) -> dict[str, int]:
    """How many properties have no row of each further set. rows: those of each partition, by its key.

    A set's partition is published whole. Raises RecordDamagedError.
    """
    return {
        asked.name: sum(rows[key] for key in rows.keys() - published_records(asked.asset, catalog).keys())
        for asked in further_sets(settings)
    }


def are_vectors_of(vectors: PublishedRecord, described: PublishedRecord) -> bool:
    """Whether vectors were made from the texts that these descriptions have."""
    made_from = vectors.metadata.get("parts", {}).get(TEXTS)
    return made_from is None or made_from == described.metadata.get(TEXTS)


@dataclass(frozen=True)
class DescribedRows:
    """A partition as it was published at one moment. vectors: None if there are none of these descriptions.

    rows: of the descriptions alone, as they are shown. vectors: ``ordinal``, ``embedding`` and ``model``.
    further: the rows of further question sets beside these.
    """

    rows: pa.Table
    vectors: pa.Table | None
    described: PublishedRecord
    embedded: PublishedRecord | None
    further: tuple[FurtherRows, ...] = ()

    @property
    def further_records(self) -> dict[str, PublishedRecord]:
        """What further sets have published of the partition, by their names."""
        return {of_set.name: of_set.record for of_set in self.further if of_set.record is not None}


def read_rows(
    settings: Settings,
    guarantee: Guarantee,
    key: str,
    columns: Sequence[str],
    *,
    ordinals: pa.Array | None = None,
) -> pa.Table:
    """Read rows of a partition as they are shown, with the fields of all question sets.

    Everything that shows answers to others reads them here. columns: those that the file has are read. With a
    guarantee and a description, RAW is one more column. ordinals: of the rows, all unless given. Raises
    PublishedError.
    """
    rows, further = read_sets(settings, guarantee, key, columns, ordinals=ordinals)
    facts = set_facts(rows, further) if further and SETS in columns else None
    rows = joined(rows, further)
    if facts is not None:
        rows = rows.append_column(SETS, facts)
    return rows.select([name for name in rows.column_names if name in columns or name == RAW])


def read_sets(
    settings: Settings,
    guarantee: Guarantee,
    key: str,
    columns: Sequence[str],
    *,
    ordinals: pa.Array | None = None,
) -> tuple[pa.Table, tuple[FurtherRows, ...]]:
    """The rows of the descriptions, and those of the further sets beside them. Raises PublishedError."""
    # The settings would make other folders of the descriptions each time, and each reads the catalogue's id.
    descriptions, *sets = question_sets(settings)
    needed = {"property_id", "ordinal"} if sets else set[str]()
    if any(asked.fills for asked in sets):
        needed.add("description")
    columns = [*columns, *sorted(needed - set(columns))]
    _, rows = _read_set(descriptions.asset, guarantee, key, columns, ordinals)
    further = []
    for asked in sets:
        of_set = dict.fromkeys([*columns, *(SET_COLUMNS if SETS in columns else ())])
        try:
            record, answered = _read_set(asked.asset, guarantee, key, [*of_set], ordinals)
        except NotPublishedError:
            schema = columns_of(asked)
            none = schema.empty_table().select([name for name in of_set if name in schema.names])
            record, answered = None, shown_rows(none, guarantee.thresholds_for(None))
        further.append(FurtherRows(asked.name, record, beside(rows, answered), asked.fills))
    return rows, tuple(further)


def _read_set(
    asset: AssetFolders, guarantee: Guarantee, key: str, columns: Sequence[str], ordinals: pa.Array | None
) -> tuple[PublishedRecord, pa.Table]:
    """The rows of one set as they are shown, and the record of their file. Raises PublishedError."""
    read = dict.fromkeys((*columns, *((CONFIDENCE,) if guarantee.targets else ())))
    # The thresholds are those of these rows, not those of rows that were published before.
    record, rows = read_recorded(asset, key, list(read))
    if ordinals is not None:
        rows = rows.filter(pc.is_in(rows["ordinal"], value_set=ordinals))
    rows = shown_rows(rows, guarantee.thresholds_for(record))
    return record, rows.select([name for name in rows.column_names if name in columns or name == RAW])


def read_recorded(asset: AssetFolders, key: str, columns: Sequence[str]) -> tuple[PublishedRecord, pa.Table]:
    """The rows of a partition's file, and the record of the version that they are of.

    columns: those that the file has are read. Raises PublishedError, OSError, and CommandError where a run
    publishes the partition again each time that it is read.
    """
    published = PublishedPartitions(asset)
    for _ in range(_ATTEMPTS):
        file = published.read(key)
        rows = file.to_table(list(columns))
        if file.record is not None and published.record(key) == file.record:
            return file.record, rows
    raise _changes_all_the_time(key)


def read_described(settings: Settings, key: str, columns: Sequence[str]) -> DescribedRows:
    """Read a partition's descriptions, their vectors and the rows of further sets, all of one moment.

    Raises PublishedError.
    """
    guarantee = Guarantee.read(settings)
    described, embedded = PublishedPartitions(settings.descriptions), PublishedPartitions(settings.embeddings)
    for _ in range(_ATTEMPTS):
        record, vectors_record = described.record(key), embedded.record(key)
        further_before = further_records(settings, key)
        rows, further = read_sets(settings, guarantee, key, columns)
        vectors = (
            None if vectors_record is None else embedded.read(key).to_table(["ordinal", "embedding", "model"])
        )
        # A partition that was published again meanwhile is read again.
        if (described.record(key), embedded.record(key)) != (record, vectors_record):
            continue
        if further_records(settings, key) == further_before:
            break
    else:
        raise _changes_all_the_time(key)
    assert record is not None
    if vectors_record is not None and not are_vectors_of(vectors_record, record):
        vectors = None  # They were made from other texts than those of these rows.
    return DescribedRows(rows.combine_chunks(), vectors, record, vectors_record, further)


def _changes_all_the_time(key: str) -> CommandError:
    return CommandError(f"Partition {key} changes all the time. Do it again when its runs are over.")


def answer_digest(row: Mapping[str, Any]) -> str:
    """A digest of what was answered for a property, and of what decided it. row: with INPUTS.

    Of the raw answer where the row has it: what is shown of it may change.
    """
    # The inputs too: a new model gives some answers like the last. If verdicts counted for these alone, the
    # accuracy would leave out its other answers.
    return digest_of([row[INPUTS], row[RAW] if RAW in row else row["description"]])


def field_confidences(column: pa.ChunkedArray, name: str) -> npt.NDArray[np.float64]:
    """The confidences of a field, by its dotted name; NaN where there is none."""
    with contextlib.suppress(pa.ArrowException):  # It has no such field.
        sure = pc.struct_field(column, name.split("."))
        if pa.types.is_floating(sure.type):
            return np.asarray(pc.fill_null(sure.cast(pa.float64()), np.nan), np.float64)
    return np.full(len(column), np.nan)


def matching_rows(settings: Settings, catalog: Catalog, where: str) -> Mask:
    """Whether the condition holds for the published row of each ordinal.

    Raises CommandError.
    """
    import duckdb

    keys = published_records(settings.descriptions, catalog)
    if not keys:
        raise CommandError(f"No description is published yet: {command('run')}.")
    doing(f"looking for which properties --where holds, {SECONDS:g} s at most")
    mask = np.zeros(catalog.rows, dtype=np.bool_)
    query = f"SELECT ordinal FROM {NAME} WHERE ({where}\n)"  # noqa: S608 - see table
    try:
        with table(settings, keys, _columns_in(where)) as connection:
            try:
                statements = connection.extract_statements(query)
                if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                    raise CommandError(
                        f"{where!r} is no condition: give what stands after WHERE, and only that."
                    )
                ordinals = connection.execute(statements[0]).fetchnumpy()["ordinal"]
            except (duckdb.InterruptException, duckdb.OperationalError):
                raise  # No other columns would help.
            except duckdb.Error as error:
                described = [row[0] for row in connection.execute(f"DESCRIBE {NAME}").fetchall()]
                names = dict.fromkeys([*_COLUMNS, *described, *([SETS] if further_sets(settings) else [])])
                raise CommandError(
                    f"--where {where!r}: {str(error).splitlines()[0]}. Columns: {', '.join(names)}."
                ) from error
    except duckdb.InterruptException as error:
        raise CommandError(
            f"--where {where!r} was ended after {SECONDS:g} s. Nothing was changed. Give a simpler condition."
        ) from error
    except duckdb.Error as error:
        raise CommandError(
            f"--where {where!r}: {str(error).splitlines()[0]}. Nothing was changed. Rows beyond {MEMORY} are"
            f" put into {gettempdir()}: if it is full, free space there, or set TMPDIR to a larger folder."
        ) from error
    ordinals = np.ma.compressed(np.ma.asarray(ordinals)).astype(np.int64)
    mask[ordinals[(ordinals >= 0) & (ordinals < catalog.rows)]] = True
    return mask


def _columns_in(where: str) -> tuple[str, ...]:
    """The columns that a condition may look at."""
    # These mean columns without their names: all of them, the one at a place, a row.
    if re.search(rf"[*#]|columns|{NAME}", where, re.IGNORECASE):
        return _VIEW
    return tuple(name for name in _VIEW if name in ("ordinal", "description") or name in where.lower())


@contextmanager
def table(
    settings: Settings, keys: Iterable[str], columns: Sequence[str] = _VIEW
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the view of these partitions' rows as they are shown, and access to nothing else.

    columns: more than these are not read where rows have to be joined. Run only one SELECT on it: a COPY
    could write to the files that it may read. After SECONDS, reading and the SELECT raise InterruptException.
    Raises PublishedError.
    """
    import duckdb

    ends = monotonic() + SECONDS
    files: list[str] = []
    config: dict[str, Any] = {"memory_limit": MEMORY, "preserve_insertion_order": False}
    with (
        # Millions of rows have more than its memory. DuckDB would put the rest beside the caller.
        TemporaryDirectory(prefix="vlm-assets-where-") as folder,
        duckdb.connect(config={**config, "temp_directory": folder}) as connection,
        _interrupted_at(ends, connection),
    ):
        if promised_shares(settings)[0] or further_sets(settings):
            rows = _copied(connection, settings, keys, columns, ends)
        else:
            # The files are what is shown: DuckDB reads of them what a condition needs, four times as fast.
            files = [quoted(str(settings.descriptions.partition(key).published), "'") for key in keys]
            rows = f"FROM read_parquet([{', '.join(files)}], union_by_name=true, hive_partitioning=false)"
        schema = connection.sql(f"SELECT * FROM ({rows}) LIMIT 0").to_arrow_table().schema  # noqa: S608
        connection.execute(
            f"CREATE VIEW {NAME} AS SELECT {_view_columns(schema)} FROM ({rows})"  # noqa: S608 - names quoted
        )
        connection.execute(f"SET allowed_paths=[{', '.join(files)}]")
        connection.execute("SET enable_external_access=false")
        connection.execute("SET lock_configuration=true")
        yield connection


@contextmanager
def _interrupted_at(ends: float, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Interrupt what the connection does from this moment of the monotonic clock on."""
    closing = threading.Event()

    def interrupt() -> None:
        while not closing.wait(0.1):
            if monotonic() >= ends:
                connection.interrupt()  # Again and again: it ends only SQL that has begun.

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


def _copied(
    connection: duckdb.DuckDBPyConnection,
    settings: Settings,
    keys: Iterable[str],
    columns: Sequence[str],
    ends: float,
) -> str:
    """Copy rows into tables of the connection, one for each schema. Gives the SQL that reads all of them.

    ends: when to give up, by the monotonic clock. Raises InterruptException.
    """
    import duckdb

    guarantee = Guarantee.read(settings)
    tables: dict[pa.Schema, str] = {}
    # A transaction for each partition takes twice the time, and threads have nothing to share of its rows.
    connection.execute("SET threads=1")
    connection.begin()
    for key in keys:
        if monotonic() >= ends:
            raise duckdb.InterruptException  # Reading files is no SQL, which could be interrupted.
        rows = read_rows(settings, guarantee, key, columns)
        rows = rows.select([name for name in rows.column_names if name in columns])
        connection.register("partition", rows)
        name = tables.get(rows.schema)
        if name is None:
            name = tables[rows.schema] = f"rows_{len(tables)}"
            connection.execute(f"CREATE TABLE {name} AS FROM partition")
        else:
            connection.execute(f"INSERT INTO {name} FROM partition")
        connection.unregister("partition")
    connection.commit()
    connection.execute("RESET threads")
    return " UNION ALL BY NAME ".join(f"FROM {name}" for name in tables.values())


def _view_columns(rows: pa.Schema) -> str:
    """The columns of a row in the view, and each field of its description that has no column's name."""
    columns = {name: name for name in _VIEW if name in rows.names}
    if "description" in columns:
        description = rows.field("description").type
        # Where no file has the column it is null, and conditions may name it all the same.
        unknown = f"NULL::{_sql_type(confidence_type(description))} AS {CONFIDENCE}"
        columns.setdefault(CONFIDENCE, unknown)
        for name in (field.name for field in description):
            columns.setdefault(name, f"description.{quoted(name)} AS {quoted(name)}")
    return ", ".join(columns.values())


def _sql_type(kind: pa.DataType) -> str:
    """A struct of confidences as DuckDB has it."""
    if not pa.types.is_struct(kind):
        return "FLOAT"
    return f"STRUCT({', '.join(f'{quoted(field.name)} {_sql_type(field.type)}' for field in kind)})"

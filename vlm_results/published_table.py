"""The published rows: read with their vectors, and as a table for a person's SQL, fields as columns.

The SQL runs where only these files can be read, no file can be written, and no network can be reached.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from vlm_assets.assets.fingerprint import TEXTS, digest_of
from vlm_assets.assets.partition import CONFIDENCE, INPUTS
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_engine.schema import confidence_type
from vlm_results.guarantee import (
    RAW,
    Guarantee,
    Thresholds,
    limits_by_file,
    quoted,
    shown_description,
    shown_rows,
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


def are_vectors_of(vectors: PublishedRecord, described: PublishedRecord) -> bool:
    """Whether vectors were made from the texts that these descriptions have."""
    made_from = vectors.metadata.get("parts", {}).get(TEXTS)
    return made_from is None or made_from == described.metadata.get(TEXTS)


@dataclass(frozen=True)
class DescribedRows:
    """A partition as it was published at one moment. vectors: None if there are none of these descriptions.

    rows: as ``read_rows`` gives them. vectors: ``ordinal``, ``embedding`` and ``model``.
    """

    rows: pa.Table
    vectors: pa.Table | None
    described: PublishedRecord
    embedded: PublishedRecord | None


def read_rows(
    settings: Settings,
    guarantee: Guarantee,
    key: str,
    columns: Sequence[str],
    *,
    ordinals: pa.Array | None = None,
) -> pa.Table:
    """Read rows of a partition as they are shown. Everything that shows answers to others reads them here.

    columns: those that the file has are read. With a guarantee and a description, RAW is one more column.
    ordinals: of the rows, all unless given. Raises PublishedError.
    """
    published = PublishedPartitions(settings.descriptions)
    read = dict.fromkeys((*columns, *((CONFIDENCE,) if guarantee.targets else ())))
    for _ in range(_ATTEMPTS):
        record = published.record(key) if guarantee.targets else None
        rows = published.read(key).to_table(list(read))
        # The thresholds are those of these rows, not those of rows that were published before.
        if not guarantee.targets or published.record(key) == record:
            break
    else:
        raise _changes_all_the_time(key)
    if ordinals is not None:
        rows = rows.filter(pc.is_in(rows["ordinal"], value_set=ordinals))
    rows = shown_rows(rows, guarantee.of(record))
    return rows.select([name for name in rows.column_names if name in columns or name == RAW])


def read_described(settings: Settings, key: str, columns: Sequence[str]) -> DescribedRows:
    """Read a partition's descriptions and their vectors, both of one moment. Raises PublishedError."""
    guarantee = Guarantee.read(settings)
    described, embedded = PublishedPartitions(settings.descriptions), PublishedPartitions(settings.embeddings)
    for _ in range(_ATTEMPTS):
        record, vectors_record = described.record(key), embedded.record(key)
        rows = read_rows(settings, guarantee, key, columns)
        vectors = (
            None if vectors_record is None else embedded.read(key).to_table(["ordinal", "embedding", "model"])
        )
        # A partition that was published again meanwhile is read again.
        if (described.record(key), embedded.record(key)) == (record, vectors_record):
            break
    else:
        raise _changes_all_the_time(key)
    assert record is not None
    if vectors_record is not None and not are_vectors_of(vectors_record, record):
        vectors = None  # They were made from other texts than those of these rows.
    return DescribedRows(rows.combine_chunks(), vectors, record, vectors_record)


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
    type_ = column.type
    for part in name.split("."):
        place = type_.get_field_index(part) if pa.types.is_struct(type_) else -1
        if place < 0:
            return np.full(len(column), np.nan)
        type_, column = type_[place].type, pc.struct_field(column, part)
    if not pa.types.is_floating(type_):
        return np.full(len(column), np.nan)
    return np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan), np.float64)


def matching_rows(settings: Settings, catalog: Catalog, where: str) -> Mask:
    """For each ordinal, whether the condition holds for its published row.

    Raises CommandError.
    """
    import duckdb

    keys = published_records(settings.descriptions, catalog)
    if not keys:
        raise CommandError(f"No description is published yet: {command('run')}.")
    guarantee = Guarantee.read(settings)
    paths = {
        settings.descriptions.partition(key).published: guarantee.of(record) for key, record in keys.items()
    }
    doing(f"looking for which properties --where holds, {SECONDS:g} s at most")
    mask = np.zeros(catalog.rows, dtype=np.bool_)
    with table(paths) as connection:
        query = f"SELECT ordinal FROM {NAME} WHERE ({where}\n)"  # noqa: S608 - see table
        try:
            statements = connection.extract_statements(query)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise CommandError(f"{where!r} is no condition: give what stands after WHERE, and only that.")
            timer = threading.Timer(SECONDS, connection.interrupt)
            timer.start()
            try:
                ordinals = connection.execute(statements[0]).fetchnumpy()["ordinal"]
            finally:
                timer.cancel()
                timer.join()
        except duckdb.InterruptException as error:
            raise CommandError(
                f"--where {where!r} was ended after {SECONDS:g} s. Nothing was changed."
                " Give a simpler condition."
            ) from error
        except duckdb.Error as error:
            names = [row[0] for row in connection.execute(f"DESCRIBE {NAME}").fetchall()]
            raise CommandError(
                f"--where {where!r}: {str(error).splitlines()[0]}. Columns: {', '.join(names)}."
            ) from error
    ordinals = np.ma.compressed(np.ma.asarray(ordinals)).astype(np.int64)
    mask[ordinals[(ordinals >= 0) & (ordinals < catalog.rows)]] = True
    return mask


@contextmanager
def table(files: Mapping[Path, Thresholds]) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the view over these files of descriptions, and access to nothing else.

    files: with the thresholds of the guarantee, below which an answer is null in the view.

    Run only one SELECT on it: a COPY could write to the files that it may read.
    """
    import duckdb

    columns, types = _view_columns(list(files))
    names = [str(path) for path in files]
    limits = limits_by_file({str(path): thresholds for path, thresholds in files.items()})
    rows = "SELECT *"
    if limits:
        rows = f"SELECT * REPLACE ({shown_description(limits, types)} AS description), description AS {RAW}"
        columns += f", {RAW}"
    with duckdb.connect(config={"memory_limit": MEMORY, "preserve_insertion_order": False}) as connection:
        listed = ", ".join(quoted(name, "'") for name in names)
        connection.execute(
            f"CREATE VIEW {NAME} AS SELECT {columns} FROM ({rows}"  # noqa: S608 - names quoted
            f" FROM read_parquet([{listed}], union_by_name=true, hive_partitioning=false, filename=true))"
        )
        connection.execute(f"SET allowed_paths=[{listed}]")
        connection.execute("SET enable_external_access=false")
        connection.execute("SET lock_configuration=true")
        yield connection


def _view_columns(paths: list[Path]) -> tuple[str, dict[str, pa.StructType]]:
    """The row's own columns, description and confidence, and each field that has no column's name.

    With them the types of description and confidence, of all fields.
    """
    types: dict[str, pa.StructType] = {}
    for schema in map(pq.read_schema, paths):
        for name in ("description", CONFIDENCE):
            if name in schema.names:
                fields = {field.name: field for field in [*types.get(name, ()), *schema.field(name).type]}
                types[name] = pa.struct(list(fields.values()))
    last = set(pq.read_schema(paths[-1]).names)
    own = [name for name in _COLUMNS if name in last]
    taken = (*own, "description", CONFIDENCE)
    fields_shown = [field.name for field in types.get("description", ()) if field.name not in taken]
    nested = [f"description.{quoted(name)} AS {quoted(name)}" for name in fields_shown]
    described = []
    if "description" in types:
        # Where no file has the column it is null, and conditions may name it all the same.
        missing = f"NULL::{_sql_type(confidence_type(types['description']))} AS {CONFIDENCE}"
        described = ["description", CONFIDENCE if CONFIDENCE in types else missing]
    return ", ".join([*own, *described, *nested]), types


def _sql_type(kind: pa.DataType) -> str:
    """A struct of confidences as DuckDB has it."""
    if not pa.types.is_struct(kind):
        return "FLOAT"
    return f"STRUCT({', '.join(f'{quoted(field.name)} {_sql_type(field.type)}' for field in kind)})"

"""The published rows: read with their vectors, and as a table for a person's SQL, fields as columns.

The SQL runs where only these files can be read, no file can be written, and no network can be reached.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from vlm_assets.assets.fingerprint import TEXTS, digest_of
from vlm_assets.assets.partition import CONFIDENCE, INPUTS
from vlm_assets.config.filled_fields import FieldSources, field_sources, in_sql, shown
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
from vlm_results.guarantee import (
    RAW,
    Guarantee,
    Thresholds,
    limits_by_file,
    shown_description,
    shown_rows,
)
from vlm_results.joined_rows import (
    FILLED,
    SET_COLUMNS,
    SETS,
    FurtherRows,
    beside,
    columns_of,
    further_records,
    further_sets,
    joined,
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
    rows = joined(rows, further)
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
    # Settings make other folders of the descriptions each time, and each reads the catalogue's id anew.
    descriptions, *sets = question_sets(settings)
    needed = {"property_id", "ordinal"} if sets else set[str]()
    if any(asked.fills for asked in sets):
        needed.add("description")
    columns = [*columns, *sorted(needed - set(columns))]
    _, rows = _read_set(descriptions.asset, guarantee, key, columns, ordinals)
    further = []
    for asked in sets:
        of_set = [*columns, *(name for name in SET_COLUMNS if name not in columns)]
        try:
            record, answered = _read_set(asked.asset, guarantee, key, of_set, ordinals)
        except NotPublishedError:
            schema = columns_of(asked)
            none = schema.empty_table().select([name for name in of_set if name in schema.names])
            record, answered = None, shown_rows(none, guarantee.of(None))
        further.append(FurtherRows(asked.name, record, beside(rows, answered), asked.fills))
    return rows, tuple(further)


def _read_set(
    asset: AssetFolders, guarantee: Guarantee, key: str, columns: Sequence[str], ordinals: pa.Array | None
) -> tuple[PublishedRecord | None, pa.Table]:
    """The rows of one set as they are shown, and the record of their file. Raises PublishedError."""
    published = PublishedPartitions(asset)
    read = dict.fromkeys((*columns, *((CONFIDENCE,) if guarantee.targets else ())))
    for _ in range(_ATTEMPTS):
        record = published.record(key) if guarantee.targets else None
        file = published.read(key)
        rows = file.to_table(list(read))
        # The thresholds are those of these rows, not those of rows that were published before.
        if not guarantee.targets or published.record(key) == record:
            break
    else:
        raise _changes_all_the_time(key)
    if ordinals is not None:
        rows = rows.filter(pc.is_in(rows["ordinal"], value_set=ordinals))
    rows = shown_rows(rows, guarantee.of(record))
    return file.record, rows.select([name for name in rows.column_names if name in columns or name == RAW])


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
    """For each ordinal, whether the condition holds for its published row.

    Raises CommandError.
    """
    import duckdb

    keys = published_records(settings.descriptions, catalog)
    if not keys:
        raise CommandError(f"No description is published yet: {command('run')}.")
    guarantee = Guarantee.read(settings)

    def files(asset: AssetFolders, records: Mapping[str, PublishedRecord]) -> dict[Path, Thresholds]:
        return {asset.partition(key).published: guarantee.of(record) for key, record in records.items()}

    further = [
        FurtherFiles(
            asked.name,
            files(asked.asset, published_records(asked.asset, catalog)),
            columns_of(asked),
            asked.fills,
        )
        for asked in further_sets(settings)
    ]
    doing(f"looking for which properties --where holds, {SECONDS:g} s at most")
    mask = np.zeros(catalog.rows, dtype=np.bool_)
    with table(files(settings.descriptions, keys), further) as connection:
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


@dataclass(frozen=True)
class FurtherFiles:
    """The files of a further question set, with their thresholds.

    columns: of its rows, by its schema. fills: see ``QuestionSet``.
    """

    name: str
    files: Mapping[Path, Thresholds]
    columns: pa.Schema
    fills: tuple[str, ...] = ()


@contextmanager
def table(
    files: Mapping[Path, Thresholds], further: Sequence[FurtherFiles] = ()
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the view over files of all question sets, and access to nothing else.

    files: of the descriptions, with the thresholds of the guarantee, below which an answer is null in the
    view.

    Run only one SELECT on it: a COPY could write to the files that it may read.
    """
    import duckdb

    sets = [FurtherFiles("descriptions", files, pa.schema([])), *further]
    descriptions, *_ = sources = [_Source.of(of_set) for of_set in sets]
    columns = _view_columns(descriptions, sources)
    listed = ", ".join(quoted(str(path), "'") for of in sets for path in of.files)
    config: dict[str, Any] = {"memory_limit": MEMORY, "preserve_insertion_order": False}
    with (
        # A join of millions of rows has more than its memory. DuckDB would put the rest beside the caller.
        TemporaryDirectory(prefix="vlm-assets-where-") as folder,
        duckdb.connect(config={**config, "temp_directory": folder}) as connection,
    ):
        for of_set in further:
            connection.register(f"nothing_of_{of_set.name}", of_set.columns.empty_table())
        rows = descriptions.rows if not further else _joined_rows(descriptions, sources)
        connection.execute(
            f"CREATE VIEW {NAME} AS SELECT {columns} FROM ({rows})"  # noqa: S608 - names quoted
        )
        connection.execute(f"SET allowed_paths=[{listed}]")
        connection.execute("SET enable_external_access=false")
        connection.execute("SET lock_configuration=true")
        yield connection


@dataclass(frozen=True)
class _Source:
    """Rows of a question set in SQL. names: of its columns, as the newest file has them.

    types: of description and confidence, with the fields of all files. is_limited: the raw answers are a
    column of their own. fills: see ``QuestionSet``.
    """

    name: str
    rows: str
    names: frozenset[str]
    types: Mapping[str, pa.StructType]
    is_limited: bool
    fills: tuple[str, ...] = ()

    @classmethod
    def of(cls, of_set: FurtherFiles) -> Self:
        """The rows of these files, as they are shown; without a file none, with the columns of its schema."""
        types = _answer_types(map(pq.read_schema, of_set.files) if of_set.files else [of_set.columns])
        last = pq.read_schema(list(of_set.files)[-1]) if of_set.files else of_set.columns
        limits = limits_by_file({str(path): thresholds for path, thresholds in of_set.files.items()})
        selected = "*" if of_set.files else f"*, description AS {RAW}"
        if limits:
            selected = f"* REPLACE ({shown_description(limits, types)} AS description), description AS {RAW}"
        listed = ", ".join(quoted(str(path), "'") for path in of_set.files)
        files = f"read_parquet([{listed}], union_by_name=true, hive_partitioning=false, filename=true)"
        rows = f"SELECT {selected} FROM {files if of_set.files else f'nothing_of_{of_set.name}'}"  # noqa: S608 - names quoted
        is_limited = bool(limits) or not of_set.files
        return cls(of_set.name, rows, frozenset(last.names), types, is_limited, of_set.fills)

    def column(self, name: str) -> str:
        """A column of its row in the joined rows, in SQL."""
        return f"{quoted(self.name)}.{name}"

    def has(self, field: str) -> str:
        """The condition in SQL that it has a raw answer."""
        return f"{self.column(RAW if self.is_limited else 'description')}.{quoted(field)} IS NOT NULL"

    def answer(self, name: str, field: str) -> str:
        """A field of its description or confidence in SQL; null where its files have no confidence of it."""
        if name == CONFIDENCE and self.types.get(CONFIDENCE, pa.struct([])).get_field_index(field) < 0:
            return f"NULL::{_sql_type(confidence_type(self.types['description']).field(field).type)}"
        return f"{self.column(name)}.{quoted(field)}"


def _answer_types(schemas: Iterable[pa.Schema]) -> dict[str, pa.StructType]:
    """The types of description and confidence, with the fields of all files."""
    types: dict[str, pa.StructType] = {}
    for schema in schemas:
        for name in ("description", CONFIDENCE):
            if name in schema.names:
                fields = {field.name: field for field in [*types.get(name, ()), *schema.field(name).type]}
                types[name] = pa.struct(list(fields.values()))
    return types


def _joined_rows(descriptions: _Source, sources: Sequence[_Source]) -> str:
    """The rows of the descriptions with the fields of all sources in SQL, as ``joined_rows.py`` has them."""
    own = [f"descriptions.{name}" for name in descriptions.names.intersection(_COLUMNS)]
    fields = field_sources((of.name, of.types.get("description", ()), of.fills) for of in sources)
    named = {of.name: of for of in sources}
    answers = ["description", CONFIDENCE, *([RAW] if descriptions.is_limited else [])]
    merged = [f"{_merged(name, named, fields)} AS {name}" for name in answers]
    fillers = {}
    for field, of_field in fields.items():
        has = ((named[name].has(field), f"'{name}'") for name in of_field.fillers)
        fillers[field] = shown("''", has, in_sql)
    facts = []
    for of in sources[1:]:
        columns = {name: of.column(name) for name in SET_COLUMNS}
        if of.fills:
            filled = [field for field in of.fills if field in fillers]
            names = ", ".join(quoted(field, "'") for field in filled)
            masks = ", ".join(f"{fillers[field]} = '{of.name}'" for field in filled)
            columns[FILLED] = f"list_where([{names}]::VARCHAR[], [{masks}]::BOOLEAN[])"
        packed = ", ".join(f"{name} := {value}" for name, value in columns.items())
        facts.append(
            f"{quoted(of.name)} := CASE WHEN {of.column('status')} IS NOT NULL THEN struct_pack({packed}) END"
        )
    joins = " ".join(
        f"LEFT JOIN ({of.rows}) AS {quoted(of.name)} ON {of.column('ordinal')} = descriptions.ordinal"
        f" AND {of.column('property_id')} = descriptions.property_id"
        for of in sources[1:]
    )
    selected = ", ".join([*own, *merged, f"struct_pack({', '.join(facts)}) AS {SETS}"])
    return f"SELECT {selected} FROM ({descriptions.rows}) AS descriptions {joins}"  # noqa: S608 - names quoted


def _merged(name: str, sources: Mapping[str, _Source], fields: Mapping[str, FieldSources]) -> str:
    """One struct of the fields of all sources in SQL; null where all are."""
    merged = []
    for field, of_field in fields.items():
        better = ((sources[of].has(field), sources[of].answer(name, field)) for of in of_field.fillers)
        value = shown(sources[of_field.first].answer(name, field), better, in_sql)
        merged.append(f"{quoted(field)} := {value}")
    has_any = " OR ".join(
        f"{of.column(name)} IS NOT NULL"
        for of in sources.values()
        if name != CONFIDENCE or CONFIDENCE in of.types
    )
    return f"CASE WHEN {has_any or 'false'} THEN struct_pack({', '.join(merged)}) END"


def _view_columns(descriptions: _Source, sources: Sequence[_Source]) -> str:
    """The row's own columns, description and confidence, and each field that has no column's name."""
    own = [name for name in _COLUMNS if name in descriptions.names]
    facts = [SETS] if len(sources) > 1 else []
    taken = (*own, "description", CONFIDENCE, *facts)
    names = dict.fromkeys(field.name for of in sources for field in of.types.get("description", ()))
    nested = [f"description.{quoted(name)} AS {quoted(name)}" for name in names if name not in taken]
    described = []
    if "description" in descriptions.types:
        # Where no file has the column it is null, and conditions may name it all the same.
        missing = f"NULL::{_sql_type(confidence_type(descriptions.types['description']))} AS {CONFIDENCE}"
        has_confidence = facts or CONFIDENCE in descriptions.types
        described = ["description", CONFIDENCE if has_confidence else missing]
    raw = [RAW] if descriptions.is_limited else []
    return ", ".join([*own, *described, *facts, *nested, *raw])


def _sql_type(kind: pa.DataType) -> str:
    """A struct of confidences as DuckDB has it."""
    if not pa.types.is_struct(kind):
        return "FLOAT"
    return f"STRUCT({', '.join(f'{quoted(field.name)} {_sql_type(field.type)}' for field in kind)})"

"""One view of all question sets: the rows of the first, which are the descriptions, with the fields of all.

A further set adds its fields to ``description`` and ``confidence`` where it has a row of the same property,
and else they are null. A field that it fills has its answer where it gives one, and else that of the sets
above it. ``published_table.py`` reads the rows, and has the same view for a person's SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from vlm_assets.assets.partition import CONFIDENCE
from vlm_assets.assets.property_descriptions import description_rows
from vlm_assets.config.question_sets import QuestionSet, question_sets
from vlm_assets.config.settings import Settings
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.wording import counted
from vlm_engine.schema import confidence_type, load_schema
from vlm_results.guarantee import RAW, Guarantee

SETS: Final = "sets"
"""The column with what is known of each further set's row beside its answer; absent where there is no set."""

SET_COLUMNS: Final = ("status", "error_kind", "error", "model", "model_revision", "described_at")
"""What SETS has of each further set; exported rows have the digest of its answer too."""

FILLED: Final = "filled"
"""What SETS has of a set that fills fields: the names of those that the row shows its answer of."""


def further_sets(settings: Settings) -> tuple[QuestionSet, ...]:
    """The question sets beside the descriptions, in the order of their file."""
    return question_sets(settings)[1:]


def columns_of(asked: QuestionSet) -> pa.Schema:
    """The columns of a set's rows, by its schema: those of partitions that it has not answered yet."""
    return description_rows(load_schema(asked.settings.description_schema).arrow_type)


def further_records(settings: Settings, key: str) -> dict[str, PublishedRecord]:
    """What further sets have published of a partition, by their names. Raises RecordDamagedError."""
    records = {asked.name: PublishedPartitions(asked.asset).record(key) for asked in further_sets(settings)}
    return {name: record for name, record in records.items() if record is not None}


def shown_version(
    settings: Settings,
    guarantee: Guarantee,
    described: PublishedRecord,
    further: Mapping[str, PublishedRecord],
) -> str:
    """What the shown rows of a partition are made from. A set without a row in it changes nothing."""
    fills = {asked.name: " ".join(asked.fills) for asked in further_sets(settings)}
    of_sets = (
        f" {name}:{record.sha256}{guarantee.version_of(record)}{fills[name]}"
        for name, record in sorted(further.items())
    )
    return "".join((described.sha256, guarantee.version_of(described), *of_sets))


@dataclass(frozen=True)
class FurtherRows:
    """A further set's rows, one for each row of the descriptions: null where the set has none.

    record: of the set's file; None: the partition has none. fills: see ``QuestionSet``.
    """

    name: str
    record: PublishedRecord | None
    rows: pa.Table
    fills: tuple[str, ...] = ()


def beside(descriptions: pa.Table, rows: pa.Table) -> pa.Table:
    """A set's rows in the order of the descriptions. Both with ``property_id`` and ``ordinal``.

    A row under another id is left out: while a withdrawal goes on, one of the two may have it still.
    """
    rows = rows.combine_chunks()
    at = pc.index_in(descriptions["ordinal"], value_set=_column(rows, "ordinal")).combine_chunks()
    is_same = pc.equal(descriptions["property_id"].combine_chunks(), _column(rows, "property_id").take(at))
    return rows.take(pc.if_else(is_same, at, pa.scalar(None, at.type)))


def filled(descriptions: pa.Table, further: Sequence[FurtherRows]) -> list[dict[str, pa.BooleanArray]]:
    """Of each further set: for each field that it fills, of which rows its answer is shown.

    The last set that has an answer gives it. What counts is the raw one: where a guarantee withholds the
    better answer, the worse one is not shown in its place.
    """
    shown: list[dict[str, pa.BooleanArray]] = [{} for _ in further]
    taken: dict[str, pa.BooleanArray] = {}
    types = _types([descriptions, *(of.rows for of in further)])
    for number in reversed(range(len(further))):
        of = further[number]
        for field in of.fills:
            answers = _column(of.rows, RAW if _has(of.rows, RAW) else "description")
            if is_fillable(types.get(field), answers.type, field):
                has = pc.struct_field(answers, field).is_valid()
                before = taken.get(field)
                shown[number][field] = has if before is None else pc.and_not(has, before)
                taken[field] = has if before is None else pc.or_(has, before)
    return shown


def is_fillable(type_: pa.DataType | None, answers: pa.StructType, field: str) -> bool:
    """Whether these answers may stand in a column of this type; files of earlier schemas may have another."""
    at = answers.get_field_index(field)
    return at >= 0 and bool(answers[at].type == type_)


def _types(tables: Iterable[pa.Table]) -> dict[str, pa.DataType]:
    """The type of each field of the descriptions, in the first of the tables that has it."""
    types: dict[str, pa.DataType] = {}
    for table in tables:
        for field in table.schema.field("description").type if _has(table, "description") else ():
            types.setdefault(field.name, field.type)
    return types


def joined(descriptions: pa.Table, further: Sequence[FurtherRows]) -> pa.Table:
    """The rows of the descriptions with the fields of all sets, in the order of their file."""
    if not further:
        return descriptions
    descriptions = descriptions.combine_chunks()
    if not _has(descriptions, CONFIDENCE) and any(_has(of.rows, CONFIDENCE) for of in further):
        descriptions = descriptions.append_column(CONFIDENCE, _answers(descriptions, CONFIDENCE))
    shown = filled(descriptions, further)
    for name in ("description", CONFIDENCE, RAW):
        if _has(descriptions, name):
            merged = _merged(_column(descriptions, name), name, further, shown)
            descriptions = descriptions.set_column(descriptions.column_names.index(name), name, merged)
    return descriptions


def set_facts(
    descriptions: pa.Table, further: Sequence[FurtherRows], *, answers: Mapping[str, pa.Array]
) -> pa.StructArray:
    """The column SETS: of each set, the facts about its row, and the digest of its answer."""
    facts = {}
    for of_set, shown in zip(further, filled(descriptions, further), strict=True):
        columns = {name: _column(of_set.rows, name) for name in SET_COLUMNS}
        columns["answer"] = answers[of_set.name]
        if of_set.fills:
            names = [
                [field for field, is_shown in zip(shown, of_row, strict=True) if is_shown]
                for of_row in zip(*(mask.to_pylist() for mask in shown.values()), strict=True)
            ]
            columns[FILLED] = pa.array(names or [[]] * of_set.rows.num_rows, pa.list_(pa.string()))
        facts[of_set.name] = pa.StructArray.from_arrays(
            list(columns.values()), names=list(columns), mask=columns["status"].is_null()
        )
    return pa.StructArray.from_arrays(list(facts.values()), names=list(facts))


def _merged(
    first: pa.StructArray,
    name: str,
    further: Sequence[FurtherRows],
    shown: Sequence[Mapping[str, pa.BooleanArray]],
) -> pa.StructArray:
    """One struct of the fields of all; null where all are. shown: see ``filled``."""
    fields = {field.name: pc.struct_field(first, field.name) for field in first.type}
    is_null = first.is_null()
    for of, of_set in zip(further, shown, strict=True):
        own = _answers(of.rows, name)
        for field in own.type:
            if field.name not in fields:
                fields[field.name] = pc.struct_field(own, field.name)
            elif field.name in of_set:
                answer = pc.struct_field(own, field.name)
                fields[field.name] = pc.if_else(of_set[field.name], answer, fields[field.name])
        is_null = pc.and_(is_null, own.is_null())
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields), mask=is_null)


def _answers(rows: pa.Table, name: str) -> pa.StructArray:
    """A column of answers of a set. Files of earlier versions have no confidence: it is not known."""
    if _has(rows, name):
        return _column(rows, name)
    type_ = rows.schema.field("description").type if _has(rows, "description") else pa.struct([])
    return pa.nulls(rows.num_rows, confidence_type(type_) if name == CONFIDENCE else type_)


def _has(table: pa.Table, name: str) -> bool:
    return name in table.column_names


def _column(table: pa.Table, name: str) -> pa.Array:
    return table[name].combine_chunks()


def lacking_sentences(lacking: Mapping[str, int]) -> Iterator[str]:
    """Which sets are not complete, for people."""
    for name, count in lacking.items():
        if count:
            yield (
                f"The question set {name} is not complete:"
                f" {counted(count, 'properties have', 'property has')} no row of it yet, and null in its"
                " fields."
            )

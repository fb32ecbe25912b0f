"""One view of all question sets: the rows of the first, which are the descriptions, with the fields of all.

A further set adds its fields to ``description`` and ``confidence`` where it has a row of the same property,
and else they are null. ``published_table.py`` reads the rows, and has the same view for a person's SQL.
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
    guarantee: Guarantee, described: PublishedRecord, further: Mapping[str, PublishedRecord]
) -> str:
    """What the shown rows of a partition are made from. A set without a row in it changes nothing."""
    of_sets = (
        f" {name}:{record.sha256}{guarantee.version_of(record)}" for name, record in sorted(further.items())
    )
    return "".join((described.sha256, guarantee.version_of(described), *of_sets))


@dataclass(frozen=True)
class FurtherRows:
    """A further set's rows, one for each row of the descriptions: null where the set has none.

    record: of the set's file; None: the partition has none.
    """

    name: str
    record: PublishedRecord | None
    rows: pa.Table


def beside(descriptions: pa.Table, rows: pa.Table) -> pa.Table:
    """A set's rows in the order of the descriptions. Both with ``property_id`` and ``ordinal``.

    A row under another id is left out: while a withdrawal goes on, one of the two may have it still.
    """
    rows = rows.combine_chunks()
    at = pc.index_in(descriptions["ordinal"], value_set=_column(rows, "ordinal")).combine_chunks()
    is_same = pc.equal(descriptions["property_id"].combine_chunks(), _column(rows, "property_id").take(at))
    return rows.take(pc.if_else(is_same, at, pa.scalar(None, at.type)))


def joined(descriptions: pa.Table, further: Sequence[FurtherRows]) -> pa.Table:
    """The rows of the descriptions with the fields of all sets, in the order of their file."""
    if not further:
        return descriptions
    descriptions = descriptions.combine_chunks()
    answers = {"description": descriptions["description"].type} if _has(descriptions, "description") else {}
    if answers and not _has(descriptions, CONFIDENCE) and any(_has(of.rows, CONFIDENCE) for of in further):
        # Files of earlier versions have no confidence.
        sure = confidence_type(answers["description"])
        descriptions = descriptions.append_column(CONFIDENCE, pa.nulls(descriptions.num_rows, sure))
    for name in ("description", CONFIDENCE, RAW):
        if _has(descriptions, name):
            tables = (descriptions, *(of.rows for of in further if _has(of.rows, name)))
            merged = _merged([_column(table, name) for table in tables])
            descriptions = descriptions.set_column(descriptions.column_names.index(name), name, merged)
    return descriptions


def set_facts(further: Iterable[FurtherRows], *, answers: Mapping[str, pa.Array]) -> pa.StructArray:
    """The column SETS: of each set, the facts about its row, and the digest of its answer."""
    facts = {}
    for of_set in further:
        columns = {name: _column(of_set.rows, name) for name in SET_COLUMNS}
        columns["answer"] = answers[of_set.name]
        facts[of_set.name] = pa.StructArray.from_arrays(
            list(columns.values()), names=list(columns), mask=columns["status"].is_null()
        )
    return pa.StructArray.from_arrays(list(facts.values()), names=list(facts))


def _merged(structs: Sequence[pa.StructArray]) -> pa.StructArray:
    """One struct of the fields of all; null where all are. A name that stands twice is that of the first."""
    fields: dict[str, pa.Array] = {}
    for struct in structs:
        for field in struct.type:
            if field.name not in fields:
                fields[field.name] = pc.struct_field(struct, field.name)
    is_null = structs[0].is_null()
    for struct in structs[1:]:
        is_null = pc.and_(is_null, struct.is_null())
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields), mask=is_null)


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

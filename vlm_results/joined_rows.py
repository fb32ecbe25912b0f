"""One view of all question sets: the rows of the first, which are the descriptions, with the fields of all.

A further set adds its fields to ``description`` and ``confidence`` where it has a row of the same property,
and else they are null. ``filled_fields.py`` says whose answer a field has that a set fills.
``published_table.py`` reads the rows, and gives the view to a person's SQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from vlm_assets.assets.description_work import description_rows
from vlm_assets.assets.partition import CONFIDENCE
from vlm_assets.config.filled_fields import FieldSources, field_sources, shown
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
    if all(rows[name].equals(descriptions[name]) for name in ("property_id", "ordinal")):
        return rows
    rows = rows.combine_chunks()
    at = pc.index_in(descriptions["ordinal"], value_set=_column(rows, "ordinal")).combine_chunks()
    is_same = pc.equal(descriptions["property_id"].combine_chunks(), _column(rows, "property_id").take(at))
    return rows.take(pc.if_else(is_same, at, pa.scalar(None, at.type)))


@dataclass(frozen=True)
class ShownAnswers:
    """Whose answer each row shows. The descriptions have an empty name.

    fillers: of each field, by row, the name of the set that fills it; empty where none does.
    """

    sources: Mapping[str, FieldSources]
    fillers: Mapping[str, pa.StringArray]

    @classmethod
    def from_rows(cls, descriptions: pa.Table, further: Sequence[FurtherRows]) -> Self:
        """Look at the raw answers."""
        sets = [FurtherRows("", None, descriptions), *further]
        raw = {
            of_set.name: _answers(of_set.rows, RAW if _has(of_set.rows, RAW) else "description")
            for of_set in sets
        }
        sources = field_sources((of_set.name, raw[of_set.name].type, of_set.fills) for of_set in sets)
        fillers = {}
        for field, of_field in sources.items():
            has = ((pc.struct_field(raw[name], field).is_valid(), name) for name in of_field.fillers)
            fillers[field] = shown(pa.repeat("", descriptions.num_rows), has, pc.if_else)
        return cls(sources, fillers)

    def filled(self, of_set: FurtherRows) -> list[list[str]]:
        """The fields of each row that a set fills."""
        fillers = {field: self.fillers[field].to_pylist() for field in of_set.fills if field in self.fillers}
        rows = range(of_set.rows.num_rows)
        return [[field for field in fillers if fillers[field][row] == of_set.name] for row in rows]

    def is_shown(self, name: str, field: str) -> pa.BooleanArray:
        """Which rows show the answer of the set with this name, also where it is null."""
        names = [name, ""] if self.sources[field].first == name else [name]
        return pc.is_in(self.fillers[field], value_set=pa.array(names))

    def merged(self, answers: Mapping[str, pa.StructArray]) -> pa.StructArray:
        """One struct of the fields of all sets; null where all are. answers: of each set, by its name."""
        fields: dict[str, pa.Array] = {}
        for own in answers.values():
            for field in (field.name for field in own.type if field.name not in fields):
                fillers = self.sources[field].fillers if field in self.sources else ()
                better = (
                    (pc.equal(self.fillers[field], filler), pc.struct_field(answers[filler], field))
                    for filler in fillers
                )
                fields[field] = shown(pc.struct_field(own, field), better, pc.if_else)
        is_null = reduce(pc.and_, (own.is_null() for own in answers.values()))
        return pa.StructArray.from_arrays(list(fields.values()), names=list(fields), mask=is_null)


def joined(descriptions: pa.Table, further: Sequence[FurtherRows]) -> pa.Table:
    """The rows of the descriptions with the fields of all sets, in the order of their file."""
    if not further:
        return descriptions
    if not _has(descriptions, CONFIDENCE) and any(_has(of_set.rows, CONFIDENCE) for of_set in further):
        descriptions = descriptions.append_column(CONFIDENCE, _answers(descriptions, CONFIDENCE))
    shown_answers = ShownAnswers.from_rows(descriptions, further)
    for place, name in enumerate(descriptions.column_names):
        if name in ("description", CONFIDENCE, RAW):
            answers = {of_set.name: _answers(of_set.rows, name) for of_set in further}
            merged = shown_answers.merged({"": _column(descriptions, name), **answers})
            descriptions = descriptions.set_column(place, name, merged)
    return descriptions


def set_facts(
    descriptions: pa.Table, further: Sequence[FurtherRows], answers: Mapping[str, pa.Array] | None = None
) -> pa.StructArray:
    """The column SETS: of each set, the facts about its row; with ``answers``, the digest of its answer."""
    facts = {}
    shown_answers = ShownAnswers.from_rows(descriptions, further)
    for of_set in further:
        columns = {name: _column(of_set.rows, name) for name in SET_COLUMNS}
        if answers is not None:
            columns["answer"] = answers[of_set.name]
        if of_set.fills:
            columns[FILLED] = pa.array(shown_answers.filled(of_set), pa.list_(pa.string()))
        facts[of_set.name] = pa.StructArray.from_arrays(
            list(columns.values()), names=list(columns), mask=columns["status"].is_null()
        )
    return pa.StructArray.from_arrays(list(facts.values()), names=list(facts))


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

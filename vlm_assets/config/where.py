"""The condition ``where`` of a question set: it chooses the properties that the set asks.

It is an SQL expression over the fields of the sets above it in the file, and over their raw confidence, as
``confidence.FIELD``. DuckDB parses it once, when the settings are read, and evaluates it for each partition.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from vlm_assets.config.filled_fields import in_sql, shown
from vlm_assets.config.questions_file import SET_PREFIX, QuestionsFile
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_engine.schema import SchemaError, confidence_type, load_schema

if TYPE_CHECKING:
    import duckdb

_CONFIDENCE: Final = "confidence"
_TABLE: Final = "properties"
_ID: Final = '"id of the property"'
"""The column of the ids: no field has this name."""
_OF_MORE: Final = {
    "SUBQUERY": "a query",
    "WINDOW": "a window",
    "LAMBDA": "a function of its own",
    "STAR": "several columns",
    "POSITIONAL_REFERENCE": "the place of a column",
}
"""What a condition of one property cannot have, by DuckDB's names of expressions."""


class WhereError(ValueError):
    """A condition cannot be evaluated: of these fields, or of the answers that are published."""


@dataclass(frozen=True)
class Answers:
    """The answers of one set that a condition looks at. fields: in the schema's order, those it looks at."""

    asset: str
    description: pa.StructType
    fields: tuple[str, ...]

    @property
    def columns(self) -> pa.Schema:
        """The columns that ``Where.evaluate`` needs of its rows."""
        return pa.schema(
            [
                ("property_id", pa.string()),
                ("description", self.description),
                (_CONFIDENCE, confidence_type(self.description)),
            ]
        )


@dataclass(frozen=True)
class WhereLook:
    """What a condition found of a property. values: of the fields that it names, in the order of names."""

    holds: bool
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Where:
    """A condition. names: the fields that it looks at, such as "roof", "address.city" or "confidence.roof".

    answers: of the sets that have these fields, in the order of the file: the last one that has an answer of
    a property gives it.
    """

    text: str
    names: tuple[str, ...]
    answers: tuple[Answers, ...]

    def evaluate(self, ids: Sequence[str], rows: Mapping[str, pa.Table]) -> dict[str, WhereLook]:
        """Whether it holds, for each id. A condition that is null does not hold. Raises WhereError.

        rows: of each of the answers' assets, with ``Answers.columns``; a property without a row has null.
        """
        import duckdb

        with _connection(self.answers, rows) as connection:
            connection.register("listed", pa.table({"property_id": pa.array(ids, pa.string())}))
            values = "".join(f", {_path(name)}" for name in self.names)
            query = f"SELECT {_ID}, coalesce(({self.text}\n), false){values} FROM {_TABLE}"  # noqa: S608
            try:
                verdicts = connection.execute(query).fetchall()
            except duckdb.Error as error:
                raise WhereError(f"{self.text!r}: {str(error).splitlines()[0]}") from error
        return {property_id: WhereLook(holds, tuple(seen)) for property_id, holds, *seen in verdicts}

    def refuse_wrong_types(self) -> None:
        """Raise WhereError where it is no condition of these fields."""
        import duckdb

        with _connection(self.answers, {}) as connection:
            try:
                # Where a condition stands, nothing is summed over rows, and no row becomes several.
                query = f"SELECT ({self.text}\n) FROM {_TABLE} WHERE ({self.text}\n)"  # noqa: S608
                shown = connection.execute(f"DESCRIBE {query}").fetchall()
            except duckdb.Error as error:
                raise WhereError(str(error).splitlines()[0]) from error
        if shown[0][1] != "BOOLEAN":
            raise WhereError(f"{self.text!r} is a {shown[0][1]}, and no condition")


@cache
def where_of(file: QuestionsFile, name: str, described_schema: str) -> Where | None:
    """The condition of a set; None where it has none. described_schema: that of the descriptions.

    Raises WhereError where it cannot be evaluated, SchemaError where the schema of a set above cannot be
    loaded.
    """
    asked = dict(file.sets)[name]
    if asked.where is None:
        return None
    schemas = {DESCRIPTIONS: described_schema}
    schemas |= {SET_PREFIX + set_name: each.description_schema for set_name, each in file.sets}
    names = list(schemas)
    above = names[: names.index(SET_PREFIX + name)]
    types = {asset: load_schema(schemas[asset]).arrow_type for asset in above}
    fields = [field.name for type_ in types.values() for field in type_]
    try:
        columns = tuple(dict.fromkeys(_names_in(asked.where)))
    except RecursionError as error:
        raise WhereError("it is nested too deeply: write it with fewer steps in each other") from error
    roots = set[str]()
    for column in columns:
        first, _, rest = column.partition(".")
        root = rest.partition(".")[0] if first == _CONFIDENCE else first
        if root not in fields:
            raise WhereError(_unknown(column, root, fields, _later(file, names[len(above) :], schemas)))
        roots.add(root)
    if not roots:
        raise WhereError(f"{asked.where!r} names no field of a set above: give a condition on one")
    answers = (
        Answers(asset, type_, tuple(field.name for field in type_ if field.name in roots))
        for asset, type_ in types.items()
    )
    where = Where(asked.where, columns, tuple(source for source in answers if source.fields))
    where.refuse_wrong_types()
    where.evaluate(["of no property"], {})
    return where


def _later(file: QuestionsFile, assets: Sequence[str], schemas: Mapping[str, str]) -> dict[str, str]:
    """The fields of the set itself and of those below it, with the name of their set."""
    later: dict[str, str] = {}
    for asset in assets:
        try:
            fields = load_schema(schemas[asset]).arrow_type
        except SchemaError:  # It is refused by itself.
            continue
        later |= {field.name: asset.removeprefix(SET_PREFIX) for field in fields if field.name not in later}
    return later


def _unknown(name: str, root: str, fields: Sequence[str], later: Mapping[str, str]) -> str:
    if root in later:
        return (
            f"{name} is of the set {later[root]}, which does not stand above it: a condition looks at sets"
            " above its own, so that no two wait for each other"
        )
    near = difflib.get_close_matches(root, fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; they have {', '.join(fields)}"
    return f"no set above it has the field {root or name}{hint}"


def _names_in(text: str) -> Iterator[str]:
    """The names of the columns in a condition. Raises WhereError where it is none on one property."""
    import duckdb

    with duckdb.connect() as connection:
        query = f"SELECT ({text}\n) FROM {_TABLE}"  # noqa: S608 - it is parsed, not run
        (parsed,) = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchone() or ("{}",)
        statements = json.loads(parsed)
        if statements.get("error", True):
            raise WhereError(f"{text!r} is no SQL condition: {statements.get('error_message', '')}")
        nodes = [statement["node"] for statement in statements["statements"]]
        select = nodes[0] if len(nodes) == 1 else {}
        whole = ("where_clause", "group_expressions", "having", "qualify", "sample", "modifiers")
        if (
            len(select.get("select_list", ())) != 1
            or select["from_table"].get("table_name") != _TABLE
            or any(select.get(part) for part in whole)
        ):
            raise WhereError(f"{text!r} is no condition: give what stands after WHERE, and only that")
        changing = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions()"
            " WHERE stability IN ('VOLATILE', 'CONSISTENT_WITHIN_QUERY')"
        ).fetchall()
    unsteady = {name for (name,) in changing}
    for node in _nodes(select["select_list"][0]):
        kind = node.get("class")
        if kind in _OF_MORE:
            raise WhereError(f"{text!r} has {_OF_MORE[kind]}: give a condition on fields of one property")
        # DuckDB calls ``age`` steady also where it counts from today, of one timestamp.
        counts_from_today = node.get("function_name") == "age" and len(node["arguments"]) == 1
        if kind == "FUNCTION" and (node["function_name"] in unsteady or counts_from_today):
            raise WhereError(f"{node['function_name']}() does not say the same each time")
        if kind == "COLUMN_REF":
            yield ".".join(node["column_names"])


def _nodes(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _nodes(inner)


@contextmanager
def _connection(
    answers: Sequence[Answers], rows: Mapping[str, pa.Table]
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection that has ``properties``, with the fields of these rows, once ``listed`` is registered."""
    import duckdb

    fields: dict[str, list[str]] = {}
    for source in answers:
        for field in source.fields:
            fields.setdefault(field, []).append(quoted(source.asset))
    values = [f"{_answer(field, sets, 'description')} AS {quoted(field)}" for field, sets in fields.items()]
    sure = [f"{quoted(field)} := {_answer(field, sets, _CONFIDENCE)}" for field, sets in fields.items()]
    joins = " ".join(
        f"LEFT JOIN {quoted(f'of_{source.asset}')} AS {quoted(source.asset)} USING (property_id)"
        for source in answers
    )
    columns = ", ".join([*values, f"struct_pack({', '.join(sure)}) AS {_CONFIDENCE}"])
    query = f"SELECT property_id AS {_ID}, {columns} FROM listed {joins}"  # noqa: S608 - names quoted
    with duckdb.connect(config={"enable_external_access": False, "lock_configuration": True}) as connection:
        for source in answers:
            connection.register(f"of_{source.asset}", rows.get(source.asset, source.columns.empty_table()))
        connection.register("listed", pa.table({"property_id": pa.array([], pa.string())}))
        try:
            connection.execute(f"CREATE TEMP VIEW {_TABLE} AS {query}")
        except duckdb.Error as error:
            raise WhereError(str(error).splitlines()[0]) from error
        yield connection


def _answer(field: str, sets: Sequence[str], column: str) -> str:
    """The answer that is shown: all sets but the first fill the field, or the settings refuse it."""
    (first, *fillers), name = sets, quoted(field)
    has = ((f"{filler}.description.{name} IS NOT NULL", f"{filler}.{column}.{name}") for filler in fillers)
    return shown(f"{first}.{column}.{name}", has, in_sql)


def _path(name: str) -> str:
    return ".".join(map(quoted, name.split(".")))


def quoted(name: str, mark: str = '"') -> str:
    """A name, or with ``'`` a text, as SQL has it."""
    return mark + name.replace(mark, mark * 2) + mark

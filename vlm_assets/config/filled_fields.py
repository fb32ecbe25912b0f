"""Whose answer of a field is shown: of the sets that fill it, that of the last in the file that has one.

The raw answers count: where a guarantee withholds the better one, the worse one is not shown in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import pyarrow as pa

T = TypeVar("T")


@dataclass(frozen=True)
class FieldSources:
    """The sets that may give the answer of a field.

    first: the first that has it; its answer is shown where no filler has one. fillers: in the file's order.
    """

    field: str
    first: str
    fillers: tuple[str, ...] = ()

    def filler(self, answers: Mapping[str, Mapping[str, Any] | None]) -> str:
        """The set that fills the field of one property; empty where none does. answers: raw, by set."""
        has = (((answers.get(name) or {}).get(self.field) is not None, name) for name in self.fillers)
        return shown("", has, lambda has, name, otherwise: name if has else otherwise)


def shown(first: T, fillers: Iterable[tuple[Any, T]], choose: Callable[[Any, T, T], T]) -> T:
    """What is shown of a field. fillers: of each whether it has an answer, and what is shown then.

    choose: (has, value, otherwise), such as ``in_sql``, or ``if_else`` of pyarrow for whole columns.
    """
    return reduce(lambda above, filler: choose(filler[0], filler[1], above), fillers, first)


def in_sql(has: str, value: str, otherwise: str) -> str:
    """Choose between expressions in SQL."""
    return f"CASE WHEN {has} THEN {value} ELSE {otherwise} END"


def field_sources(
    sets: Iterable[tuple[str, Iterable[pa.Field], Collection[str]]],
) -> dict[str, FieldSources]:
    """The sources of each field. sets: in the file's order, each with its fields and those that it fills.

    Files of earlier schemas may have a field of another type: such an answer is shown in no other's place.
    """
    sources: dict[str, FieldSources] = {}
    types: dict[str, pa.DataType] = {}
    for name, fields, fills in sets:
        for field in fields:
            of_field = sources.setdefault(field.name, FieldSources(field.name, name))
            if types.setdefault(field.name, field.type) == field.type and field.name in fills:
                sources[field.name] = replace(of_field, fillers=(*of_field.fillers, name))
    return sources

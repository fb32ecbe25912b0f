"""Right answers for some properties, read from a truth file or from a person's review.

When two values mean the same is in ``vlm_engine/schema.py``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_durable.files.sealed_json import FormatVersionError, refuse_newer_format

REVIEWS: Final = "review.jsonl"
"""The home's file of verdicts."""

_REVIEWS_FORMAT: Final = 2

_IDS: Final = ("property_id", "id")
_STRUCTS: Final = ("description", "truth")
_NO_FIELDS: Final = frozenset({"hard", "status"})
_MODEL: Final = "model"

Descriptions = Mapping[str, Mapping[str, Any] | None]
"""Descriptions by property; None where a property failed."""


class TruthError(ValueError):
    """A truth file cannot be used; the message says why."""


@dataclass(frozen=True)
class FieldVerdict:
    """A person's verdict on a property. true_fields: the right values, corrections included.

    answer: a digest of the answer that was judged and of its inputs, followed by those of further question
    sets, with blanks between them; empty in format 1, which did not keep it. right, wrong: names of fields.
    why: the reason why the property was chosen; empty where it was not chosen. weight: what it counts for in
    the accuracy of all; 0 where it says nothing of others. by_chance: whether chance alone drew it, so that
    it may certify a promise. filled: of each field that a question set filled, the digest of that set's
    answer, which is the one that was judged.
    """

    property_id: str
    at: str
    answer: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    true_fields: Mapping[str, Any]
    why: str = ""
    weight: float = 1.0
    by_chance: bool = True
    filled: Mapping[str, str] = field(default_factory=dict)

    @property
    def judgement(self) -> tuple[object, ...]:
        """What was judged and how, whenever and why."""
        return self.answer, self.right, self.wrong, self.true_fields, self.filled

    def judges(self, name: str, answer: str) -> bool:
        """Whether it is on the answer with this digest where it is on a field."""
        return answer in self.answer.split() and self.filled.get(name, answer) == answer

    def outlasts(self, later: FieldVerdict) -> bool:
        """Whether this verdict on a property stays, though a later one was given on the same answer.

        Chance drew this one and not the other. Who chooses what to judge again would decide which labels of
        the random sample change, and which leave it.
        """
        is_same = not set(self.answer.split()).isdisjoint(later.answer.split())
        return self.by_chance and not later.by_chance and is_same

    def line(self) -> bytes:
        """The line of the file; training reads its ``description``."""
        content = {
            "format": _REVIEWS_FORMAT,
            "property_id": self.property_id,
            "at": self.at,
            "answer": self.answer,
            "right": self.right,
            "wrong": self.wrong,
            "why": self.why,
            "weight": self.weight,
            "by_chance": self.by_chance,
            **({"filled": self.filled} if self.filled else {}),
            "description": self.true_fields,
        }
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()


def read_truth(path: Path, *, hard_too: bool = True) -> dict[str, dict[str, Any]]:
    """The known fields of properties, by id: a review, or a CSV, JSONL or parquet file with id and fields.

    The fields may be one struct. An empty cell is not known. In JSONL the last line of a property counts.
    hard_too: rows with a value in ``hard`` as well.

    Raises TruthError.
    """
    try:
        fields_of = _reviewed(path.parent) if path.name == REVIEWS else _listed(path, hard_too=hard_too)
    except (OSError, ValueError, AttributeError, KeyError, csv.Error, pa.ArrowException) as error:
        if isinstance(error, TruthError):
            raise
        raise TruthError(f"{path} does not read: {error}") from error
    if not any(fields_of.values()):
        raise TruthError(f"{path} says nothing of any property.")
    return fields_of


def _reviewed(home: Path) -> dict[str, dict[str, Any]]:
    """What a person said is right, without the fields that they left open or took away."""
    return {
        name: {key: value for key, value in verdict.true_fields.items() if value not in (None, "")}
        for name, verdict in verdicts(home).items()
    }


def _listed(path: Path, *, hard_too: bool) -> dict[str, dict[str, Any]]:
    rows = _rows(path)
    column = next((name for name in _IDS if rows and name in rows[0]), None)
    if column is None:
        raise TruthError(f"{path} has no rows with a column property_id or id.")
    fields_of: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = str(row[column])
        if name in fields_of and path.suffix != ".jsonl":
            raise TruthError(f"{path} has {name!r} twice: which of the two is true?")
        if hard_too or row.get("hard") in (None, ""):
            fields_of[name] = _fields(row)
    return fields_of


def names_a_model(path: Path) -> bool:
    """Whether the rows name the model that gave them, as published and exported rows do. Raises OSError."""
    if path.suffix == ".parquet":
        return _MODEL in pq.read_schema(path).names
    return any(row.get(_MODEL) for row in _rows(path))


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path, partitioning=None).to_pylist()
        return rows
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    with path.open(newline="", encoding="utf-8-sig") as stream:
        listed: list[dict[str, Any]] = list(csv.DictReader(stream))
    return [{name: value if name in _IDS else _typed(value) for name, value in row.items()} for row in listed]


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    nested = next((row[name] for name in _STRUCTS if isinstance(row.get(name), Mapping)), row)
    return {
        name: value
        for name, value in nested.items()
        if name not in _IDS and name not in _NO_FIELDS and value not in (None, "")
    }


def _typed(text: str | None) -> Any:
    """A cell of a CSV: numbers and truth values as what they are, everything else as text."""
    try:
        value = json.loads((text or "").lower())
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def verdicts(home: Path) -> dict[str, FieldVerdict]:
    """The verdict that counts for each property: the latest, unless an earlier one outlasts it.

    They are in the order in which chance drew them: looks take the first. Raises TruthError,
    FormatVersionError, OSError.
    """
    verdicts: dict[str, FieldVerdict] = {}
    for verdict in _all_verdicts(home):
        earlier = verdicts.get(verdict.property_id)
        if earlier is not None and earlier.outlasts(verdict):
            continue
        if earlier is not None and not earlier.by_chance:
            del verdicts[verdict.property_id]  # A later place: the labels before keep theirs.
        verdicts[verdict.property_id] = verdict
    return verdicts


def drawn_by_chance(home: Path) -> set[str]:
    """The properties that chance drew for any of their verdicts. Raises what ``verdicts`` raises."""
    return {verdict.property_id for verdict in _all_verdicts(home) if verdict.by_chance}


def _all_verdicts(home: Path) -> Iterator[FieldVerdict]:
    """Every verdict of the file, in its order. Raises what ``verdicts`` raises."""
    path = home / REVIEWS
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # Being written, or torn by a power cut: nobody was told that it is kept.
            try:
                content = json.loads(line)
                refuse_newer_format(content.get("format", 0), _REVIEWS_FORMAT, path)
                # Earlier versions kept no weight: what was chosen for being suspicious did not count.
                why = content.get("why", "")
                verdict = FieldVerdict(
                    content["property_id"], content["at"], content.get("answer", ""), tuple(content["right"]),
                    tuple(content["wrong"]), content["description"], why,
                    weight=float(content.get("weight", 0.0 if why else 1.0)),
                    by_chance=bool(content.get("by_chance", not why)),
                    filled=dict(content.get("filled", {})),
                )  # fmt: skip
            except FormatVersionError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TruthError(
                    f"{path}: line {number} does not read ({error}). Put it right or take it out: the other"
                    " lines are not lost."
                ) from error
            yield verdict

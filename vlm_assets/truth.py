"""A truth file: what is right of some properties, by a person or another model, and how far answers agree.

What lives here: reading it, when two values mean the same, and shares with their intervals. What does not:
who compares what (``operate/compare.py``, ``operate/quality.py``).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

_Z: Final = 1.959964
"""Of a 95% interval."""

_IDS: Final = ("property_id", "id")
_STRUCTS: Final = ("description", "truth")
_NO_FIELDS: Final = frozenset({"hard", "status"})
_TRUE, _FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})

Descriptions = Mapping[str, Mapping[str, Any] | None]
"""Of each property, its description; None where it failed."""


class TruthError(ValueError):
    """A truth file cannot be used; the message says why."""


@dataclass(frozen=True)
class Share:
    """A share of so many, with its 95% interval."""

    share: float
    low: float
    high: float
    of: int

    def sentence(self) -> str:
        """For people."""
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})" if self.of else "none"


def wilson(count: int, of: int) -> Share:
    """A share with Wilson's interval, which is sound for few and for none of them."""
    if not of:
        return Share(0.0, 0.0, 1.0, 0)
    share, z2 = count / of, _Z * _Z
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return Share(share, max(0.0, middle - half), min(1.0, middle + half), of)


def same(said: Any, right: Any) -> bool:
    """Whether two values mean the same: numbers by value, words whatever their case, lists in any order."""
    if isinstance(said, list | tuple) and isinstance(right, list | tuple):
        return sorted(map(_plain, said)) == sorted(map(_plain, right))
    return _plain(said) == _plain(right)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, sort_keys=True, default=str).casefold()
    text = " ".join(str(value).split()).casefold()
    if text in _TRUE and not text.isdigit():
        return "true"
    if text in _FALSE and not text.isdigit():
        return "false"
    try:
        return repr(float(text))
    except ValueError:
        return text


def read_truth(path: Path, *, hard_too: bool = True) -> dict[str, dict[str, Any]]:
    """The known fields of properties, by id: a CSV, JSONL or parquet file with an id and the fields.

    The fields may be one struct. An empty cell is not known. In JSONL the last line of a property counts, as
    a review is kept (``HOME/review.jsonl``). hard_too: rows with a value in ``hard`` as well.

    Raises TruthError.
    """
    try:
        rows = _rows(path)
        column = next((one for one in _IDS if rows and one in rows[0]), None)
        if column is None:
            raise TruthError(f"{path} has no rows with a column property_id or id.")
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            name = str(row[column])
            if name in found and path.suffix != ".jsonl":
                raise TruthError(f"{path} has {name!r} twice: which of the two is true?")
            if hard_too or row.get("hard") in (None, ""):
                found[name] = _fields(row)
    except (OSError, ValueError, AttributeError, KeyError, csv.Error, pa.ArrowException) as error:
        if isinstance(error, TruthError):
            raise
        raise TruthError(f"{path} does not read: {error}") from error
    if not any(found.values()):
        raise TruthError(f"{path} says nothing of any property.")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path, partitioning=None).to_pylist()
        return rows
    if path.suffix == ".jsonl":
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n") and not lines[-1].endswith(b"}"):
            lines.pop()  # Torn by a power cut while it was written.
        return [json.loads(line) for line in lines if line.strip()]
    with path.open(newline="", encoding="utf-8-sig") as stream:
        listed: list[dict[str, Any]] = list(csv.DictReader(stream))
    return [{name: value if name in _IDS else _typed(value) for name, value in row.items()} for row in listed]


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    nested = next((row[name] for name in _STRUCTS if isinstance(row.get(name), Mapping)), row)
    return {
        name: one
        for name, one in nested.items()
        if name not in _IDS and name not in _NO_FIELDS and one not in (None, "")
    }


def _typed(text: str | None) -> Any:
    """A cell of a CSV: numbers and truth values as what they are, everything else as text."""
    try:
        value = json.loads((text or "").lower())
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text

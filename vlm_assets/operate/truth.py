"""A truth file: what is right of some properties, by a person or another model, and how far answers agree.

What lives here: reading it (CSV, JSONL or parquet with a column ``property_id`` and one for each field), and
shares with their intervals. What does not: who compares what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ID = "property_id"
_Z = 1.959963984540054  # 95%
_READERS = {".csv": "read_csv", ".jsonl": "read_json", ".json": "read_json", ".parquet": "read_parquet"}


class TruthError(ValueError):
    """A truth file that cannot be used; the message says what, where and what to do."""


@dataclass(frozen=True)
class Share:
    """So many of so many. low, high: the 95% interval after Wilson (1927)."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """The share; 0 of nothing."""
        return self.hits / self.of if self.of else 0.0

    @property
    def low(self) -> float:
        """The lower end."""
        return self._middle - self._half

    @property
    def high(self) -> float:
        """The upper end."""
        return self._middle + self._half

    @property
    def _middle(self) -> float:
        return (self.hits + _Z * _Z / 2) / (self.of + _Z * _Z)

    @property
    def _half(self) -> float:
        spread = self.hits * (self.of - self.hits) / self.of if self.of else 0.0
        return _Z * math.sqrt(spread + _Z * _Z / 4) / (self.of + _Z * _Z)

    def sentence(self) -> str:
        """For people."""
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%}) of {self.of:,}"


Truth = Mapping[str, Mapping[str, Any]]
"""What is right, by property id and then by field; a field that is not known is left out."""


def read_truth(path: Path) -> Truth:
    """Read a truth file. Raises TruthError."""
    import duckdb

    reader = _READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise TruthError(f"{path} is no truth file: give a .csv, .jsonl or .parquet file that is there.")
    try:
        relation = duckdb.connect().sql(f"SELECT * FROM {reader}($file)", params={"file": str(path)})  # noqa: S608 - one of three names
        names = relation.columns
        rows = relation.fetchall()
    except duckdb.Error as error:
        raise TruthError(f"{path} cannot be read: {error}") from error
    if ID not in names:
        raise TruthError(f"{path} has no column {ID!r}; it has {', '.join(names)}.")
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        fields = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        one = str(fields.pop(ID, ""))
        if one in found:
            raise TruthError(f"{path} has property {one!r} twice: which is right?")
        found[one] = fields
    return found


def is_same(answer: Any, right: Any) -> bool:
    """Whether an answer is what is right; a CSV knows neither case nor numbers of its own."""
    if isinstance(answer, bool) or isinstance(right, bool):
        return str(answer).lower() == str(right).lower()
    if isinstance(answer, int | float) and isinstance(right, int | float):
        return math.isclose(answer, right, rel_tol=1e-6)
    return str(answer).strip() == str(right).strip()

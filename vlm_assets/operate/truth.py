"""A truth file: what is right of some properties, by a person or another model, and how far answers agree.

What lives here: reading it, when two values mean the same, and shares with their intervals. What does not:
who compares what (``compare.py``, ``quality.py``).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

_Z: Final = 1.959964
"""Of a 95% interval."""

_IDS: Final = ("property_id", "id")
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


def read_truth(path: Path, wanted: Collection[str] | None = None) -> Descriptions:
    """The known fields of some properties, or of all: a CSV, JSONL or parquet file with an id and fields.

    The fields may be one struct. An empty cell is not known. Raises TruthError.
    """
    try:
        if path.suffix == ".parquet":
            rows = pq.read_table(path, partitioning=None).to_pylist()
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        else:
            with path.open(newline="", encoding="utf-8-sig") as stream:
                rows = list(csv.DictReader(stream))
    except (OSError, ValueError, AttributeError, csv.Error) as error:
        raise TruthError(f"{path} does not read: {error}") from error
    column = next((one for one in _IDS if rows and one in rows[0]), None)
    if column is None:
        raise TruthError(f"{path} has no rows with a column property_id or id.")
    asked = None if wanted is None else set(wanted)
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = str(row[column])
        if name in found:
            raise TruthError(f"{path} has {name!r} twice: which of the two is true?")
        if asked is None or name in asked:
            nested = [one for one in row.values() if isinstance(one, Mapping)]
            fields = {key: one for each in nested or [row] for key, one in each.items()}
            found[name] = {
                key: one for key, one in fields.items() if key not in _IDS and one not in (None, "")
            }
    if not found and asked is not None:
        raise TruthError(
            f"{path} knows none of the {len(asked)} properties of the sample: are its ids those of the"
            " catalogue? A larger --limit takes more of them."
        )
    return found

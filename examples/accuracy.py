"""How much of what was described is true: the published descriptions of an example against its truth.

What lives here: the comparison, field by field, from the parquet files. What does not: how good the model is
on its own (evaluation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

_COLUMNS: Final = ("property_id", "status", "description")


class NoTruthError(FileNotFoundError):
    """There is nothing to compare with, or nothing to compare."""


@dataclass(frozen=True)
class Accuracy:
    """Shares from 0 to 1, over the sound properties: those with nothing hard about them."""

    total: float
    """Share of all fields that are right; a property that is failed or absent has none right."""
    per_field: Mapping[str, float]
    properties: int
    """Sound properties compared."""
    undescribed: int
    """Sound properties among them without a description."""

    def report(self) -> str:
        """The figures for people, the weakest field first."""
        weakest = sorted(self.per_field.items(), key=lambda item: item[1])
        lines = [f"{self.total:.2%} of all fields are right, over {self.properties} sound properties"]
        if self.undescribed:
            lines.append(f"{self.undescribed} of them have no description; their fields count as wrong")
        return "\n".join([*lines, *(f"  {name:20s}{share:8.2%}" for name, share in weakest)])


def accuracy(home: Path) -> Accuracy:
    """Compare ``property_descriptions/*.parquet`` below ``home`` with ``example/truth.parquet``.

    Only the truth's fields count. Raises NoTruthError where the example or the descriptions are missing, or
    where no property of the example is sound.
    """
    path = home / "example" / "truth.parquet"
    if not path.is_file():
        raise NoTruthError(f"{path} does not exist: only the rendered example has a known truth")
    partitions = sorted((home / "property_descriptions").glob("*.parquet"))
    if not partitions:
        raise NoTruthError(f"no partition is published in {home / 'property_descriptions'} yet")
    told: dict[str, Mapping[str, Any]] = {}
    for partition in partitions:
        for row in pq.read_table(partition, columns=list(_COLUMNS)).to_pylist():
            if row["status"] == "ok":
                told[row["property_id"]] = row["description"]
    sound = [row for row in pq.read_table(path).to_pylist() if row["hard"] is None]
    if not sound:
        raise NoTruthError(f"{path} has no property without something hard about it")
    per_field = {
        name: sum(told.get(row["property_id"], {}).get(name) == row["truth"][name] for row in sound)
        / len(sound)
        for name in sound[0]["truth"]
    }
    return Accuracy(
        total=sum(per_field.values()) / len(per_field),
        per_field=per_field,
        properties=len(sound),
        undescribed=sum(row["property_id"] not in told for row in sound),
    )

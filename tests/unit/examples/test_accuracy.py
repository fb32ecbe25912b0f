"""Accuracy of a finished run: counted over sound properties, from the published files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.accuracy import NoTruthError, accuracy


def _truth(home: Path, rows: list[dict[str, Any]]) -> None:
    (home / "example").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), home / "example" / "truth.parquet")


def _partition(home: Path, key: str, rows: list[dict[str, Any]]) -> None:
    (home / "property_descriptions").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), home / "property_descriptions" / f"{key}.parquet")


def _row(identity: str, status: str, roof: str | None, floors: int | None) -> dict[str, Any]:
    told = None if roof is None else {"roof": roof, "floors": floors, "summary": "free"}
    return {"property_id": identity, "status": status, "description": told, "error": None}


def test_fields_are_counted_over_sound_properties_and_partitions(tmp_path: Path) -> None:
    """A wrong field, a failed property and an absent one count as wrong; hard properties do not count."""
    _truth(
        tmp_path,
        [
            {"property_id": name, "truth": {"roof": "flat", "floors": 2}, "hard": hard}
            for name, hard in (("a", None), ("b", None), ("c", None), ("d", None), ("x", "one_image"))
        ],
    )
    _partition(tmp_path, "000000000-000000001", [_row("a", "ok", "flat", 2), _row("b", "ok", "flat", 3)])
    _partition(tmp_path, "000000002-000000004", [_row("c", "failed", None, None), _row("x", "ok", "hip", 9)])
    found = accuracy(tmp_path)
    assert found.per_field == {"roof": 0.5, "floors": 0.25}
    assert (found.total, found.properties, found.undescribed) == (0.375, 4, 2)
    assert "37.50%" in found.report() and "2 of them" in found.report()


def test_without_truth_or_descriptions_it_says_so(tmp_path: Path) -> None:
    """One's own properties have no truth; an unfinished example has nothing to compare."""
    with pytest.raises(NoTruthError, match="only the rendered example"):
        accuracy(tmp_path)
    _truth(tmp_path, [{"property_id": "a", "truth": {"roof": "flat"}, "hard": None}])
    with pytest.raises(NoTruthError, match="no partition is published"):
        accuracy(tmp_path)

"""What is handed on of a data set: the rows of exports, and changes with their snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.homes import Dataset
from vlm_results.changes import Change, Since, SnapshotWriter, changes


def exported_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Every row of an export as JSON lines, by id; none comes twice."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    rows = {row["property_id"]: row for row in map(json.loads, lines)}
    assert len(rows) == len(lines)
    return rows


def list_changes(dataset: Dataset, since: Since, following: Path) -> list[Change]:
    """The changes since then; writes the next snapshot."""
    with SnapshotWriter.opened(following, dataset.catalog) as writer:
        listed = list(changes(dataset.settings, dataset.catalog, since, writer))
        writer.finish()
    return listed

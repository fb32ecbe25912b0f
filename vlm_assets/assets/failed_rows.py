"""The failed rows of a partition: how many, of which kinds, and the first ones with the reason.

What lives here: their form, and reading those of a journal without a lock. What does not: those of published
files (``published_rows.py``), how often a failed row is tried (``generations.py``), and the check that
refuses too many of them (``checks.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resources.journal.errors import SegmentUnreadableError
from resources.journal.segments import segment_paths, verified_rows
from resources.storage.layout import PartitionPaths

FIRST = 5
"""How many failed properties are named."""

_COLUMNS = ("property_id", "ordinal", "status", "error_kind", "error")


@dataclass(frozen=True)
class FailedRow:
    """One property that could not be described, and why."""

    property_id: str
    kind: str
    error: str

    def sentence(self) -> str:
        """The property and the reason, for people."""
        return f"{self.property_id}: {self.kind}: {self.error}"


@dataclass(frozen=True)
class FailedRows:
    """The failed rows of so many. first: of the lowest ordinals."""

    rows: int
    kinds: Mapping[str, int]
    first: tuple[FailedRow, ...]

    @property
    def failed(self) -> int:
        """How many have failed."""
        return sum(self.kinds.values())

    def sentence(self) -> str:
        """How many failed, of which kinds, and the first of them with the reason."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        said = f"{self.failed} of {self.rows} properties failed" + (f" ({kinds})" if kinds else "")
        return said + (f". First: {self.first[0].sentence()}" if self.first else "")


def unpublished_failures(paths: PartitionPaths) -> FailedRows:
    """The failed rows of a partition's latest journal. A segment that does not read is left out."""
    journals = [(path.stat().st_mtime_ns, path) for path in paths.journals.glob("*") if path.is_dir()]
    last: dict[str, dict[str, Any]] = {}
    for path in segment_paths(max(journals)[1]) if journals else []:
        try:
            table = verified_rows(path)
        except SegmentUnreadableError:
            continue
        names = [name for name in _COLUMNS if name in table.schema.names]
        # A later segment's row takes the place of a failed one.
        last |= {row["property_id"]: row for row in table.select(names).to_pylist()}
    failed = sorted(
        (row for row in last.values() if row.get("status", "ok") != "ok"), key=lambda row: row["ordinal"]
    )
    kinds = Counter(str(row.get("error_kind")) for row in failed)
    first = (
        FailedRow(row["property_id"], str(row.get("error_kind")), str(row.get("error")))
        for row in failed[:FIRST]
    )
    return FailedRows(len(last), dict(kinds.most_common()), tuple(first))

"""How good a finished partition of descriptions is: counts, failures and their kinds, rows to look at."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from resources.publishing.partition_rows import PartitionRows
from vlm_assets.assets.contact_sheet import shown_id

SAMPLED = 4
"""Described properties that are looked at."""
FAILED_SHOWN = 4
"""Failed properties that are looked at; more are named."""
_NAMED = 10

_OF_PROPERTY = ["property_id", "ordinal", "status", "error_kind", "error"]
_COUNTED = ["attempts", "images_seen", "images_failed"]

Row = dict[str, Any]


@dataclass
class Quality:
    """Counts of a partition's rows. sample, failed: rows to look at, as dicts of the file's columns."""

    rows: int = 0
    ok: int = 0
    failed_by_kind: Counter[str] = field(default_factory=Counter)
    images_seen: int = 0
    images_failed: int = 0
    properties_with_failed_images: int = 0
    asked_again: int = 0
    sample: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    """The first failed rows, at most as many as are named."""

    def table(self) -> str:
        """Markdown for a person."""
        failed = sum(self.failed_by_kind.values())
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.failed_by_kind.most_common())
        lines = [
            ("described", f"{self.ok:,} of {self.rows:,} properties ({self.ok / max(1, self.rows):.1%})"),
            ("failed", f"{failed:,} ({kinds})" if failed else "none"),
        ]
        if failed:
            named = [shown_id(row["property_id"]) for row in self.failed[:_NAMED]]
            more = [f"{failed - len(named):,} more"] if failed > len(named) else []
            lines.append(("which", ", ".join([*named, *more])))
        images = f"{self.images_failed:,} of {self.images_seen + self.images_failed:,}"
        of = f"{self.properties_with_failed_images:,} propert"
        of += "y" if self.properties_with_failed_images == 1 else "ies"
        lines.append(("images left out", f"{images}, in {of}" if self.images_failed else "none"))
        if self.asked_again:
            lines.append(("asked more than once", f"{self.asked_again:,} properties"))
        return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {said} |" for name, said in lines)])


def read_quality(rows: PartitionRows) -> Quality:
    """Read a finished file once. The sample is random but the same each time the partition is computed."""
    found = Quality()
    smallest: list[tuple[bytes, int]] = []
    for batch in rows.iter_batches([*_OF_PROPERTY, *_COUNTED]):
        _count(found, batch)
        ok = batch.filter(pc.equal(batch["status"], "ok")).select(["property_id", "ordinal"])
        lots = [(_lot(row["property_id"]), row["ordinal"]) for row in ok.to_pylist()]
        smallest = heapq.nsmallest(SAMPLED, [*smallest, *lots])
    wanted = pa.array([ordinal for _, ordinal in smallest], pa.int64())
    for batch in rows.iter_batches(["property_id", "ordinal", "error", "description"]) if smallest else ():
        found.sample += batch.filter(pc.is_in(batch["ordinal"], value_set=wanted)).to_pylist()
    return found


def _count(found: Quality, batch: pa.RecordBatch) -> None:
    found.rows += batch.num_rows
    failed = batch.filter(pc.not_equal(batch["status"], "ok"))
    found.ok += batch.num_rows - failed.num_rows
    found.failed_by_kind.update(kind or "unknown" for kind in failed["error_kind"].to_pylist())
    found.failed += failed.slice(0, _NAMED - len(found.failed)).to_pylist()
    found.images_seen += pc.sum(batch["images_seen"]).as_py() or 0
    left_out = pc.list_value_length(batch["images_failed"])
    found.images_failed += pc.sum(left_out).as_py() or 0
    found.properties_with_failed_images += pc.sum(pc.greater(left_out, 0)).as_py() or 0
    found.asked_again += pc.sum(pc.greater(batch["attempts"], 1)).as_py() or 0


def _lot(property_id: str) -> bytes:
    return hashlib.blake2b(property_id.encode(), digest_size=8).digest()

"""Journals of partitions, opened in one way, and rows that say nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from vlm_durable.files.layout import PartitionPaths
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.segments import JournalIdentity

PLAIN = pa.schema([("ordinal", pa.int64()), ("property_id", pa.string())])


def open_journal(paths: PartitionPaths, generation: str, ids: Collection[str], /, **options: Any) -> Journal:
    """Open a generation of a partition. options: of the identity and ``Journal.open``, in place of these."""
    identity = {
        "key": paths.key,
        "generation": generation,
        "fingerprints": {},
        "schema": PLAIN,
        "expected_ids": frozenset(ids),
    }
    identity |= {name: options.pop(name) for name in identity.keys() & options.keys()}
    given = {"high_water_mark": paths.high_water_mark(generation), "quarantine": paths.quarantine}
    return Journal.open(paths.journal(generation), JournalIdentity(**identity), **(given | options))


def plain_rows(ids: Collection[str], first: int = 0) -> pa.Table:
    """A row for each id, in the order of their ordinals."""
    return pa.table({"ordinal": range(first, first + len(ids)), "property_id": list(ids)}, schema=PLAIN)

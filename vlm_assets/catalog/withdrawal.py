"""Taking properties out of the catalogue and its copies: their rows become tombstones.

A tombstone keeps the ordinal, has no images, and a keyed digest for an id (``tombstones.py``): nothing of the
property is left, and an ingest still knows that it was withdrawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_copies import backup_paths, catalog_path, publish, quarantine
from vlm_assets.catalog.catalog_file import SCHEMA, CatalogWriter, inputs_digest
from vlm_assets.catalog.ingest import only_ingest


def replace_by_tombstones(home: Path, tombstones: Mapping[str, str]) -> Iterator[Path]:
    """Take these properties out of the catalogue and its copies; gives each file that had them.

    tombstones: by the id of each. Safe to repeat. Raises CatalogError, IngestBusyError, OSError.
    """
    with only_ingest(home, "withdrawing properties"):
        catalog = Catalog.open(home)
        if _has_any(catalog_path(home), tombstones):
            writer = CatalogWriter()
            for one, table in catalog.slices(with_tail=True):
                rows = _without(table, tombstones)
                if catalog.header.tail is not None and one == catalog.tail:
                    writer.add_tail(one, rows, since=catalog.header.tail.since)
                else:
                    writer.add(one, rows)
            publish(home, writer.finish(replace(catalog.header, sequence=catalog.header.sequence + 1)))
            yield catalog_path(home)
        for path in backup_paths(home):
            if path.exists() and _has_any(path, tombstones):
                # Published once more, it is its own previous version.
                publish(home, catalog_path(home).read_bytes())
                yield path
        for path in sorted(quarantine(home).glob("*")):
            if path.is_file():
                path.unlink()
                yield path


def _has_any(path: Path, ids: Collection[str]) -> bool:
    """Whether a file has a row of these properties; one that does not read may have."""
    try:
        found = pq.read_table(path, columns=["property_id"])["property_id"]
    except (OSError, pa.ArrowException):
        return True
    return any(one in ids for one in found.to_pylist())


def _without(table: pa.Table, tombstones: Mapping[str, str]) -> pa.Table:
    gone = {"image_uris": [], "image_bytes": [], "inputs_digest": inputs_digest((), ())}
    rows = [
        {**row, **gone, "property_id": tombstones[row["property_id"]]}
        if row["property_id"] in tombstones
        else row
        for row in table.to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)

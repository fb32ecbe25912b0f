"""Taking withdrawn properties out of the catalogue and its copies; a tombstone stays in the place of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.catalog_copies import backup_paths, catalog_path, publish_catalog, quarantine
from vlm_assets.catalog.catalog_file import SCHEMA, CatalogWriter, inputs_digest
from vlm_assets.catalog.ingest import only_ingest
from vlm_assets.catalog.stored_catalog import extend_catalog, pull_catalog
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror


def replace_by_tombstones(
    home: Path, tombstones: Mapping[str, str], store: Mirror = NO_MIRROR
) -> Iterator[Path]:
    """Take these properties out of the catalogue and its copies; gives each file that had them.

    tombstones: by the id of each. The store's catalogue goes first. Safe to repeat. Raises CatalogError,
    IngestBusyError, StoreError, OSError.
    """
    with only_ingest(home, "withdrawing properties"):
        in_store = pull_catalog(home, store)
        catalog = Catalog.open(home)
        if _has_any(catalog_path(home), tombstones):
            writer = CatalogWriter()
            for range_, table in catalog.slices(with_tail=True):
                rows = _with_tombstones(table, tombstones)
                if catalog.header.tail is not None and range_ == catalog.tail:
                    writer.add_tail(range_, rows, since=catalog.header.tail.since)
                else:
                    writer.add(range_, rows)
            data = writer.finish(replace(catalog.header, sequence=catalog.header.sequence + 1))
            extend_catalog(home, data, store=store, over=in_store)
            yield catalog_path(home)
        for path in backup_paths(home):
            if path.exists() and _has_any(path, tombstones):
                # Published once more, it is its own previous version.
                publish_catalog(home, catalog_path(home).read_bytes())
                yield path
        for path in sorted(quarantine(home).glob("*")):
            if path.is_file():
                path.unlink()
                yield path


def _has_any(path: Path, ids: Collection[str]) -> bool:
    """Whether a file has a row of these properties; one that does not read may have."""
    try:
        listed_ids = pq.read_table(path, columns=["property_id"])["property_id"]
    except (OSError, pa.ArrowException):
        return True
    return any(property_id in ids for property_id in listed_ids.to_pylist())


def _with_tombstones(table: pa.Table, tombstones: Mapping[str, str]) -> pa.Table:
    gone = {"image_uris": [], "image_bytes": [], "inputs_digest": inputs_digest((), ())}
    rows = [
        {**row, **gone, "property_id": tombstones[row["property_id"]]}
        if row["property_id"] in tombstones
        else row
        for row in table.to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)

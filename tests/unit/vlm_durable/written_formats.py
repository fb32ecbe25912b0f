"""A small home in the formats of this version, and the structure of every file in it.

Run as a script it writes ``formats/NUMBER``, after a format changed and its number was raised. The folders of
earlier numbers stay: this version must still read the previous one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.journals import open_journal
from vlm_durable.files.layout import Home, PartitionPaths
from vlm_durable.files.sealed_json import unseal
from vlm_durable.journal import commits, high_water_mark
from vlm_durable.journal.journal import Journal
from vlm_durable.versions import partition_files, version_mark
from vlm_durable.versions.published import PublishedPartitions

FORMATS = Path(__file__).with_name("formats")
PUBLISHED, UNDER_WAY, GENERATION = "000000000-000000002", "000000003-000000005", "generation"
SCHEMA = pa.schema([("property_id", pa.string()), ("ordinal", pa.int64()), ("text", pa.string())])


def rows(first: int, count: int) -> pa.Table:
    """Rows of these ordinals."""
    ordinals = range(first, first + count)
    ids, texts = [f"p{n}" for n in ordinals], [f"text {n}" for n in ordinals]
    return pa.table([ids, list(ordinals), texts], schema=SCHEMA)


def paths(home: Path, key: str) -> PartitionPaths:
    """The files of a partition of the home."""
    return Home(home).asset("property_descriptions").partition(key)


def work_under_way(home: Path) -> Journal:
    """The journal of the partition under way."""
    ids = [f"p{n}" for n in range(3, 6)]
    place = paths(home, UNDER_WAY)
    return open_journal(place, GENERATION, ids, schema=SCHEMA, fingerprints={"model": "m"})


def write(home: Path) -> None:
    """One partition published twice, and one with two of three rows committed."""
    partitions = PublishedPartitions(paths(home, PUBLISHED).asset)
    for fingerprint in ("one", "two"):
        table = rows(0, 3).replace_schema_metadata({"version": fingerprint})
        ids = table["property_id"].to_pylist()
        batches = table.to_batches()
        staged = partitions.stage(PUBLISHED, batches, table.schema, expected_ids=ids, fingerprint=fingerprint)
        partitions.publish(staged)
    with work_under_way(home) as journal:
        for number in (3, 4):
            journal.submit(rows(number, 1))
            journal.flush()


def structure(home: Path) -> dict[str, Any]:
    """The format number and the structure of each kind of file."""
    published, under_way = paths(home, PUBLISHED), paths(home, UNDER_WAY)
    journal = under_way.journal(GENERATION)
    metadata = pq.read_metadata(next(journal.glob("segment-*"))).metadata
    line = metadata[b"vlm_assets.keys"]
    prefix, _, listed = line.partition(b" ")
    return {
        "manifest": _shape(unseal(max(journal.glob("manifest-*")).read_bytes())),
        "mark": _shape(unseal(under_way.high_water_mark(GENERATION).read_bytes())),
        "record": _shape(unseal(published.record.read_bytes())),
        "version mark": _shape(unseal(published.version_mark.read_bytes())),
        "segment": {
            "metadata": sorted(key.decode() for key in metadata),
            "owner": _shape(json.loads(metadata[b"vlm_assets.journal"])),
            "keys": [prefix.decode(), _shape(json.loads(listed)), len(json.loads(listed))],
        },
    }


def number() -> str:
    """The name of this version's folder: the numbers of its formats."""
    numbers = {
        "journal": commits.FORMAT,
        "mark": high_water_mark.FORMAT,
        "record": partition_files.FORMAT,
        "version-mark": version_mark.FORMAT,
    }
    return "-".join(f"{name}-{number}" for name, number in numbers.items())


def _shape(value: object) -> object:
    if isinstance(value, dict):
        return {key: _shape(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return type(value).__name__


if __name__ == "__main__":
    folder = FORMATS / number()
    if folder.exists():
        sys.exit(f"{folder} is written already: raise the number of the format that changed")
    write(folder / "home")
    for lock in (folder / "home").rglob("*.lock"):
        lock.unlink()
    (folder / "structure.json").write_text(json.dumps(structure(folder / "home"), indent=1) + "\n")

"""CPU seconds of a tick of the sensors that look at files, workers and runs, over ten thousand partitions.

``python -m benchmarks.health_ticks [--partitions 10000]``. A real catalogue, published files with records and
second copies, a Dagster instance (SQLite) that knows all of them as materialized. Each sensor: its first
look, ticks with nothing new, and for the files one after ten of them were truncated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.sensor_ticks import write_history
from sensors import published_file_drift
from vlm_assets.assets.description_work import description_rows
from vlm_assets.assets.fingerprint import TEXTS
from vlm_assets.assets.published_rows import COUNTED
from vlm_assets.automation.sensors import build_sensors
from vlm_assets.config.settings import Settings, load_settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.files.sealed_json import sealed
from vlm_durable.versions.partition_files import PartitionVersions, PublishedRecord
from vlm_durable.versions.version_mark import VersionMark, mark_copies

_PARTS = {f"part {number}": "0123456789abcdef" for number in range(8)}
_COUNTED = {"kinds": {"ok": 1}, "stretches": [{"device": "cpu-0", "first": 1.0, "last": 2.0, "rows": 1}]}
_METADATA: dict[str, dict[str, object]] = {
    "property_descriptions": {TEXTS: "0123", COUNTED: _COUNTED, "began": 1.0, "parts": _PARTS},
    "property_embeddings": {"began": 1.0, "parts": {**_PARTS, TEXTS: "0123"}},
}
"""What a run's record says, by asset."""


def make_home(folder: Path, partitions: int) -> Settings:
    """A catalogue of one property a range, all of them published."""
    listing = folder / "listing.jsonl"
    listing.write_text(
        "".join(
            json.dumps({"property_id": f"p{n}", "images": [f"{n}.jpg"]}) + "\n" for n in range(partitions)
        )
    )
    settings = load_settings(home=folder / "home", devices="cpu:2")
    ingest(listing, settings.home, range_size=1)
    row = {
        "property_id": "p",
        "status": "ok",
        "images_seen": 1,
        "device": "cpu-0",
        "described_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    columns = description_rows(pa.struct([("building_type", pa.string())]))
    pq.write_table(pa.Table.from_pylist([row], schema=columns), folder / "one.parquet")
    content = (folder / "one.parquet").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    for asset in settings.partitioned_assets:
        for directory in (asset.published, asset.versions, asset.version_marks):
            directory.mkdir(parents=True, exist_ok=True)
        for key in keys(settings):
            record = PublishedRecord(
                key, 1, digest, len(content), 1, "ids", "f", "2026-01-01T00:00:00Z", _METADATA[asset.name]
            )
            manifest = PartitionVersions(key, record).to_bytes(asset.name)
            paths = asset.partition(key)
            for path in (paths.published, paths.version(0)):
                path.write_bytes(content)
            for path in (paths.record, paths.record_copy):
                path.write_bytes(manifest)
            mark_content = {"published": asdict(record), "previous": []}
            mark = VersionMark(f"{asset.name}/{key}", 1, digest, record.published_at, mark_content)
            for path in mark_copies(paths.version_mark):
                path.write_bytes(sealed(asdict(mark)))
    return settings


def keys(settings: Settings) -> list[str]:
    """The partitions of a home."""
    return [property_range.key for property_range in Catalog.open(settings.home).ranges]


class Ticking:
    """A sensor and its cursor; each tick gets an instance of its own, as the code server makes one."""

    def __init__(self, sensor: dg.SensorDefinition, dagster_home: str) -> None:
        self._sensor = sensor
        self._dagster_home = dagster_home
        self._cursor: str | None = None

    def tick(self, title: str) -> str:
        """Tick, print the CPU seconds, and give what the tick said."""
        with dg.DagsterInstance.from_config(self._dagster_home) as instance:
            context = dg.build_sensor_context(instance=instance, cursor=self._cursor)
            before = time.process_time()
            result = self._sensor(context)
            took = time.process_time() - before
        message = (result.skip_message if isinstance(result, dg.SkipReason) else None) or ""
        self._cursor = context.cursor
        print(f"{self._sensor.name}, {title}: {took:.2f} s of CPU ({message[:70]})", flush=True)
        return message


def main() -> None:
    """Print a line a tick."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=10_000)
    count = parser.parse_args().partitions
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = make_home(folder, count)
        (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        with dg.DagsterInstance.from_config(name) as instance:
            write_history(instance, keys(settings), failed=False)
        sensors = build_sensors(settings, keys(settings))
        for sensor in sensors:
            ticking = Ticking(sensor, name)
            message = ticking.tick("first look")
            while "next time" in message:
                message = ticking.tick("goes on")
            ticking.tick("nothing new")
            ticking.tick("nothing new")
            if sensor.name == published_file_drift.NAME:
                for key in keys(settings)[:10]:
                    settings.descriptions.partition(key).published.write_bytes(b"x")
                ticking.tick("ten truncated")


if __name__ == "__main__":
    main()

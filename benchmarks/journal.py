"""How long a commit and a re-open take: python -m benchmarks.journal [--directory /mnt/disk]

Rows have the columns of the descriptions. Three figures: a verified commit of 2,000 rows as the commit thread
sees it, ``submit`` as the model's thread sees it, and opening a journal of 165,000 rows in 2,750 segments,
every byte read and verified, with a warm page cache and, as root, with a cold one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from vlm_assets.assets.description_work import description_rows
from vlm_assets.config.settings import load_settings
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.segments import JournalIdentity
from vlm_engine.schema import load_schema

COMMIT_ROWS = 2000
SEGMENT_ROWS = 60
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--segments", type=int, default=2750)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where the journals lie (default: a temporary folder)")
    arguments = parser.parse_args()
    schema = description_rows(load_schema(load_settings().description_schema).arrow_type)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        _commits(Path(folder) / "commits", schema, arguments.commits)
        _reopen(Path(folder) / "reopen", schema, arguments.segments, arguments.repeat)
    print(f"load {os.getloadavg()[0]:.1f}")


def _commits(home: Path, schema: pa.Schema, commits: int) -> None:
    total = COMMIT_ROWS * commits
    tables = [_rows(schema, start, COMMIT_ROWS) for start in range(0, total, COMMIT_ROWS)]
    submits, whole = [], []
    with _open(home, schema, _ids(total)) as journal:
        for table in tables:
            started = time.perf_counter()
            journal.submit(table)
            submits.append(time.perf_counter() - started)
            journal.flush()
            whole.append(time.perf_counter() - started - submits[-1])
        journal.retire()
    print(f"verified commit of {COMMIT_ROWS} rows: {_percentiles(whole)} over {commits}")
    print(f"submit of {COMMIT_ROWS} rows: {_percentiles(submits)}")


def _reopen(home: Path, schema: pa.Schema, segments: int, repeat: int) -> None:
    total = SEGMENT_ROWS * segments
    expected = _ids(total)
    with _open(home, schema, expected) as journal:
        for start in range(0, total, SEGMENT_ROWS):
            journal.submit(_rows(schema, start, SEGMENT_ROWS))
            journal.flush()
    title = f"re-open and verify {total} rows in {segments} segments"
    _time(f"{title}, warm", home, schema, expected, repeat, before=lambda: None)
    if os.access(_DROP_CACHES, os.W_OK):
        _time(f"{title}, cold", home, schema, expected, repeat, before=_drop_caches)
    else:
        print(f"{title}, cold: not measured, which needs root")


def _time(
    title: str, home: Path, schema: pa.Schema, expected: list[str], repeat: int, before: Callable[[], None]
) -> None:
    seconds, cpu = [], []
    for _ in range(repeat):
        before()
        started, spent = time.perf_counter(), time.process_time()
        with _open(home, schema, expected) as journal:
            seconds.append(time.perf_counter() - started)
            cpu.append(time.process_time() - spent)
            if journal.committed_rows != len(expected):
                raise RuntimeError(f"{journal.committed_rows} of {len(expected)} rows came back")
    print(f"{title}: {_percentiles(seconds)}, {statistics.median(cpu):.2f} s of CPU")


def _ids(total: int) -> list[str]:
    return [f"property-{n:06d}" for n in range(total)]


def _open(home: Path, schema: pa.Schema, expected: list[str]) -> Journal:
    return Journal.open(
        home / "journal",
        JournalIdentity("benchmark", "g", {}, schema, frozenset(expected)),
        high_water_mark=home / "mark.json",
    )


def _rows(schema: pa.Schema, start: int, count: int) -> pa.Table:
    rows = [
        {
            "property_id": f"property-{n:06d}",
            "ordinal": n,
            "status": "ok",
            "raw_text": f"text of {n} " * 20,
            "attempts": 1,
            "images_failed": [],
            "seconds": n / 7,
            "model": "a-model/of-this-name",
            "fingerprint": f"{n % 3:064d}",
            "device": "cuda:0",
        }
        for n in range(start, start + count)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _percentiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return f"p50 {1000 * statistics.median(seconds):.1f} ms, p95 {1000 * cuts[-1]:.1f} ms"


def _drop_caches() -> None:
    os.sync()
    _DROP_CACHES.write_text("3\n")


if __name__ == "__main__":
    main()

"""Publishes ROWS rows of about 2 KB in FOLDER, and prints the process's peak memory (MiB) and seconds."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from vlm_durable.files.layout import Home
from vlm_durable.versions.published import PublishedPartitions

SCHEMA = pa.schema([("property_id", pa.string()), ("raw_text", pa.binary())])
ROWS_A_BATCH = 500


def batches(rows: int) -> Iterator[pa.RecordBatch]:
    chance = random.Random(1)
    for start in range(0, rows, ROWS_A_BATCH):
        ids = [f"{number:06d}" for number in range(start, start + ROWS_A_BATCH)]
        texts = [chance.randbytes(2000) for _ in ids]
        yield pa.record_batch([ids, texts], schema=SCHEMA)


def main(folder: Path, rows: int) -> None:
    partitions = PublishedPartitions(Home(folder).asset("a"))
    expected = {f"{number:06d}" for number in range(rows)}
    start = time.monotonic()
    staged = partitions.stage("000-001", batches(rows), SCHEMA, expected_ids=expected, fingerprint="f")
    record = partitions.publish(staged).record
    seconds = time.monotonic() - start
    assert record.rows == rows
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

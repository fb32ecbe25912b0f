"""The floor, first form: a loop in one process that decodes, asks and keeps rows, and writes them last."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.describing import Describer, decode_property, row_schema
from benchmarks.contenders.task import Task


def main() -> None:
    """Describe what the task names."""
    task = Task.read(sys.argv[1])
    describer = Describer(task)
    rows = []
    for batch in task.batches():
        inputs = describer.inputs([decode_property(one, task) for one in batch])
        rows += describer.describe(batch, inputs)
    pq.write_table(pa.Table.from_pylist(rows, row_schema(task)), Path(task.output) / "rows.parquet")
    task.synchronise_output()
    task.mark("durable", len(rows))


if __name__ == "__main__":
    main()

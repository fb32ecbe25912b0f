"""The floor: a plain loop with one worker process of torch's DataLoader ahead of it.

The worker decodes and runs the processor; the loop has only the model, the grammar and the rows to do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.describing import (
    Describer,
    decode_property,
    load_processor,
    model_inputs,
    row_schema,
)
from benchmarks.contenders.task import Task


def main() -> None:
    """Describe what the task names."""
    from torch.utils.data import DataLoader

    task = Task.read(sys.argv[1])
    processor = load_processor(task)

    def prepared(batch: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        images = [decode_property(row, task) for row in batch]
        return batch, dict(model_inputs(processor, task.prompt, images))

    loader = DataLoader(
        task.rows(),
        batch_size=task.batch,
        num_workers=1,
        prefetch_factor=2,
        collate_fn=prepared,
    )
    ahead = iter(loader)  # The worker begins now, while the model loads.
    describer = Describer(task, processor)
    rows = []
    for batch, inputs in ahead:
        rows += describer.describe(batch, inputs)
    pq.write_table(pa.Table.from_pylist(rows, row_schema(task)), Path(task.output) / "rows.parquet")
    task.synchronise_output()
    task.mark("durable", len(rows))


if __name__ == "__main__":
    main()

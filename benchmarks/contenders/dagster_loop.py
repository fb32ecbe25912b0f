"""A plain Dagster asset around a bare loop, which writes one parquet file; no journal, no checks."""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import sys
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.contenders.describing import Describer, decode_property, row_schema
from benchmarks.contenders.task import Task


@dg.asset
def descriptions(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    """What people write first."""
    task = Task.read(sys.argv[1])
    describer = Describer(task)
    rows = []
    for batch in task.batches():
        inputs = describer.inputs([decode_property(row, task) for row in batch])
        rows += describer.describe(batch, inputs)
        context.log.info(f"{len(rows)} described")
    pq.write_table(pa.Table.from_pylist(rows, row_schema(task)), Path(task.output) / "rows.parquet")
    task.synchronise_output()
    task.mark("durable", len(rows))
    return dg.MaterializeResult(metadata={"rows": len(rows)})


def main() -> None:
    """Materialize the asset in this process, with the history of DAGSTER_HOME."""
    with dg.DagsterInstance.get() as instance:
        dg.materialize([descriptions], instance=instance)


if __name__ == "__main__":
    main()

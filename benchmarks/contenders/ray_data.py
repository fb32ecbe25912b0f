"""Ray Data on one machine: a stage of tasks that decodes and runs the processor, one actor with the model.

As its guides have it: an actor class that loads the model once, a pool of one, a batch a block so that both
stages stream, parquet at the end. Tasks take the cores that the actor leaves.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import pyarrow as pa

from benchmarks.contenders.describing import (
    Describer,
    decode_property,
    load_processor,
    model_inputs,
    row_schema,
)
from benchmarks.contenders.task import Task

_INPUTS = "input_"


def prepare(batch: dict[str, Any], task: Task) -> dict[str, Any]:
    """``property_id``, ``ordinal`` and ``images`` in; ids and the processor's tensors, of one width, out."""
    images = [decode_property({"images": list(paths)}, task) for paths in batch["images"]]
    tensors = dict(model_inputs(load_processor(task), task.prompt, images))
    ids = {name: batch[name] for name in ("property_id", "ordinal")}
    return ids | {_INPUTS + name: tensor.numpy() for name, tensor in tensors.items()}


class Model:
    """The actor."""

    def __init__(self, task: Task) -> None:
        self._describer = Describer(task)
        self._schema = row_schema(task)

    def __call__(self, batch: dict[str, Any]) -> pa.Table:
        """Rows of one batch."""
        import torch

        properties = [
            {"property_id": str(id_), "ordinal": int(ordinal)}
            for id_, ordinal in zip(batch["property_id"], batch["ordinal"], strict=True)
        ]
        inputs = {
            name.removeprefix(_INPUTS): torch.tensor(values)
            for name, values in batch.items()
            if name.startswith(_INPUTS)
        }
        return pa.Table.from_pylist(self._describer.describe(properties, inputs), self._schema)


def main() -> None:
    """Describe what the task names."""
    import ray
    import ray.data

    task = Task.read(sys.argv[1])
    # A socket's path is at most 107 bytes long: a short folder, wherever the task lies.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=task.cores,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=1 << 30,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        rows = task.rows()
        described = (
            ray.data.from_items(rows, override_num_blocks=-(-len(rows) // task.batch))
            .map_batches(prepare, fn_kwargs={"task": task}, batch_size=task.batch, num_cpus=1)
            .map_batches(
                Model,
                fn_constructor_args=(task,),
                batch_size=task.batch,
                compute=ray.data.ActorPoolStrategy(size=1),
                num_cpus=1,
            )
        )
        described.write_parquet(task.output)
        task.synchronise_output()
        task.mark("durable", len(rows))
        ray.shutdown()


if __name__ == "__main__":
    main()

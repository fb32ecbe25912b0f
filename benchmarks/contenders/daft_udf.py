"""Daft on one machine: a function that decodes, a class with the model loaded once, parquet at the end."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from PIL import Image

from benchmarks.contenders.describing import Describer, decode_property, row_schema
from benchmarks.contenders.task import Task


@dataclass
class Decoded:
    """The images of a property as one value; Daft would look into a list."""

    images: list[Image.Image]


class Model:
    """What ``daft.cls`` makes one instance of."""

    def __init__(self, task: Task) -> None:
        self._describer = Describer(task)

    def describe(self, ids: Any, ordinals: Any, images: Any) -> list[dict[str, Any]]:
        """Rows of one batch."""
        properties = [
            {"property_id": id_, "ordinal": ordinal}
            for id_, ordinal in zip(ids.to_pylist(), ordinals.to_pylist(), strict=True)
        ]
        inputs = self._describer.inputs([listing.images for listing in images.to_pylist()])
        return self._describer.describe(properties, inputs)


def main() -> None:
    """Describe what the task names."""
    import daft
    import pyarrow as pa

    task = Task.read(sys.argv[1])
    row = daft.DataType.from_arrow_type(pa.struct(row_schema(task)))

    @daft.func.batch(return_dtype=daft.DataType.python(), batch_size=task.batch)  # type: ignore[untyped-decorator]
    def decode(images: daft.Series) -> list[Any]:
        return [Decoded(decode_property({"images": paths}, task)) for paths in images.to_pylist()]

    describe = daft.method.batch(return_dtype=row, unnest=True, batch_size=task.batch)(Model.describe)
    Model.describe = describe  # type: ignore[method-assign]  # Daft's classes are made before it is imported
    model = daft.cls(Model, max_concurrency=1)(task)
    rows = task.rows()
    frame = daft.from_pylist(rows)
    frame = frame.with_column("images", decode(frame["images"]))
    frame = frame.select(model.describe(frame["property_id"], frame["ordinal"], frame["images"]))
    frame.write_parquet(task.output)
    task.synchronise_output()
    task.mark("durable", len(rows))


if __name__ == "__main__":
    main()

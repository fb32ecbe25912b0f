"""What every contender of ``make bench`` is given, and the moments that it marks.

What lives here: the task as a file, and marks on a clock that all processes of a machine share. What does
not: any contender, and what is made of the marks (bench_runs.py). Only the standard library is imported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Moment = Literal["asked", "first_batch", "durable"]
"""asked: the first properties go to the model. first_batch: their rows are there. durable: all rows are on
disk, written and synchronised; what a contender does afterwards (checks, publishing) comes later.
"""


@dataclass(frozen=True)
class Task:
    """The same work for every contender.

    properties: JSON lines of ``property_id``, ``ordinal`` and ``images`` (paths), in the order of the
    batches. output: folder for parquet files. marks: file that the moments are appended to. batch: properties
    described together; this project has its own settings. guided: answers are held to the schema by a
    grammar. threads: of torch. cores: of the machine, for what schedules by them. max_pixels: of
    an image before the processor sees it.
    """

    properties: str
    output: str
    marks: str
    model: str
    prompt: str
    description_schema: str
    batch: int
    guided: bool
    max_new_tokens: int
    max_images: int
    max_pixels: int
    threads: int
    cores: int

    @classmethod
    def read(cls, path: str) -> Task:
        """The task that ``write`` has left."""
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        """Leave it for a contender's process."""
        path.write_text(json.dumps(asdict(self)))

    def rows(self) -> list[dict[str, Any]]:
        """The properties: ``property_id``, ``ordinal``, ``images``."""
        return [json.loads(line) for line in Path(self.properties).read_text().splitlines()]

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """The properties, as many as are described together at a time."""
        rows = self.rows()
        for start in range(0, len(rows), self.batch):
            yield rows[start : start + self.batch]

    def mark(self, moment: Moment, rows: int = 0) -> None:
        """Note that this moment is now; ``rows``: of the first batch, or of all that is durable."""
        content = {"moment": moment, "at": time.monotonic(), "rows": rows}
        line = json.dumps({**content, "cpu": time.process_time(), "pid": os.getpid()}) + "\n"
        descriptor = os.open(self.marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def synchronise_output(self) -> None:
        """Have every file of the output on the disk, as every contender must before it is done."""
        for path in [*Path(self.output).rglob("*"), Path(self.output)]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

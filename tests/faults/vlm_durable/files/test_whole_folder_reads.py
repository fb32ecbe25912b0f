"""A reader that is pointed at a whole asset folder, before any file operation of a life: as after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from faults import partition_life
from faults.file_operations import FileOperations


def read(folder: Path) -> set[str]:
    """Every entry of the folder as parquet, by three readers: the texts found, after comparing them."""
    if not folder.is_dir() or not list(folder.iterdir()):
        return set()
    each = [pq.ParquetFile(path).read().column("text").to_pylist() for path in folder.iterdir()]
    whole = pads.dataset(folder, format="parquet", exclude_invalid_files=False).to_table(columns=["text"])
    texts = whole.column("text").to_pylist()
    assert sorted(texts) == sorted(text for one in each for text in one)
    with duckdb.connect() as connection:
        found = connection.execute("select text from read_parquet(?)", [f"{folder}/*"]).fetchall()
    assert sorted(text for (text,) in found) == sorted(texts)
    assert len(texts) == partition_life.TOTAL
    return {text.partition(" of ")[0] for text in texts}


@pytest.mark.promise("Readers see the whole old file or the whole new one")
def test_the_folder_reads_before_every_file_operation(memory_path: Path) -> None:
    """Commits, staging, publishing twice and retiring never show a reader anything but one whole version."""
    folder = partition_life.asset(memory_path).published
    operations = FileOperations(memory_path)
    seen: list[set[str]] = []

    def before(operation: Any, operations: Any) -> None:
        if not seen or operation.name in ("replace", "link", "unlink", "create"):
            seen.append(read(folder))

    operations.before = before
    with operations.watched():
        partition_life.live(memory_path, lambda **said: None)
    seen.append(read(folder))
    changes = [one for one, before in zip(seen, [None, *seen], strict=False) if one != before]
    assert changes == [set(), {"version 1"}, {"version 2"}]
    assert len(seen) > 100

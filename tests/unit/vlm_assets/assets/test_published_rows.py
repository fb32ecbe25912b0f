"""What published rows tell of outcomes, devices and time, and that unchanged files are not read twice."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_assets.assets.published_rows import (
    PublishedRows,
    PublishedRowsNote,
    Stretch,
    read_published_rows,
)
from vlm_assets.operate.throughput import MOST_BARS, throughput


def read(dataset, known=None) -> dict[str, PublishedRows]:
    records = [dataset.descriptions.record(key) for key in dataset.keys]
    return read_published_rows(dataset.settings.descriptions, records, known or {})


def test_rows_are_told_by_outcome_device_and_time(dataset) -> None:
    """Ok and failed rows by kind; the stretch in which a device described them, with its batches."""
    found = read(dataset)
    assert list(found) == dataset.keys
    second = found[dataset.keys[1]]
    assert (second.ok, dict(second.failed)) == (2, {"missing": 1})
    assert [one.sentence() for one in second.first_failed] == ["p4: missing: its image is gone"]
    (stretch,) = second.stretches
    assert (stretch.device, stretch.rows, stretch.images, stretch.batches) == ("cpu-0", 3, 6, 3)
    assert stretch.last - stretch.first == 4.0


def test_files_with_another_description_are_read_together(dataset) -> None:
    """A column that one schema has and another has not, or has otherwise, is no reason to lose a file."""
    path = dataset.settings.descriptions.partition(dataset.keys[2]).published
    table = pq.read_table(path)
    pq.write_table(table.append_column("extra", pa.array([1] * table.num_rows)).drop(["raw_text"]), path)
    assert [rows.ok for rows in read(dataset).values()] == [3, 2, 3]


def test_a_file_that_does_not_read_leaves_the_others(dataset) -> None:
    """One damaged file never breaks the triage."""
    path = dataset.settings.descriptions.partition(dataset.keys[0]).published
    path.write_bytes(b"not parquet")
    assert list(read(dataset)) == dataset.keys[1:]


def test_unchanged_files_are_not_read_again(dataset, tmp_path: Path) -> None:
    """What was noted holds for the digest it was noted for; a file published anew is read anew."""
    note = PublishedRowsNote(tmp_path)
    assert note.read() == {}
    first = read(dataset)
    note.write(first)
    assert note.read() == first
    for key in dataset.keys:
        dataset.settings.descriptions.partition(key).published.unlink()
    assert read(dataset, note.read()) == first
    changed = dataset.describe(dataset.keys[0], text="another house")
    again = read(dataset, note.read())
    assert again[dataset.keys[0]].sha256 == changed.sha256
    damaged = tmp_path / "published_rows.json"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert note.read() == {}


def stretch(device: str, first: float, last: float, rows: int, batches: int = 10) -> Stretch:
    return Stretch(device, first, last, rows, rows * 9, batches)


def test_throughput_keeps_every_row_and_fits() -> None:
    """A month or a minute of work is cut into as many bars as fit; an idle time stays empty."""
    day = 86_400.0
    work = [stretch("a", day * n, day * n + 590, 100) for n in (0, 1, 29)] + [stretch("b", 0, 0, 7)]
    done = throughput(work)
    assert len(done.bars) <= MOST_BARS
    assert round(sum(sum(bar.values()) for bar in done.bars), 6) == 307
    assert done.devices == ["a", "b"]
    assert done.bars[10] == {}
    minute = throughput([stretch("a", 1000, 1060, 60)])
    assert (minute.width, len(minute.bars)) == (10, 7)
    assert throughput([]).highest == 0.0

"""What may be published and read, and what a refusal leaves behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.damage import flip_bit
from vlm_durable.files.files import DurableWriteError
from vlm_durable.files.layout import Home
from vlm_durable.versions import published
from vlm_durable.versions.partition_files import FileDamagedError, PartitionBusyError
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import PublishedError

KEY = "000000000-000000009"
IDS = [f"p {i}/ü" for i in range(10)]


def test_staged_file_is_not_a_parquet_name_until_published(partitions: Any) -> None:
    """No reader's ``*.parquet`` finds a file that is not published."""
    staged = partitions.stage_text("a")
    assert staged.path.parent == partitions.asset.staging
    assert staged.path.name.startswith(".") and staged.path.suffix == ".tmp"
    assert list(partitions.home.rglob("*.parquet")) == []
    assert partitions.keys() == []
    partitions.publish(staged)
    assert partitions.keys() == [KEY]
    assert partitions.leftovers() == []


def test_record_says_what_was_published(partitions: Any) -> None:
    """The record holds digest, rows, key-set digest, fingerprint, sequence and metadata."""
    publication = partitions.publish_text("a")
    record = partitions.record(KEY)
    assert record == publication.record
    assert record is not None
    assert (record.rows, record.fingerprint, record.sequence, record.metadata) == (10, "fa", 1, {"ok": 10})
    assert record.bytes == partitions.path(KEY).stat().st_size
    assert partitions.verify(KEY).ok


@pytest.mark.promise("A published file has a verified second copy")
def test_two_versions_before_really_exist(partitions: Any) -> None:
    """Slot 0 is a second copy, not a link, and slots 1 and 2 are the versions before it."""
    for text in "abcd":
        partitions.publish_text(text)
    assert partitions.slots() == ["d", "c", "b"]
    published, copy = partitions.path(KEY), partitions.files.slot(0)
    assert published.read_bytes() == copy.read_bytes()
    assert published.stat().st_ino != copy.stat().st_ino
    assert published.stat().st_nlink == copy.stat().st_nlink == 1
    assert partitions.verify(KEY).ok


def test_earlier_versions_are_read_where_they_are_whole(partitions: Any) -> None:
    """Rows may be taken from them: newest first, and none from a file that is not what was published."""
    for text in "abcd":
        partitions.publish_text(text)

    def versions() -> list[str]:
        return [version.record.sha256 for version in partitions.read_earlier(KEY, [])]

    before = [version.sha256 for version in partitions.files.settle()[0].previous]
    assert versions() == before
    flip_bit(partitions.files.slot(1))
    assert versions() == before[1:]


def test_identical_file_rotates_nothing(partitions: Any) -> None:
    """A materialization that changes nothing changes nothing on disk, whatever the batches' sizes."""
    partitions.publish_text("a")
    partitions.publish_text("b")
    before = {path: path.stat().st_mtime_ns for path in partitions.home.rglob("*") if "lock" not in path.name}
    batches = [partitions.rows(IDS, "b").slice(0, 3), partitions.rows(IDS, "b").slice(3)]
    staged = partitions.stage(KEY, batches, partitions.SCHEMA, expected_ids=IDS, fingerprint="fb")
    publication = partitions.publish(staged)
    after = {path: path.stat().st_mtime_ns for path in before if path.is_file()}
    assert not publication.changed
    assert publication.record.sequence == 2
    assert after == {path: before[path] for path in after}
    assert partitions.slots() == ["b", "a", None]
    assert partitions.leftovers() == []


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (IDS[:-1], "1 missing: 'p 9/ü'"),
        ([*IDS, "x"], "1 not expected: 'x'"),
        ([*IDS[:-1], "x"], "1 missing: 'p 9/ü'; 1 not expected: 'x'"),
        ([*IDS, IDS[0]], "1 more than once: 'p 0/ü'"),
        ([*IDS[:-1], None], "1 without an id"),
        ([], "10 missing: 'p 0/ü', 'p 1/ü', 'p 2/ü', 'p 3/ü', 'p 4/ü', …"),
    ],
)
@pytest.mark.promise("Every input gets exactly one row", "Exactly once")
def test_wrong_id_set_is_refused(partitions: Any, ids: list[str], said: str) -> None:
    """Equal counts hide a swap: ids are compared as sets, and the first offending ones are named."""
    partitions.publish_text("a")
    staged = partitions.stage_text("b", ids)
    with pytest.raises(PublishedError) as refusal:
        partitions.publish(staged)
    assert said in str(refusal.value)
    assert partitions.text_of(partitions.path(KEY)) == "a"
    assert partitions.verify(KEY).ok
    staged.discard()
    assert partitions.leftovers() == []


def test_staged_file_changed_after_read_back_is_refused(partitions: Any) -> None:
    """What is published is what was read back, to the byte."""
    partitions.publish_text("a")
    with partitions.stage_text("b") as staged:
        flip_bit(staged.path, 40)
        with pytest.raises(FileDamagedError, match="changed after it was read back"):
            partitions.publish(staged)
    assert partitions.text_of(partitions.path(KEY)) == "a"
    assert partitions.slots() == ["a", None, None]


def test_paused_publisher_is_fenced(partitions: Any) -> None:
    """A file staged before another run published does not replace that run's file."""
    partitions.publish_text("a")
    paused = partitions.stage_text("b")
    partitions.publish_text("c")
    with pytest.raises(PublishedError, match="was published by another process"):
        partitions.publish(paused)
    assert partitions.slots() == ["c", "a", None]


def test_living_stage_survives_another(partitions: Any) -> None:
    """Only a dead process's temporary files are removed by the next stage."""
    living = partitions.stage_text("b")
    partitions.stage_text("c").discard()
    assert living.path.exists()
    living.release()
    partitions.stage_text("c").discard()
    assert not living.path.exists()


def test_one_publisher_at_a_time(partitions: Any) -> None:
    """Two processes cannot publish one partition at a time; the lock goes with the process."""
    staged = partitions.stage_text("a")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\n"
            "from vlm_durable.versions.partition_files import PartitionFiles\n"
            "from vlm_durable.files.layout import Home\n"
            "asset = Home(pathlib.Path(sys.argv[1])).asset(sys.argv[2])\n"
            "with PartitionFiles(asset, sys.argv[3]).locked(0):\n"
            "    print('held', flush=True)\n"
            "    sys.stdin.read()\n",
            str(partitions.home),
            partitions.asset.name,
            KEY,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(PartitionBusyError):
            partitions.publish(staged)
    finally:
        holder.kill()
        holder.communicate()
    assert partitions.publish(staged).changed


def test_row_groups_are_bounded_and_pages_have_checksums(partitions: Any) -> None:
    """One row group of 1,024 rows is in memory at a time, and a flipped bit in a page is noticed."""
    ids = [f"{i:05d}" for i in range(2500)]
    batches: Iterator[pa.RecordBatch] = (
        partitions.rows(ids[start : start + 700]) for start in range(0, 2500, 700)
    )
    staged = partitions.stage(KEY, batches, partitions.SCHEMA, expected_ids=ids, fingerprint="f")
    partitions.publish(staged)
    metadata = pq.read_metadata(partitions.path(KEY))
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert sizes == [1024, 1024, 452]
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    read = partitions.read(KEY)
    assert read.to_table()["property_id"].to_pylist() == ids
    column = metadata.row_group(0).column(0)
    flip_bit(partitions.path(KEY), column.data_page_offset + column.total_compressed_size // 2)
    with pytest.raises((OSError, pa.ArrowException), match=r"(?i)crc|checksum"):
        read.to_table()


def test_failing_batches_leave_nothing(partitions: Any) -> None:
    """An error while rows are produced leaves the old file, no temporary one, and is the error raised."""
    partitions.publish_text("a")

    def broken() -> Iterator[pa.RecordBatch]:
        yield partitions.rows(IDS)
        raise RuntimeError("the journal ended")

    with pytest.raises(RuntimeError, match="the journal ended"):
        partitions.stage(KEY, broken(), partitions.SCHEMA, expected_ids=IDS, fingerprint="f")
    with pytest.raises(PublishedError, match="ordinal: int64"):
        batch = pa.record_batch([IDS], names=["property_id"])
        partitions.stage(KEY, [batch], partitions.SCHEMA, expected_ids=IDS, fingerprint="f")
    with pytest.raises(TypeError):
        partitions.stage(
            KEY, [], partitions.SCHEMA, expected_ids=[], fingerprint="f", metadata={"x": object()}
        )
    assert partitions.leftovers() == []
    assert partitions.verify(KEY).ok


def test_empty_partition_can_be_published(partitions: Any) -> None:
    """No rows is a file too, where no id is expected."""
    partitions.publish(partitions.stage(KEY, [], partitions.SCHEMA, expected_ids=[], fingerprint="f"))
    assert partitions.read(KEY).to_table().num_rows == 0
    assert partitions.read(KEY).schema.equals(partitions.SCHEMA)


@pytest.mark.parametrize("key", ["", "a/b", "..", ".hidden", "a.0", "a b", "ü", "x" * 151, "a\n"])
def test_partition_key_must_be_a_file_name(partitions: Any, key: str) -> None:
    """No key reaches out of the directory or takes another key's backup name."""
    with pytest.raises(PublishedError, match="cannot be a file name"):
        partitions.record(key)


def test_lazy_reading_by_column(partitions: Any) -> None:
    """Columns are chosen when rows are asked for; DuckDB reads the same rows."""
    partitions.publish_text("a")
    handle = partitions.read(KEY)
    assert handle.to_table(["ordinal"]).column_names == ["ordinal"]
    assert [batch.num_rows for batch in handle.iter_batches(["ordinal"], batch_rows=4)] == [4, 4, 2]
    assert handle.record == partitions.record(KEY)
    assert handle.to_table(["property_id"])["property_id"].to_pylist() == IDS
    with duckdb.connect() as connection:
        files = f"{partitions.asset.published}/*.parquet"
        assert connection.sql(f"select count(*) from '{files}'").fetchall() == [(10,)]


def test_another_asset_is_refused(partitions: Any, tmp_path: Path) -> None:
    """A file staged for one asset is not published as another's."""
    other = PublishedPartitions(Home(tmp_path).asset("property_embeddings"))
    with pytest.raises(PublishedError, match="was staged for"):
        other.publish(partitions.stage_text("a"))


def test_rows_that_did_not_reach_the_file_are_noticed(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows read back than were written: not staged, and nothing left behind."""
    write_rows = published.write_rows
    monkeypatch.setattr(published, "write_rows", lambda *given: write_rows(*given) + 1)
    with pytest.raises(DurableWriteError, match="reads back 10 rows where 11 were written"):
        partitions.stage_text("a")
    assert partitions.leftovers() == []

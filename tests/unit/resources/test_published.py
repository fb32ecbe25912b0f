"""What may be published, verified, restored and read, and what a refusal leaves behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from resources import published
from resources.journal import files
from resources.journal.files import DurableWriteError
from resources.partition_files import PartitionFiles
from resources.published import Publication, PublishedPartitions
from resources.published_errors import (
    CannotRestoreError,
    DigestMismatchError,
    InvalidPartitionKeyError,
    NotPublishedError,
    PartitionBusyError,
    PublishedByAnotherError,
    PublishedFileDamagedError,
    RecordDamagedError,
    WrongIdSetError,
    WrongPartitionError,
    WrongSchemaError,
)
from resources.published_verification import FindingKind
from resources.staged_file import StagedFile

KEY = "000000000-000000009"
IDS = [f"p {i}/ü" for i in range(10)]
SCHEMA = pa.schema([("property_id", pa.string()), ("ordinal", pa.int64()), ("text", pa.string())])


def rows(ids: list[str], text: str = "a") -> pa.RecordBatch:
    return pa.record_batch([ids, list(range(len(ids))), [text] * len(ids)], schema=SCHEMA)


@pytest.fixture
def partitions(tmp_path: Path) -> PublishedPartitions:
    return PublishedPartitions(tmp_path / "property_descriptions", lock_seconds=0.2)


def stage(partitions: PublishedPartitions, text: str = "a", ids: list[str] = IDS) -> StagedFile:
    return partitions.stage(
        KEY, [rows(ids, text)], SCHEMA, expected_ids=IDS, fingerprint=f"f{text}", metadata={"ok": len(ids)}
    )


def publish(partitions: PublishedPartitions, text: str = "a") -> Publication:
    return partitions.publish(stage(partitions, text))


def text_of(path: Path) -> str:
    return pq.read_table(path).column("text")[0].as_py()


def slots(partitions: PublishedPartitions) -> list[str | None]:
    paths = [PartitionFiles(partitions.directory, KEY).slot(number) for number in (0, 1, 2)]
    return [text_of(path) if path.exists() else None for path in paths]


def leftovers(partitions: PublishedPartitions) -> list[Path]:
    return [path for path in partitions.directory.rglob("*.tmp") if path.is_file()]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 0x10
    path.write_bytes(data)


def test_staged_file_is_not_a_parquet_name_until_published(partitions: PublishedPartitions) -> None:
    """No reader's ``*.parquet`` finds a file that is not published."""
    staged = stage(partitions)
    assert staged.path.parent == partitions.directory
    assert staged.path.name.startswith(".") and staged.path.suffix == ".tmp"
    assert list(partitions.directory.rglob("*.parquet")) == []
    assert partitions.keys() == []
    partitions.publish(staged)
    assert partitions.keys() == [KEY]
    assert leftovers(partitions) == []


def test_record_says_what_was_published(partitions: PublishedPartitions) -> None:
    """The record holds digest, rows, key-set digest, fingerprint, sequence and metadata."""
    publication = publish(partitions)
    record = partitions.record(KEY)
    assert record == publication.record
    assert record is not None
    assert (record.rows, record.fingerprint, record.sequence, record.metadata) == (10, "fa", 1, {"ok": 10})
    assert record.bytes == publication.path.stat().st_size
    assert partitions.verify(KEY).ok


def test_two_versions_before_really_exist(partitions: PublishedPartitions) -> None:
    """Slot 0 is a second copy, not a link, and slots 1 and 2 are the versions before it."""
    for text in "abcd":
        publish(partitions, text)
    assert slots(partitions) == ["d", "c", "b"]
    published, copy = partitions.path(KEY), PartitionFiles(partitions.directory, KEY).slot(0)
    assert published.read_bytes() == copy.read_bytes()
    assert published.stat().st_ino != copy.stat().st_ino
    assert published.stat().st_nlink == copy.stat().st_nlink == 1
    assert partitions.verify(KEY).ok


def test_identical_file_rotates_nothing(partitions: PublishedPartitions) -> None:
    """A materialization that changes nothing changes nothing on disk, whatever the batches' sizes."""
    publish(partitions, "a")
    publish(partitions, "b")
    before = {
        path: path.stat().st_mtime_ns for path in partitions.directory.rglob("*") if "lock" not in path.name
    }
    batches = [rows(IDS, "b").slice(0, 3), rows(IDS, "b").slice(3)]
    staged = partitions.stage(KEY, batches, SCHEMA, expected_ids=IDS, fingerprint="fb")
    publication = partitions.publish(staged)
    after = {path: path.stat().st_mtime_ns for path in before if path.is_file()}
    assert not publication.changed
    assert publication.record.sequence == 2
    assert after == {path: before[path] for path in after}
    assert slots(partitions) == ["b", "a", None]
    assert leftovers(partitions) == []


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
def test_wrong_id_set_is_refused(partitions: PublishedPartitions, ids: list[str], said: str) -> None:
    """Equal counts hide a swap: ids are compared as sets, and the first offending ones are named."""
    publish(partitions, "a")
    staged = stage(partitions, "b", ids)
    with pytest.raises(WrongIdSetError) as refusal:
        partitions.publish(staged)
    assert said in str(refusal.value)
    assert text_of(partitions.path(KEY)) == "a"
    assert partitions.verify(KEY).ok
    staged.discard()
    assert leftovers(partitions) == []


def test_staged_file_changed_after_read_back_is_refused(partitions: PublishedPartitions) -> None:
    """What is published is what was read back, to the byte."""
    publish(partitions, "a")
    with stage(partitions, "b") as staged:
        flip(staged.path)
        with pytest.raises(DigestMismatchError, match="changed after it was read back"):
            partitions.publish(staged)
    assert text_of(partitions.path(KEY)) == "a"
    assert slots(partitions) == ["a", None, None]


def test_paused_publisher_is_fenced(partitions: PublishedPartitions) -> None:
    """A file staged before another run published does not replace that run's file."""
    publish(partitions, "a")
    paused = stage(partitions, "b")
    publish(partitions, "c")
    with pytest.raises(PublishedByAnotherError):
        partitions.publish(paused)
    assert slots(partitions) == ["c", "a", None]


def test_living_stage_survives_another(partitions: PublishedPartitions) -> None:
    """Only a dead process's temporary files are removed by the next stage."""
    living = stage(partitions, "b")
    stage(partitions, "c").discard()
    assert living.path.exists()
    living.release()
    stage(partitions, "c").discard()
    assert not living.path.exists()


def test_one_publisher_at_a_time(partitions: PublishedPartitions) -> None:
    """Two processes cannot publish one partition at a time; the lock goes with the process."""
    staged = stage(partitions)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\n"
            "from resources.partition_files import PartitionFiles\n"
            "with PartitionFiles(pathlib.Path(sys.argv[1]), sys.argv[2]).locked(0):\n"
            "    print('held', flush=True)\n"
            "    sys.stdin.read()\n",
            str(partitions.directory),
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


def test_verifying_during_a_publication(partitions: PublishedPartitions) -> None:
    """While another process publishes, what readers see is judged, and nothing is touched."""
    publish(partitions, "a")
    publish(partitions, "b")
    partition = PartitionFiles(partitions.directory, KEY)
    with partition.locked(0):
        partition.slot(1).unlink()
        assert partitions.verify(KEY).ok
        flip(partitions.path(KEY))
        assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.DIGEST_DIFFERS]
    assert len(partitions.verify(KEY).findings) == 2


def test_row_groups_are_bounded_and_pages_have_checksums(partitions: PublishedPartitions) -> None:
    """One row group of 1,024 rows is in memory at a time, and a flipped bit in a page is noticed."""
    ids = [f"{i:05d}" for i in range(2500)]
    batches: Iterator[pa.RecordBatch] = (rows(ids[start : start + 700]) for start in range(0, 2500, 700))
    staged = partitions.stage(KEY, batches, SCHEMA, expected_ids=ids, fingerprint="f")
    partitions.publish(staged)
    metadata = pq.read_metadata(partitions.path(KEY))
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert sizes == [1024, 1024, 452]
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    read = partitions.read(KEY)
    assert read.ids() == ids
    column = metadata.row_group(0).column(0)
    data = bytearray(partitions.path(KEY).read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    partitions.path(KEY).write_bytes(data)
    with pytest.raises((OSError, pa.ArrowException), match=r"(?i)crc|checksum"):
        read.to_table()
    with pytest.raises((OSError, pa.ArrowException), match=r"(?i)crc|checksum"):
        read.dataset().to_table()


def test_failing_batches_leave_nothing(partitions: PublishedPartitions) -> None:
    """An error while rows are produced leaves the old file, no temporary one, and is the error raised."""
    publish(partitions, "a")

    def broken() -> Iterator[pa.RecordBatch]:
        yield rows(IDS)
        raise RuntimeError("the journal ended")

    with pytest.raises(RuntimeError, match="the journal ended"):
        partitions.stage(KEY, broken(), SCHEMA, expected_ids=IDS, fingerprint="f")
    with pytest.raises(WrongSchemaError, match="ordinal: int64"):
        batch = pa.record_batch([IDS], names=["property_id"])
        partitions.stage(KEY, [batch], SCHEMA, expected_ids=IDS, fingerprint="f")
    with pytest.raises(TypeError):
        partitions.stage(KEY, [], SCHEMA, expected_ids=[], fingerprint="f", metadata={"x": object()})
    assert leftovers(partitions) == []
    assert partitions.verify(KEY).ok


def test_empty_partition_can_be_published(partitions: PublishedPartitions) -> None:
    """No rows is a file too, where no id is expected."""
    partitions.publish(partitions.stage(KEY, [], SCHEMA, expected_ids=[], fingerprint="f"))
    assert partitions.read(KEY).num_rows == 0
    assert partitions.read(KEY).schema.equals(SCHEMA)


@pytest.mark.parametrize("key", ["", "a/b", "..", ".hidden", "a.0", "a b", "ü", "x" * 151, "a\n"])
def test_partition_key_must_be_a_file_name(partitions: PublishedPartitions, key: str) -> None:
    """No key reaches out of the directory or takes another key's backup name."""
    with pytest.raises(InvalidPartitionKeyError):
        partitions.record(key)


def test_lazy_reading_by_column(partitions: PublishedPartitions) -> None:
    """Columns are chosen at read or later; DuckDB and datasets read the same rows."""
    publish(partitions, "a")
    handle = partitions.read(KEY, ["text"])
    assert handle.to_table().column_names == ["text"]
    assert handle.to_table(["ordinal"]).column_names == ["ordinal"]
    assert [batch.num_rows for batch in handle.iter_batches(["ordinal"], batch_rows=4)] == [4, 4, 2]
    assert handle.record == partitions.record(KEY)
    assert handle.ids() == IDS
    assert handle.dataset().count_rows() == 10
    counted = duckdb.sql(f"select count(*) from '{partitions.directory}/*.parquet'").fetchall()
    assert counted == [(10,)]


def test_reading_what_is_not_there(partitions: PublishedPartitions) -> None:
    """Not published, deleted and damaged are told apart by name."""
    with pytest.raises(NotPublishedError):
        partitions.read(KEY)
    publish(partitions)
    path = partitions.path(KEY)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(PublishedFileDamagedError, match=r"truncated.*`vlm-assets repair`"):
        partitions.read(KEY)
    path.unlink()
    with pytest.raises(PublishedFileDamagedError, match="missing"):
        partitions.read(KEY)


def damage_rows(path: Path) -> None:
    pq.write_table(pa.table({"property_id": ["x"]}), path)


@pytest.mark.parametrize(
    ("damage", "kind", "shallow"),
    [
        (Path.unlink, FindingKind.MISSING, True),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), FindingKind.TRUNCATED, True),
        (lambda path: path.write_bytes(b""), FindingKind.TRUNCATED, True),
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), FindingKind.UNREADABLE, True),
        (flip, FindingKind.DIGEST_DIFFERS, False),
        (damage_rows, FindingKind.ROWS_DIFFER, True),
    ],
)
def test_damage_is_found_and_restored(
    partitions: PublishedPartitions, damage: object, kind: FindingKind, shallow: bool
) -> None:
    """Each kind of damage has its name; restoring keeps the damaged file and brings the whole one back."""
    publish(partitions, "a")
    whole = partitions.path(KEY).read_bytes()
    assert callable(damage)
    damage(partitions.path(KEY))
    found = partitions.verify(KEY)
    assert [one.kind for one in found.findings] == [kind]
    assert str(partitions.path(KEY)) in found.sentence()
    assert "`vlm-assets repair`" in found.sentence(), "a command, not a function's name"
    assert partitions.verify(KEY, deep=False).ok is not shallow
    damaged = partitions.path(KEY).read_bytes() if partitions.path(KEY).exists() else None
    restoration = partitions.restore(KEY)
    assert restoration.changed and "restored from" in restoration.notes[-1]
    assert partitions.path(KEY).read_bytes() == whole
    assert partitions.verify(KEY).ok
    kept = [path.read_bytes() for path in partitions.directory.glob(".quarantine/*")]
    assert kept == ([] if damaged is None else [damaged])
    assert not list(partitions.directory.glob(".quarantine/*.parquet"))
    assert not partitions.restore(KEY).changed


def test_second_copy_is_made_anew(partitions: PublishedPartitions) -> None:
    """A damaged or missing backup is a finding, and restoring makes it from the whole published file."""
    publish(partitions, "a")
    slot = PartitionFiles(partitions.directory, KEY).slot(0)
    flip(slot)
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.BACKUP_DIFFERS]
    assert partitions.restore(KEY).changed
    slot.unlink()
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.BACKUP_MISSING]
    assert partitions.restore(KEY).changed
    assert partitions.verify(KEY).ok


def test_restore_says_when_nothing_is_whole(partitions: PublishedPartitions) -> None:
    """With both copies damaged nothing is touched, and the version before is named."""
    publish(partitions, "a")
    publish(partitions, "b")
    flip(partitions.path(KEY))
    flip(PartitionFiles(partitions.directory, KEY).slot(0))
    before = sorted(partitions.directory.rglob("*"))
    with pytest.raises(CannotRestoreError, match=r"1\.parquet .version 1, 10 rows"):
        partitions.restore(KEY)
    assert sorted(partitions.directory.rglob("*")) == before
    with pytest.raises(NotPublishedError):
        partitions.restore("other")


def test_publishing_over_damage_keeps_what_it_finds(partitions: PublishedPartitions) -> None:
    """A damaged published file or backup is kept aside and not counted as a version; the rest rotates."""
    for text in "abc":
        publish(partitions, text)
    flip(partitions.path(KEY))
    flip(PartitionFiles(partitions.directory, KEY).slot(1))
    publication = publish(partitions, "d")
    assert slots(partitions) == ["d", "c", "a"]
    assert len(list(partitions.directory.glob(".quarantine/*"))) == 2
    assert len(publication.notes) == 2
    assert partitions.verify(KEY).ok


def test_damaged_second_copy_is_replaced_before_rotation(partitions: PublishedPartitions) -> None:
    """The version before is what readers saw, even where its second copy had been damaged."""
    publish(partitions, "a")
    flip(PartitionFiles(partitions.directory, KEY).slot(0))
    publish(partitions, "b")
    assert slots(partitions) == ["b", "a", None]
    assert partitions.verify(KEY).ok


def test_same_file_again_heals(partitions: PublishedPartitions) -> None:
    """Materializing the same rows puts a damaged file and backup right, and rotates nothing."""
    publish(partitions, "a")
    publish(partitions, "b")
    flip(partitions.path(KEY))
    PartitionFiles(partitions.directory, KEY).slot(0).unlink()
    publication = publish(partitions, "b")
    assert not publication.changed and publication.notes
    assert slots(partitions) == ["b", "a", None]
    assert partitions.verify(KEY).ok


def test_foreign_file_is_found_and_kept(partitions: PublishedPartitions) -> None:
    """A parquet file without a record is named; publishing over it keeps it in the quarantine."""
    path = partitions.path(KEY)
    path.parent.mkdir(parents=True)
    damage_rows(path)
    foreign = path.read_bytes()
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.FOREIGN_FILE]
    assert partitions.record(KEY) is None
    publish(partitions, "a")
    assert [one.read_bytes() for one in partitions.directory.glob(".quarantine/*")] == [foreign]
    assert partitions.verify(KEY).ok


def test_verifying_nothing_creates_nothing(partitions: PublishedPartitions) -> None:
    """A look at what was never published leaves no directory behind."""
    found = partitions.verify(KEY)
    assert [one.kind for one in found.findings] == [FindingKind.NOT_PUBLISHED]
    assert not partitions.directory.exists()


@pytest.mark.parametrize("damage", [Path.unlink, flip])
@pytest.mark.parametrize("which", [0, 1])
def test_record_is_restored_from_its_copy(
    partitions: PublishedPartitions, damage: object, which: int
) -> None:
    """Either copy of the record brings the other back, and it is said."""
    publish(partitions, "a")
    record = partitions.record(KEY)
    path = PartitionFiles(partitions.directory, KEY).record_paths[which]
    assert callable(damage)
    damage(path)
    assert partitions.record(KEY) == record
    found = partitions.verify(KEY)
    assert found.ok and any(str(path) in one for one in found.repairs)
    assert partitions.verify(KEY).repairs == ()


def test_both_records_damaged_is_not_nothing(partitions: PublishedPartitions) -> None:
    """Unreadable never means empty: it stops, and names what accepts the loss."""
    publish(partitions, "a")
    for path in PartitionFiles(partitions.directory, KEY).record_paths:
        flip(path)
    with pytest.raises(RecordDamagedError, match="vlm-assets repair"):
        partitions.record(KEY)
    with pytest.raises(RecordDamagedError):
        stage(partitions, "b")
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.RECORD_DAMAGED]
    moved = partitions.set_aside(KEY)
    assert len(moved) == 4
    assert publish(partitions, "b").record.sequence == 1
    assert len(list(partitions.directory.glob(".quarantine/*"))) == 4


def test_another_directory_is_refused(partitions: PublishedPartitions, tmp_path: Path) -> None:
    """A file staged for one asset is not published as another's."""
    other = PublishedPartitions(tmp_path / "property_embeddings")
    with pytest.raises(WrongPartitionError):
        other.publish(stage(partitions))


def test_a_copy_of_what_changed_meanwhile_replaces_nothing(
    partitions: PublishedPartitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy verifies, changes while it is copied, and must not become the published file."""
    publish(partitions, "a")
    partitions.path(KEY).unlink()
    copy = files.copy_temporary

    def changed(source: Path, path: Path) -> tuple[Path, str]:
        flip(source)
        return copy(source, path)

    monkeypatch.setattr(files, "copy_temporary", changed)
    with pytest.raises(DigestMismatchError, match="changed while it was copied"):
        partitions.restore(KEY)
    assert not partitions.path(KEY).exists()
    assert leftovers(partitions) == []


def test_rows_that_did_not_reach_the_file_are_noticed(
    partitions: PublishedPartitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows read back than were written: not staged, and nothing left behind."""
    write_rows = published.write_rows
    monkeypatch.setattr(published, "write_rows", lambda *given: write_rows(*given) + 1)
    with pytest.raises(DurableWriteError, match="reads back 10 rows where 11 were written"):
        stage(partitions)
    assert leftovers(partitions) == []


def test_finishing_a_publication_keeps_a_file_damaged_meanwhile(
    partitions: PublishedPartitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its last step, the old file then damaged: the new one comes, the damaged one is kept."""
    publish(partitions, "a")
    replace = files.publish_replacing

    def killed(temporary: Path, path: Path) -> None:
        if path == partitions.path(KEY):
            raise SystemExit
        replace(temporary, path)

    with monkeypatch.context() as dying, pytest.raises(SystemExit):
        dying.setattr(files, "publish_replacing", killed)
        publish(partitions, "b")
    flip(partitions.path(KEY))
    damaged = partitions.path(KEY).read_bytes()
    assert partitions.verify(KEY).ok
    assert text_of(partitions.path(KEY)) == "b"
    assert damaged in [path.read_bytes() for path in partitions.directory.glob(".quarantine/*")]


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_record_is_kept_aside(partitions: PublishedPartitions, which: int) -> None:
    """What does not verify is never deleted, records included."""
    publish(partitions, "a")
    path = PartitionFiles(partitions.directory, KEY).record_paths[which]
    flip(path)
    damaged = path.read_bytes()
    assert partitions.verify(KEY).ok
    assert [one.read_bytes() for one in partitions.directory.glob(".quarantine/*")] == [damaged]


def test_a_shallow_look_notices_another_file_with_as_many_rows(partitions: PublishedPartitions) -> None:
    """The same number of rows in a file of another size is not what was published."""
    publish(partitions, "a")
    pq.write_table(pa.Table.from_batches([rows(IDS, "b")]), partitions.path(KEY), compression="none")
    assert [one.kind for one in partitions.verify(KEY, deep=False).findings] == [FindingKind.DIGEST_DIFFERS]
    with pytest.raises(PublishedFileDamagedError):
        partitions.read(KEY)


def test_another_partitions_record_is_not_taken_for_this_ones(partitions: PublishedPartitions) -> None:
    """A record copied under another key is damage there: nothing is said to be published by it."""
    publish(partitions, "a")
    whole = PartitionFiles(partitions.directory, KEY).record_path.read_bytes()
    PartitionFiles(partitions.directory, "other").record_path.write_bytes(whole)
    with pytest.raises(RecordDamagedError, match="for partition"):
        partitions.record("other")

"""Damage to what is published: each kind is found by its name and put right, and nothing is deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.damage import flip_bit
from vlm_durable.files import files
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.partition_files import (
    CannotRestoreError,
    FileDamagedError,
    NotPublishedError,
    judge,
)
from vlm_durable.versions.version_mark import VersionMarkFile, mark_copies
from vlm_durable.versions.versioned_object import RecordDamagedError

KEY = "000000000-000000009"


def flip(path: Path) -> None:
    """Damage a row, and not the footer."""
    flip_bit(path, 40)


def test_verifying_during_a_publication(partitions: Any) -> None:
    """While another process publishes, what readers see is judged, and nothing is touched."""
    partitions.publish_text("a")
    partitions.publish_text("b")
    partition = partitions.files
    with partition.locked(0):
        partition.slot(1).unlink()
        assert partitions.verify(KEY).ok
        flip(partitions.path(KEY))
        assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.DIGEST_DIFFERS]
    assert len(partitions.verify(KEY).findings) == 2


def test_reading_what_is_not_there(partitions: Any) -> None:
    """Not published, deleted and damaged are told apart by name."""
    with pytest.raises(NotPublishedError):
        partitions.read(KEY)
    partitions.publish_text("a")
    path = partitions.path(KEY)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FileDamagedError, match=r"truncated.*`vlm-assets repair`"):
        partitions.read(KEY)
    path.unlink()
    with pytest.raises(FileDamagedError, match="missing"):
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
@pytest.mark.promise("Nothing damaged is used")
def test_damage_is_found_and_restored(
    partitions: Any, damage: object, kind: FindingKind, shallow: bool
) -> None:
    """Each kind of damage has its name; restoring keeps the damaged file and brings the whole one back."""
    partitions.publish_text("a")
    whole = partitions.path(KEY).read_bytes()
    assert callable(damage)
    damage(partitions.path(KEY))
    found = partitions.verify(KEY)
    assert [one.kind for one in found.findings] == [kind]
    assert str(partitions.path(KEY)) in found.sentence()
    assert "`vlm-assets repair`" in found.sentence(), "a command, not a function's name"
    record = partitions.record(KEY)
    assert (judge(partitions.path(KEY), record, deep=False) is None) is not shallow
    damaged = partitions.path(KEY).read_bytes() if partitions.path(KEY).exists() else None
    restoration = partitions.restore(KEY)
    assert restoration.changed and "restored from" in restoration.notes[-1]
    assert partitions.path(KEY).read_bytes() == whole
    assert partitions.verify(KEY).ok
    kept = partitions.quarantined()
    assert kept == ([] if damaged is None else [damaged])
    assert not list(partitions.files.quarantine.glob("*.parquet"))
    assert not partitions.restore(KEY).changed


def test_second_copy_is_made_anew(partitions: Any) -> None:
    """A damaged or missing backup is a finding, and restoring makes it from the whole published file."""
    partitions.publish_text("a")
    slot = partitions.files.slot(0)
    flip(slot)
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.SECOND_COPY]
    assert partitions.restore(KEY).changed
    slot.unlink()
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.SECOND_COPY]
    assert partitions.restore(KEY).changed
    assert partitions.verify(KEY).ok


def test_restore_says_when_nothing_is_whole(partitions: Any) -> None:
    """With both copies damaged nothing is touched, and the version before is named."""
    partitions.publish_text("a")
    partitions.publish_text("b")
    flip(partitions.path(KEY))
    flip(partitions.files.slot(0))
    before = sorted(partitions.home.rglob("*"))
    with pytest.raises(CannotRestoreError, match=r"1\.parquet .version 1, 10 rows"):
        partitions.restore(KEY)
    assert sorted(partitions.home.rglob("*")) == before
    with pytest.raises(NotPublishedError):
        partitions.restore("other")


def test_publishing_over_damage_keeps_what_it_finds(partitions: Any) -> None:
    """A damaged published file or backup is kept aside and not counted as a version; the rest rotates."""
    for text in "abc":
        partitions.publish_text(text)
    flip(partitions.path(KEY))
    flip(partitions.files.slot(1))
    publication = partitions.publish_text("d")
    assert partitions.slots() == ["d", "c", "a"]
    assert len(partitions.quarantined()) == 2
    assert len(publication.notes) == 2
    assert partitions.verify(KEY).ok


def test_damaged_second_copy_is_replaced_before_rotation(partitions: Any) -> None:
    """The version before is what readers saw, even where its second copy had been damaged."""
    partitions.publish_text("a")
    flip(partitions.files.slot(0))
    partitions.publish_text("b")
    assert partitions.slots() == ["b", "a", None]
    assert partitions.verify(KEY).ok


def test_same_file_again_heals(partitions: Any) -> None:
    """Materializing the same rows puts a damaged file and backup right, and rotates nothing."""
    partitions.publish_text("a")
    partitions.publish_text("b")
    flip(partitions.path(KEY))
    partitions.files.slot(0).unlink()
    publication = partitions.publish_text("b")
    assert not publication.changed and publication.notes
    assert partitions.slots() == ["b", "a", None]
    assert partitions.verify(KEY).ok


def test_foreign_file_is_found_and_kept(partitions: Any) -> None:
    """A parquet file without a record is named; publishing over it keeps it in the quarantine."""
    path = partitions.path(KEY)
    path.parent.mkdir(parents=True)
    damage_rows(path)
    foreign = path.read_bytes()
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.UNRECORDED]
    assert partitions.record(KEY) is None
    partitions.publish_text("a")
    assert partitions.quarantined() == [foreign]
    assert partitions.verify(KEY).ok


def test_verifying_nothing_creates_nothing(partitions: Any) -> None:
    """A look at what was never published leaves no directory behind."""
    found = partitions.verify(KEY)
    assert [one.kind for one in found.findings] == [FindingKind.NOT_PUBLISHED]
    assert not partitions.home.exists()


@pytest.mark.parametrize("damage", [Path.unlink, flip])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.promise("What does not verify is moved aside")
def test_record_is_restored_from_its_copy(partitions: Any, damage: Any, which: int) -> None:
    """Either copy of the record brings the other back, it is said, and the damaged one is kept."""
    partitions.publish_text("a")
    record = partitions.record(KEY)
    path = partitions.files.record_paths[which]
    damage(path)
    damaged = [path.read_bytes()] if path.exists() else []
    assert partitions.record(KEY) == record
    found = partitions.verify(KEY)
    assert found.ok and any(str(path) in one for one in found.repairs)
    assert partitions.verify(KEY).repairs == ()
    assert partitions.quarantined() == damaged


def test_both_records_damaged_is_not_nothing(partitions: Any) -> None:
    """Unreadable never means empty: where the mark is gone too it stops, and names what accepts the loss."""
    partitions.publish_text("a")
    for path in partitions.files.record_paths:
        flip(path)
    for path in mark_copies(partitions.files.paths.version_mark):
        path.unlink()
    with pytest.raises(RecordDamagedError, match="vlm-assets repair"):
        partitions.record(KEY)
    with pytest.raises(RecordDamagedError):
        partitions.stage_text("b")
    assert [one.kind for one in partitions.verify(KEY).findings] == [FindingKind.RECORD]
    moved = partitions.set_aside(KEY)
    assert len(moved) == 4
    assert partitions.publish_text("b").record.sequence == 1
    assert len(partitions.quarantined()) == 4


def test_a_copy_of_what_changed_meanwhile_replaces_nothing(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy verifies, changes while it is copied, and must not become the published file."""
    partitions.publish_text("a")
    partitions.path(KEY).unlink()
    copy = files.copy_temporary

    def changed(source: Path, path: Path, staging: Path | None = None) -> tuple[Path, str]:
        flip(source)
        return copy(source, path, staging)

    monkeypatch.setattr(files, "copy_temporary", changed)
    with pytest.raises(FileDamagedError, match="changed while it was copied"):
        partitions.restore(KEY)
    assert not partitions.path(KEY).exists()
    assert partitions.leftovers() == []


def test_finishing_a_publication_keeps_a_file_damaged_meanwhile(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its last step, the old file then damaged: the new one comes, the damaged one is kept."""
    partitions.publish_text("a")
    replace = files.publish_replacing

    def killed(temporary: Path, path: Path) -> None:
        if path == partitions.path(KEY):
            raise SystemExit
        replace(temporary, path)

    with monkeypatch.context() as dying, pytest.raises(SystemExit):
        dying.setattr(files, "publish_replacing", killed)
        partitions.publish_text("b")
    flip(partitions.path(KEY))
    damaged = partitions.path(KEY).read_bytes()
    assert partitions.verify(KEY).ok
    assert partitions.text_of(partitions.path(KEY)) == "b"
    assert damaged in partitions.quarantined()


def test_a_first_publication_is_finished_though_its_record_is_damaged(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its mark, its record then damaged: nothing but the record's copy knows the file."""

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as dying, pytest.raises(SystemExit):
        dying.setattr(VersionMarkFile, "write", killed)
        partitions.publish_text("a")
    flip(partitions.files.record_path)
    assert partitions.verify(KEY).ok
    assert partitions.text_of(partitions.path(KEY)) == "a"


def test_a_shallow_look_notices_another_file_with_as_many_rows(partitions: Any) -> None:
    """The same number of rows in a file of another size is not what was published."""
    partitions.publish_text("a")
    others = pa.Table.from_batches([partitions.rows(list(partitions.IDS), "b")])
    pq.write_table(others, partitions.path(KEY), compression="none")
    found = judge(partitions.path(KEY), partitions.record(KEY), deep=False)
    assert found is not None and found.kind is FindingKind.DIGEST_DIFFERS
    with pytest.raises(FileDamagedError):
        partitions.read(KEY)


def test_another_partitions_record_is_not_taken_for_this_ones(partitions: Any) -> None:
    """A record copied under another key is damage there: nothing is said to be published by it."""
    partitions.publish_text("a")
    whole = partitions.files.record_path.read_bytes()
    partitions.asset.partition("other").record.write_bytes(whole)
    with pytest.raises(RecordDamagedError, match="for partition"):
        partitions.record("other")

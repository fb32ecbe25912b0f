"""Prune takes what is needed no more, and nothing at all beside a partition that is not whole."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.damage import flip_bit
from tests.support.journals import PLAIN, open_journal, plain_rows
from vlm_assets.services.home_audit import audit
from vlm_assets.services.pruning import RemovalKind, find_removable, remove
from vlm_durable.journal.high_water_mark import read_mark

FIRST, SECOND, THIRD = "000000000-000000002", "000000003-000000005", "000000006-000000008"
DESCRIBED = "property_descriptions"
LONG_AGO = time.time() - 7 * 86400


def plan(dataset):
    return find_removable(dataset.settings, dataset.catalog)


def whats(found):
    return [(one.kind, one.path.name) for one in found.removals]


def prune(dataset) -> list[str]:
    return list(remove(dataset.settings, plan(dataset).removals))


def journal(dataset, key: str, generation: str, *, rows: int = 2, old: bool = True) -> tuple[Path, Path]:
    """A journal with a few committed rows; old: from before everything was published."""
    paths = dataset.settings.descriptions.partition(key)
    directory, mark = paths.journal(generation), paths.high_water_mark(generation)
    ids = [row["property_id"] for row in dataset.rows(key)]
    with open_journal(paths, generation, ids) as one:
        one.submit(plain_rows(ids[:rows]))
        one.flush()
    if old:
        for path in (*directory.rglob("*"), directory):
            os.utime(path, (LONG_AGO, LONG_AGO))
    return directory, mark


@pytest.fixture
def replaced(dataset):
    """The first partition was published three times."""
    for text in ("a villa", "a castle"):
        dataset.describe(FIRST, text=text)
    dataset.embed(FIRST)
    return dataset


def test_nothing_to_prune(dataset):
    """The published file, its second copy and the records are never on the list."""
    assert plan(dataset).removals == []


def test_earlier_versions_go_and_the_audit_stays_clean(replaced):
    """With the earlier versions gone the record names none: nothing is missing afterwards."""
    assert [one[0] for one in whats(plan(replaced))] == [RemovalKind.EARLIER_VERSION] * 3
    prune(replaced)
    assert not replaced.copy_of(FIRST, 1).exists()
    found = audit(replaced.settings, replaced.catalog, deep=True)
    assert found.ok and not found.findings
    assert plan(replaced).removals == []
    replaced.describe(FIRST, text="a tower")
    assert replaced.descriptions.verify(FIRST).ok


def test_listing_changes_nothing(replaced):
    """What is listed is still there until it is agreed to."""
    journal(replaced, FIRST, "old")
    before = {p: p.stat().st_mtime_ns for p in replaced.settings.home.rglob("*")}
    assert len(plan(replaced).removals) == 4
    assert {p: p.stat().st_mtime_ns for p in replaced.settings.home.rglob("*")} == before


@pytest.mark.parametrize("damaged", ["published", "copy"])
def test_beside_damage_everything_stays(replaced, damaged):
    """One flipped bit in the published file or its second copy, and every older copy is kept."""
    journal(replaced, FIRST, "old")
    flip_bit(replaced.descriptions.path(FIRST) if damaged == "published" else replaced.copy_of(FIRST))
    found = plan(replaced)
    assert all(one.asset != DESCRIBED for one in found.removals)
    assert len(found.kept) == 3
    assert "vlm-assets repair" in found.kept[0]


@pytest.mark.parametrize("damaged", ["published", "copy"])
def test_damage_between_listing_and_removing(replaced, damaged):
    """What was whole when it was listed is read again before anything beside it goes."""
    directory, _ = journal(replaced, FIRST, "old")
    removals = [one for one in plan(replaced).removals if one.asset == DESCRIBED]
    flip_bit(replaced.descriptions.path(FIRST) if damaged == "published" else replaced.copy_of(FIRST))
    said = list(remove(replaced.settings, removals))
    assert all(one.path.exists() for one in removals)
    assert directory.is_dir()
    assert "Kept" in said[-1]


@pytest.mark.parametrize("when", ["before it is listed", "between listing and removing"])
def test_beside_a_partition_that_was_put_back_everything_stays(replaced, when):
    """The newest version may lie in the quarantine alone: nothing goes until a person has decided."""
    paths = replaced.settings.descriptions.partition(FIRST)
    before = {
        path: path.read_bytes()
        for path in (paths.published, paths.record, paths.record_copy, paths.version(0))
    }
    newest = replaced.describe(FIRST, text="a tower")
    paths.quarantine.mkdir(parents=True, exist_ok=True)
    only = paths.quarantine / "kept"
    only.write_bytes(paths.published.read_bytes())
    listed = plan(replaced)
    for path, content in before.items():
        path.write_bytes(content)
    for number in (1, 2):
        paths.version(number).write_bytes(b"damaged")
    if when == "before it is listed":
        listed = plan(replaced)
        assert all(one.asset != DESCRIBED for one in listed.removals)
        assert f"version {newest.sequence} of partition {FIRST}" in listed.kept[0]
    said = list(remove(replaced.settings, [one for one in listed.removals if one.asset == DESCRIBED]))
    assert all(one.startswith("Kept") for one in said)
    assert only.exists() and paths.version(1).exists()


def test_a_superseded_journal_goes_and_is_never_missed(dataset):
    """The rows of a generation that another one replaced go; its mark says retired, not lost."""
    directory, mark = journal(dataset, FIRST, "old")
    assert whats(plan(dataset)) == [(RemovalKind.JOURNAL, "old")]
    prune(dataset)
    assert not directory.exists()
    left = read_mark(mark, key=FIRST, generation="old").mark
    assert left is not None and left.retired and left.rows == 2


def test_work_under_way_is_never_superseded(dataset):
    """A journal that was written after the publication is the next version under way."""
    journal(dataset, FIRST, "next", old=False)
    journal(dataset, SECOND, "fp-s-after-1")
    assert plan(dataset).removals == []


def test_a_journal_of_an_unpublished_partition_stays(empty):
    """Unpublished rows are the only copy there is, however old."""
    journal(empty, FIRST, "old")
    found = plan(empty)
    assert found.removals == []


def test_a_journal_in_use_stays(dataset):
    """A journal that a process holds is refused by name, and stays whole."""
    from vlm_durable.journal.journal_errors import JournalLockedError

    directory, mark = journal(dataset, FIRST, "old")
    removals = plan(dataset).removals
    ids = [row["property_id"] for row in dataset.rows(FIRST)]
    with open_journal(dataset.settings.descriptions.partition(FIRST), "old", ids) as held:
        # Opening wrote to it, so it is no longer older than the publication.
        assert plan(dataset).removals == []
        for path in (*directory.rglob("*"), directory):
            os.utime(path, (LONG_AGO, LONG_AGO))
        with pytest.raises(JournalLockedError):
            list(remove(dataset.settings, removals))
        assert held.committed_rows == 2
    assert read_mark(mark, key=FIRST, generation="old").mark.retired is False


def test_quarantine_goes_where_its_partition_is_whole(dataset):
    """What was set aside from a partition goes only once that partition is whole again."""
    path = dataset.descriptions.path(FIRST)
    sound = path.read_bytes()
    path.write_bytes(b"damaged")
    assert plan(dataset).removals == []
    dataset.descriptions.restore(FIRST)
    ((what, name),) = whats(plan(dataset))
    assert what is RemovalKind.QUARANTINED and name.startswith(FIRST)
    prune(dataset)
    assert path.read_bytes() == sound
    assert list(dataset.settings.descriptions.partition(FIRST).quarantine.iterdir()) == []


def test_quarantine_of_nobody_needs_every_partition_whole(dataset):
    """A quarantined file that lies in no partition's folder may belong to any of them."""
    aside = dataset.settings.descriptions.quarantine / "mine.parquet.abc"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(b"rows")
    flip_bit(dataset.copy_of(THIRD))
    found = plan(dataset)
    assert found.removals == []
    assert THIRD in found.kept[0]
    dataset.descriptions.restore(THIRD)
    assert (RemovalKind.QUARANTINED, aside.name) in whats(plan(dataset))


@pytest.mark.parametrize("key", [SECOND, "000000009-000000011"])
def test_the_quarantine_of_a_partition_that_is_not_looked_at_needs_it_whole(dataset, key):
    """A withdrawal from another partition, or an older catalogue, takes no last copy of this one's rows."""
    only = dataset.settings.descriptions.partition(key).quarantine / "kept"
    only.parent.mkdir(parents=True)
    only.write_bytes(b"rows")
    if key == SECOND:
        for path in (dataset.descriptions.path(key), dataset.copy_of(key)):
            flip_bit(path)
    for found in (find_removable(dataset.settings, dataset.catalog, keys=[FIRST]), plan(dataset)):
        assert found.removals == []
        assert found.kept[0].startswith(f"{only} stays: ")
        assert key in found.kept[0]


def test_abandoned_temporaries_go_and_used_ones_stay(dataset):
    """What a killed process left goes; a file that a living process is writing stays."""
    folder = dataset.settings.descriptions.staging
    (folder / f".{FIRST}.parquet.1-abc.tmp").write_bytes(b"half")
    batch = pa.RecordBatch.from_pylist([{"property_id": "p0", "ordinal": 0}], schema=PLAIN)
    with dataset.descriptions.stage(FIRST, [batch], PLAIN, expected_ids=["p0"], fingerprint="x") as staged:
        (folder / f".{FIRST}.parquet.1-def.tmp").write_bytes(b"half")
        said = prune(dataset)
        assert staged.path.exists()
        assert any("a process needs it" in sentence for sentence in said)
    assert not list(folder.glob(".*.tmp"))


def test_an_interrupted_publication_keeps_everything(replaced):
    """Until a publication is finished, nobody knows which version is the last: all stay."""
    from dataclasses import replace

    from vlm_durable.versions.partition_files import PartitionVersions, PendingPublication

    files = replaced.settings.descriptions.partition(FIRST)
    manifest = PartitionVersions.from_bytes(files.record.read_bytes(), asset=DESCRIBED, key=FIRST)
    pending = PendingPublication(replace(manifest.published, sequence=9, sha256="0" * 64), manifest.previous)
    files.record.write_bytes(replace(manifest, pending=pending).to_bytes(DESCRIBED))
    found = plan(replaced)
    assert all(one.asset != DESCRIBED for one in found.removals)
    assert "under way or was interrupted" in found.kept[0]


def test_a_dataset_on_its_way_keeps_what_it_needs(replaced):
    """With one partition of the two gone, only the whole one is pruned."""
    replaced.describe(SECOND, text="a villa")
    paths = replaced.settings.descriptions.partition(SECOND)
    paths.record.unlink()
    paths.record_copy.unlink()
    found = plan(replaced)
    assert {one.needs for one in found.removals if one.asset == DESCRIBED} == {(FIRST,)}
    assert any(SECOND in sentence for sentence in found.kept)

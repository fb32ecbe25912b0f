"""What follows by ``changes`` is the same as what is published, whatever happened in between."""

from __future__ import annotations

import json
import random
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.damage import flip_bit
from tests.support.exports import list_changes
from tests.support.homes import Dataset
from tests.support.listings import write_listing
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog_file import is_tombstone
from vlm_catalog.ingest import ingest
from vlm_durable.files.files import DurableWriteError
from vlm_results import changes as changes_module


@pytest.fixture
def told(call, dataset, tmp_path):
    """What the command tells: the lines, and the counts of the last one."""

    def tell(since: object = None, following: str | None = None) -> tuple[list[dict[str, Any]], dict]:
        words = ["changes", "--json"]
        words += [] if since is None else ["--since", str(since)]
        words += [] if following is None else ["--next", str(tmp_path / following)]
        *lines, counts = map(json.loads, call(*words).stdout.splitlines())
        return lines, counts

    return tell


@pytest.fixture
def tell(dataset: Dataset, tmp_path: Path):
    """Lists the changes and writes the next snapshot."""

    def tell_since(since: Path | datetime | None, following: str) -> list[changes_module.Change]:
        before: changes_module.Since = changes_module.Since()
        if isinstance(since, datetime):
            before = changes_module.PointInTime(dataset.settings, since)
        elif since is not None:
            before = changes_module.RowSnapshot(since, dataset.catalog)
        return list_changes(dataset, before, tmp_path / following)

    return tell_since


def ids_by_kind(listed) -> dict[str, set]:
    kinds: dict[str, set] = {}
    for change in listed:
        kinds.setdefault(change.change.value, set()).add(change.property_id)
    assert len({change.ordinal for change in listed}) == len(listed), "told twice"
    return kinds


def test_everything_is_new_once(dataset, tell, tmp_path):
    """The first snapshot holds all; with it nothing is told until something is published."""
    assert ids_by_kind(tell(None, "1")) == {"new": {f"p{number}" for number in range(9)}}
    assert tell(tmp_path / "1", "2") == []
    assert (tmp_path / "1").stat().st_mode & 0o077 == 0, "ids are for the caller alone"


def test_one_row_that_is_another_is_told_alone(dataset, tell, tmp_path):
    """A partition that is published again tells the rows that differ, with their status."""
    tell(None, "1")
    key = dataset.keys[1]

    def another(rows):
        changed = {"description": {"floors": 3, "has_pool": True}}
        return [{**row, **(changed if row["property_id"] == "p5" else {})} for row in rows]

    dataset.describe(key, another, text="a house")
    (change,) = tell(tmp_path / "1", "2")
    assert (change.change, change.property_id, change.ordinal, change.status) == ("changed", "p5", 5, "ok")
    dataset.describe(key, lambda rows: another([{**row, "status": "failed"} for row in rows]), text="a house")
    listed = tell(tmp_path / "2", "3")
    assert {(change.property_id, change.status) for change in listed} == {("p3", "failed"), ("p5", "failed")}


def test_the_same_rows_published_again_are_no_change(dataset, tell, tmp_path):
    """When, where and by which run a row was made is nothing that a database follows."""
    tell(None, "1")
    for key in dataset.keys:
        dataset.describe(key, lambda rows: [{**row, "device": "cuda-7", "raw_text": "x"} for row in rows])
    assert tell(tmp_path / "1", "2") == []


def test_a_text_and_its_vector_are_told_as_they_come(dataset, tell, tmp_path):
    """New texts are told without the vectors of the old ones, and once more with their own."""
    tell(None, "1")
    key = dataset.keys[0]
    dataset.describe(key, settings="other", text="another house")
    listed = tell(tmp_path / "1", "2")
    assert {(change.property_id, change.has_vector) for change in listed} == {
        (name, False) for name in ("p0", "p1", "p2")
    }
    dataset.embed(key)
    listed = tell(tmp_path / "2", "3")
    assert {(change.change, change.has_vector) for change in listed} == {("changed", True)}
    dataset.embed(key, lambda rows: [{**row, "embedding": [2.0, float(row["ordinal"])]} for row in rows])
    assert len(tell(tmp_path / "3", "4")) == 3


def test_a_withdrawn_id_is_told_by_the_snapshot_alone_and_is_in_none_after(dataset, tell, tmp_path):
    """The home has forgotten it; the caller's own file names it once. A time can give its ordinal."""
    before = datetime.now(UTC)
    tell(None, "1")
    dataset.withdraw("p5")
    (change,) = tell(tmp_path / "1", "2")
    assert (change.change, change.property_id, change.ordinal) == ("withdrawn", "p5", 5)
    assert b"p5" not in (tmp_path / "2").read_bytes() and b"withdrawn" not in (tmp_path / "2").read_bytes()
    assert tell(tmp_path / "2", "3") == []
    listed = {change.ordinal: change for change in tell(before, "4")}
    assert (listed[5].change, listed[5].property_id) == ("withdrawn", None)
    # The earlier version was removed with the property: what else changed there cannot be known.
    assert {listed[3].change, listed[4].change} == {"changed"}
    assert len(listed) == 3


def test_between_the_rewrites_of_a_withdrawal_no_row_is_told_twice(dataset, tell, tmp_path):
    """A withdrawal rewrites descriptions, then vectors. What is asked in between is told once, after both."""
    before = datetime.now(UTC)
    tell(None, "1")
    dataset.embed(dataset.keys[1], lambda rows: [{**row, "embedding": [2.0, 1.0]} for row in rows])
    steps = withdraw(dataset.settings, prepare_withdrawal(dataset.settings, ["p4"]))
    rewritten = str(dataset.settings.descriptions.partition(dataset.keys[1]).published)
    assert any(rewritten in sentence for sentence in steps)  # Stops here, before the vectors.
    assert tell(tmp_path / "1", "2") == []
    assert tell(before, "from a time") == []
    for _ in steps:
        pass
    for snapshot in ("2", "1"):
        assert ids_by_kind(tell(tmp_path / snapshot, "3")) == {
            "changed": {"p3", "p5"},
            "withdrawn": {"p4"},
        }, snapshot
    assert tell(tmp_path / "3", "4") == []


def test_a_time_is_compared_with_the_version_of_then(dataset, tell, tmp_path, monkeypatch):
    """As long as that version is kept only its differences are told; after it, every row of the partition."""
    key, times = dataset.keys[2], [datetime.now(UTC)]
    for floors in (3, 4, 5):
        p7 = {"description": {"floors": floors, "has_pool": False}}
        dataset.describe(
            key, lambda rows, p7=p7: [{**row, **(p7 if row["property_id"] == "p7" else {})} for row in rows]
        )
        times.append(datetime.now(UTC) + timedelta(milliseconds=2))
        while datetime.now(UTC) < times[-1]:
            pass
    assert tell(times[3], "a") == []
    assert ids_by_kind(tell(times[2], "b")) == {"changed": {"p7"}}
    assert ids_by_kind(tell(times[1], "c")) == {"changed": {"p7"}}
    assert ids_by_kind(tell(times[0], "d")) == {"changed": {"p6", "p7", "p8"}}
    everything = ids_by_kind(tell(times[0] - timedelta(days=1), "e"))
    assert everything == {"new": {f"p{number}" for number in range(6)}, "changed": {"p6", "p7", "p8"}}
    assert tell(tmp_path / "e", "f") == [], "a snapshot goes on from a time"


def test_what_a_follower_has_is_what_is_published(dataset, tell, tmp_path):
    """Random publications, withdrawals and crashes of the follower: what it took over is what is there."""
    chance = random.Random(5)
    followed: dict[str, str] = {}
    snapshot: Path | None = None
    for number in range(25):
        key = chance.choice(dataset.keys)
        floors = [chance.randrange(3) for _ in range(9)]

        def changed(rows, floors=floors):
            return [
                {**row, "description": {"floors": floors[row["ordinal"]], "has_pool": True}}
                if row["status"] == "ok" and not is_tombstone(row["property_id"])
                else {**row, "status": "failed"}
                for row in rows
            ]

        dataset.describe(key, changed, text=f"text {floors}")
        if number in (8, 16):
            gone = chance.choice([name for name in followed if not is_tombstone(name)])
            dataset.withdraw(gone)
        listed = tell(snapshot, f"s{number}")
        if chance.random() < 0.3:
            continue  # The follower died: it asks from its last snapshot once more.
        ids_by_kind(listed)
        now = published(dataset)
        for change in listed:
            if change.change == "withdrawn":
                del followed[change.property_id]
            else:
                assert (change.change == "new") is (change.property_id not in followed)
                followed[change.property_id] = now[change.property_id]
        snapshot = tmp_path / f"s{number}"
        assert followed == now


def published(dataset: Dataset) -> dict[str, str]:
    rows = [row for key in dataset.keys for row in dataset.descriptions.read(key).to_table().to_pylist()]
    return {
        row["property_id"]: json.dumps([row["status"], row["description"]])
        for row in rows
        if not is_tombstone(row["property_id"])
    }


def test_a_snapshot_is_written_whole_or_not_at_all(dataset, tell, tmp_path, monkeypatch):
    """Until everything was told there is no next snapshot: the same is told again. Nothing is left."""
    tell(None, "1")
    dataset.describe(dataset.keys[0], text="another", settings="other")
    with monkeypatch.context() as patch, pytest.raises(DurableWriteError):
        patch.setattr(changes_module.TemporaryFile, "seal", full)
        tell(tmp_path / "1", "2")
    catalog = dataset.catalog
    with changes_module.SnapshotWriter.opened(tmp_path / "2", catalog) as writer:
        before = changes_module.RowSnapshot(tmp_path / "1", catalog)
        next(changes_module.changes(dataset.settings, catalog, before, writer))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "home"]
    assert len(tell(tmp_path / "1", "2")) == 3


def full(*_):
    raise DurableWriteError(28, "could not write")


def test_a_partition_without_a_record_is_told_neither_as_new_nor_as_gone(dataset, tell, tmp_path):
    """It is a case for the audit; once its record is back, the snapshot still knows it."""
    tell(None, "1")
    paths = dataset.settings.descriptions.partition(dataset.keys[1])
    contents = {path: path.read_bytes() for path in (paths.record, paths.record_copy)}
    for path in contents:
        path.unlink()
    assert tell(tmp_path / "1", "2") == []
    for path, content in contents.items():
        path.write_bytes(content)
    assert tell(tmp_path / "2", "3") == []


def test_the_command_writes_a_line_a_change_and_refuses_what_is_no_cursor(told, dataset, tmp_path):
    """Programs read line after line, and the counts at the end. With a wrong cursor nothing is told."""
    lines, counts = told(following="1")
    assert lines[0] == {
        "change": "new", "property_id": "p0", "ordinal": 0, "status": "ok", "has_vector": True,
    }  # fmt: skip
    assert counts == {
        "new": 9, "changed": 0, "withdrawn": 0, "not_compared": 0, "next": str(tmp_path / "1"),
    }  # fmt: skip
    assert told(since=tmp_path / "1")[0] == []
    assert told(since="2026-01-01")[1]["new"] == 9
    ingest(write_listing(tmp_path / "x.jsonl", {"x": ["x.jpg"]}), tmp_path / "other", range_size=1)
    other = Dataset(dataset.settings.model_copy(update={"home": tmp_path / "other"}))
    with pytest.raises(CommandError, match="another catalogue"):
        changes_module.RowSnapshot(tmp_path / "1", other.catalog)
    next_column = pq.ParquetFile(tmp_path / "1").metadata.row_group(0).column(1)
    shutil.copyfile(tmp_path / "1", tmp_path / "damaged")
    flip_bit(tmp_path / "damaged", next_column.dictionary_page_offset - 1)
    (tmp_path / "text").write_text("x")
    for since, message in (
        (tmp_path / "text", "is no snapshot that can be read"),
        (tmp_path / "gone", "neither a snapshot nor a time"),
    ):
        with pytest.raises(CommandError, match=message):
            changes_module.told_before(str(since), dataset.settings, dataset.catalog)
    dataset.describe(dataset.keys[0], text="another", settings="other")
    with pytest.raises(CommandError, match="is no snapshot that can be read"):
        snapshot = changes_module.RowSnapshot(tmp_path / "damaged", dataset.catalog)
        list(changes_module.changes(dataset.settings, dataset.catalog, snapshot))


def test_the_earlier_snapshot_is_not_written_over_under_another_name(told, call, tmp_path):
    """Until its changes were taken over it is needed: a link to it is the same file."""
    told(following="1")
    (tmp_path / "latest").symlink_to("1")
    before = (tmp_path / "1").read_bytes()
    with pytest.raises(CommandError, match="names the snapshot of --since"):
        call("changes", "--since", str(tmp_path / "latest"), "--next", str(tmp_path / "1"))
    assert (tmp_path / "1").read_bytes() == before

"""The Iceberg table is always one whole version of each partition, and has nothing of who was withdrawn."""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table

from faults.file_operations import FileOperations, fail_at
from tests.support.forking import ForkServer, StartForkServer, fork_server  # noqa: F401 - a fixture
from tests.support.homes import DESCRIPTIONS, Dataset, publish
from tests.support.listings import write_listing
from tests.support.shares import count_share, share_of
from vlm_assets.config.settings import load_settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.ingest import ingest
from vlm_results import described_table
from vlm_results.described_table import BroughtUpToDate, TableChanges, TablePlace, bring_up_to_date
from vlm_results.exported_images import Images
from vlm_results.iceberg_files import named_files
from vlm_results.known_tables import has_table, note_of, remember

SHARES = 160


@pytest.fixture
def dataset(dataset: Dataset) -> Dataset:
    """The nine properties, of which a run makes vectors too."""
    return Dataset(dataset.settings.model_copy(update={"embedding_model": "example"}))


def follow(dataset: Dataset, folder: Path | None = None) -> BroughtUpToDate:
    return bring_up_to_date(
        dataset.settings, dataset.catalog, TablePlace.from_settings(dataset.settings, folder)
    )


def table_of(dataset: Dataset, folder: Path | None = None) -> Table:
    return TablePlace.from_settings(dataset.settings, folder).read()


def rows_at(table: Table, snapshot: int | None = None) -> dict[str, dict[str, Any]]:
    """The rows of a snapshot, by id."""
    rows = table.scan(snapshot_id=snapshot).to_arrow().to_pylist()
    assert len({row["property_id"] for row in rows}) == len(rows)
    return {row["property_id"]: row for row in rows}


def partitions_at(table: Table, snapshot: int | None = None) -> dict[str, list[tuple[Any, ...]]]:
    """What was made of each partition: the ids, the texts and the vectors."""
    partitions: dict[str, list[tuple[Any, ...]]] = {}
    for row in sorted(rows_at(table, snapshot).values(), key=lambda row: row["ordinal"]):
        content = (row["property_id"], row["text"], str(row["embedding"]), row["source"])
        partitions.setdefault(row["range"], []).append(content)
    return partitions


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def named(table: Table) -> set[Path]:
    return {Path(location.removeprefix("file://")) for location in named_files(table)}


def test_a_partition_is_one_snapshot_and_only_changed_ones_are_written(dataset):
    """Three commits for three partitions, none where nothing changed, one for a changed one, each whole."""
    first = follow(dataset)
    assert (first.written, first.rows, first.partitions, first.snapshots) == (3, 9, 3, 3)
    assert (again := follow(dataset)).written == 0 and again.snapshot == first.snapshot
    key = dataset.keys[1]
    dataset.describe(key, text="another house", settings="other")
    dataset.embed(key)
    table = table_of(dataset)
    before = partitions_at(table)
    assert follow(dataset).written == 1
    table = table_of(dataset)
    assert [len(partitions_at(table, one.snapshot_id)) for one in table.snapshots()] == [1, 2, 3, 3]
    assert partitions_at(table, first.snapshot) == before
    after = partitions_at(table)
    assert {name for name in after if after[name] != before[name]} == {key}
    newest = table.current_snapshot()
    assert newest.summary["vlm-assets.range"] == key
    assert newest.summary["vlm-assets.source"] == after[key][0][3]
    assert {row["model"] for row in rows_at(table).values()} == {"model-s", "model-other"}


def test_new_descriptions_wait_for_their_vectors(dataset):
    """A reader never gets descriptions of one version with vectors of another, or without."""
    follow(dataset)
    before = partitions_at(table_of(dataset))
    key = dataset.keys[0]
    five = {"description": {"floors": 5, "has_pool": True}}
    dataset.describe(key, lambda rows: [{**row, **five} for row in rows], text="five floors")
    waiting = follow(dataset)
    assert (waiting.written, waiting.waiting) == (0, (key,))
    assert "1 partition waits" in " ".join(waiting.sentences())
    assert partitions_at(table_of(dataset)) == before
    dataset.embed(key)
    assert follow(dataset).written == 1
    assert rows_at(table_of(dataset))["p0"]["description"] == {"floors": 5, "has_pool": True}


def test_without_an_embedding_model_descriptions_wait_for_nothing(empty):
    """Who computes no vectors has a table all the same."""
    settings = empty.settings.model_copy(update={"embedding_model": None})
    dataset = Dataset(settings)
    dataset.describe(dataset.keys[0])
    assert follow(dataset).written == 1
    assert [row["embedding"] for row in rows_at(table_of(dataset)).values()] == [None] * 3


def test_duckdb_reads_it_and_a_row_says_where_its_images_are(pictures):
    """Spark, Trino and DuckDB read the same files; an image that cannot be read is null."""
    settings = pictures.settings.model_copy(update={"embedding_model": None})
    dataset = Dataset(settings)
    follow(dataset)
    connection = table_of(dataset).scan().to_duckdb("properties")
    rows = connection.sql("SELECT property_id, image_uris FROM properties ORDER BY ordinal").fetchall()
    assert [row[0] for row in rows] == list("abcd")
    opened = [uri for _, uris in rows for uri in uris if uri is not None]
    assert opened and all(Path(uri).is_file() for uri in opened)
    assert None in dict(rows)["b"]


def change_behind(dataset: Dataset) -> str:
    """Describe a partition anew, and withdraw a property of another one without the table's knowing."""
    folder, away = dataset.settings.described_table, dataset.settings.home.parent / "away"
    folder.rename(away)
    note_of(dataset.settings, folder).unlink()
    dataset.withdraw("p7")
    away.rename(folder)
    remember(dataset.settings, folder)
    dataset.describe(dataset.keys[0], text="another house", settings="other")
    dataset.embed(dataset.keys[0])
    return "p7"


@pytest.fixture(scope="module")
def server(fork_server: StartForkServer) -> Iterator[ForkServer]:  # noqa: F811
    """Processes that bring a table up to date, and are killed."""
    with fork_server(Path(__file__).with_name("killed_table.py")) as server:
        yield server


@pytest.fixture(scope="module")
def changed_home(made: Path, server: ForkServer) -> Dataset:
    """A home whose table lacks a change and a withdrawal; a table cannot be moved, so all tests share it."""
    place = server.new_home()
    shutil.copytree(made / "published", place / "home")
    settings = load_settings(model="example", embedding_model="example", home=place / "home")
    dataset = Dataset(settings)
    follow(dataset)
    change_behind(dataset)
    shutil.copytree(settings.described_table, place / "as-it-was")
    return dataset


@pytest.fixture
def changed(changed_home: Dataset) -> Dataset:
    """The same, the table as it was."""
    restore(changed_home)
    return changed_home


def restore(dataset: Dataset) -> None:
    shutil.rmtree(dataset.settings.described_table)
    shutil.copytree(dataset.settings.home.parent / "as-it-was", dataset.settings.described_table)


def is_whole_and_done(dataset: Dataset, expected: dict[str, list[tuple[Any, ...]]]) -> None:
    """The next run has the table as it should be, and no file that nothing names."""
    follow(dataset)
    table = table_of(dataset)
    assert partitions_at(table) == expected
    follow(dataset)
    folder = dataset.settings.described_table
    assert files_below(folder) - {folder / ".lock", folder / "catalog.db"} == named(table_of(dataset))


def shown(dataset: Dataset) -> dict[str, list[tuple[Any, ...]]]:
    """What a reader gets now, who knows nothing of runs; each earlier snapshot reads too."""
    try:
        table = table_of(dataset)
    except CommandError:
        return {}
    for snapshot in table.snapshots():
        partitions_at(table, snapshot.snapshot_id)
    return partitions_at(table) if table.current_snapshot() else {}


@pytest.mark.parametrize("begun", [False, True])
def test_a_kill_at_any_operation_leaves_whole_partitions(changed, server, begun):
    """Each partition is the one before or the new one, for a reader; the next run finishes, and tidies up."""
    before = shown(changed) if begun else {}
    follow(changed)
    after = shown(changed)
    folder = changed.settings.described_table
    kills = 0
    for at in count_share(1, SHARES):
        restore(changed)
        if not begun:
            shutil.rmtree(folder)
            folder.mkdir()
            note_of(changed.settings, folder).unlink(missing_ok=True)
        if server.kill_at(at, home=str(changed.settings.home)) is None:
            break
        kills += 1
        for key, rows in shown(changed).items():
            assert rows in (before.get(key), after[key]), at
        is_whole_and_done(changed, after)
        assert not has_text(folder, "p7")
    assert kills > 1


def test_what_a_kill_left_of_a_table_without_a_state_is_removed(dataset):
    """No table names its files, and the next run begins another folder: they would stay for ever."""
    folder = dataset.settings.described_table
    left = folder / "described_properties_1" / "metadata" / ".00000-state.metadata.json.1-0.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a state")
    assert follow(dataset).removed == 1
    assert not left.exists() and len(rows_at(table_of(dataset))) == 9


def test_a_full_disk_leaves_whole_partitions(changed):
    """The run ends with an error that says so; the next one, with room, finishes."""
    dataset, folder = changed, changed.settings.described_table
    before = shown(dataset)
    with FileOperations(folder).watched() as operations:
        follow(dataset)
    after = partitions_at(table_of(dataset))
    for at in share_of(range(1, operations.count), SHARES):
        restore(dataset)
        with FileOperations(folder, fail_at(at, errno.ENOSPC)).watched():
            try:
                follow(dataset)
            except (OSError, CommandError) as error:
                assert "No space left" in str(error), at
        for key, rows in shown(dataset).items():
            assert rows in (before[key], after[key]), at
        is_whole_and_done(dataset, after)


def has_text(folder: Path, text: str) -> list[Path]:
    """The files that have this id, each decoded: its two letters come by chance in what is compressed."""
    return [path for path in files_below(folder) if holds(path, text.encode(), folder)]


def holds(path: Path, text: bytes, folder: Path) -> bool:
    content = path.read_bytes()
    if path.suffix == ".parquet":
        footer = content[-8 - int.from_bytes(content[-8:-4], "little") :]
        rows = json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
        return b'"' + text + b'"' in rows or bytes([len(text)]) + text in footer
    if path.suffix == ".avro":
        # Each block ends with the marker that the file ends with: two numbers, then deflated records. A text
        # has its length before it, doubled.
        for block in content.split(content[-16:])[1:-1]:
            numbers = [at for at, byte in enumerate(block) if byte < 128][:2]
            if bytes([2 * len(text)]) + text in zlib.decompress(block[numbers[1] + 1 :], -15):
                return True
        return False
    # A state names its files by their whole path, and a temporary folder's name can have the id by chance.
    return text in content.replace(bytes(folder), b"")


def test_nothing_of_a_withdrawn_property_is_left_on_the_disk(dataset):
    """Whatever snapshot had it, and also where descriptions wait for vectors: its id is in no file."""
    follow(dataset)
    first, second, _ = dataset.keys
    dataset.describe(first, text="another house", settings="other")
    dataset.embed(first)
    follow(dataset)
    table = table_of(dataset)
    table.manage_snapshots().create_tag(table.snapshots()[1].snapshot_id, "kept").commit()
    dataset.describe(second, text="it waits for vectors")
    folder = dataset.settings.described_table
    assert len(has_text(folder, "p1")) == 2 and len(has_text(folder, "p3")) == 1
    said = dataset.withdraw("p1", "p3")
    assert any(str(folder) in line for line in said)
    assert has_text(folder, "p1") == has_text(folder, "p3") == []
    table = table_of(dataset)
    assert list(table.refs()) == ["main"]
    left = {"p0", "p2", "p4", "p5", "p6", "p7", "p8"}
    assert rows_at(table).keys() == left
    again = follow(dataset)
    assert again.waiting == (second,)
    dataset.embed(second)
    follow(dataset)
    assert {name for name in rows_at(table_of(dataset)) if name.startswith("p")} == left
    assert has_text(folder, "p1") == has_text(folder, "p3") == []


def test_another_folder_forgets_with_its_next_run(dataset, tmp_path):
    """A table that is not the asset's has the ids until its command runs again, as the withdrawal says."""
    folder = tmp_path / "out"
    follow(dataset, folder)
    said = dataset.withdraw("p1")
    assert any(f"export {folder} --format iceberg" in line for line in said)
    assert has_text(folder, "p1")
    assert follow(dataset, folder).snapshots == 1
    assert has_text(folder, "p1") == []


@pytest.mark.parametrize("damage", ["gone", "text", "older"])
def test_a_catalogue_that_is_lost_is_made_again(changed, damage):
    """Gone, no database, or put back from before files were removed: its snapshots are there."""
    dataset, place = changed, TablePlace.from_settings(changed.settings)
    older = place.sqlite.read_bytes()
    follow(dataset)
    table = table_of(dataset)
    snapshots, rows = {one.snapshot_id for one in table.snapshots()}, partitions_at(table)
    if damage == "gone":
        place.sqlite.unlink()
    else:
        place.sqlite.write_bytes(older if damage == "older" else b"no database at all " * 100)
    assert follow(dataset).written == 0
    table = table_of(dataset)
    assert {one.snapshot_id for one in table.snapshots()} == snapshots
    assert partitions_at(table) == rows


def test_a_lost_file_is_written_again_and_a_lost_table_is_not_guessed(dataset):
    """A state that lacks a file is no state; where none is left, the sentence says what to do."""
    follow(dataset)
    before = partitions_at(table_of(dataset))
    folder = dataset.settings.described_table
    sorted(folder.rglob("*.parquet"))[1].unlink()
    assert follow(dataset).written == 2
    assert partitions_at(table_of(dataset)) == before
    for path in folder.rglob("*.metadata.json"):
        path.write_bytes(path.read_bytes()[:-9])
    files = files_below(folder)
    with pytest.raises(CommandError, match=r"No state of the table .* has all of its files"):
        follow(dataset)
    assert files_below(folder) == files


def described_with(dataset: Dataset, key: str, **description: Any) -> None:
    """Publish a partition whose descriptions have these fields, with its vectors."""
    types = pa.struct([(name, pa.array([value]).type) for name, value in description.items()])
    schema = DESCRIPTIONS.set(DESCRIPTIONS.get_field_index("description"), pa.field("description", types))
    rows = [
        {**row, "description": description} for row in dataset.descriptions.read(key).to_table().to_pylist()
    ]
    publish(dataset.descriptions, key, rows, schema, f"fp-{description}", {}, texts=str(description))
    dataset.embed(key)


def test_fields_that_are_added_or_left_out_are_null_elsewhere(dataset):
    """The table follows the schema of descriptions, and what was written before reads as it did."""
    follow(dataset)
    described_with(dataset, dataset.keys[0], floors=3, view="the sea")
    assert follow(dataset).written == 1
    rows = rows_at(table_of(dataset))
    assert rows["p0"]["description"] == {"floors": 3, "has_pool": None, "view": "the sea"}
    assert rows["p3"]["description"] == {"floors": 2, "has_pool": False, "view": None}


def test_another_type_begins_another_table(dataset):
    """A column cannot become a text: the table before stays under its folder's name, and forgets too."""
    follow(dataset)
    first, second, third = dataset.keys
    described_with(dataset, first, floors="two", has_pool=False)
    after = follow(dataset)
    assert (after.partitions, after.written, after.other_types) == (1, 1, (second, third))
    place = TablePlace.from_settings(dataset.settings)
    with place.opened() as opened:
        before = opened._load("described_properties_1")
        assert len(rows_at(before)) == 9
    assert follow(dataset).written == 0
    dataset.withdraw("p1", "p8")
    assert has_text(place.folder, "p1") == has_text(place.folder, "p8") == []
    with place.opened() as opened:
        assert len(rows_at(opened._load("described_properties_1"))) == 7
    described_with(dataset, second, floors="two", has_pool=False)
    described_with(dataset, third, floors="two", has_pool=False)
    assert follow(dataset).other_types == ()


def test_a_commit_of_another_program_is_not_lost(dataset, monkeypatch):
    """Somebody commits between our look and our commit: the table is loaded again, and both are in it."""
    follow(dataset)
    key = dataset.keys[0]
    dataset.describe(key, text="another house", settings="other")
    dataset.embed(key)
    write, others = described_table._dataframe_to_data_files, []

    def beside(*arguments: Any, **more: Any) -> Any:
        if len(others) < 2:
            others.append(1)
            table_of(dataset).delete(f"range == '{dataset.keys[1 + len(others) - 1]}'")
        return write(*arguments, **more)

    monkeypatch.setattr(described_table, "_dataframe_to_data_files", beside)
    assert follow(dataset).written == 1
    assert partitions_at(table_of(dataset)).keys() == {key}
    monkeypatch.undo()
    assert follow(dataset).written == 2, "what another program took out is written again"


def test_snapshots_are_bounded_and_days_are_kept(dataset, monkeypatch):
    """The newest and the last of each earlier day stay, a tagged one too; files of others go."""
    monkeypatch.setattr(described_table, "RECENT_SNAPSHOTS", 3)
    monkeypatch.setattr(described_table, "DAILY_SNAPSHOTS", 1)
    key = dataset.keys[0]
    follow(dataset)
    for number in range(4):
        dataset.describe(key, text=f"house {number}", settings=f"s{number}")
        dataset.embed(key)
        last = follow(dataset)
    assert last.snapshots == 4
    table = table_of(dataset)
    assert len({task.file.file_path for one in table.snapshots()
                for task in table.scan(snapshot_id=one.snapshot_id).plan_files()}) < 7  # fmt: skip
    follow(dataset)
    folder = dataset.settings.described_table
    assert files_below(folder) - {folder / ".lock", folder / "catalog.db"} == named(table_of(dataset))
    day = 86_400_000
    metadata = table.metadata.model_copy(
        update={
            "snapshots": [
                one.model_copy(
                    update={
                        "snapshot_id": number,
                        "sequence_number": number,
                        "timestamp_ms": number * day // 3,
                    }
                )
                for number, one in enumerate([table.snapshots()[0]] * 10)
            ],
            "refs": {},
        }
    )
    # The next is the third of the newest. Of 0 to 7, of which 6 and 7 are of one day, its last one stays.
    assert set(described_table._expired(metadata, everything=False)) == set(range(7))


def test_a_table_of_another_catalogue_or_place_is_refused(dataset, tmp_path):
    """Ranges of another catalogue would replace its partitions; a moved table names files that are gone."""
    folder = tmp_path / "out"
    follow(dataset, folder)
    ingest(write_listing(tmp_path / "x.jsonl", {"x": ["x.jpg"]}), tmp_path / "other", range_size=1)
    other = Dataset(load_settings(model="example", home=tmp_path / "other"))
    other.describe(other.keys[0])
    with pytest.raises(CommandError, match="the table of another catalogue"):
        follow(other, folder)
    folder.rename(tmp_path / "moved")
    with pytest.raises(CommandError, match="move it back"):
        follow(dataset, tmp_path / "moved")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("")
    for place, message in ((tmp_path / "full", "holds other files"), (tmp_path / "a#b", "has #")):
        with pytest.raises(CommandError, match=message):
            follow(dataset, place)
    with pytest.raises(CommandError, match="holds no image files"):
        bring_up_to_date(
            dataset.settings, dataset.catalog, TablePlace.from_settings(dataset.settings), Images.copy
        )


def test_a_table_on_a_disk_that_is_not_mounted_is_missed(dataset):
    """A withdrawal is not done, and no other table begins in the mount point, until a person says so."""
    folder = dataset.settings.described_table
    follow(dataset)
    folder.rename(folder.with_name("disk"))
    folder.mkdir()
    withdrawal = prepare_withdrawal(dataset.settings, ["p1"])
    for repeat in (lambda: follow(dataset), lambda: [*withdraw(dataset.settings, withdrawal)]):
        with pytest.raises(CommandError, match=r"is not there\. Mount its disk, or delete"):
            repeat()
    assert has_table(dataset.settings) and not files_below(folder)
    folder.rmdir()
    folder.with_name("disk").rename(folder)
    assert has_text(folder, "p1")
    list(withdraw(dataset.settings, withdrawal))
    assert has_text(folder, "p1") == []
    shutil.rmtree(folder)
    note_of(dataset.settings, folder).unlink()
    assert follow(dataset).written == 3


def test_a_catalogue_with_the_table_of_another_home_is_refused(dataset, tmp_path):
    """The name of the table is the same in each home: the second would write into the first one's files."""
    first = TablePlace.from_settings(dataset.settings)
    follow(dataset)
    rows = rows_at(first.read())
    shared = f"sqlite:///{first.sqlite}"
    second = TablePlace(tmp_path / "second", shared)
    for away in (False, True):
        if away:
            first.folder.rename(tmp_path / "away")
            first.folder.mkdir()
            shutil.copy(tmp_path / "away" / "catalog.db", first.sqlite)
        with second.opened() as opened, pytest.raises(CommandError, match="_TABLE_CATALOG to a database"):
            opened.current()
    shutil.rmtree(first.folder)
    (tmp_path / "away").rename(first.folder)
    assert rows_at(first.read()) == rows


def test_a_table_under_another_name_of_its_folder_loses_no_file(dataset, tmp_path):
    """By a link, or in a copy, each path is another one: all files would be what nothing names."""
    folder = tmp_path / "out"
    follow(dataset, folder)
    (tmp_path / "link").symlink_to(folder)
    shutil.copytree(folder, tmp_path / "copy")
    before = files_below(folder)
    for other in ("link", "copy"):
        with pytest.raises(CommandError, match="Name the folder as it was named"):
            follow(dataset, tmp_path / other)
    assert files_below(folder) == before and len(files_below(tmp_path / "copy")) == len(before)


def test_changes_between_two_snapshots(dataset, call, tmp_path):
    """A database follows by the table's own snapshots; one that a withdrawal removed is named as gone."""
    folder = dataset.settings.described_table
    first = follow(dataset)

    def told(*since: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        words = ("changes", "--json", "--table", str(folder), *since)
        *lines, counts = map(json.loads, call(*words).stdout.splitlines())
        return lines, counts

    lines, counts = told()
    assert (len(lines), counts["new"], counts["next"]) == (9, 9, str(first.snapshot))
    assert told("--since", counts["next"])[0] == []
    key = dataset.keys[1]
    nine = {"description": {"floors": 9, "has_pool": True}}
    dataset.describe(key, lambda rows: [{**rows[0], **nine}, *rows[1:]], text="nine")
    dataset.embed(key)
    follow(dataset)
    lines, after = told("--since", counts["next"])
    assert lines == [
        {"change": "changed", "property_id": "p3", "ordinal": 3, "status": "ok", "has_vector": True}
    ]
    assert told("--since", after["next"])[0] == []
    assert told("--since", "2026-01-01")[1]["new"] == 9
    dataset.withdraw("p3")
    with pytest.raises(CommandError, match=r"has no snapshot .* any more"):
        TableChanges(table_of(dataset), after["next"])
    with pytest.raises(CommandError, match="leave out --next"):
        call("changes", "--table", str(folder), "--next", str(tmp_path / "next"))

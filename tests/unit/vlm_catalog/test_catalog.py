"""Reading the catalogue: the footer for ranges, verified rows, sentences where it cannot be read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.damage import damage_rows, flip_bit, flipped
from tests.support.listings import list_properties
from vlm_catalog.catalog import Catalog, CatalogUnreadableError
from vlm_catalog.catalog_copies import backup_paths, catalog_path, last_put_back, mark_path
from vlm_catalog.catalog_file import CatalogError, CatalogHeader, rows_digest
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import PropertyRange


@pytest.fixture(scope="module")
def large_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 ranges of five properties."""
    folder = tmp_path_factory.mktemp("large")
    ingest(list_properties(folder, 5_000), folder / "home", range_size=5)
    return folder / "home"


@pytest.fixture
def home(large_home: Path, tmp_path: Path) -> Path:
    """A copy of the large home that a test may damage."""
    shutil.copytree(large_home, tmp_path / "home")
    return tmp_path / "home"


def test_the_names_in_the_footer_are_those_of_every_earlier_catalogue(home: Path) -> None:
    """A catalogue written years ago is still one: the footer's keys are a format, not names of modules."""
    written = pq.read_metadata(home / "property_catalog" / "catalog.parquet").metadata
    assert {b"vlm_assets.catalog", b"vlm_assets.catalog.sha256"} <= set(written)


def test_ranges_come_from_the_footer_alone(home: Path) -> None:
    """Definitions load thousands of partitions without reading a row: not one row is readable here."""
    intact = Catalog.open(home)
    damage_rows(intact.path)
    damaged = Catalog.open(home)
    assert len(damaged.ranges) == 1_000
    assert damaged.ranges == intact.ranges
    assert damaged.rows == 5_000
    assert damaged.slice_digest(damaged.ranges[7]) == intact.slice_digest(intact.ranges[7])
    assert last_put_back(home) is None
    damage_rows(backup_paths(home)[0])
    with pytest.raises(CatalogUnreadableError, match=r"catalog\.0\.parquet"):
        damaged.slice(damaged.ranges[7])
    with pytest.raises(CatalogUnreadableError):
        damaged.find("id 1")
    with pytest.raises(CatalogUnreadableError):
        damaged.image_counts()
    with pytest.raises(CatalogUnreadableError):
        damaged.verify()


def test_slices_are_the_rows_of_their_range(large_home: Path) -> None:
    """A range's rows are its own, in order, over row group borders as well, and fit their digest."""
    catalog = Catalog.open(large_home)
    assert pq.read_metadata(catalog.path).num_row_groups > 1
    for one in (catalog.ranges[0], catalog.ranges[818], catalog.ranges[819], catalog.ranges[-1]):
        table = catalog.slice(one)
        assert table["ordinal"].to_pylist() == list(range(one.start, one.stop))
        assert table["property_id"].to_pylist() == [f"id {i}" for i in range(one.start, one.stop)]
        assert table["image_uris"].to_pylist()[0] == [f"{one.start}a.jpg", f"{one.start}b.jpg"]
        assert rows_digest(table) == catalog.slice_digest(one)


def damage_group(path: Path, group: int) -> None:
    """Flip a bit of the ordinals of a row group."""
    flip_bit(path, pq.read_metadata(path).row_group(group).column(0).data_page_offset)


def test_a_slice_reads_the_row_groups_of_its_range_only(home: Path) -> None:
    """A partition is not slowed, nor stopped by damage, by the rest of the catalogue."""
    catalog = Catalog.open(home)
    damage_group(catalog.path, 0)
    assert catalog.slice(catalog.ranges[-1]).num_rows == 5
    assert last_put_back(home) is None
    assert catalog.slice(catalog.ranges[0]).num_rows == 5
    assert last_put_back(home) is not None


def test_ranges_larger_than_a_row_group_are_read_whole(tmp_path: Path) -> None:
    """The range size may exceed the size of a row group."""
    ingest(list_properties(tmp_path, 5_000), tmp_path / "home", range_size=4_500, close=True)
    catalog = Catalog.open(tmp_path / "home")
    assert [len(one) for one in catalog.ranges] == [4_500, 500]
    assert [table.num_rows for _, table in catalog.slices()] == [4_500, 500]
    assert catalog.slice(catalog.ranges[1])["ordinal"].to_pylist() == list(range(4_500, 5_000))


def test_properties_are_found_by_id(large_home: Path) -> None:
    """One property is found with its place; an id that is not there is None."""
    catalog = Catalog.open(large_home)
    row = catalog.find("id 4876")
    assert row is not None
    assert (row.ordinal, row.property_id, row.range) == (4876, "id 4876", PropertyRange(4875, 4880))
    assert row.image_uris == ("4876a.jpg", "4876b.jpg")
    assert row.image_bytes == (None, None)
    assert catalog.find("id 5000") is None
    assert catalog.find("caf\udce9") is None, "typed in another encoding, which is no fault of the catalogue"


def test_unknown_ranges_and_ordinals_are_refused(large_home: Path) -> None:
    """A key of another catalogue finds nothing here, and never other rows."""
    catalog = Catalog.open(large_home)
    for wrong in (PropertyRange(0, 6), PropertyRange(3, 5), PropertyRange(5_000, 5_005)):
        with pytest.raises(CatalogError, match=f"has no range {wrong.key}"):
            catalog.slice(wrong)
    assert catalog.range_of(4_999) == catalog.ranges[-1]
    for ordinal in (-1, 5_000):
        with pytest.raises(CatalogError):
            catalog.range_of(ordinal)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Whatever byte is damaged, either all rows are right or reading stops, without a mark too."""
    ingest(list_properties(tmp_path, 12), tmp_path / "home", range_size=5)
    catalog = Catalog.open(tmp_path / "home")
    rows = [table for _, table in catalog.slices(with_tail=True)]
    data = catalog.path.read_bytes()
    backup_paths(tmp_path / "home")[0].write_bytes(b"lost")
    ids = [f"id {number}" for number in range(12)]
    noticed = 0
    for at in range(0, len(data), 7):
        catalog.path.write_bytes(flipped(data, at, at % 8))
        shutil.rmtree(mark_path(tmp_path / "home").parent, ignore_errors=True)
        try:
            read = Catalog.open(tmp_path / "home")
            assert read.ordinals_of(ids) == list(range(12))
            assert read.image_counts().tolist() == [2] * 12
            tables = [table for _, table in read.slices(with_tail=True)]
        except CatalogUnreadableError:
            noticed += 1
        else:
            assert read.header == catalog.header
            assert tables == rows
    assert noticed > 50


def rewrite(home: Path, table: pa.Table, header: CatalogHeader) -> None:
    """Have a catalogue without a second copy be a sound parquet file of these rows with this header."""
    backup_paths(home)[0].write_bytes(b"lost")
    shutil.rmtree(mark_path(home).parent)
    with pq.ParquetWriter(catalog_path(home), table.schema.remove_metadata()) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(header.metadata())


@pytest.mark.parametrize("name", ["ordinal", "property_id", "image_uris", "image_bytes", "inputs_digest"])
@pytest.mark.parametrize("other", ["values", "types"])
def test_sound_parquet_with_other_rows_is_noticed(tmp_path: Path, name: str, other: str) -> None:
    """Rows that someone rewrote under the same header are not taken for what was ingested."""
    (tmp_path / "1a.jpg").touch()
    ingest(list_properties(tmp_path, 3), tmp_path / "home", range_size=3)
    catalog = Catalog.open(tmp_path / "home")
    table = pq.read_table(catalog.path)
    place = table.schema.get_field_index(name)
    field, column = table.schema.field(place), table[name]
    if other == "values":
        column = column.take(pa.array([1, 0, 2]))
    else:
        field = field.with_nullable(True)
    rewrite(tmp_path / "home", table.set_column(place, field, column), catalog.header)
    with pytest.raises(CatalogUnreadableError, match="not what was ingested"):
        Catalog.open(tmp_path / "home").slice(catalog.ranges[0])


@pytest.mark.parametrize(
    "ranges",
    [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 4)], [(0, 2)]],
    ids=["gap", "overlap", "more", "fewer"],
)
def test_ranges_that_are_not_those_of_the_rows_are_noticed(tmp_path: Path, ranges: list) -> None:
    """Every row lies in one range, and every range has its rows."""
    ingest(list_properties(tmp_path, 3), tmp_path / "home", range_size=3)
    catalog = Catalog.open(tmp_path / "home")
    digests = ("0",) * len(ranges)
    wrong = replace(catalog.header, ranges=tuple(PropertyRange(*one) for one in ranges), digests=digests)
    rewrite(tmp_path / "home", pq.read_table(catalog.path), wrong)
    with pytest.raises(CatalogUnreadableError, match="its ranges"):
        Catalog.open(tmp_path / "home")


@pytest.mark.parametrize("damage", ["gone", "empty", "truncated", "not a catalogue"])
def test_an_unreadable_catalogue_names_its_backups(tmp_path: Path, damage: str) -> None:
    """Unreadable is never the same as empty: the error says where the copies are and what they hold."""
    home = tmp_path / "home"
    ingest(list_properties(tmp_path, 3), home, range_size=2)
    ingest(list_properties(tmp_path, 5), home)
    path = Catalog.open(home).path
    second_copy, previous = backup_paths(home)
    damage_rows(second_copy)
    match damage:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "truncated":
            path.write_bytes(path.read_bytes()[:-40])
        case _:
            pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(CatalogUnreadableError) as raised:
        Catalog.open(home)
    message = str(raised.value)
    assert f"{second_copy} (ingest 2, 5 properties)" in message
    assert f"{previous} (ingest 1, 3 properties)" in message
    with pytest.raises(CatalogUnreadableError):
        ingest(list_properties(tmp_path, 5), home)


def test_readers_of_parquet_find_the_catalogue_alone(tmp_path: Path) -> None:
    """The folder holds the catalogue and nothing else: any reader may be pointed at it."""
    home = tmp_path / "home"
    ingest(list_properties(tmp_path, 3), home)
    ingest(list_properties(tmp_path, 5), home)
    assert [path.name for path in (home / "property_catalog").iterdir()] == ["catalog.parquet"]


def test_rows_updated_underneath_are_not_mixed(tmp_path: Path) -> None:
    """An open catalogue goes on reading ranges that stayed, and stops at one whose images were replaced."""
    home = tmp_path / "home"
    source = list_properties(tmp_path, 6)
    ingest(source, home, range_size=2)
    before = Catalog.open(home)
    source.write_text(source.read_text().replace("5b.jpg", "5c.jpg"))
    ingest(source, home, update=True)
    assert before.slice(before.ranges[0]).num_rows == 2
    updated = "was updated while it was in use"
    with pytest.raises(CatalogError, match=f"{updated}, and {before.ranges[2].key}"):
        before.slice(before.ranges[2])
    with pytest.raises(CatalogError, match=updated):
        before.verify()


def test_damage_in_the_middle_brings_no_row_twice(home: Path) -> None:
    """Who reads all rows meets it after some of them, and goes on from the second copy."""
    catalog = Catalog.open(home)
    whole = catalog.path.read_bytes()
    damage_group(catalog.path, 1)
    assert [one for one, _ in catalog.slices()] == list(catalog.ranges)
    assert catalog.path.read_bytes() == whole


def test_images_are_counted_of_the_properties_that_the_catalogue_had(tmp_path: Path) -> None:
    """Neither those that came since, nor as few as an older version has that was put back meanwhile."""
    home = tmp_path / "home"
    ingest(list_properties(tmp_path, 3), home)
    before, older = Catalog.open(home), catalog_path(home).read_bytes()
    ingest(list_properties(tmp_path, 5), home)
    now = Catalog.open(home)
    assert len(before.image_counts()) == 3
    catalog_path(home).write_bytes(older)
    assert len(now.image_counts()) == 5


def test_a_home_can_be_moved_with_its_images(tmp_path: Path) -> None:
    """A root inside the home is kept relative to it."""
    home = tmp_path / "home"
    (home / "images" / "1").mkdir(parents=True)
    (home / "images" / "1" / "a.jpg").write_bytes(b"a")
    ingest(home / "images", home)
    moved = tmp_path / "elsewhere"
    home.rename(moved)
    assert Catalog.open(moved).image_path("1/a.jpg").read_bytes() == b"a"
    assert not ingest(moved / "images", moved).written

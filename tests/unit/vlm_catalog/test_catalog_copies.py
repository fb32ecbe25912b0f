"""The catalogue's copies: damage is put back by whoever meets it; another format is no damage."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.damage import damage_rows
from tests.support.kills import killed_homes
from tests.support.listings import list_properties, write_listing
from vlm_catalog import catalog_copies
from vlm_catalog.catalog import Catalog, CatalogUnreadableError
from vlm_catalog.catalog_copies import (
    backup_paths,
    catalog_path,
    check_copies,
    last_put_back,
    only_catalog_writer,
    publish_catalog,
    put_back,
    quarantine,
    replace_catalog,
)
from vlm_catalog.catalog_file import CatalogFormatError
from vlm_catalog.ingest import close_tail, ingest
from vlm_catalog.withdrawn_ids import WithdrawnIds, save_withdrawn
from vlm_durable.files.files import DurableWriteError


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten ranges of five properties and a tail of two, catalogued in two steps."""
    folder = tmp_path_factory.mktemp("template")
    ingest(list_properties(folder, 30), folder / "home", range_size=5)
    ingest(list_properties(folder, 52), folder / "home")
    return folder / "home"


@pytest.fixture
def home(template: Path, tmp_path: Path) -> Path:
    """A copy of the template that a test may damage."""
    shutil.copytree(template, tmp_path / "home")
    return tmp_path / "home"


READERS = {
    "open": lambda catalog: Catalog.open(catalog.home).header,
    "slice": lambda catalog: catalog.slice(catalog.ranges[7]),
    "slices": lambda catalog: [table for _, table in catalog.slices()],
    "tail": lambda catalog: catalog.slice(catalog.tail),
    "find": lambda catalog: catalog.find("id 41"),
    "image_counts": lambda catalog: catalog.image_counts().tolist(),
    "verify": lambda catalog: catalog.verify(),
    "close_tail": lambda catalog: close_tail(catalog.home),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", ["rows", "footer", "gone"])
def test_a_damaged_catalogue_is_put_back_by_whoever_reads_it(template, home, tmp_path, damage, reader):
    """With an intact second copy no reader sees the damage, the damaged file is kept, and it is told once."""
    path = catalog_path(home)
    whole = path.read_bytes()
    shutil.copytree(template, tmp_path / "undamaged")
    expected = READERS[reader](Catalog.open(tmp_path / "undamaged"))
    catalog = Catalog.open(home)
    match damage:
        case "rows":
            damage_rows(path)
        case "footer":
            path.write_bytes(whole[:-40])
        case _:
            path.unlink()
    damaged = path.read_bytes() if path.exists() else None
    assert READERS[reader](catalog) == expected
    if (damage, reader) == ("rows", "open"):
        assert last_put_back(home) is None, "the footer is whole, and nothing else was read"
        check_copies(home)
    told = last_put_back(home)
    assert told is not None
    if damaged is not None:
        (kept,) = quarantine(home).glob("catalog.parquet.*")
        assert kept.read_bytes() == damaged
        assert str(kept) in told[2]
    if reader != "close_tail":
        assert path.read_bytes() == whole
    put_back(home, "again")
    assert last_put_back(home) == told, "a whole catalogue is left alone"


def test_bit_rot_is_found_before_anybody_reads_it(home: Path) -> None:
    """The regular look compares both copies, and puts the damaged one right, whichever it is."""
    whole = catalog_path(home).read_bytes()
    paths = catalog_path(home), backup_paths(home)[0]
    for rotten, harm in itertools.product(paths, (damage_rows, lambda path: path.write_bytes(whole[:-1]))):
        harm(rotten)
        damaged = rotten.read_bytes()
        check_copies(home)
        assert damaged in [path.read_bytes() for path in quarantine(home).glob(f"{rotten.name}.*")]
        assert catalog_path(home).read_bytes() == backup_paths(home)[0].read_bytes() == whole
    backup_paths(home)[0].unlink()
    check_copies(home)
    assert backup_paths(home)[0].read_bytes() == whole
    damage_rows(catalog_path(home))
    backup_paths(home)[0].write_bytes(whole[:-1])
    with pytest.raises(CatalogUnreadableError):
        check_copies(home)


WRITERS = {
    "publish": lambda home: publish_catalog(home, catalog_path(home).read_bytes()),
    "replace": lambda home: replace_catalog(home, catalog_path(home).read_bytes()),
    "put back": lambda home: put_back(home, "in this test"),
    "compare": lambda home: check_copies(home),
    "open": lambda home: (catalog_path(home).unlink(), Catalog.open(home)),
    "withdraw": lambda home: save_withdrawn(home, WithdrawnIds.new()),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_one_process_at_a_time_writes(home: Path, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    """Who comes second waits, and then writes neither the catalogue nor the list of withdrawn ids."""
    monkeypatch.setattr(catalog_copies, "_WAIT_SECONDS", 0.0)
    backup_paths(home)[0].write_bytes(catalog_path(home).read_bytes() + b" ")
    refused = pytest.raises((DurableWriteError, CatalogUnreadableError), match="another process has been")
    with only_catalog_writer(home), refused:
        WRITERS[writer](home)


def test_no_repair_is_made_untold(home: Path, tmp_path: Path) -> None:
    """Killed anywhere, a repair that was made is noted; the next look makes the rest of it."""
    whole = catalog_path(home).read_bytes()
    damage_rows(catalog_path(home))
    for killed, _ in killed_homes(home, lambda: check_copies(home), tmp_path / "killed"):
        assert catalog_path(killed).read_bytes() != whole or last_put_back(killed) is not None
        check_copies(killed)
        assert catalog_path(killed).read_bytes() == whole
    (quarantine(home) / "put_back.json").write_bytes(b"damaged")
    assert last_put_back(home) is not None, "a note that cannot be read is one all the same"


def test_a_catalogue_is_never_put_back_from_the_one_before(home: Path) -> None:
    """The version before has fewer properties: taking it by itself would give their ordinals away anew."""
    for path in (catalog_path(home), backup_paths(home)[0]):
        damage_rows(path)
    damaged = catalog_path(home).read_bytes()
    with pytest.raises(CatalogUnreadableError, match=r"catalog\.1\.parquet \(ingest 1, 30 properties\)"):
        Catalog.open(home).verify()
    assert catalog_path(home).read_bytes() == damaged


def test_a_catalogue_of_a_newer_version_is_refused_and_left_alone(home: Path, tmp_path: Path) -> None:
    """Another format is no damage: it is named with both versions, and no copy replaces it."""
    path = catalog_path(home)
    table = pq.read_table(path)
    body = Catalog.open(home).header.metadata()[b"vlm_assets.catalog"]
    body = body.replace(b'"format":2', b'"format":3')
    digest = hashlib.sha256(body).hexdigest().encode()
    with pq.ParquetWriter(path, table.schema.remove_metadata()) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"vlm_assets.catalog": body, b"vlm_assets.catalog.sha256": digest})
    newer = path.read_bytes()
    with pytest.raises(CatalogFormatError, match="format 3 and this version reads 2"):
        Catalog.open(home)
    with pytest.raises(CatalogFormatError):
        ingest(list_properties(tmp_path, 5), home)
    with pytest.raises(CatalogFormatError):
        check_copies(home)
    assert path.read_bytes() == newer


def test_a_catalogue_of_the_previous_format_is_read_and_grows(tmp_path: Path) -> None:
    """Format 1, as an earlier version wrote it: its ordinals stay, and the next ingest writes format 2."""
    home = tmp_path / "home"
    catalog_path(home).parent.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("formats") / "catalog-1.parquet", catalog_path(home))
    before = Catalog.open(home)
    before.verify()
    assert [one.key for one in before.ranges] == [
        "000000000-000000001", "000000002-000000003", "000000004-000000004"
    ]  # fmt: skip
    rows = before.slice(before.ranges[0]).to_pylist()
    assert rows[1]["image_uris"] == ["1/a.jpg", "1/b.jpg"]
    assert len(rows[1]["inputs_digest"]) == 32
    more = write_listing(tmp_path / "more.jsonl", {"q0": ["q.jpg"], "q1": ["q.jpg"]})
    ingest(more, home, image_root=Path("/srv"))
    after = Catalog.open(home)
    after.verify()
    assert after.ranges[:3] == before.ranges
    assert after.slice(after.ranges[0]).to_pylist() == rows
    assert after.rows == 7

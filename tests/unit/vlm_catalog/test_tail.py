"""The unfilled tail of the catalogue, no partition until it is full or closed; what rows were made of."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import inputs_digest
from vlm_catalog.ingest import close_tail, ingest
from vlm_catalog.ranges import PropertyRange


def test_an_unfilled_tail_is_no_partition_until_it_is_full(tree: Path, tmp_path: Path) -> None:
    """Properties wait until they fill a range; their ordinals and the keys of all ranges stay."""
    home = tmp_path / "home"
    report = ingest(tree, home, range_size=3)
    first = Catalog.open(home)
    assert (report.new, report.waiting, report.new_ranges) == (5, 2, (PropertyRange(0, 3),))
    assert (first.ranges, first.tail, first.rows) == ((PropertyRange(0, 3),), PropertyRange(3, 5), 5)
    assert any("Waiting: 2, too few for a partition of 3." in one for one in report.sentences())
    row = first.find("ü")
    assert row is not None
    assert (row.ordinal, row.range) == (4, first.tail)
    assert first.range_of(4) == first.tail
    shutil.copytree(tree / "x", tree / "0")
    grown = ingest(tree, home)
    after = Catalog.open(home)
    assert (grown.new, grown.waiting, grown.new_ranges) == (1, 0, (PropertyRange(3, 6),))
    assert after.ranges == (PropertyRange(0, 3), PropertyRange(3, 6))
    assert after.slice_digest(PropertyRange(0, 3)) == first.slice_digest(PropertyRange(0, 3))
    ids = [name for _, table in after.slices() for name in table["property_id"].to_pylist()]
    assert ids == ["00123", "a", "b b", "x", "ü", "0"]


def test_the_age_of_a_tail_is_that_of_its_first_property(tree, tmp_path, monkeypatch) -> None:
    """New properties every hour must not keep the first ones waiting for ever."""
    home = tmp_path / "home"

    def since() -> float | None:
        tail = Catalog.open(home).header.tail
        return tail.since if tail is not None else None

    for at, name, expected in (
        (100.0, "1", 100.0),
        (200.0, "2", None),
        (300.0, "3", 300.0),
        (350.0, "4", 300.0),
    ):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        shutil.copytree(tree / "x", tree / name)
        ingest(tree, home, range_size=7)
        assert since() == expected
    monkeypatch.setattr(time, "time", lambda: 400.0)
    shutil.copytree(tree / "x", tree / "5")
    ingest(tree, home, range_size=1)
    assert since() is None


def test_closing_makes_a_range_of_the_tail(tree: Path, tmp_path: Path) -> None:
    """A person who does not want to wait gets a smaller partition, once, with the rows as they were."""
    home = tmp_path / "home"
    ingest(tree, home, range_size=3)
    before = Catalog.open(home)
    assert close_tail(home) == PropertyRange(3, 5)
    after = Catalog.open(home)
    assert (after.ranges, after.tail) == ((PropertyRange(0, 3), PropertyRange(3, 5)), None)
    assert after.slice_digest(PropertyRange(3, 5)) == before.slice_digest(PropertyRange(3, 5))
    assert after.header.sequence == before.header.sequence + 1
    assert close_tail(home) is None
    shutil.copytree(tree / "x", tree / "y")
    assert ingest(tree, home).waiting == 1
    assert ingest(tree, home, close=True).new_ranges == (PropertyRange(5, 6),)


def test_changed_images_in_the_tail_make_nothing_stale(tree: Path, tmp_path: Path) -> None:
    """An update of a property that is in no partition yet is taken, and no partition is called stale."""
    home = tmp_path / "home"
    ingest(tree, home, range_size=3)
    (tree / "ü" / "1.jpg").write_bytes(b"other")
    assert ingest(tree, home).changed_not_taken == 1
    report = ingest(tree, home, update=True)
    assert (report.written, report.changed_taken, report.stale_ranges) == (True, 1, ())
    row = Catalog.open(home).find("ü")
    assert row is not None
    assert row.image_bytes == (5, 2)


def test_each_row_has_the_digest_of_its_own_inputs(tree: Path, tmp_path: Path) -> None:
    """A changed image list, order or file changes the digest of that property and of no other."""
    home = tmp_path / "home"
    ingest(tree, home, range_size=5)

    def digests() -> dict[str, str]:
        table = Catalog.open(home).slice(PropertyRange(0, 5))
        return dict(zip(*(table[name].to_pylist() for name in ("property_id", "inputs_digest")), strict=True))

    before = digests()
    assert before["a"] == inputs_digest(["a/1.jpg", "a/2.jpg"], [1, 2])
    assert len(set(before.values())) == 5
    (tree / "x" / "1.jpg").write_bytes(b"other")
    ingest(tree, home, update=True)
    assert {name for name, digest in digests().items() if digest != before[name]} == {"x"}
    assert inputs_digest(["1", "2"], [1, 1]) != inputs_digest(["2", "1"], [1, 1])
    assert inputs_digest(["1"], [None]) != inputs_digest(["1"], [1])

"""Ingest: append-only ordinals, refusals that change nothing, backups, one at a time."""

from __future__ import annotations

import csv
import fcntl
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.damage import flipped
from tests.support.listings import catalogued, write_listing
from vlm_catalog.catalog import Catalog, CatalogUnreadableError
from vlm_catalog.catalog_copies import backup_paths
from vlm_catalog.catalog_file import CatalogHeader, CatalogWriter, verify_file
from vlm_catalog.image_root import ImageOutsideRootError
from vlm_catalog.ingest import IngestBusyError, close_tail, ingest, take_in
from vlm_catalog.listing import IngestRequest, ListingError
from vlm_catalog.ranges import PropertyRange

NASTY_IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
    lambda text: text.strip() != ""
)
"""Any text that is an id: quotes, commas, line breaks, slashes, leading zeros, every script."""


def test_a_folder_tree_becomes_a_catalogue(tree: Path, tmp_path: Path) -> None:
    """Every property once, with its images' sizes, in ranges of the size asked for."""
    report = ingest(tree, tmp_path / "home", range_size=2, close=True)
    catalog = Catalog.open(tmp_path / "home")
    assert [one.key for one in report.new_ranges] == [
        "000000000-000000001",
        "000000002-000000003",
        "000000004-000000004",
    ]
    assert catalog.ranges == report.new_ranges
    assert list(catalogued(tmp_path / "home")) == ["00123", "a", "b b", "x", "ü"]
    assert catalog.slice(catalog.ranges[0])["image_bytes"].to_pylist() == [[1, 2], [1, 2]]
    assert (report.new, report.rows, report.images_listed, report.images_missing) == (5, 5, 10, 0)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(NASTY_IDS, min_size=1, max_size=8, unique=True), st.integers(1, 4))
def test_every_id_survives_every_format(tmp_path: Path, ids: list[str], size: int) -> None:
    """Whatever text an id is, it comes out of CSV, JSONL and parquet as it went in, and finds its row."""
    images = {name: [f"{at}/1.jpg", f"{at}/ü |.jpg"] for at, name in enumerate(ids)}
    with (tmp_path / "list.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["property_id", "images"])
        writer.writerows([name, json.dumps(some)] for name, some in images.items())
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "property_id"])
        writer.writerows([image, name] for name, some in images.items() for image in some)
    write_listing(tmp_path / "list.jsonl", images)
    table = pa.table({"property_id": list(images), "images": list(images.values())})
    pq.write_table(table, tmp_path / "list.parquet")
    for name in ("list.csv", "rows.csv", "list.jsonl", "list.parquet"):
        home = tmp_path / "home"
        ingest(tmp_path / name, home, range_size=size)
        assert catalogued(home) == images
        row = Catalog.open(home).find(ids[-1])
        assert row is not None
        assert row.ordinal == len(ids) - 1
        shutil.rmtree(home)


def test_another_range_size_says_that_what_is_catalogued_keeps_its_own(tree: Path, tmp_path: Path) -> None:
    """Asked for and not done is said, and stops no scripted ingest; new properties do get that size."""
    home = tmp_path / "home"
    ingest(tree, home, range_size=2, close=True)
    for same in (None, 2):
        assert not any("keep their size" in said for said in ingest(tree, home, range_size=same).sentences())
    (said,) = [one for one in ingest(tree, home, range_size=3).sentences() if "keep their size" in one]
    assert "keep their size of 2 properties" in said
    assert "Only new ranges have 3" in said
    folders = [home / name / "property_catalog" for name in ("", ".versions", ".state/version_marks")]
    assert f"remove {', '.join(map(str, folders))}, and ingest again" in said
    assert [len(one) for one in Catalog.open(home).ranges] == [2, 2, 1]
    some = next(one for one in tree.iterdir() if one.is_dir())
    for name in ("new-1", "new-2", "new-3"):
        shutil.copytree(some, tree / name)
    grown = ingest(tree, home, range_size=3)
    assert any("keep their size of 2" in one for one in grown.sentences())
    assert [len(one) for one in Catalog.open(home).ranges] == [2, 2, 1, 3]
    assert not any("keep their size" in one for one in ingest(tree, home, range_size=3).sentences())
    for folder in folders:
        shutil.rmtree(folder)
    ingest(tree, home, range_size=3)
    assert Catalog.open(home).header.range_size == 3


def test_ingesting_the_same_again_changes_nothing(tree: Path, tmp_path: Path) -> None:
    """An unchanged re-ingest leaves every file as it was, byte for byte, and says so."""
    ingest(tree, tmp_path / "home", range_size=2)
    folder = tmp_path / "home" / "property_catalog"
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.glob("catalog*")}
    report = ingest(tree, tmp_path / "home")
    assert {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.glob("catalog*")} == before
    assert not report.written
    assert (report.unchanged, report.new_ranges, report.stale_ranges) == (5, (), ())
    assert "stays as it was" in report.sentences()[0]


def test_growth_opens_new_ranges_and_touches_no_old_one(tree: Path, tmp_path: Path) -> None:
    """New properties go behind the known ones, in ranges of their own, also where their ids sort before."""
    home = tmp_path / "home"
    ingest(tree, home, range_size=2, close=True)
    before = Catalog.open(home)
    (tree / "0").mkdir()
    (tree / "0" / "1.jpg").write_bytes(b"1")
    report = ingest(tree, home, close=True)
    after = Catalog.open(home)
    assert report.new_ranges == (PropertyRange(5, 6),)
    assert report.stale_ranges == ()
    assert after.ranges == (*before.ranges, PropertyRange(5, 6))
    assert after.catalog_id == before.catalog_id
    assert [after.slice_digest(one) for one in before.ranges] == [
        before.slice_digest(one) for one in before.ranges
    ]
    assert verify_file(backup_paths(home)[1]) == before.header


def test_properties_that_disappear_stay(tree: Path, tmp_path: Path) -> None:
    """What is no longer listed keeps its ordinal and its row, and is named."""
    ingest(tree, tmp_path / "home")
    shutil.rmtree(tree / "b b")
    report = ingest(tree, tmp_path / "home")
    assert (report.gone, report.gone_ids, report.written) == (1, ("b b",), False)
    assert "b b" in catalogued(tmp_path / "home")
    assert any("not in this source (b b)" in sentence for sentence in report.sentences())


@pytest.mark.parametrize("change", ["another size", "another image", "one less", "it went missing"])
def test_changed_images_are_taken_only_with_update(tree: Path, tmp_path: Path, change: str) -> None:
    """A known property's change is named and left; with update it is taken, and the stale range is named."""
    home = tmp_path / "home"
    ingest(tree, home, range_size=2)
    bytes_before = Catalog.open(home).path.read_bytes()
    folder = tree / "x"
    match change:
        case "another size":
            (folder / "1.jpg").write_bytes(b"other")
        case "another image":
            (folder / "0.jpg").write_bytes(b"0")
        case "one less":
            (folder / "2.jpg").unlink()
        case _:
            (folder / "1.jpg").unlink()
            (folder / "1.jpg").symlink_to("nowhere.jpg")
    left = ingest(tree, home)
    assert (left.changed_not_taken, left.changed_taken, left.changed_ids) == (1, 0, ("x",))
    assert left.unchanged == 4
    assert any("--update` takes them" in sentence for sentence in left.sentences())
    assert Catalog.open(home).path.read_bytes() == bytes_before

    before = Catalog.open(home)
    taken = ingest(tree, home, update=True)
    after = Catalog.open(home)
    assert (taken.changed_taken, taken.stale_ranges) == (1, (PropertyRange(2, 4),))
    assert any("000000002-000000003" in sentence for sentence in taken.sentences())
    stale = [one for one in before.ranges if after.slice_digest(one) != before.slice_digest(one)]
    assert stale == [PropertyRange(2, 4)]
    row = after.find("x")
    assert row is not None
    assert row.ordinal == 3
    assert (
        row.image_bytes
        == {
            "another size": (5, 2),
            "another image": (1, 1, 2),
            "one less": (1,),
            "it went missing": (None, 2),
        }[change]
    )
    assert not ingest(tree, home, update=True).written


def test_missing_images_cost_themselves_only(tmp_path: Path) -> None:
    """A listed image that is not there has null bytes and is counted; the property is catalogued."""
    (tmp_path / "there.jpg").write_bytes(b"123")
    source = write_listing(tmp_path / "list.jsonl", {"1": ["there.jpg", "gone.jpg"], "2": []})
    report = ingest(source, tmp_path / "home", close=True)
    catalog = Catalog.open(tmp_path / "home")
    assert catalog.slice(catalog.ranges[0])["image_bytes"].to_pylist() == [[3, None], []]
    assert (report.images_missing, report.missing_uris, report.without_images) == (1, ("gone.jpg",), 1)
    assert "1 property has no image: it will be a failed row." in report.sentences()


def test_what_cannot_be_taken_is_refused_by_line_and_changes_nothing(tmp_path: Path) -> None:
    """Paths that leave the root, what is repeated, ids that are none: all counted, each with its line."""
    root = tmp_path / "images"
    root.mkdir()
    (root / "a.jpg").touch()
    (root / "out.jpg").symlink_to("/etc/hostname")
    (root / "folder").mkdir()
    home = tmp_path / "home"
    ingest(write_listing(tmp_path / "good.jsonl", {"0": ["a.jpg"]}), home, image_root=root)
    before = Catalog.open(home).path.read_bytes()
    lines = [
        ("1", ["a.jpg"], None),
        ("2", ["../secret.jpg"], "outside"),
        ("3", ["/etc/passwd"], "outside"),
        ("4", ["out.jpg"], "outside"),
        ("1", ["b.jpg"], "the id stands in line 1 already"),
        ("6", ["a.jpg", "./a.jpg"], "twice"),
        ("", ["a.jpg"], "the id is empty"),
        ("8\0", ["a.jpg"], "NUL"),
        ("9\ud800", ["a.jpg"], "UTF-8"),
        ("10", ["folder"], "not a file"),
        ("11", ["s3://bucket/a.jpg"], "it is on S3"),
    ]
    source = tmp_path / "bad.jsonl"
    source.write_text(
        "".join(json.dumps({"property_id": name, "images": some}) + "\n" for name, some, _ in lines)
    )
    with pytest.raises(ListingError, match="10 of its entries") as raised:
        ingest(source, home, image_root=root)
    said = str(raised.value).splitlines()
    for number, (_, _, reason) in enumerate(lines, 1):
        assert reason is None or [text for text in said if f"line {number}: " in text and reason in text], (
            said
        )
    assert Catalog.open(home).path.read_bytes() == before


def test_the_same_image_twice_in_rows_of_an_image_is_refused(tmp_path: Path) -> None:
    """Rows of one id are grouped, and the row that repeats an image is the one that is named."""
    source = tmp_path / "list.csv"
    source.write_text("property_id,image\n1,a.jpg\n2,a.jpg\n1,b.jpg\n1,a.jpg\n")
    with pytest.raises(ListingError, match="line 5: the same image twice"):
        ingest(source, tmp_path / "home")


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    """A source without a property never makes, nor changes, a catalogue."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "header.csv").write_text("property_id,images\n")
    (tmp_path / "tree" / "id" / "photos").mkdir(parents=True)
    for name in ("empty.jsonl", "header.csv", "tree"):
        with pytest.raises(ListingError, match=name):
            ingest(tmp_path / name, tmp_path / "home")
    assert not (tmp_path / "home" / "property_catalog" / "catalog.parquet").exists()


def test_paths_are_relative_to_the_image_root_given(tree: Path, tmp_path: Path) -> None:
    """A listing may lie anywhere when the images' folder is named; a tree below the root keeps its place."""
    (tmp_path / "lists").mkdir()
    source = write_listing(tmp_path / "lists" / "list.jsonl", {"a": [f"{tree}/a/1.jpg", "b b/2.jpg"]})
    ingest(source, tmp_path / "home", image_root=tree)
    assert catalogued(tmp_path / "home") == {"a": ["a/1.jpg", "b b/2.jpg"]}
    ingest(tree, tmp_path / "home2", image_root=tmp_path)
    assert catalogued(tmp_path / "home2")["a"] == ["tree/a/1.jpg", "tree/a/2.jpg"]


def test_another_image_root_needs_update(tree: Path, tmp_path: Path) -> None:
    """A second source elsewhere is not mixed in by mistake; images that moved are found again with update."""
    home = tmp_path / "home"
    ingest(tree, home)
    moved = tmp_path / "moved"
    tree.rename(moved)
    with pytest.raises(ListingError, match="--image-root"):
        ingest(moved, home)
    report = ingest(moved, home, update=True)
    assert (report.moved, report.stale_ranges, report.unchanged) == (True, (), 5)
    assert Catalog.open(home).image_path("a/1.jpg") == moved / "a" / "1.jpg"


def test_an_update_with_other_properties_elsewhere_takes_no_image_away(tree: Path, tmp_path: Path) -> None:
    """Somebody's own photographs in a home of others: with their root, no known image would be found."""
    home = tmp_path / "home"
    ingest(tree, home)
    other = tmp_path / "other"
    (other / "zz").mkdir(parents=True)
    (other / "zz" / "1.jpg").write_bytes(b"x")
    before = Catalog.open(home).path.read_bytes()
    for update in (False, True):
        with pytest.raises(ListingError, match="a home of their own"):
            ingest(other, home, update=update)
    assert Catalog.open(home).path.read_bytes() == before


def test_several_image_roots(tmp_path: Path) -> None:
    """Each path is found in its own root and may leave none; roots come to those known; each may move."""
    home, roots = tmp_path / "home", [tmp_path / name for name in ("one", "two", "three")]
    for root, image in zip(roots, ("a.jpg", "b.jpg", "c.jpg"), strict=True):
        root.mkdir()
        for name in (image, "both.jpg"):
            (root / name).write_bytes(root.name.encode())
    first = write_listing(tmp_path / "first.jsonl", {"a": ["a.jpg"], "b": ["b.jpg", f"{roots[1]}/both.jpg"]})
    ingest(first, home, image_root=roots[:2])
    known = {"a": ["a.jpg"], "b": ["/2/b.jpg", "/2/both.jpg"]}
    assert catalogued(home) == known
    assert Catalog.open(home).image_path("/2/b.jpg") == roots[1] / "b.jpg"
    # The roots are remembered; and one of them alone, as a folder tree or for a listing, is among them.
    assert ingest(first, home).unchanged == 2
    for bad, why in (("both.jpg", "write its whole path"), (f"{roots[2]}/c.jpg", "lies in none of")):
        with pytest.raises(ListingError, match=why):
            ingest(write_listing(tmp_path / "bad.jsonl", {"x": [bad]}), home)
    third = write_listing(tmp_path / "third.jsonl", {"c": ["c.jpg"]})
    for update in (False, True):
        with pytest.raises(ListingError, match=f"further folder of this machine: .*--image-root {roots[2]}"):
            ingest(third, home, image_root=roots[2], update=update)
    report = ingest(third, home, image_root=roots)
    assert (report.new, report.moved, catalogued(home)) == (1, True, {**known, "c": ["/3/c.jpg"]})
    assert ingest(third, home, image_root=roots[2]).unchanged == 1
    with pytest.raises(ImageOutsideRootError):
        Catalog.open(home).image_path("/4/a.jpg")
    moved = [roots[0], roots[1].rename(tmp_path / "moved"), roots[2]]
    report = ingest(third, home, image_root=moved, update=True)
    assert (report.moved, report.stale_ranges) == (True, ())
    assert Catalog.open(home).image_path("/2/b.jpg") == moved[1] / "b.jpg"


def test_an_update_without_a_readable_image_is_refused(tree: Path, tmp_path: Path) -> None:
    """A disk that is not mounted does not make every range stale."""
    source = write_listing(tmp_path / "list.jsonl", {"a": ["tree/a/1.jpg"]})
    ingest(source, tmp_path / "home")
    shutil.rmtree(tree)
    with pytest.raises(ListingError, match="Is the disk there"):
        ingest(source, tmp_path / "home", update=True)
    assert ingest(source, tmp_path / "home").changed_not_taken == 1


def test_one_ingest_at_a_time(tree: Path, tmp_path: Path) -> None:
    """A second ingest is refused, naming the one at work, and goes through once that has ended."""
    home = tmp_path / "home"
    ingest(tree, home)
    with (home / ".state" / "ingest.lock").open("r+") as lock:
        # Shared, which only an exclusive lock does not go along with.
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(IngestBusyError, match=r"process \d+, source .*tree"):
            ingest(tree, home)
    assert not ingest(tree, home).written


def test_what_came_while_a_person_was_asked_is_not_written_over(tree: Path, tmp_path: Path) -> None:
    """Nobody waits for the answer: another ingest goes through, and the one that asked begins anew."""
    home = tmp_path / "home"
    ingest(tree, home, range_size=2)
    (tree / "x" / "1.jpg").write_bytes(b"other")

    def grow(*_: object) -> None:
        shutil.copytree(tree / "x", tree / "y")
        ingest(tree, home)

    with pytest.raises(IngestBusyError, match="was changed while you were asked"):
        take_in(IngestRequest(tree, update=True), home, before_update=grow)
    assert list(catalogued(home))[-1] == "y"


def test_a_lost_second_copy_is_made_again(tree: Path, tmp_path: Path) -> None:
    """An ingest that changes nothing still leaves an intact second copy behind."""
    home = tmp_path / "home"
    ingest(tree, home)
    copy = backup_paths(home)[0]
    copy.write_bytes(b"damaged")
    assert not ingest(tree, home).written
    assert copy.read_bytes() == Catalog.open(home).path.read_bytes()


def test_a_catalogue_that_does_not_read_back_is_not_published(tree, tmp_path, monkeypatch) -> None:
    """What was written is decoded and compared before it takes the old catalogue's place."""
    home = tmp_path / "home"
    ingest(tree, home)
    before = Catalog.open(home).path.read_bytes()
    finish = CatalogWriter.finish

    def finish_damaged(writer: CatalogWriter, header: CatalogHeader) -> bytes:
        return flipped(finish(writer, header), 100)

    monkeypatch.setattr(CatalogWriter, "finish", finish_damaged)
    (tree / "x" / "1.jpg").write_bytes(b"other")
    with pytest.raises(CatalogUnreadableError):
        ingest(tree, home, update=True)
    assert Catalog.open(home).path.read_bytes() == before


def test_a_range_size_below_one_is_refused(tree: Path, tmp_path: Path) -> None:
    """A range size of 0 ends in a sentence before anything is read."""
    with pytest.raises(ValueError, match="1 or more"):
        ingest(tree, tmp_path / "home", range_size=0)


class GrowingCatalogue(RuleBasedStateMachine):
    """Ingests of any listings in any order, against a plain dict: an ordinal is given once and for ever."""

    folder: Path
    home: Path

    def __init__(self) -> None:
        super().__init__()
        self.ordinals: dict[str, int] = {}
        self.images: dict[str, list[str]] = {}
        self.ranges: tuple[PropertyRange, ...] = ()

    listings = st.dictionaries(
        st.sampled_from(["0", "00", "a", "a/b", "ü", "y y", "z\n"]),
        st.lists(st.sampled_from(["1.jpg", "2.jpg", "x/3.jpg"]), unique=True, max_size=3),
        min_size=1,
    )

    @rule()
    def close_the_tail(self) -> None:
        """What waits becomes a range, and nothing else changes."""
        if not self.ordinals:
            return
        tail = Catalog.open(self.home).tail
        assert close_tail(self.home) == tail
        assert Catalog.open(self.home).tail is None
        self.ranges = (*self.ranges, *([tail] if tail is not None else []))

    @rule(listing=listings, update=st.booleans(), size=st.none() | st.integers(1, 3), close=st.booleans())
    def ingest(self, listing: dict[str, list[str]], update: bool, size: int | None, close: bool) -> None:
        """Take a listing, and do to the model what the promise says."""
        report = ingest(
            write_listing(self.folder / "list.jsonl", listing),
            self.home,
            range_size=size,
            update=update,
            close=close,
        )
        new = [name for name in listing if name not in self.ordinals]
        changed = [name for name in listing if name in self.images and self.images[name] != listing[name]]
        for name in new:
            self.ordinals[name] = len(self.ordinals)
            self.images[name] = listing[name]
        if update:
            self.images |= {name: listing[name] for name in changed}
        assert report.new == len(new)
        assert report.changed_taken == (len(changed) if update else 0)
        assert report.changed_not_taken == (0 if update else len(changed))
        assert report.written == bool(new or (update and changed) or report.new_ranges)
        catalog = Catalog.open(self.home)
        assert catalog.waiting < (size or catalog.header.range_size)
        assert not (close and catalog.tail)
        assert catalog.ranges == (*self.ranges, *report.new_ranges)
        self.ranges = catalog.ranges

    @invariant()
    def every_ordinal_is_as_first_given(self) -> None:
        """The catalogue is the model, row for row."""
        if self.ordinals:
            catalog = Catalog.open(self.home)
            catalog.verify()
            assert catalog.ranges == self.ranges
            assert catalogued(self.home) == self.images
            assert list(catalogued(self.home)) == sorted(self.ordinals, key=self.ordinals.__getitem__)


def test_ordinals_are_given_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is ingested in whatever order, no property changes its ordinal or its range."""

    class InFolder(GrowingCatalogue):
        def __init__(self) -> None:
            super().__init__()
            self.folder = tmp_path_factory.mktemp("growing")
            self.home = self.folder / "home"

    run_state_machine_as_test(
        InFolder, settings=settings(max_examples=12, stateful_step_count=6, deadline=None)
    )

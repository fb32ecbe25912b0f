"""Ingest with --skip-bad: bad entries go to a reject file with their reasons, and the rest is taken."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.support.listings import catalogued
from vlm_catalog.catalog import Catalog, CatalogMissingError
from vlm_catalog.ingest import ingest, take_in
from vlm_catalog.listing import IngestRequest, ListingError


def rejected(path: Path) -> list[tuple[str, str]]:
    """Line and reason of each rejected entry."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [(row["line"], row["reason"]) for row in csv.DictReader(stream)]


def test_a_property_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    """A bad image leaves its property out; a repeated line or image leaves out the repetition only."""
    (tmp_path / "folder").mkdir()
    source = tmp_path / "list.csv"
    source.write_bytes(
        b"property_id,images\n"
        b"good,a.jpg|b.jpg\n"
        b"leaves,a.jpg|../secret.jpg|c.jpg\n"
        b"short\n"
        b"good,c.jpg\n"
        b"twice,a.jpg|./a.jpg|b.jpg\n"
        b"foreign\xff,a.jpg\n"
        b"folder,folder\n"
        b"last,z.jpg\n"
    )
    home = tmp_path / "home"
    with pytest.raises(ListingError, match="6 of its entries"):
        ingest(source, home)
    with pytest.raises(CatalogMissingError):
        Catalog.open(home)
    report = take_in(IngestRequest(source, skip_bad=True), home)
    assert catalogued(home) == {"good": ["a.jpg", "b.jpg"], "twice": ["a.jpg", "b.jpg"], "last": ["z.jpg"]}
    assert report.refused == 6
    assert report.rejects is not None
    assert sorted(line for line, _ in rejected(report.rejects)) == ["3", "4", "5", "6", "7", "8"]
    assert "outside" in dict(rejected(report.rejects))["3"]
    assert any(str(report.rejects) in sentence for sentence in report.sentences())


def test_rows_of_an_image_are_left_out_with_their_property(tmp_path: Path) -> None:
    """A bad row anywhere in the file takes the rows of its property with it, and those alone."""
    source = tmp_path / "list.csv"
    source.write_text("property_id,image\n1,a.jpg\n2,a.jpg\n1,/etc/passwd\n3,a.jpg\n1,b.jpg\n3,b.jpg\n")
    report = take_in(IngestRequest(source, skip_bad=True), tmp_path / "home")
    assert catalogued(tmp_path / "home") == {"2": ["a.jpg"], "3": ["a.jpg", "b.jpg"]}
    assert (report.new, report.refused) == (2, 1)
    (left_out,) = [sentence for sentence in report.sentences() if "left out" in sentence]
    assert left_out.startswith(
        "1 entry was refused and left out, and what else is listed of the same property;"
    )


def test_a_known_property_with_a_bad_entry_is_not_called_gone(tmp_path: Path) -> None:
    """It is in the source, and the reject file says why it was not compared."""
    source = tmp_path / "list.csv"
    source.write_text("property_id,images\n1,a.jpg\n2,a.jpg\n")
    ingest(source, tmp_path / "home")
    source.write_text("property_id,images\n1,../a.jpg\n3,a.jpg\n")
    report = take_in(IngestRequest(source, skip_bad=True), tmp_path / "home")
    assert (report.gone_ids, report.new, report.rows) == (("2",), 1, 3)


def test_a_source_without_a_good_property_changes_nothing(tmp_path: Path) -> None:
    """Not one to take is an error, and leaves no reject file of an ingest that was not."""
    source = tmp_path / "list.csv"
    source.write_text("property_id,images\n1,../a.jpg\n")
    with pytest.raises(ListingError, match="not one of its properties") as raised:
        take_in(IngestRequest(source, skip_bad=True), tmp_path / "home")
    assert f"are listed by `vlm-assets ingest {source}`." in str(raised.value)
    assert not list((tmp_path / "home" / "rejected").iterdir())


def test_images_on_s3_in_a_listing_of_a_disk_say_the_whole_command(tmp_path: Path) -> None:
    """The refused ingest is suggested again with the root that such images need and its options."""
    source = tmp_path / "list.csv"
    source.write_text("property_id,images\n1,s3://photos/1.jpg\n2,a.jpg\n")
    with pytest.raises(ListingError, match="line 2: it is on S3") as raised:
        ingest(source, tmp_path / "home", range_size=7)
    again = f"vlm-assets ingest {source} --range-size 7 --image-root s3://BUCKET/PREFIX"
    assert f"name the folder of all: `{again}`." in str(raised.value)


def test_a_source_without_a_bad_entry_has_no_reject_file(tmp_path: Path) -> None:
    """The option costs nothing where nothing is bad."""
    source = tmp_path / "list.csv"
    source.write_text("property_id,images\n1,a.jpg\n")
    report = take_in(IngestRequest(source, skip_bad=True), tmp_path / "home")
    assert (report.refused, report.rejects) == (0, None)
    assert not (tmp_path / "home" / "rejected").exists()


def test_ingest_says_how_many_properties_have_more_images_than_are_shown(tmp_path: Path) -> None:
    """What is beyond the limit is not dropped without a word."""
    source = tmp_path / "list.csv"
    source.write_text("property_id,images\n1,a.jpg|b.jpg|c.jpg\n2,a.jpg|b.jpg\n")
    report = take_in(IngestRequest(source), tmp_path / "home", max_images=2)
    assert report.more_images == 1
    assert any("1 property has more than 2 images" in sentence for sentence in report.sentences())
    again = take_in(IngestRequest(source), tmp_path / "home", max_images=3)
    assert not any("more than" in sentence for sentence in again.sentences())

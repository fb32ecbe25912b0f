"""Text listings as other programs write them: delimiters, byte order marks, encodings, separators."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.listings import open_source, read_source
from vlm_catalog.listing import ListingError, ReadingOptions

ROWS = {"Müller 1": ["a b.jpg", "ü.jpg"], "00123": ["c.jpg"], "none": []}


def csv_text(delimiter: str) -> str:
    lines = [f"price{delimiter}property_id{delimiter}images"]
    lines += [
        f'"1{delimiter}5"{delimiter}{name}{delimiter}"{"|".join(images)}"' for name, images in ROWS.items()
    ]
    return "\r\n".join(lines) + "\r\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt"])
def test_what_spreadsheets_write_is_read_as_it_is(tmp_path, delimiter, encoding, suffix) -> None:
    """Delimiter, byte order mark and encoding are found out, whatever the file is called, and are said."""
    source = tmp_path / f"listing{suffix}"
    source.write_bytes(csv_text(delimiter).encode(encoding))
    assert read_source(source) == ROWS
    said = open_source(source)[0].format
    if (delimiter, encoding) == (",", "utf-8"):
        assert said is None
    else:
        assert said is not None
        assert f"This looks like {'tab' if delimiter == chr(9) else delimiter}-separated text in UTF-" in said


def test_jsonl_of_windows_programs_is_read(tmp_path: Path) -> None:
    """A byte order mark or UTF-16 costs no line."""
    source = tmp_path / "listing.jsonl"
    text = '{"property_id": "Müller 1", "images": ["ü.jpg"]}\r\n\r\n'
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        source.write_bytes(text.encode(encoding))
        assert read_source(source) == {"Müller 1": ["ü.jpg"]}


def test_another_encoding_is_named_and_read_when_asked_for(tmp_path: Path) -> None:
    """No id comes into the catalogue by a guess: the likely encoding and the command are named."""
    for name, text in (
        ("listing.csv", csv_text(";")),
        ("listing.jsonl", '{"property_id": "Müller 1", "images": ["ü.jpg"]}\n'),
    ):
        source = tmp_path / name
        source.write_bytes(text.encode("windows-1252"))
        listing, problems = open_source(source)
        records = list(listing.records)
        for one in records:
            for value in (one.property_id, *one.images):
                if not value.isascii():
                    problems.add(one.line, "not UTF-8", value)
        with pytest.raises(ListingError, match="look like windows-1252") as raised:
            problems.refuse()
        assert "Müller 1" in str(raised.value)
        assert f"`vlm-assets ingest {source} --encoding windows-1252`" in str(raised.value)
        assert "Müller 1" in read_source(source, ReadingOptions(encoding="windows-1252"))
    with pytest.raises(ListingError, match=r"unknown encoding: klingon\. Name another one"):
        open_source(tmp_path / "listing.csv", ReadingOptions(encoding="klingon"))


def test_columns_that_do_not_fit_say_what_the_file_looks_like(tmp_path: Path) -> None:
    """The columns that were found are named, split at the delimiter that the file has."""
    source = tmp_path / "listing.csv"
    source.write_text("id_number;photo files;price\n1;a.jpg;2\n")
    with pytest.raises(ListingError, match="columns id_number, photo files, price") as raised:
        open_source(source)
    assert "this looks like ;-separated text" in str(raised.value)


@pytest.mark.parametrize("separator", [";", ",", "\t"])
def test_images_with_another_separator_are_not_one_image(tmp_path: Path, separator: str) -> None:
    """A field of several images is never taken for one that is missing; the option that reads it is named."""
    source = tmp_path / "listing.csv"
    source.write_text(f'property_id,images\n1,"a.jpg{separator} b.jpg"\n2,"a;b.jpg"\n')
    listing, problems = open_source(source)
    assert [one.property_id for one in listing.records] == ["2"], "a name with a semicolon in it is one image"
    with pytest.raises(ListingError, match="--image-separator") as raised:
        problems.refuse()
    assert f"line 2: this looks like {separator}-separated images" in str(raised.value)
    again = shlex.join(["vlm-assets", "ingest", str(source), "--image-separator", separator])
    assert f"`{again}`" in str(raised.value)
    if separator == ";":
        assert read_source(source, ReadingOptions(image_separator="; "))["1"] == ["a.jpg", "b.jpg"]


def test_a_delimiter_that_is_asked_for_is_the_only_one(tmp_path: Path) -> None:
    """A person who says it is not overruled."""
    source = tmp_path / "listing.csv"
    source.write_text("property_id;images\n1;a.jpg\n")
    assert read_source(source, ReadingOptions(delimiter=";")) == {"1": ["a.jpg"]}
    with pytest.raises(ListingError):
        open_source(source, ReadingOptions(delimiter=","))


def test_progress_is_told_to_the_end_of_the_source(tmp_path: Path) -> None:
    """What is done grows to the size of the file."""
    source = tmp_path / "listing.csv"
    source.write_text("property_id,images\n" + "".join(f"{n},{n}.jpg\n" for n in range(50_000)))
    listing, _ = open_source(source)
    assert listing.total == source.stat().st_size
    seen = [listing.done() for _ in listing.records]
    assert seen == sorted(seen)
    assert len(set(seen)) > 5
    assert listing.done() == listing.total

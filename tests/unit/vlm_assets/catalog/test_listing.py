"""Readers of listings: what is accepted as written, and what is refused by its line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlm_assets.catalog.image_root import ImageRoot
from vlm_assets.catalog.listed_images import gather
from vlm_assets.catalog.listing import (
    DETECTED,
    INNER_FOLDERS,
    NOT_IMAGES,
    IngestRequest,
    Listing,
    ListingError,
    Problems,
    ReadingOptions,
    open_listing,
)


def read(source: Path) -> dict[str, list[str]]:
    """Read a source to its end: each id with its images, in the order of reading."""
    return grouped(opened(source)[0], source)[0]


def opened(source: Path, options: ReadingOptions = DETECTED) -> tuple[Listing, Problems]:
    problems = Problems(source, IngestRequest.from_arguments(source, [], None, options, {}))
    root = source if source.is_dir() else source.parent
    # The pool is only asked while a folder tree is read; it ends with the process.
    pool = ThreadPoolExecutor(2)
    return open_listing(source, image_root=str(root), pool=pool, problems=problems, options=options), problems


def grouped(listing: Listing, source: Path) -> tuple[dict[str, list[str]], Listing]:
    found: dict[str, list[str]] = {}
    for record in listing.records:
        found.setdefault(record.property_id, []).extend(record.images)
    return found, listing


def refused(source: Path) -> str:
    """Read a source that has broken lines, and return what the refusal says."""
    listing, problems = opened(source)
    list(listing.records)
    with pytest.raises(ListingError) as raised:
        problems.refuse()
    return str(raised.value)


def test_folder_trees_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    """Ids in code point order, images as a person counts them, suffixes in any case, the rest noted."""
    source = tmp_path / "tree"
    for name in ("b", "00123", "ünïcode ✓", "a b", "B"):
        (source / name).mkdir(parents=True)
    for image in ("10.jpg", "2.JPG", "1.jpeg", "a10.png", "A9.webp", "x.tif", "x.TIFF"):
        (source / "a b" / image).touch()
    for other in ("notes.txt", ".hidden.jpg"):
        (source / "a b" / other).touch()
    (source / "a b" / "folder.jpg").mkdir()
    (source / "beside.jpg").touch()
    (source / ".thumbnails").mkdir()
    listing, _ = opened(source)
    found, _ = grouped(listing, source)
    assert list(found) == ["00123", "B", "a b", "b", "ünïcode ✓"]
    assert found["a b"] == [
        f"a b/{name}" for name in ("1.jpeg", "2.JPG", "10.jpg", "A9.webp", "a10.png", "x.tif", "x.TIFF")
    ]
    assert found["b"] == []
    assert listing.notes == {
        "hidden files or folders": 2,
        NOT_IMAGES: 1,
        "folders inside property folders": 1,
        "files beside the property folders": 1,
    }


def test_images_in_folders_below_a_propertys_own(tmp_path: Path) -> None:
    """A single inner folder is looked into; several, perhaps properties, only when asked; never a link."""
    source = tmp_path / "tree"
    for name in ("1/photos/large/2.jpg", "2/front.jpg", "2/thumbs/front.jpg", "3/a/x.jpg", "3/b/.hidden.jpg"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / "1" / "photos" / "again").symlink_to(source / "1")
    listing, _ = opened(source)
    found, _ = grouped(listing, source)
    assert found == {"1": ["1/photos/large/2.jpg"], "2": ["2/front.jpg"], "3": []}
    assert listing.notes == {INNER_FOLDERS: 3, "links to folders inside property folders": 1}
    listing, _ = opened(source, ReadingOptions(nested=True))
    found, _ = grouped(listing, source)
    assert found["2"] == ["2/front.jpg", "2/thumbs/front.jpg"]
    assert found["3"] == ["3/a/x.jpg"]


def test_files_without_a_known_suffix_are_recognised_by_content(tmp_path: Path) -> None:
    """A picture named .jp2, .ppm or nothing is an image; others are named; a pipe stops nothing."""
    folder = tmp_path / "tree" / "a"
    folder.mkdir(parents=True)
    for name, kind in (
        ("1.jp2", "JPEG2000"),
        ("2.pcx", "PCX"),
        ("3.ppm", "PPM"),
        ("4", "PNG"),
        ("5.x", "JPEG"),
    ):
        Image.new("RGB", (8, 8), (200, 10, 10)).save(folder / name, kind)
    (folder / "prices.csv").write_text("property_id,price\n")
    (folder / "empty").touch()
    os.mkfifo(folder / "pipe")
    source = tmp_path / "tree"
    listing, _ = opened(source)
    assert grouped(listing, source)[0] == {"a": ["a/1.jp2", "a/2.pcx", "a/3.ppm", "a/4", "a/5.x"]}
    assert listing.notes == {NOT_IMAGES: 3}
    assert listing.not_images == ["a/empty", "a/pipe", "a/prices.csv"]


def test_a_link_in_a_circle_costs_one_image(tmp_path: Path) -> None:
    """As one that leads nowhere: the image is listed, and missing when it is opened; the rest is taken."""
    source = tmp_path / "tree"
    (source / "a").mkdir(parents=True)
    for name in ("circle", "a/circle.jpg", "a/circle.txt"):
        (source / name).symlink_to(Path(name).name)
    (source / "a" / "fine.jpg").touch()
    assert read(source) == {"a": ["a/circle.jpg", "a/fine.jpg"]}


class Unsaid(list[object]):
    """The entries of a folder on a disk that fails when it is asked what they are."""

    def __enter__(self) -> Unsaid:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(("fails", "said"), [("tree", "cannot be read: "), ("a", "a folder cannot be read")])
def test_what_a_failing_disk_does_not_say_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, said: str
) -> None:
    """A property whose folder cannot be told from a file, for an error of the disk, is never left out."""
    (tmp_path / "tree" / "a" / "inner").mkdir(parents=True)
    scandir = os.scandir

    def failing(folder: str | Path) -> object:
        if Path(folder).name != fails:
            return scandir(folder)
        asked = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        return Unsaid(SimpleNamespace(name=one.name, path=one.path, is_dir=asked) for one in scandir(folder))

    monkeypatch.setattr("vlm_assets.catalog.listing.os.scandir", failing)
    with pytest.raises((ListingError), match=said):
        listing, problems = opened(tmp_path / "tree")
        grouped(listing, tmp_path / "tree")
        problems.refuse()


def test_photographs_of_telephones_and_browsers_are_images(tmp_path: Path) -> None:
    """Passed over, they would count as a property without images, which says nothing of what to do."""
    source = tmp_path / "tree"
    (source / "a").mkdir(parents=True)
    for name in ("1.HEIC", "2.jfif", "3.avif"):
        (source / "a" / name).touch()
    assert read(source) == {"a": ["a/1.HEIC", "a/2.jfif", "a/3.avif"]}


def test_a_folder_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A name that is not UTF-8 cannot be an id; it is named, not passed over."""
    source = tmp_path / "tree"
    (source / "fine").mkdir(parents=True)
    Path(f"{source}/caf\udce9").mkdir()
    assert r"not UTF-8: " in refused(source)
    assert r"caf\udce9" in refused(source)


def test_csv_ids_are_text_as_written(tmp_path: Path) -> None:
    """Leading zeros, spaces, slashes, quotes, commas and line breaks of an id survive."""
    source = tmp_path / "listing.csv"
    source.write_text(
        "\ufeffprice,images,property_id\n"
        "1,a.jpg|b c.jpg,00123\n"
        '2,"[""x|y.jpg"", ""z.jpg""]",  spaced / id \n'
        '3,,"says ""hi"", twice"\n'
        "\n"
        '4,"a,b.jpg","two\nlines"\n',
        encoding="utf-8",
    )
    assert read(source) == {
        "00123": ["a.jpg", "b c.jpg"],
        "  spaced / id ": ["x|y.jpg", "z.jpg"],
        'says "hi", twice': [],
        "two\nlines": ["a,b.jpg"],
    }


def test_csv_with_a_row_an_image_is_grouped_by_id(tmp_path: Path) -> None:
    """Rows of one id may lie apart; their order is the images' order."""
    source = tmp_path / "listing.CSV"
    source.write_text("property_id,image\r\n7,b.jpg\r\n8,a|b.jpg\r\n7,a.jpg\r\n")
    assert read(source) == {"7": ["b.jpg", "a.jpg"], "8": ["a|b.jpg"]}


def test_broken_csv_lines_are_all_counted_and_named(tmp_path: Path) -> None:
    """Every broken line is counted, with the line number that an editor shows."""
    source = tmp_path / "listing.csv"
    source.write_bytes(
        b'property_id,images\n1,"two\nlines.jpg"\n2\n3,a.jpg,extra\n4,[1]\n5,[broken\n6,"x"y\n7,ok.jpg\n'
    )
    message = refused(source)
    assert "5 of its entries" in message
    assert "line 4: 1 field where the header has 2: 2" in message
    assert "line 5: 3 fields where the header has 2: 3,a.jpg,extra" in message
    assert "line 6: the images are no JSON array of strings: [1]" in message
    assert "line 7: the images are no JSON array" in message
    assert "line 8: no valid CSV" in message


def test_only_the_first_twenty_of_many_are_named(tmp_path: Path) -> None:
    """A million broken lines make a message that can be read, with the true count."""
    source = tmp_path / "listing.csv"
    source.write_text("property_id,images\n" + "lonely\n" * 25)
    message = refused(source)
    assert message.count("line ") == 20
    assert "25 of its entries" in message
    assert "and 5 more" in message
    assert message.endswith(f"or take the rest now: `vlm-assets ingest {source} --skip-bad`")


@pytest.mark.parametrize(
    "header",
    ["a,b", "property_id,bild", "property_id,images,image", "property_id,id,images", "property_id;bild"],
)
def test_csv_without_the_columns_names_those_needed(tmp_path: Path, header: str) -> None:
    """A listing with other columns, or with two that fit, says which it has and which are needed."""
    source = tmp_path / "listing.csv"
    source.write_text(header + "\n1,a.jpg\n")
    with pytest.raises(ListingError, match="exactly one of property_id"):
        opened(source)


def test_jsonl_is_read_and_its_broken_lines_refused(tmp_path: Path) -> None:
    """Objects are taken as they are; what is none is refused with its line and reason."""
    source = tmp_path / "listing.jsonl"
    good = [{"property_id": "a/b ü", "images": ["1.jpg"]}, {"id": 42, "image_uris": [], "more": 1}]
    source.write_text("".join(json.dumps(line) + "\n\n" for line in good))
    assert read(source) == {"a/b ü": ["1.jpg"], "42": []}
    source.write_bytes(
        b'{"property_id": "1", "images": ["a.jpg"]}\n{"property_id": "2", "images": "a.jpg"}\n'
        b'{"property_id": "3"\n[1]\n{"property_id": 4.5, "images": []}\n'
        b'{"property_id": "5", "images": ["\xff"]}\n'
        b'{"property_id": "6"}\n{"property_id": true, "images": []}\n'
    )
    message = refused(source)
    assert "7 of its entries" in message
    for line, reason in (
        (2, "no images"),
        (3, "no valid JSON"),
        (4, "no object"),
        (5, "no object"),
        (6, "not UTF-8"),
    ):
        assert f"line {line}: {reason}" in message


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"property_id": ["00123", "b/ü"], "images": [["1.jpg", "2.jpg"], []]}),
        pa.table(
            {
                "id": pa.array(["00123", "b/ü"], pa.large_string()),
                "image_uris": pa.array([["1.jpg", "2.jpg"], []], pa.large_list(pa.large_string())),
            }
        ),
        pa.table(
            {
                "images": [["1.jpg", "2.jpg"], []],
                "property_id": pa.array(["00123", "b/ü"]).dictionary_encode(),
                "other": [1, 2],
            }
        ),
    ],
)
def test_parquet_with_a_row_a_property(tmp_path: Path, table: pa.Table) -> None:
    """The usual ways to hold text and lists in parquet read alike."""
    pq.write_table(table, tmp_path / "listing.parquet")
    assert read(tmp_path / "listing.parquet") == {"00123": ["1.jpg", "2.jpg"], "b/ü": []}


def test_parquet_with_a_row_an_image_and_whole_numbers(tmp_path: Path) -> None:
    """Whole numbers are ids by their digits."""
    table = pa.table({"property_id": [7, 8, 7], "image": ["b.jpg", "c.jpg", "a.jpg"]})
    pq.write_table(table, tmp_path / "listing.parquet")
    assert read(tmp_path / "listing.parquet") == {"7": ["b.jpg", "a.jpg"], "8": ["c.jpg"]}


def test_parquet_that_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    """Nulls are refused by row, other types and broken files as a whole."""
    source = tmp_path / "listing.parquet"
    pq.write_table(pa.table({"property_id": ["a", None, "c"], "images": [["1"], [], [None]]}), source)
    message = refused(source)
    assert "line 2: a null" in message
    assert "line 3: a null" in message
    pq.write_table(pa.table({"property_id": [1.5], "images": [["1"]]}), source)
    with pytest.raises(ListingError, match="property_id is double"):
        opened(source)
    pq.write_table(pa.table({"property_id": [str(at) for at in range(9999)], "image": ["a"] * 9999}), source)
    data = source.read_bytes()
    source.write_bytes(data[:200] + bytes(len(data) // 2) + data[200 + len(data) // 2 :])
    with pytest.raises(ListingError, match="cannot be read"):
        list(opened(source)[0].records)
    source.write_bytes(b"PAR1 but not really")
    with pytest.raises(ListingError, match="cannot be read"):
        opened(source)


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    """Each kind of wrong source has a sentence of its own."""
    with pytest.raises(ListingError, match="no folder or listing"):
        opened(tmp_path / "nothing.csv")
    (tmp_path / "listing.xlsx").touch()
    with pytest.raises(ListingError, match=r"\.csv, \.tsv, \.jsonl or \.parquet"):
        opened(tmp_path / "listing.xlsx")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ListingError):
        opened(tmp_path / "empty.csv")


_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from concurrent.futures import ThreadPoolExecutor
from vlm_assets.catalog.image_root import ImageRoot
from vlm_assets.catalog.listed_images import gather
from vlm_assets.catalog.listing import DETECTED, IngestRequest, ListingError, Problems, open_listing
source = Path(sys.argv[1])
request = IngestRequest.from_arguments(source, [], None, DETECTED, {})
pool, problems = ThreadPoolExecutor(1), Problems(source, request)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    listing = open_listing(source, image_root="/nowhere", pool=pool, problems=problems)
    gather(listing, ImageRoot.at(Path("/nowhere")), pool=pool, problems=problems, advance=lambda *_: None)
    problems.refuse()
except ListingError as error:
    print(str(error)[:2000])
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < int(sys.argv[3]) << 10, f"{grown} KiB"
"""


def _attack(kind: str, folder: Path) -> Path:
    source = folder / f"{kind}.parquet"
    if kind == "a long line":
        source = folder / "line.jsonl"
        with source.open("w") as stream:
            for _ in range(200):
                stream.write("x" * (1 << 20))
        return source
    if kind == "many columns of text":
        source = folder / "columns.csv"
        source.write_text("id,image" + ",x" * 1_000_000 + "\n")
        return source
    if kind == "a large footer":
        with source.open("wb") as stream:
            stream.truncate(1 << 30)
            stream.seek(0, os.SEEK_END)
            stream.write((900 << 20).to_bytes(4, "little") + b"PAR1")
        return source
    if kind == "many columns":
        pq.write_table(pa.table({f"c{at}": ["1"] for at in range(1001)}), source)
    elif kind == "many row groups":
        table = pa.table({"id": ["a"] * 100_001})
        with pq.ParquetWriter(source, table.schema, write_statistics=False, store_schema=False) as writer:
            writer.write_table(table, row_group_size=1)
    elif kind == "a long id":
        ids = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), ["x" * (1 << 20)])
        pq.write_table(pa.table({"id": ids, "image": ["a.jpg"] * 256}), source)
    elif kind == "a long value":
        images = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), ["a/" + "x" * (1 << 20)])
        pq.write_table(pa.table({"id": [str(at) for at in range(4096)], "image": images}), source)
    elif kind == "a long list":
        values = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000_000, pa.int32()), ["x" * 4000])
        lists = pa.ListArray.from_arrays(pa.array([0, 2_000_000], pa.int32()), values)
        pq.write_table(pa.table({"id": ["1"], "images": lists}), source)
    else:
        images = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), ["x" * 4000])
        pq.write_table(pa.table({"id": pa.array(range(1_000_000)), "image": images}), source)
    return source


@pytest.mark.parametrize(
    ("kind", "words", "mebibytes"),
    [
        ("a long value", "more than 4,096 characters", 1024),
        ("a long list", "more than 10,000 images", 1024),
        ("many rows", "unpacks to more than", 1024),
        ("a long line", "more than 4,194,304 characters", 1024),
        ("a long id", "the id has more than 1,000 characters", 256),
        ("many columns", "has 1,001 columns; 1,000 are read at most", 64),
        ("many columns of text", "has 1,000,002 columns; 1,000 are read at most", 256),
        ("many row groups", "has 100,001 row groups; 100,000 are read at most", 256),
        ("a large footer", "its footer would have 943,718,400 bytes; 16,777,216 are read at most", 32),
    ],
)
def test_a_small_file_does_not_fill_the_memory(kind: str, words: str, mebibytes: int, tmp_path: Path) -> None:
    """A listing that would take gigabytes is refused with a sentence before; 138 KB once took 3.5 GB."""
    checkout = Path(__file__).resolve().parents[4]
    arguments = [_attack(kind, tmp_path), checkout, str(mebibytes)]
    command = [sys.executable, "-c", _IN_LITTLE_MEMORY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "list.parquet"])
def test_an_id_is_refused_from_1001_characters_on(name: str, tmp_path: Path) -> None:
    """One of 1,000 is taken in every format, and the longer one is named with its line."""
    source, ids = tmp_path / name, ["ü" * 1000, "ü" * 1001]
    if name == "list.csv":
        source.write_text("id,image\n" + "".join(f"{one},a.jpg\n" for one in ids))
    elif name == "list.jsonl":
        source.write_text("".join(json.dumps({"id": one, "images": ["a.jpg"]}) + "\n" for one in ids))
    else:
        pq.write_table(pa.table({"id": ids, "image": ["a.jpg"] * 2}), source)
    listing, problems = opened(source)
    root, pool = ImageRoot.at(tmp_path), ThreadPoolExecutor(1)
    listed = gather(listing, root, pool=pool, problems=problems, advance=lambda *_: None)
    assert list(listed.codes) == ids[:1]
    assert problems.count == 1
    with pytest.raises(ListingError, match=r"line \d: the id has more than 1,000 characters: ü"):
        problems.refuse()


def test_an_object_of_too_many_fields_is_refused(tmp_path: Path) -> None:
    """The line is named with the reason, and not as one without an id."""
    source = tmp_path / "list.jsonl"
    wide = {"id": "2", "images": [], **{f"c{at}": 1 for at in range(999)}}
    source.write_text(json.dumps(wide) + "\n")
    assert "line 1: more than 1,000 fields" in refused(source)
    wide.popitem()
    source.write_text(json.dumps(wide) + "\n")
    assert read(source) == {"2": []}


def test_real_columns_are_taken_by_likely_names_or_those_given(tmp_path: Path) -> None:
    """A listing goes in as somebody's program wrote it; what fits no name is refused with its columns."""
    likely = tmp_path / "likely.csv"
    likely.write_text("Listing ID,Price,Photos\n1,5,a.jpg|b.jpg\n")
    listing, _ = opened(likely)
    assert grouped(listing, likely)[0] == {"1": ["a.jpg", "b.jpg"]}
    assert listing.format is not None
    assert "Listing ID" in listing.format
    other = tmp_path / "other.csv"
    other.write_text("Objekt,Bilder\n1,a.jpg|b.jpg\n")
    with pytest.raises(
        ListingError,
        match=r"Objekt, Bilder.*`vlm-assets ingest .*other\.csv --id-column N",
    ):
        opened(other)
    options = ReadingOptions(id_column="objekt", image_column="BILDER")
    listing, _ = opened(other, options)
    assert grouped(listing, other)[0] == {"1": ["a.jpg", "b.jpg"]}

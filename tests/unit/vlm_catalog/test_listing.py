"""Readers of listings: what is accepted as written, and what is refused by its line."""

from __future__ import annotations

import errno
import io
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

from tests.support.listings import images_of, open_source, read_source
from vlm_catalog.image_root import ImageRoot
from vlm_catalog.listed_images import gather
from vlm_catalog.listing import INNER_FOLDERS, NOT_IMAGES, ListingError, ReadingOptions


def refusal_of(source: Path) -> str:
    """Read a source that cannot be taken, and return what the refusal says."""
    with pytest.raises(ListingError) as raised:
        read_source(source)
    return str(raised.value)


def touch(folder: Path, *names: str) -> Path:
    """Make empty files below a folder, and folders where the name ends with a slash."""
    for name in names:
        (folder / name if name.endswith("/") else (folder / name).parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (folder / name).touch()
    return folder


def test_folder_trees_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    """Ids in code point order, images as a person counts them, suffixes in any case, the rest noted.

    Photographs of telephones and browsers are images: passed over, they would count as missing ones.
    """
    images = [
        "1.jpeg",
        "2.JPG",
        "3.HEIC",
        "4.jfif",
        "5.avif",
        "10.jpg",
        "A9.webp",
        "a10.png",
        "x.tif",
        "x.TIFF",
    ]
    folders = ("b/", "00123/", "ünïcode ✓/", "a b/", "B/", ".thumbnails/", "a b/folder.jpg/")
    source = touch(tmp_path / "tree", *folders, "a b/notes.txt", "a b/.hidden.jpg", "beside.jpg")
    touch(source / "a b", *images[::-1])
    listing, _ = open_source(source)
    found = images_of(listing)
    assert list(found) == ["00123", "B", "a b", "b", "ünïcode ✓"]
    assert (found["a b"], found["b"]) == ([f"a b/{name}" for name in images], [])
    assert listing.notes == {
        "hidden files or folders": 2,
        NOT_IMAGES: 1,
        "folders inside property folders": 1,
        "files beside the property folders": 1,
    }


def test_images_in_folders_below_a_propertys_own(tmp_path: Path) -> None:
    """A single inner folder is looked into; several, perhaps properties, only when asked; never a link."""
    names = ("1/photos/large/2.jpg", "2/front.jpg", "2/thumbs/front.jpg", "3/a/x.jpg", "3/b/.hidden.jpg")
    source = touch(tmp_path / "tree", *names)
    (source / "1" / "photos" / "again").symlink_to(source / "1")
    listing, _ = open_source(source)
    assert images_of(listing) == {"1": ["1/photos/large/2.jpg"], "2": ["2/front.jpg"], "3": []}
    assert listing.notes == {INNER_FOLDERS: 3, "links to folders inside property folders": 1}
    found = read_source(source, ReadingOptions(nested=True))
    assert (found["2"], found["3"]) == (["2/front.jpg", "2/thumbs/front.jpg"], ["3/a/x.jpg"])


def test_files_without_a_known_suffix_are_recognised_by_content(tmp_path: Path) -> None:
    """A picture named .jp2, .ppm or nothing is an image; others are named; a pipe stops nothing."""
    source = touch(tmp_path / "tree", "a/empty")
    kinds = {"1.jp2": "JPEG2000", "2.pcx": "PCX", "3.ppm": "PPM", "4": "PNG", "5.x": "JPEG"}
    for name, kind in kinds.items():
        Image.new("RGB", (8, 8), (200, 10, 10)).save(source / "a" / name, kind)
    (source / "a" / "prices.csv").write_text("property_id,price\n")
    os.mkfifo(source / "a" / "pipe")
    listing, _ = open_source(source)
    assert images_of(listing) == {"a": [f"a/{name}" for name in kinds]}
    assert listing.notes == {NOT_IMAGES: 3}
    assert listing.not_images == ["a/empty", "a/pipe", "a/prices.csv"]


def test_a_link_in_a_circle_costs_one_image(tmp_path: Path) -> None:
    """As one that leads nowhere: the image is listed, and missing when it is opened; the rest is taken."""
    source = touch(tmp_path / "tree", "a/fine.jpg")
    for name in ("circle", "a/circle.jpg", "a/circle.txt"):
        (source / name).symlink_to(Path(name).name)
    assert read_source(source) == {"a": ["a/circle.jpg", "a/fine.jpg"]}


class Unsaid(list[object]):
    """The entries of a folder on a disk that fails when it is asked what they are."""

    def __enter__(self) -> Unsaid:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(("fails", "said"), [("tree", "cannot be read: "), ("a", "a folder cannot be read")])
def test_what_a_failing_disk_does_not_say_is_not_passed_over(tmp_path, monkeypatch, fails, said) -> None:
    """A property whose folder cannot be told from a file, for an error of the disk, is never left out."""
    touch(tmp_path / "tree", "a/inner/")
    scandir = os.scandir

    def failing(folder: str | Path) -> object:
        if Path(folder).name != fails:
            return scandir(folder)
        asked = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        return Unsaid(SimpleNamespace(name=one.name, path=one.path, is_dir=asked) for one in scandir(folder))

    monkeypatch.setattr("vlm_catalog.listing.os.scandir", failing)
    with pytest.raises(ListingError, match=said):
        read_source(tmp_path / "tree")


def test_a_folder_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A name that is not UTF-8 cannot be an id; it is named, not passed over."""
    message = refusal_of(touch(tmp_path / "tree", "fine/", "caf\udce9/"))
    assert "not UTF-8: " in message and r"caf\udce9" in message


def parquet(**columns: object) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


def wide(fields: int) -> dict[str, object]:
    """An object with an id, images and so many fields in all."""
    return {"id": "2", "images": [], **{f"c{at}": 1 for at in range(fields - 2)}}


LISTS = [["1.jpg", "2.jpg"], []]
LARGE_LISTS = pa.array(LISTS, pa.large_list(pa.large_string()))
TEXTS = pa.array(["00123", "b/ü"])
AS_IN_THE_FILE = {"00123": ["1.jpg", "2.jpg"], "b/ü": []}
ODD_IDS = (
    "\ufeffprice,images,property_id\n"
    "1,a.jpg|b c.jpg,00123\n"
    '2,"[""x|y.jpg"", ""z.jpg""]",  spaced / id \n'
    '3,,"says ""hi"", twice"\n\n'
    '4,"a,b.jpg","two\nlines"\n'
)
OBJECTS = '{"property_id": "a/b ü", "images": ["1.jpg"]}\n\n{"id": 42, "image_uris": [], "more": 1}\n\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        pytest.param(
            "list.csv",
            ODD_IDS.encode(),
            {
                "00123": ["a.jpg", "b c.jpg"],
                "  spaced / id ": ["x|y.jpg", "z.jpg"],
                'says "hi", twice': [],
                "two\nlines": ["a,b.jpg"],
            },
            id="ids are text: zeros, spaces, slashes, quotes, commas and line breaks survive",
        ),
        pytest.param(
            "list.CSV",
            b"property_id,image\r\n7,b.jpg\r\n8,a|b.jpg\r\n7,a.jpg\r\n",
            {"7": ["b.jpg", "a.jpg"], "8": ["a|b.jpg"]},
            id="a row an image: rows of one id may lie apart, in the order of the images",
        ),
        pytest.param(
            "list.jsonl", OBJECTS.encode(), {"a/b ü": ["1.jpg"], "42": []}, id="objects of both spellings"
        ),
        pytest.param("list.jsonl", json.dumps(wide(1000)).encode(), {"2": []}, id="1,000 fields"),
        pytest.param(
            "list.parquet", parquet(property_id=TEXTS, images=LISTS), AS_IN_THE_FILE, id="text and lists"
        ),
        pytest.param(
            "list.parquet",
            parquet(id=TEXTS.cast(pa.large_string()), image_uris=LARGE_LISTS),
            AS_IN_THE_FILE,
            id="large text and lists",
        ),
        pytest.param(
            "list.parquet",
            parquet(images=LISTS, property_id=TEXTS.dictionary_encode(), other=[1, 2]),
            AS_IN_THE_FILE,
            id="a dictionary and another column",
        ),
        pytest.param(
            "list.parquet",
            parquet(property_id=[7, 8, 7], image=["b.jpg", "c.jpg", "a.jpg"]),
            {"7": ["b.jpg", "a.jpg"], "8": ["c.jpg"]},
            id="a row an image, and whole numbers as ids by their digits",
        ),
    ],
)
def test_a_listing_is_taken_as_it_is_written(tmp_path, name, content, expected) -> None:
    """Whatever program wrote it: no id is changed, and no image is lost or comes to another property."""
    (tmp_path / name).write_bytes(content)
    assert read_source(tmp_path / name) == expected


BROKEN_CSV = b'property_id,images\n1,"two\nlines.jpg"\n2\n3,a.jpg,extra\n4,[1]\n5,[broken\n6,"x"y\n7,ok.jpg\n'
BROKEN_JSONL = (
    b'{"property_id": "1", "images": ["a.jpg"]}\n{"property_id": "2", "images": "a.jpg"}\n'
    b'{"property_id": "3"\n[1]\n{"property_id": 4.5, "images": []}\n'
    b'{"property_id": "5", "images": ["\xff"]}\n'
    b'{"property_id": "6"}\n{"property_id": true, "images": []}\n'
)
DAMAGED = parquet(property_id=[str(at) for at in range(9999)], image=["a"] * 9999)
HALF = len(DAMAGED) // 2


@pytest.mark.parametrize(
    ("name", "content", "sentences"),
    [
        pytest.param(
            "list.csv",
            BROKEN_CSV,
            [
                "5 of its entries",
                "line 4: 1 field where the header has 2: 2",
                "line 5: 3 fields where the header has 2: 3,a.jpg,extra",
                "line 6: the images are no JSON array of strings: [1]",
                "line 7: the images are no JSON array",
                "line 8: no valid CSV",
            ],
            id="broken lines of CSV, by the number that an editor shows",
        ),
        pytest.param(
            "list.jsonl",
            BROKEN_JSONL,
            [
                "7 of its entries",
                *("line 2: no images", "line 3: no valid JSON", "line 4: no object", "line 5: no object"),
                "line 6: not UTF-8",
            ],
            id="broken lines of JSON",
        ),
        pytest.param(
            "list.jsonl",
            json.dumps(wide(1001)).encode(),
            ["line 1: more than 1,000 fields"],
            id="1,001 fields",
        ),
        pytest.param(
            "list.parquet",
            parquet(property_id=["a", None, "c"], images=[["1"], [], [None]]),
            ["line 2: a null", "line 3: a null"],
            id="nulls of parquet",
        ),
        pytest.param(
            "list.parquet",
            parquet(property_id=[1.5], images=[["1"]]),
            ["property_id is double"],
            id="numbers",
        ),
        pytest.param(
            "list.parquet",
            DAMAGED[:200] + bytes(HALF) + DAMAGED[200 + HALF :],
            ["cannot be read"],
            id="damaged parquet",
        ),
        pytest.param("list.parquet", b"PAR1 but not really", ["cannot be read"], id="no parquet"),
        pytest.param("list.xlsx", b"", [".csv, .tsv, .jsonl or .parquet"], id="a spreadsheet"),
        pytest.param("list.csv", b"", [""], id="an empty file"),
        *(
            pytest.param(
                "list.csv", f"{header}\n1,a.jpg\n".encode(), ["exactly one of property_id"], id=header
            )
            for header in (
                *("a,b", "property_id,bild", "property_id,images,image", "property_id,id,images"),
                "property_id;bild",
            )
        ),
        pytest.param(
            "list.csv",
            b"Objekt,Bilder\n1,a.jpg\n",
            ["Objekt, Bilder", "list.csv --id-column N"],
            id="columns of other names, with the options that name them",
        ),
    ],
)
def test_a_listing_that_cannot_be_taken_is_refused_by_what_is_wrong(tmp_path, name, content, sentences):
    """All broken lines are counted and named; other types, columns and files are refused as a whole."""
    (tmp_path / name).write_bytes(content)
    message = refusal_of(tmp_path / name)
    assert [sentence for sentence in sentences if sentence not in message] == [], message


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A slip in a name is no empty listing."""
    assert "no folder or listing" in refusal_of(tmp_path / "nothing.csv")


def test_only_the_first_twenty_of_many_are_named(tmp_path: Path) -> None:
    """A million broken lines make a message that can be read, with the true count."""
    source = tmp_path / "listing.csv"
    source.write_text("property_id,images\n" + "lonely\n" * 25)
    message = refusal_of(source)
    assert message.count("line ") == 20
    assert "25 of its entries" in message and "and 5 more" in message
    assert message.endswith(f"or take the rest now: `vlm-assets ingest {source} --skip-bad`")


_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from concurrent.futures import ThreadPoolExecutor
from vlm_catalog.image_root import ImageRoot
from vlm_catalog.listed_images import gather
from vlm_catalog.listing import IngestRequest, ListingError, Problems, open_listing
source = Path(sys.argv[1])
pool, problems = ThreadPoolExecutor(1), Problems(source, IngestRequest(source))
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
    listing, problems = open_source(source)
    root, pool = ImageRoot.at(tmp_path), ThreadPoolExecutor(1)
    listed = gather(listing, root, pool=pool, problems=problems, advance=lambda *_: None)
    assert list(listed.codes) == ids[:1]
    assert problems.count == 1
    with pytest.raises(ListingError, match=r"line \d: the id has more than 1,000 characters: ü"):
        problems.refuse()


def test_real_columns_are_taken_by_likely_names_or_those_given(tmp_path: Path) -> None:
    """A listing goes in as somebody's program wrote it, and it is said which columns were taken."""
    source = tmp_path / "list.csv"
    source.write_text("Listing ID,Price,Photos\n1,5,a.jpg|b.jpg\n")
    listing, _ = open_source(source)
    assert images_of(listing) == {"1": ["a.jpg", "b.jpg"]}
    assert listing.format is not None and "Listing ID" in listing.format
    source.write_text("Objekt,Bilder\n1,a.jpg|b.jpg\n")
    options = ReadingOptions(id_column="objekt", image_column="BILDER")
    assert read_source(source, options) == {"1": ["a.jpg", "b.jpg"]}

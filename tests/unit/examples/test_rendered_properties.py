"""The example on disk: complete, repeatable, with its few hard properties, and never half written."""

import json
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.rendered_properties import (
    ExampleMismatchError,
    folder_name,
    hard_properties,
    list_properties,
    property_id,
    truth_type,
    write_example,
)
from examples.truth import FIELDS, draw_truth, known


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An example of 12 properties."""
    home = tmp_path_factory.mktemp("home")
    write_example(home, properties=12, seed=3)
    return home


def _files(home: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(home)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in home.rglob("*")
        if path.is_file()
    }


def _readable(path: Path) -> bool:
    try:
        Image.open(path).load()
    except OSError:
        return False
    return True


def test_listing_truth_and_photos_agree(home: Path) -> None:
    """What the listing names is there and readable, apart from what is hard on purpose."""
    folder = home / "example"
    listing = [json.loads(line) for line in (folder / "listing.jsonl").read_text().splitlines()]
    truth = pq.read_table(folder / "truth.parquet")
    assert truth.schema.field("truth").type == truth_type()
    rows = {row["property_id"]: row for row in truth.to_pylist()}
    assert [one["property_id"] for one in listing] == list(rows)
    for index, one in enumerate(listing):
        row = rows[one["property_id"]]
        assert row["truth"] == known(draw_truth("example", 3, index))
        readable = [(folder / image).is_file() and _readable(folder / image) for image in one["images"]]
        expected = {
            None: (9, 10),
            "rotated_images": (9, 10),
            "corrupt_image": (8, 9),
            "missing_image": (8, 9),
            "one_image": (1,),
            "no_readable_image": (0,),
        }[row["hard"]]
        assert sum(readable) in expected, one["property_id"]
        assert len(readable) in ((1,) if row["hard"] == "one_image" else (9, 10))
    assert not {"summary"} & set(FIELDS)


def test_rotated_photos_turn_upright(home: Path) -> None:
    """The pixels are stored sideways with a tag; whoever follows the tag sees the photo as it was taken."""
    from PIL import ImageOps

    listed = next(one for one in list_properties(properties=12, seed=3) if one.hard == "rotated_images")
    with Image.open(home / "example" / listed.images[0]) as photo:
        assert photo.size == (240, 320)
        upright = ImageOps.exif_transpose(photo)
    assert upright.size == (320, 240)
    sky, ground = upright.getpixel((160, 20)), upright.getpixel((160, 225))
    assert isinstance(sky, tuple) and isinstance(ground, tuple)
    assert sky[2] - sky[0] > ground[2] - ground[0]


def test_a_second_run_changes_nothing(home: Path) -> None:
    """The same seed and size again touch no file."""
    before = _files(home)
    write_example(home, properties=12, seed=3)
    assert _files(home) == before


@pytest.mark.parametrize(("properties", "seed"), [(12, 4), (13, 3)])
def test_another_example_is_refused(home: Path, properties: int, seed: int) -> None:
    """Two examples in one home would be told apart by nobody; the message says what to do."""
    before = _files(home)
    with pytest.raises(ExampleMismatchError, match=r"12 properties with seed 3.*another home"):
        write_example(home, properties=properties, seed=seed)
    assert _files(home) == before


def test_what_was_removed_is_rendered_again(home: Path) -> None:
    """A photo that is gone comes back the same; a leftover of an interrupted render goes."""
    photo = home / "example" / next(iter(list_properties(properties=12, seed=3))).images[0]
    content = photo.read_bytes()
    photo.unlink()
    leftover = photo.parent.parent / ".half.tmp"
    leftover.mkdir()
    (leftover / "01.jpg").write_bytes(b"half")
    write_example(home, properties=12, seed=3)
    assert photo.read_bytes() == content
    assert not leftover.exists()


@pytest.mark.parametrize("properties", [10, 24, 40, 240, 5000])
def test_hard_properties_are_few_and_spread(properties: int) -> None:
    """Every kind occurs, one property alone is unreadable, no two hard ones stand side by side."""
    hard = hard_properties(properties)
    assert set(hard.values()) == {
        "corrupt_image",
        "missing_image",
        "one_image",
        "rotated_images",
        "no_readable_image",
    }
    assert list(hard.values()).count("no_readable_image") == 1
    places = sorted(hard)
    assert all(after - before >= properties // 10 for before, after in pairwise(places))
    assert max(places) < properties


def test_identities_are_unique_and_awkward_and_folders_safe() -> None:
    """Spaces, slashes, unicode and leading zeros are among them, and each has a folder of its own."""
    identities = [property_id(index, 7) for index in range(6000)]
    folders = {folder_name(identity) for identity in identities}
    assert len(set(identities)) == len(folders) == 6000
    assert all(folder.isascii() and "/" not in folder and not folder.startswith(".") for folder in folders)
    for wanted in (" ", "/", "東", "ü"):
        assert any(wanted in identity for identity in identities[:240])
    assert any(identity.isdigit() and identity.startswith("00") for identity in identities[:240])


def test_an_empty_example_is_refused(tmp_path: Path) -> None:
    """Nothing is written for an example of no properties."""
    with pytest.raises(ValueError, match="at least one"):
        write_example(tmp_path, properties=0)
    assert list(tmp_path.iterdir()) == []

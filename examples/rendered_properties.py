"""The example on disk: rendered photos, the listing of them, and the truth beside it.

What lives here: identities and folder names of the properties, which few are hard on purpose, and how the
files come to stand. What does not: what is true (truth.py) and how it looks (scenes.py). A property's folder
gets its name when all its photos are durable, so what stands there is whole; the listing is written last.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from examples.scenes import Property, draw_property, encode_photo, render
from examples.truth import FIELDS, draw_truth, known
from vlm_assets.config.property_description import PropertyDescription
from vlm_assets.config.settings import EXAMPLE
from vlm_durable.files.files import (
    TEMPORARY_SUFFIX,
    make_directory,
    sync_directory,
    write_replacing,
    write_temporary,
)

Hard = Literal["corrupt_image", "missing_image", "one_image", "rotated_images", "no_readable_image"]

_RENDERER: Final = 2
"""Raised when the same seed would look different: an example is then rendered into a new home."""

_WORKERS: Final = 2


class ExampleMismatchError(ValueError):
    """Another example stands in this home already."""


@dataclass(frozen=True)
class Listed:
    """One property of an example: who it is, where its photos lie, what is hard about it."""

    index: int
    property_id: str
    images: tuple[str, ...]
    """Paths of its photos, relative to the listing."""
    hard: Hard | None
    absent: tuple[str, ...]
    """Those of the listed photos that do not exist, on purpose."""


def write_example(
    home: Path,
    *,
    properties: int = 240,
    seed: int = 7,
    workers: int = _WORKERS,
    advance: Callable[[int, int], None] = lambda done, properties: None,
) -> Path:
    """Render an example below ``home`` and return the path of its listing (JSON lines).

    Writes ``example/images/…``, ``example/listing.jsonl`` and ``example/truth.parquet``. Interrupted, it goes
    on where it was; complete, it changes nothing. advance: told how many of the properties are rendered.
    Raises ExampleMismatchError where an example of another seed or size stands, and ValueError for a size
    below one.
    """
    if properties < 1:
        raise ValueError(f"an example needs at least one property, not {properties}")
    folder = home / EXAMPLE
    make_directory(folder / "images")
    _claim(folder, properties=properties, seed=seed)
    _remove_leftovers(folder / "images")
    listed = list(list_properties(properties=properties, seed=seed))
    missing = [one for one in listed if not _stands(folder, one)]
    if missing:
        with ProcessPoolExecutor(min(workers, len(missing)), mp_context=get_context("spawn")) as pool:
            rendered = pool.map(partial(_render_property, folder, seed), missing, chunksize=4)
            for done, _ in enumerate(rendered, start=len(listed) - len(missing) + 1):
                advance(done, len(listed))
        sync_directory(folder / "images")
    _write_once(folder / "truth.parquet", _truth_bytes(listed, seed))
    listing = folder / "listing.jsonl"
    rows = ({"property_id": one.property_id, "images": one.images} for one in listed)
    _write_once(listing, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return listing


def list_properties(*, properties: int, seed: int) -> Iterator[Listed]:
    """The properties of an example in the order of its listing; nothing is rendered for it."""
    hard = hard_properties(properties)
    for index in range(properties):
        identity = property_id(index, seed)
        kind = hard.get(index)
        count = 1 if kind == "one_image" else len(draw_property("example", seed, index).views)
        images = tuple(f"images/{folder_name(identity)}/{number:02d}.jpg" for number in range(1, count + 1))
        absent: tuple[str, ...] = ()
        if kind == "missing_image":
            absent = (images[4],)
        elif kind == "no_readable_image":
            absent = images[1::2]
        yield Listed(index, identity, images, kind, absent)


def hard_properties(properties: int) -> dict[int, Hard]:
    """Which properties are hard: spread evenly, each kind once, from 40 properties on most kinds twice.

    Only one property has no readable image at all. Examples of fewer than ten properties have none.
    """
    if properties < 10:
        return {}
    kinds: list[Hard] = ["corrupt_image", "rotated_images", "no_readable_image", "missing_image", "one_image"]
    if properties >= 40:
        kinds += ["rotated_images", "corrupt_image", "one_image", "missing_image"]
    return {(2 * place + 1) * properties // (2 * len(kinds)): kind for place, kind in enumerate(kinds)}


_TOWNS: Final = ("Alderney", "Bexhill", "Corfe", "Dunmore", "Elstow", "Fairford", "Gretna", "Harlech")


def property_id(index: int, seed: int) -> str:
    """The identity of a property: mostly plain, now and then as awkward as real ones are."""
    number = index + 1
    odd = {
        5: f"{number:08d}",
        11: f"Flat {number}, Mill Lane",
        17: f"{_TOWNS[seed % 8]}/{number}/B",
        23: f"Zürich-Höngg {number}",
        29: f"東京-{number:05d}",
    }
    return odd.get(index % 41, f"{_TOWNS[(index // 41 + seed) % 8].upper()}-{number:05d}")


def folder_name(identity: str) -> str:
    """A folder name for any identity, one to one: ASCII, no slash, "=" where a URL would have "%"."""
    return quote(identity, safe="").replace("%", "=")


def _claim(folder: Path, *, properties: int, seed: int) -> None:
    claim = {"properties": properties, "seed": seed, "renderer": _RENDERER}
    path = folder / "example.json"
    if not path.exists():
        write_replacing(path, (json.dumps(claim) + "\n").encode())
        return
    found = json.loads(path.read_text())
    if found != claim:
        raise ExampleMismatchError(
            f"{folder} holds an example of {_words(found)}, not of {_words(claim)}; choose another home, "
            f"ask for the same properties and seed, or remove {folder.parent} and its results"
        )


def _words(claim: Mapping[str, Any]) -> str:
    return f"{claim['properties']} properties with seed {claim['seed']} (renderer {claim['renderer']})"


def _remove_leftovers(images: Path) -> None:
    """What an interrupted render left under temporary names."""
    for path in images.glob(f".*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(path)


def _stands(folder: Path, listed: Listed) -> bool:
    directory = (folder / listed.images[0]).parent
    wanted = {Path(image).name for image in listed.images if image not in listed.absent}
    return directory.is_dir() and {path.name for path in directory.iterdir()} == wanted


def _render_property(folder: Path, seed: int, listed: Listed) -> None:
    directory = (folder / listed.images[0]).parent
    building = directory.with_name(f".{directory.name}{TEMPORARY_SUFFIX}")
    shutil.rmtree(building, ignore_errors=True)
    make_directory(building)
    home = draw_property("example", seed, listed.index)
    for number, (image, view) in enumerate(zip(listed.images, home.views, strict=False)):
        if image not in listed.absent:
            name = building / Path(image).name
            write_temporary(name, _photo_bytes(home, view, listed.hard, number)).rename(name)
    sync_directory(building)
    if directory.exists():
        shutil.rmtree(directory)
    building.rename(directory)


def _photo_bytes(home: Property, view: str, hard: Hard | None, number: int) -> bytes:
    photo = render(home, view)
    if hard == "rotated_images":
        # As a phone held sideways stores it: the pixels turned, and a tag that says how to turn them back.
        return encode_photo(photo.transpose(Image.Transpose.ROTATE_90), orientation=6)
    data = encode_photo(photo)
    if hard == "no_readable_image" or (hard == "corrupt_image" and number == 4):
        return data[: len(data) // 3]
    return data


def truth_type() -> pa.DataType:
    """The Arrow struct of the truth: the fields of the description without free text."""
    properties = PropertyDescription.model_json_schema()["properties"]
    types = {"string": pa.string(), "integer": pa.int64(), "boolean": pa.bool_()}
    return pa.struct([(name, types[properties[name]["type"]]) for name in FIELDS])


def _truth_bytes(listed: Sequence[Listed], seed: int) -> bytes:
    rows: list[dict[str, Any]] = [known(draw_truth("example", seed, one.index)) for one in listed]
    table = pa.table(
        {
            "property_id": pa.array([one.property_id for one in listed], pa.string()),
            "truth": pa.array(rows, truth_type()),
            "hard": pa.array([one.hard for one in listed], pa.string()),
        }
    )
    stream = io.BytesIO()
    pq.write_table(table, stream)
    return stream.getvalue()


def _write_once(path: Path, data: bytes) -> None:
    """Write a file unless it stands there with the same content."""
    if not path.exists() or path.read_bytes() != data:
        write_replacing(path, data)

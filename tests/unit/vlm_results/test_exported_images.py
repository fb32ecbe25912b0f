"""The pictures of an export: each opens from its folder, none is from outside the image root."""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import io
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support.exports import exported_rows
from tests.support.homes import DESCRIPTIONS, Dataset, publish
from tests.support.kills import killed_homes
from tests.support.pictures import LISTED, OPENED
from vlm_assets.services.command_error import CommandError
from vlm_catalog.ingest import ingest
from vlm_durable.files.files import DurableWriteError
from vlm_results import export as export_module
from vlm_results import exported_images
from vlm_results.export import Exported, ExportOptions, Format, export
from vlm_results.exported_images import ExportedImages, Images
from vlm_results.exported_rows import LATER_COLUMNS


def exported(pictures: Dataset, folder: Path, format_: Format = Format.jsonl, **more: object) -> Exported:
    return export(pictures.settings, pictures.catalog, folder, format_, ExportOptions(**more))


def uris_of(folder: Path) -> dict[str, str | None]:
    """The URI of each image by its name."""
    pairs = (
        zip(row["image_names"], row["image_uris"], strict=True) for row in exported_rows(folder).values()
    )
    return {name: uri for row in pairs for name, uri in row}


def colour_of(file: Path | io.BytesIO) -> tuple[int, ...]:
    with Image.open(file) as image:
        return image.convert("RGB").getpixel((4, 4))


def colours_by_path(folder: Path, uris: dict[str, str | None]) -> dict[str, tuple[int, ...]]:
    return {name: colour_of(folder / uri) for name, uri in uris.items() if uri is not None}


@pytest.mark.parametrize("images", [Images.link, Images.copy])
def test_every_uri_opens_from_the_folder_of_the_export_and_what_does_not_is_null(pictures, tmp_path, images):
    """A reader of the export needs nothing else; what is gone, or leads out, costs itself and is counted."""
    folder = tmp_path / "out"
    done = exported(pictures, folder, images=images)
    uris = uris_of(folder)
    opened = OPENED | ({"c/page.jpg"} if images == "link" else set())
    assert {name for name, uri in uris.items() if uri is not None} == opened
    assert (done.rows, done.images, done.images_missing) == (4, len(opened), 8 - len(opened))
    uris["c/page.jpg"] = None
    colours = colours_by_path(folder, uris)
    assert colours["a/1.jpg"] == colours["c/inside.jpg"] != colours["b/1.jpg"]
    about = json.loads((folder / "export.json").read_text())
    assert about["image_roots"] == [str(tmp_path / "pictures")]
    assert (about["images"], about["images_missing"]) == (images, 8 - len(opened))


def test_copies_are_named_by_their_content_and_hold_the_same_bytes(pictures, tmp_path):
    """Two properties' 1.jpg do not meet, and anybody can see that a copy is what was read."""
    folder = tmp_path / "out"
    exported(pictures, folder, images=Images.copy)
    uris = uris_of(folder)
    assert uris["a/1.jpg"] != uris["b/1.jpg"]
    for name in OPENED:
        copy = folder / uris[name]
        assert copy.read_bytes() == (tmp_path / "pictures" / name).read_bytes()
        assert copy.stem == hashlib.sha256(copy.read_bytes()).hexdigest()
        assert copy.suffix == Path(name).suffix
        assert not copy.is_symlink()
    moved = folder.rename(tmp_path / "sent")
    assert len(colours_by_path(moved, uris)) == len(OPENED)


def test_a_link_that_is_put_there_while_an_image_is_opened_is_not_followed(pictures, tmp_path, monkeypatch):
    """Between the look at a path and its opening somebody may exchange it; nothing from outside comes in."""
    root, found = pictures.catalog.images, type(pictures.catalog.images).locate

    def exchanged(self, uri):
        place = found(self, uri)
        if uri == "a/2.png":
            place.unlink()
            place.symlink_to(tmp_path / "secret.jpg")
        return place

    monkeypatch.setattr(type(root), "locate", exchanged)
    done = exported(pictures, tmp_path / "out", images=Images.copy)
    assert uris_of(tmp_path / "out")["a/2.png"] is None
    assert done.images_missing == 4
    secret = (tmp_path / "secret.jpg").read_bytes()
    assert secret not in [path.read_bytes() for path in (tmp_path / "out").rglob("*.jpg")]


def test_an_embedded_image_is_bounded_and_the_rows_that_wait_too(pictures, tmp_path, monkeypatch):
    """An image that is too large is null and counted. A reader holds a whole row group: it stays small."""
    large = pictures.settings.home.parent / "pictures" / "d" / "with space #1.jpg"
    Image.effect_noise((64, 64), 80).convert("RGB").save(large)
    monkeypatch.setattr(exported_images, "EMBEDDED_BYTES", large.stat().st_size - 1)
    monkeypatch.setattr(exported_images, "_GROUP_BYTES", 1)
    monkeypatch.setattr(exported_images, "IMAGES_TOGETHER", 1)
    folder = tmp_path / "out"
    done = exported(pictures, folder, Format.huggingface, images=Images.embed)
    assert (done.images, done.images_missing) == (4, 4)
    files = sorted((folder / "data").iterdir())
    assert [pq.ParquetFile(path).num_row_groups for path in files] == [2, 2]
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    embedded = {
        name: image for row in rows for name, image in zip(row["image_names"], row["images"], strict=True)
    }
    root = tmp_path / "pictures"
    for name, image in embedded.items():
        expected = (root / name).read_bytes() if name in OPENED - {"d/with space #1.jpg"} else None
        assert (image and image["bytes"]) == expected, name
    assert not (folder / "images").exists()


def test_the_embedded_images_of_one_property_are_bounded_together(pictures, tmp_path, monkeypatch):
    """Thousands of large images would fill the memory: what comes after a limit is null and counted."""
    first = pictures.settings.home.parent / "pictures" / "a" / "1.jpg"
    monkeypatch.setattr(exported_images, "_ROW_BYTES", first.stat().st_size)
    monkeypatch.setattr(exported_images, "IMAGES_TOGETHER", 1)
    exported(pictures, tmp_path / "out", images=Images.embed)
    images = exported_rows(tmp_path / "out")["a"]["images"]
    assert images[0] is not None
    assert set(images[1:]) == {None}


def test_embedded_images_of_json_lines_are_texts_that_a_browser_shows(pictures, tmp_path):
    """A data URI is what pages, pandas and Label Studio take; a CSV, whose cells are no place, refuses."""
    folder = tmp_path / "out"
    exported(pictures, folder, images=Images.embed)
    row = exported_rows(folder)["b"]
    head, _, body = row["images"][0].partition(",")
    assert head == "data:image/jpeg;base64"
    assert colour_of(io.BytesIO(base64.b64decode(body)))[2] > 200
    assert row["images"][1] is None
    with pytest.raises(CommandError, match="A cell of a CSV holds no image"):
        exported(pictures, tmp_path / "flat", Format.csv, images=Images.embed)


@pytest.mark.parametrize("images", [Images.link, Images.copy])
def test_a_base_url_stands_before_each_name_escaped(pictures, tmp_path, images):
    """What serves the images finds each, also with blanks and # in its name; a link needs no file here."""
    folder = tmp_path / "out"
    exported(pictures, folder, images=images, image_base_url="https://img.example/x")
    uris = {name: uri for name, uri in uris_of(folder).items() if uri is not None}
    paths = {name: unquote(urlsplit(uri).path) for name, uri in uris.items()}
    if images == "link":
        assert paths == {name: f"/x/{name}" for row in LISTED.values() for name in row}
    else:
        assert all((folder / path.removeprefix("/x/")).is_file() for path in paths.values())
        assert paths.keys() == OPENED
    with pytest.raises(CommandError, match="names no image"):
        exported(pictures, tmp_path / "none", images=Images.none, image_base_url="https://img.example")
    with pytest.raises(CommandError, match="is no address"):
        exported(pictures, tmp_path / "none", image_base_url="https://img.example/\x1b]0;")


def test_without_images_nothing_names_one_and_none_is_needed(pictures, tmp_path):
    """Texts for others tell nothing of this machine, and are exported while the images' disk is away."""
    (tmp_path / "pictures").rename(tmp_path / "away")
    (tmp_path / "pictures").mkdir()
    folder = tmp_path / "out"
    for images in (Images.link, Images.copy, Images.embed):
        with pytest.raises(CommandError, match=r"There is nothing in .*Is the disk of"):
            exported(pictures, folder, images=images)
    assert not folder.exists()
    exported(pictures, folder, Format.huggingface, images=Images.none)
    names = pq.read_schema(next((folder / "data").iterdir())).names
    assert not [name for name in names if "image" in name]
    assert str(tmp_path) not in (folder / "export.json").read_text()
    assert "Images are not part of it." in (folder / "README.md").read_text()


def test_what_was_used_and_what_failed_is_exported(pictures, tmp_path):
    """Used images by their URIs, failed ones by name and reason; rows of an earlier version say nothing."""
    row = {
        "images_used": ["b/1.jpg"],
        "images_failed": [{"uri": "b/gone.jpg", "kind": "missing", "error": "it is not there"}],
    }
    key, folder = pictures.keys[0], tmp_path / "out"
    types = exported_images.pa, LATER_COLUMNS
    schema = DESCRIPTIONS
    for name in row:
        schema = schema.append(types[0].field(name, types[1][name]))
    published = pictures.descriptions.read(key).to_table().to_pylist()
    rows = [{**one, **(row if one["property_id"] == "b" else {})} for one in published]
    publish(pictures.descriptions, key, rows, schema, "fp-other", {}, texts="other")
    exported(pictures, folder, images=Images.copy)
    found = exported_rows(folder)
    assert found["b"]["images_used"] == [found["b"]["image_uris"][0]]
    assert found["b"]["images_failed"] == [
        {"name": "b/gone.jpg", "kind": "missing", "error": "it is not there"}
    ]
    assert found["b"]["described_at"] == "2026-11-01T00:00:02+00:00"
    assert (found["c"]["images_used"], found["c"]["images_failed"]) == (None, None)


def test_a_csv_has_the_images_as_json(pictures, tmp_path):
    """A cell with several images is read by any JSON parser."""
    exported(pictures, tmp_path / "out", Format.csv, images=Images.copy)
    with (tmp_path / "out" / f"{pictures.keys[0]}.csv").open(newline="") as file:
        rows = {row["property_id"]: row for row in csv.DictReader(file)}
    uris = json.loads(rows["b"]["image_uris"])
    assert (tmp_path / "out" / uris[0]).is_file() and uris[1] is None


def test_an_image_that_is_back_is_tried_once_more_and_the_rest_is_kept(pictures, tmp_path):
    """Putting an image back and exporting again is all that is needed, and costs its shard alone."""
    folder = tmp_path / "out"
    exported(pictures, folder, images=Images.copy)
    assert exported(pictures, folder, images=Images.copy).kept == 2
    Image.new("RGB", (8, 8), "cyan").save(tmp_path / "pictures" / "b" / "gone.jpg")
    again = exported(pictures, folder, images=Images.copy)
    assert (again.kept, again.images, again.images_missing) == (1, 6, 2)
    assert colour_of(folder / uris_of(folder)["b/gone.jpg"])[1] > 200


def test_a_copy_that_is_gone_or_left_over_is_put_right(pictures, tmp_path):
    """A folder that is said to be whole has each copy, and no other: a withdrawn property's are removed."""
    folder = tmp_path / "out"
    exported(pictures, folder, images=Images.copy)
    before = {path: path.read_bytes() for path in (folder / "images").rglob("*.*")}
    for change in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"cut"),
        lambda path: (path.parent / "left.jpg").write_bytes(b"of a property that was withdrawn"),
        lambda path: (path.parent / ".copy.1-2.tmp").write_bytes(b"begun"),
    ):
        change(min(before))
        assert exported(pictures, folder, images=Images.copy).kept == 1
        assert {path: path.read_bytes() for path in (folder / "images").rglob("*.*")} == before
    fewer = folder / "images" / pictures.keys[1]
    note = folder / ".shards" / f"{pictures.keys[1]}.json"
    pictures.settings.descriptions.partition(pictures.keys[1]).record.unlink()
    pictures.settings.descriptions.partition(pictures.keys[1]).record_copy.unlink()
    exported(pictures, folder, images=Images.copy)
    assert not fewer.exists() and not note.exists()


def test_a_full_disk_ends_the_export_and_is_no_failed_image(pictures, tmp_path, monkeypatch):
    """A copy that cannot be written is not the image's fault: nothing says that the folder is whole."""

    class Full(export_module.TemporaryFile):
        def seal(self):
            raise DurableWriteError(errno.ENOSPC, "could not write")

    with monkeypatch.context() as patch, pytest.raises(DurableWriteError):
        patch.setattr(exported_images, "TemporaryFile", Full)
        exported(pictures, tmp_path / "out", images=Images.copy)
    assert not (tmp_path / "out" / "export.json").exists()
    assert exported(pictures, tmp_path / "out", images=Images.copy).images == len(OPENED)


def test_roots_that_moved_are_followed(pictures, tmp_path):
    """Links of an export name the folder in which the images are."""
    folder = tmp_path / "out"
    exported(pictures, folder)
    for name in ("out.jpg", "inside.jpg"):
        (tmp_path / "pictures" / "c" / name).unlink()
    (tmp_path / "pictures").rename(tmp_path / "moved")
    ingest(tmp_path / "listing.jsonl", pictures.settings.home, update=True, image_root=tmp_path / "moved")
    assert exported(pictures, folder).kept == 0
    assert uris_of(folder)["a/1.jpg"] == str(tmp_path / "moved" / "a" / "1.jpg")


def test_a_killed_export_leaves_no_torn_copy_and_goes_on(pictures, tmp_path):
    """SIGKILL before a fifth of the operations: what has a name is whole, the next one ends the same."""
    results = tmp_path / "results"
    work = lambda: exported(pictures, results / "out", images=Images.copy)  # noqa: E731
    folders = [killed / "out" for killed, _ in killed_homes(results, work, tmp_path / "killed", parts=5)]
    folders, whole = [folder for folder in folders if folder.exists()], files_of(results / "out")
    assert len(folders) > 10
    rows_and_images = [name for name in whole if name.endswith((".jsonl", ".jpg", ".png"))]
    for folder in folders:
        for path in (folder / "images").rglob("[!.]*.*"):
            assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()
        if (folder / "export.json").exists():
            assert files_of(folder).items() >= {name: whole[name] for name in rows_and_images}.items()
        exported(pictures, folder, images=Images.copy)
        assert files_of(folder) == whole


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and ".shards" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


class Bucket:
    """A store with the pictures of a folder, or one that is asked for none."""

    places = ("s3://bucket/pictures",)

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    def locate(self, name: str) -> str:
        return f"s3://bucket/pictures/{name}"

    def fetch(self, address: str) -> bytes:
        assert self.root is not None, address
        name = address.removeprefix("s3://bucket/pictures/")
        if name not in OPENED:
            raise exported_images.ImageError("missing", f"{address} is not there.")
        return (self.root / name).read_bytes()


def test_images_on_s3_are_linked_by_their_address_without_a_request(pictures, tmp_path):
    """Millions of objects are not asked for; what their names hold is kept."""
    catalog = pictures.catalog
    catalog.__dict__["images"] = Bucket()
    done = export(pictures.settings, catalog, tmp_path / "out", Format.jsonl)
    assert done.images_missing == 0
    assert uris_of(tmp_path / "out")["b/gone.jpg"] == "s3://bucket/pictures/b/gone.jpg"


def test_fetched_images_are_copied_as_they_came(pictures, tmp_path):
    """From a store they come through the bounded fetcher, whose fault of one image costs that image."""
    root, catalog = tmp_path / "pictures", pictures.catalog
    catalog.__dict__["images"] = Bucket(root)
    images = ExportedImages(catalog, tmp_path / "out", Images.copy)
    export(pictures.settings, catalog, tmp_path / "out", Format.jsonl, ExportOptions(images=Images.copy))
    assert images.copied_keys()
    for name, uri in uris_of(tmp_path / "out").items():
        assert (uri is not None) == (name in OPENED)
        assert uri is None or (tmp_path / "out" / uri).read_bytes() == (root / name).read_bytes()

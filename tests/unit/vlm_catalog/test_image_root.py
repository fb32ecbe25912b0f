"""The image root: paths become URIs, and nothing leaves the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_catalog.image_root import ImageOutsideRootError, ImageRoot, InvalidImagePathError, S3ImageRoot
from vlm_durable.mirror.bucket import S3Folder


@pytest.fixture
def root(tmp_path: Path) -> ImageRoot:
    folder = tmp_path / "images"
    (folder / "7").mkdir(parents=True)
    (folder / "7" / "1.jpg").write_bytes(b"12345")
    (tmp_path / "secret.jpg").write_bytes(b"!")
    return ImageRoot.at(folder)


@pytest.mark.parametrize(
    ("written", "uri"),
    [
        ("7/1.jpg", "7/1.jpg"),
        ("./7//1.jpg", "7/1.jpg"),
        ("7/x/../1.jpg", "7/1.jpg"),
        ("not there/ü |,\n.jpg", "not there/ü |,\n.jpg"),
        (" 7/1.jpg ", " 7/1.jpg "),
        ("..7/1..jpg", "..7/1..jpg"),
    ],
)
def test_paths_become_uris(root: ImageRoot, written: str, uri: str) -> None:
    """A path is kept as written, but for what means nothing."""
    assert root.uri(written) == uri


def test_absolute_paths_inside_become_relative(root: ImageRoot) -> None:
    """A listing with absolute paths stands for the same images as one with relative ones."""
    assert root.uri(f"{root.path}/7/1.jpg") == "7/1.jpg"


@pytest.mark.parametrize(
    "written",
    ["../secret.jpg", "7/../../secret.jpg", "/etc/passwd", "/", "..", "//etc/passwd", "7/../../images2/x"],
)
def test_paths_that_leave_are_refused(root: ImageRoot, written: str) -> None:
    """Neither .. nor an absolute path reaches what lies outside the root."""
    with pytest.raises(ImageOutsideRootError):
        root.uri(written)


@pytest.mark.parametrize("inside", ["7/1.jpg", "7/a b|ü.jpg", "..7/1..jpg"])
def test_what_lies_in_a_folder_on_s3_is_named_either_way(inside: str) -> None:
    """A key below the folder and the whole address are the same image."""
    root = S3ImageRoot(S3Folder.parse("s3://bucket/images"))
    address = f"s3://bucket/images/{inside}"
    assert root.uri(inside) == root.uri(address) == inside
    assert root.locate(inside) == address


@pytest.mark.parametrize(
    "written",
    [
        "s3://other/1.jpg",
        "s3://bucket/images2/1.jpg",
        "7/../../1.jpg",
        "/1.jpg",
        "./1.jpg",
        "https://a/1.jpg",
    ],
)
def test_nothing_leads_out_of_a_folder_on_s3(written: str) -> None:
    """What lies between here and the store may resolve dots; a neighbour's name may begin alike."""
    root = S3ImageRoot(S3Folder.parse("s3://bucket/images"))
    for ask in (root.uri, root.locate):
        with pytest.raises(ImageOutsideRootError):
            ask(written)


def test_a_folder_whose_name_begins_alike_is_outside(root: ImageRoot) -> None:
    """images2 is not inside images."""
    with pytest.raises(ImageOutsideRootError):
        root.uri(f"{root.path}2/1.jpg")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "empty"),
        ("a\0b.jpg", "NUL"),
        ("a\udcff.jpg", "UTF-8"),
        (".", "root itself"),
        ("s3://bucket/1.jpg", "on S3"),
        ("https://example.org/1.jpg", "URL"),
    ],
)
def test_what_is_no_path_is_refused(root: ImageRoot, written: str, reason: str) -> None:
    """Text that names no image on this disk is refused with its reason."""
    with pytest.raises(InvalidImagePathError, match=reason):
        root.uri(written)
    if reason in ("empty", "NUL", "UTF-8"):
        with pytest.raises(InvalidImagePathError, match=reason):
            root.locate(written)


def test_size_is_that_of_the_file_or_none(root: ImageRoot) -> None:
    """A missing image costs that image: it has no size, and no error."""
    assert root.size("7/1.jpg") == 5
    assert root.size("7/2.jpg") is None
    assert root.size("8/1.jpg") is None
    assert root.size("7/1.jpg/1.jpg") is None
    assert root.size("7/" + "x" * 300 + ".jpg") is None


def test_links_are_followed_inside_and_refused_outside(root: ImageRoot) -> None:
    """A link is as good as what it leads to, and may not lead out, as a file or as a folder."""
    folder = Path(root.path)
    (folder / "inside.jpg").symlink_to(folder / "7" / "1.jpg")
    (folder / "dangling.jpg").symlink_to(folder / "7" / "9.jpg")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "out.jpg").symlink_to(folder.parent / "secret.jpg")
    (folder / "outfolder").symlink_to(folder.parent)
    assert root.size("inside.jpg") == 5
    assert root.locate("inside.jpg") == folder / "7" / "1.jpg"
    assert root.size("dangling.jpg") is None
    assert root.size("loop.jpg") is None
    for uri in ("out.jpg", "outfolder/secret.jpg"):
        with pytest.raises(ImageOutsideRootError):
            root.size(uri)
        with pytest.raises(ImageOutsideRootError):
            root.locate(uri)


def test_a_folder_is_no_image(root: ImageRoot) -> None:
    """A path to a folder is refused, not taken for a file of some size."""
    with pytest.raises(InvalidImagePathError, match="not a file"):
        root.size("7")


def test_a_root_that_is_a_link_confines_to_what_it_leads_to(root: ImageRoot, tmp_path: Path) -> None:
    """Images on another disk behind a link inside the home are read like any."""
    (tmp_path / "link").symlink_to(root.path)
    linked = ImageRoot.at(tmp_path / "link")
    assert linked.size("7/1.jpg") == 5
    assert linked.uri(f"{root.path}/7/1.jpg") == linked.uri(f"{linked.path}/7/1.jpg") == "7/1.jpg"

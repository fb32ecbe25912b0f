"""A dataset with real images, some of which cannot be given on."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.support.homes import Dataset
from tests.support.listings import write_listing
from vlm_assets.config.settings import load_settings
from vlm_catalog.ingest import ingest

LISTED = {
    "a": ["a/1.jpg", "a/2.png"],
    "b": ["b/1.jpg", "b/gone.jpg"],
    "c": ["c/page.jpg", "c/out.jpg", "c/inside.jpg"],
    "d": ["d/with space #1.jpg"],
}
COLOURS = {"a/1.jpg": "red", "a/2.png": "lime", "b/1.jpg": "blue", "d/with space #1.jpg": "white"}
OPENED = {"a/1.jpg", "a/2.png", "b/1.jpg", "c/inside.jpg", "d/with space #1.jpg"}


@pytest.fixture
def pictures(tmp_path: Path) -> Dataset:
    """Two ranges of two described properties; of eight images one is gone, one a page, one a link out."""
    root = tmp_path / "pictures"
    for name, colour in COLOURS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), colour).save(root / name)
    (root / "c").mkdir()
    (root / "b" / "gone.jpg").write_bytes(b"soon")
    (root / "c" / "page.jpg").write_bytes(b"<html>not found</html>")
    Image.new("RGB", (8, 8), "black").save(tmp_path / "secret.jpg")
    (root / "c" / "out.jpg").write_bytes(b"soon")
    (root / "c" / "inside.jpg").symlink_to(root / "a" / "1.jpg")
    listing = write_listing(tmp_path / "listing.jsonl", LISTED)
    ingest(listing, tmp_path / "home", range_size=2, image_root=root)
    (root / "b" / "gone.jpg").unlink()
    (root / "c" / "out.jpg").unlink()
    (root / "c" / "out.jpg").symlink_to(tmp_path / "secret.jpg")
    made = Dataset(load_settings(model="example", home=tmp_path / "home"))
    for key in made.keys:
        made.describe(key)
    return made

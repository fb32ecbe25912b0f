"""What ``vlm-assets doctor`` says of the images of a catalogue: real files, looked at by real workers."""

import io

import pillow_heif
import pytest
from PIL import Image

from vlm_assets.config.settings import load_settings
from vlm_assets.services.doctor import catalog_checks
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest


def picture(kind: str) -> bytes:
    pillow_heif.register_heif_opener()
    stream = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def source(tmp_path):
    """Four properties with 15 images each, of six formats; 3 HEIC and the one WebP are cut short."""
    heic, jpeg, webp = picture("HEIF"), picture("JPEG"), picture("WEBP")
    for number in range(4):
        folder = tmp_path / "listings" / f"p{number}"
        folder.mkdir(parents=True)
        for image in range(10):
            (folder / f"{image}.jpg").write_bytes(jpeg)
        for image in range(5):
            whole = number < 3 or image < 2
            (folder / f"phone {image}.HEIC").write_bytes(heic if whole else heic[:-9])
    (tmp_path / "listings/p1/cut.webp").write_bytes(webp[: len(webp) // 2])
    (tmp_path / "listings/p2/page.jpg").write_bytes(b"<html>not found</html>")
    return tmp_path / "listings"


def examined(home):
    return list(catalog_checks.examine_images(load_settings(home=home)))


def test_the_formats_that_fail_are_named_with_how_many(source, tmp_path, monkeypatch):
    """Guards: a person learns which files to mend; a cut WebP is one failed image, and stops no check."""
    ingest(source, tmp_path / "home")
    ((level, said),) = examined(tmp_path / "home")
    assert level == "warning"
    assert said.startswith("62 images of 4 properties: 41 JPEG, 20 HEIC, 1 WEBP; ")
    assert "8.1% cannot be read: 3 of 20 HEIC, 1 of 1 WEBP, 1 of 41 JPEG (5 unreadable);" in said


def test_a_decoder_that_is_not_installed_is_an_error_of_its_own(source, tmp_path, monkeypatch):
    """Guards: what a package lacks is said with what to install, and is not held against the images."""
    ingest(source, tmp_path / "home")
    block = tmp_path / "block"
    block.mkdir()
    (block / "pillow_heif.py").write_text("raise ImportError('not there')")
    monkeypatch.setenv("PYTHONPATH", str(block))
    ((level, said),) = examined(tmp_path / "home")
    assert level == "error"
    assert "20 of 20 HEIC" in said
    assert "20 no_decoder" in said
    assert "the extra 'heic' is not installed" in said


def test_the_sample_is_the_same_each_time_and_of_all_images(source, tmp_path, monkeypatch):
    """Guards: what lies behind a property's first image is looked at, all over the catalogue, and again."""
    monkeypatch.setattr(catalog_checks, "IMAGES", 24)
    ingest(source, tmp_path / "home")
    catalog = Catalog.open(tmp_path / "home")
    jobs, outside, sizes = catalog_checks._sampled_images(catalog)
    assert (len(jobs), outside, len(sizes)) == (24, 0, 24)
    assert {job.property_id for job in jobs} == {"p0", "p1", "p2", "p3"}
    places = {job.image_uris[0].partition("/")[2] for job in jobs}
    assert len(places) > 10, "each property's own images are chosen"
    assert jobs == catalog_checks._sampled_images(catalog)[0]

"""Thumbnails of what people attack with: bounded, in a worker, never in the process that asks."""

import io
import resource
import zlib
from pathlib import Path

import pytest
from PIL import Image

from vlm_engine.images import thumbnails
from vlm_engine.images.images import PropertyJob
from vlm_engine.images.thumbnails import make_thumbnails

SIDE = 13_300


def write_huge_png(path: Path) -> None:
    """A PNG of 13,300 x 13,300 pixels in less than a megabyte, written row by row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    packed = zlib.compressobj(9)
    row = bytes(1 + 3 * SIDE)
    body = b"".join([*(packed.compress(row) for _ in range(SIDE)), packed.flush()])
    size = SIDE.to_bytes(4, "big")
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size + size + bytes([8, 2, 0, 0, 0]))
        + chunk(b"IDAT", body)
        + chunk(b"IEND", b"")
    )


def opened(file: bytes | None) -> Image.Image:
    assert file is not None
    return Image.open(io.BytesIO(file))


@pytest.fixture
def photo(tmp_path):
    Image.new("RGB", (600, 400), "red").save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


def test_a_huge_picture_fills_no_memory_of_the_run(tmp_path, photo):
    """Guards: a PNG of 177 million pixels in 700 KB costs its worker memory, and the run none."""
    write_huge_png(tmp_path / "huge.png")
    assert (tmp_path / "huge.png").stat().st_size < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    paths = tuple(map(str, (photo, tmp_path / "huge.png", photo)))
    [[first, _, last]] = make_thumbnails([PropertyJob("p", 0, paths)], height=88)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert opened(first).size == opened(last).size == (132, 88)


def test_what_cannot_be_decoded_gets_a_placeholder(tmp_path, photo):
    """Guards: a JPEG of 6,400 scans, and what is no image, leave their places empty."""
    progressive = tmp_path / "scans.jpg"
    Image.new("RGB", (64, 48)).save(progressive, progressive=True)
    data = progressive.read_bytes()
    last = data.rindex(b"\xff\xda")
    progressive.write_bytes(data[:last] + data[last:-2] * 6400 + data[-2:])
    (tmp_path / "none.jpg").write_bytes(b"no image")
    paths = tuple(map(str, (progressive, photo, tmp_path / "none.jpg")))
    jobs = [PropertyJob("p", 0, paths), PropertyJob("q", 1, (str(photo),)), PropertyJob("r", 2, ())]
    made = make_thumbnails(jobs, height=88)
    assert [[file is not None for file in files] for files in made] == [[False, True, False], [True], []]


def test_a_page_does_not_wait_for_a_disk(tmp_path, photo, monkeypatch):
    """Guards: images whose storage hangs leave a page with placeholders, and publication goes on."""
    monkeypatch.setattr(thumbnails, "_ALL_SECONDS", 2.0)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "sys.addaudithook(lambda what, a: what == 'open' and 'hangs' in str(a[0]) and signal.pause())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    (tmp_path / "hangs.jpg").write_bytes(photo.read_bytes())
    jobs = [
        PropertyJob("p", 0, (str(photo),)),
        PropertyJob("q", 1, (str(tmp_path / "hangs.jpg"), str(photo))),
    ]
    [[shown], missing] = make_thumbnails(jobs, height=88)
    assert opened(shown).size == (132, 88)
    assert missing == [None, None]

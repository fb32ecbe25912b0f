"""One image as a person would see it, or a named reason why not."""

import contextlib
import io
import os
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from tests.support.damage import flipped
from vlm_engine.images import images
from vlm_engine.images.images import (
    FORMATS,
    MAX_SOURCE_PIXELS,
    TRANSIENT_IMAGE_KINDS,
    ImageError,
    fitted_size,
    load_image,
    read_pieces,
    recognised_format,
)

pillow_heif.register_heif_opener()

LEFT, RIGHT = (200, 40, 30), (30, 60, 190)
ANY_SIZE = 1 << 40


def picture(width: int = 64, height: int = 48) -> Image.Image:
    """Red on the left, blue on the right, and a green stripe along the top."""
    image = Image.new("RGB", (width, height), LEFT)
    image.paste(RIGHT, (width // 2, 0, width, height))
    image.paste((20, 160, 40), (0, 0, width, height // 8))
    return image


def pixels(path: Path, max_pixels: int = ANY_SIZE) -> np.ndarray:
    return np.asarray(load_image(path, max_pixels=max_pixels)).astype(int)


def grey(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L")).astype(int)


ODD = {
    "plain.jpg": lambda p: picture().save(p, quality=95),
    "progressive.jpg": lambda p: picture().save(p, quality=95, progressive=True),
    "cmyk.jpg": lambda p: picture().convert("CMYK").save(p, quality=95),
    "cmyk.tiff": lambda p: picture().convert("CMYK").save(p),
    "palette.png": lambda p: picture().quantize(8).save(p),
    "palette.gif": lambda p: picture().quantize(8).save(p),
    "opaque.png": lambda p: picture().convert("RGBA").save(p),
    "lossless.webp": lambda p: picture().save(p, lossless=True),
    "animated.gif": lambda p: picture().save(p, save_all=True, append_images=[Image.new("RGB", (64, 48))]),
    "animated.webp": lambda p: picture().save(
        p, save_all=True, append_images=[Image.new("RGB", (64, 48))], lossless=True
    ),
    "animated.png": lambda p: picture().save(p, save_all=True, append_images=[Image.new("RGB", (64, 48))]),
    "two.mpo": lambda p: picture().save(p, save_all=True, append_images=[Image.new("RGB", (64, 48))]),
    "favicon.ico": lambda p: picture().save(p, sizes=[(64, 48)]),
    "render.tga": lambda p: picture().save(p),
    "pages.tiff": lambda p: picture().save(p, save_all=True, append_images=[Image.new("RGB", (64, 48))]),
    "ycbcr.tiff": lambda p: picture().convert("YCbCr").save(p),
    "plain.bmp": lambda p: picture().save(p),
    "plain.ppm": lambda p: picture().save(p),
    "phone.heic": lambda p: picture().save(p, quality=95),
    "sharp.heic": lambda p: picture().convert("RGBA").save(p, quality=95),
    "several.heic": lambda p: picture().save(p, save_all=True, append_images=[Image.new("RGB", (64, 48))]),
    "other-brand.heic": lambda p: put(p, heic().replace(b"ftypheic", b"ftypmif1", 1)),
    "plain.avif": lambda p: picture().save(p, quality=95),
    "sequence.avif": lambda p: picture().save(
        p, quality=95, save_all=True, append_images=[Image.new("RGB", (64, 48))]
    ),
    "wrong-name.txt": lambda p: picture().save(p, "PNG"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_show_the_picture(name, tmp_path):
    """Guards: fault 17: an odd colour mode, container or animation shows what a person sees."""
    ODD[name](tmp_path / name)
    seen = pixels(tmp_path / name)
    assert seen.shape == (48, 64, 3)
    # Away from edges, where JPEG rings; CMYK without a profile is only about the same colour.
    for (row, column), colour in {(30, 10): LEFT, (30, 54): RIGHT, (2, 10): (20, 160, 40)}.items():
        assert np.abs(seen[row, column] - colour).max() < 16


GREYS = {
    "grey.jpg": lambda p: picture().convert("L").save(p, quality=95),
    "grey.png": lambda p: picture().convert("L").save(p),
    "16-bit.png": lambda p: Image.fromarray((grey(picture()) * 257).astype(np.uint16)).save(p),
    "16-bit-other-byte-order.tiff": lambda p: Image.frombytes(
        "I;16B", (64, 48), (grey(picture()) * 257).astype(">u2").tobytes()
    ).save(p),
    "16-bit.tiff": lambda p: Image.fromarray((grey(picture()) * 257).astype(np.uint16)).save(p),
    "32-bit.tiff": lambda p: Image.fromarray(grey(picture()).astype(np.int32)).save(p),
    "grey-and-alpha.png": lambda p: picture().convert("LA").save(p),
}


@pytest.mark.parametrize("name", GREYS)
def test_grey_files_keep_their_shades(name, tmp_path):
    """Guards: fault 17: 16 bits a channel are scaled down, not clipped to a white picture."""
    GREYS[name](tmp_path / name)
    seen = pixels(tmp_path / name)
    assert seen.shape == (48, 64, 3)
    assert np.abs(seen - grey(picture())[..., None])[8:, [5, 58]].max() <= 3


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 1e6)])
def test_floats_are_stretched_from_dark_to_light(low, high, tmp_path):
    """Guards: fault 17: a file of floats shows its picture instead of black or white."""
    ramp = np.linspace(low, high, 64, dtype=np.float32)[None].repeat(48, axis=0)
    Image.fromarray(ramp).save(tmp_path / "float.tiff")
    seen = pixels(tmp_path / "float.tiff")[0, :, 0]
    assert seen[0] == 0
    assert seen[-1] >= 254
    assert (np.diff(seen) > 0).all()


def see_through(mode: str) -> Image.Image:
    image = picture().convert("RGBA")
    image.paste((0, 0, 0, 0), (32, 0, 64, 48))
    if mode == "P":
        flat = Image.new("P", image.size)
        flat.putpalette([*LEFT, 0, 0, 0])
        flat.paste(1, (32, 0, 64, 48))
        flat.info["transparency"] = 1
        return flat
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode, tmp_path):
    """Guards: fault 17: the black behind a cut-out is not shown to the model."""
    see_through(mode).save(tmp_path / "cut-out.png")
    seen = pixels(tmp_path / "cut-out.png")
    assert (seen[:, 33:] == 255).all()
    assert seen[30, 10].min() < 100


UPSIDE = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", UPSIDE)
@pytest.mark.parametrize("name", ["turned.jpg", "turned.png", "turned.tiff", "turned.webp", "turned.heic"])
@pytest.mark.parametrize("max_pixels", [ANY_SIZE, 700])
def test_turned_images_stand_upright(orientation, name, max_pixels, tmp_path):
    """Guards: fault 17: every EXIF orientation is applied, once, whether or not the image is made smaller."""
    how = UPSIDE[orientation]
    stored = picture() if how is None else picture().transpose(how)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / name, exif=exif.tobytes(), quality=95)
    seen = pixels(tmp_path / name, max_pixels)
    height, width = seen.shape[:2]
    assert width > height
    assert np.abs(seen[height * 3 // 4, width // 8] - LEFT).max() < 16
    assert np.abs(seen[height * 3 // 4, width * 7 // 8] - RIGHT).max() < 16


def test_damaged_exif_costs_no_picture(tmp_path):
    """Guards: fault 17: a picture whose EXIF is garbage is shown as viewers show it."""
    picture().save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xffgarbage")
    assert pixels(tmp_path / "a.jpg").shape == (48, 64, 3)


def jpeg(directory: Path, width: int = 640, height: int = 480, **options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(directory / "whole.jpg", **options)
    return (directory / "whole.jpg").read_bytes()


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def heic() -> bytes:
    stream = io.BytesIO()
    picture().save(stream, "HEIF", quality=95)
    return stream.getvalue()


def heic_bomb(path: Path) -> None:
    """A HEIC that shows 64 x 48 pixels, cut out of 40,000 x 40,000."""
    data = heic()
    at = data.index(b"ispe") + 8
    assert b"clap" in data, "Pillow is told the size of the part that is shown"
    path.write_bytes(data[:at] + (40_000).to_bytes(4, "big") * 2 + data[at + 8 :])


def png(directory: Path) -> bytes:
    picture().save(directory / "whole.png")
    return (directory / "whole.png").read_bytes()


def bomb(path: Path) -> None:
    """A GIF of a few bytes that claims 65,000 pixels a side."""
    picture().quantize(4).save(path)
    data = bytearray(path.read_bytes())
    data[6:10] = (65_000).to_bytes(2, "little") * 2
    path.write_bytes(data)


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(b"\xff\xd8\xff")
        stream.truncate(600 << 20)


BAD = {
    "half.jpg": ("unreadable", lambda p: put(p, jpeg(p.parent)[:20_000])),
    "half-progressive.jpg": ("unreadable", lambda p: put(p, jpeg(p.parent, progressive=True)[:20_000])),
    "last-byte-missing.jpg": ("unreadable", lambda p: put(p, jpeg(p.parent)[:-1])),
    "tail-of-zeros.jpg": ("unreadable", lambda p: put(p, jpeg(p.parent)[:20_000] + bytes(50_000))),
    "header-only.jpg": ("unreadable", lambda p: put(p, jpeg(p.parent)[:300])),
    "half.png": ("unreadable", lambda p: put(p, png(p.parent)[:120])),
    "flipped.png": ("unreadable", lambda p: put(p, flipped(png(p.parent), 60, 6))),
    "page.jpg": ("unreadable", lambda p: put(p, b"<!DOCTYPE html><title>403 Forbidden</title>")),
    "phone.heic": ("unreadable", lambda p: put(p, b"\0\0\0\x18ftypheic" + bytes(40))),
    "half.heic": ("unreadable", lambda p: put(p, heic()[: len(heic()) // 2])),
    "last-byte-missing.heic": ("unreadable", lambda p: put(p, heic()[:-1])),
    "clip.mp4": ("unreadable", lambda p: put(p, b"\0\0\0\x18ftypisom" + bytes(40))),
    "noise.jpg": ("unreadable", lambda p: put(p, bytes(range(256)) * 40)),
    "one-byte.jpg": ("unreadable", lambda p: put(p, b"\xff")),
    "script.eps": ("unreadable", lambda p: put(p, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")),
    "nothing.jpg": ("empty", lambda p: put(p, b"")),
    "bomb.gif": ("too_large", bomb),
    "bomb.heic": ("too_large", heic_bomb),
    "file-of-600-mib.jpg": ("too_large", sparse),
    "directory.jpg": ("not_a_file", lambda p: p.mkdir()),
    "fifo.jpg": ("not_a_file", os.mkfifo),
    "device.jpg": ("not_a_file", lambda p: p.symlink_to("/dev/zero")),
    "missing.jpg": ("missing", lambda p: None),
    "dangling.jpg": ("missing", lambda p: p.symlink_to("nowhere")),
    "loop.jpg": ("missing", lambda p: p.symlink_to(p)),
    "below-a-file.jpg/a.jpg": ("missing", lambda p: put(p.parent, b"x")),
    "n" * 300 + ".jpg": ("missing", lambda p: None),
    "nul\0.jpg": ("missing", lambda p: None),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BAD, ids=lambda name: name[:24].replace("\0", "?"))
def test_bad_files_are_a_named_error(name, tmp_path):
    """Guards: fault 17: a bad image is a named error with a sentence: no half pictures, no waiting."""
    kind, make = BAD[name]
    make(tmp_path / name)
    with pytest.raises(ImageError) as caught:
        load_image(tmp_path / name, max_pixels=4096)
    assert caught.value.kind == kind
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith("..")
    assert kind not in TRANSIENT_IMAGE_KINDS


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("page.jpg", "web page"),
        ("phone.heic", "as HEIC"),
        ("clip.mp4", "video"),
        ("one-byte.jpg", "begins with ff"),
    ],
)
def test_what_is_no_image_is_told_from_what_is_damaged(name, said, tmp_path):
    """Guards: fault 17: the sentence says what the file is and what to do, not that it is cut short."""
    BAD[name][1](tmp_path / name)
    with pytest.raises(ImageError, match=said):
        load_image(tmp_path / name, max_pixels=4096)


def test_a_decoder_that_is_missing_is_no_fault_of_the_image(tmp_path, monkeypatch):
    """Guards: what an installation lacks is named, and another try comes after it was installed."""
    (tmp_path / "a.heic").write_bytes(heic())
    picture().save(tmp_path / "a.avif")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr("PIL.AvifImagePlugin.SUPPORTED", False)
    monkeypatch.setattr("PIL.features.check", lambda feature: feature != "avif")
    for name, words in (("a.heic", "the extra 'heic' is not installed"), ("a.avif", "built without AVIF")):
        with pytest.raises(ImageError, match=words) as caught:
            load_image(tmp_path / name, max_pixels=4096)
        assert caught.value.kind == "no_decoder"
        assert caught.value.kind in TRANSIENT_IMAGE_KINDS


def test_sockets_are_no_images(tmp_path, monkeypatch):
    """Guards: fault 17: whatever stands in a folder, opening it does not wait."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        with pytest.raises(ImageError, match="socket") as caught:
            load_image(Path("socket.jpg"), max_pixels=4096)
    assert caught.value.kind == "not_a_file"


@contextlib.contextmanager
def as_nobody():
    """Root may read everything, so root becomes nobody for a moment."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_permission_is_named(tmp_path):
    """Guards: fault 17: what only a person can cure says so."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # Where nobody may look, pytest's own folders being root's alone.
        closed = Path(folder, "a.jpg")
        put(closed, jpeg(tmp_path))
        closed.chmod(0)
        with as_nobody(), pytest.raises(ImageError) as caught:
            load_image(closed, max_pixels=4096)
    assert caught.value.kind == "denied"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow complains of each damaged tag.
def test_every_byte_flipped_or_cut_is_a_picture_or_an_image_error(tmp_path):
    """Guards: fault 17: no damage makes the decoder raise anything but an ImageError."""
    wholes = [jpeg(tmp_path, 40, 30), png(tmp_path)]
    for options in ({"format": "GIF"}, {"format": "WEBP"}, {"format": "TIFF", "compression": "tiff_lzw"}):
        picture().save(tmp_path / "other", **options)
        wholes.append((tmp_path / "other").read_bytes())
    wholes.append(heic())
    path, refused = tmp_path / "damaged", 0
    for whole in wholes:
        for position in range(0, len(whole), 7):
            for damaged in (flipped(whole, position, 6), whole[:position]):
                path.write_bytes(damaged)
                try:
                    assert load_image(path, max_pixels=256).mode == "RGB"
                except ImageError:
                    refused += 1
    assert refused > 100


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(1, 3_000_000))
def test_the_bound_on_pixels_holds_for_every_shape(width, height, max_pixels):
    """Guards: memory and vision tokens: no shape gets more than max_pixels, none is enlarged or vanishes."""
    fitted = fitted_size(width, height, max_pixels)
    assert fitted[0] * fitted[1] <= max_pixels
    assert 1 <= fitted[0] <= width
    assert 1 <= fitted[1] <= height


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (9000, 30), (1, 1), (50, 5000)])
@pytest.mark.parametrize("max_pixels", [4096, 1 << 20])
def test_a_line_is_no_shape_that_models_refuse(size, max_pixels, tmp_path):
    """Guards: a line gets a border, so that its property is described: Qwen's processors refuse 200 to 1."""
    Image.new("RGB", size, "black").save(tmp_path / "line.png")
    shown = load_image(tmp_path / "line.png", max_pixels=max_pixels)
    assert max(shown.size) / min(shown.size) < 200
    assert shown.width * shown.height <= max_pixels
    assert (shown.width < shown.height) == (size[0] < size[1])
    assert shown.getpixel((0, 0)) == (0, 0, 0)


def test_the_shape_is_kept():
    """Guards: pictures are not squeezed: 4000 x 3000 stays 4 to 3."""
    width, height = fitted_size(4000, 3000, 1 << 20)
    assert abs(width / height - 4 / 3) < 0.005
    assert width * height > 0.99 * (1 << 20)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_scaled_decoding_shows_the_same_picture(mode, tmp_path):
    """Guards: decoding a JPEG at a reduced scale changes speed, not the picture."""
    whole = picture(1600, 1200).convert(mode)
    whole.save(tmp_path / "large.jpg", quality=92)
    fast = pixels(tmp_path / "large.jpg", 10_000)
    with Image.open(tmp_path / "large.jpg") as slow:
        slow.load()
        size = (fast.shape[1], fast.shape[0])
        reference = np.asarray(slow.convert("RGB").resize(size, Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(fast - reference).mean() < 2


def test_photographs_are_not_decoded_in_full(tmp_path, monkeypatch):
    """Guards: throughput: a photograph is decoded at a reduced scale, not in full."""
    put(tmp_path / "photo.jpg", jpeg(tmp_path, 3000, 2000))
    decoded = []
    load = JpegImageFile.load

    def noted(image):
        decoded.append(image.size)
        return load(image)

    monkeypatch.setattr(JpegImageFile, "load", noted)
    load_image(tmp_path / "photo.jpg", max_pixels=40_000)
    assert set(decoded) == {(375, 250)}, "an eighth of each side"
    decoded.clear()
    load_image(tmp_path / "photo.jpg", max_pixels=ANY_SIZE)
    assert set(decoded) == {(3000, 2000)}


@pytest.mark.parametrize(("allowed", "shown"), [(10_486, (100, 75)), (12_000, (126, 94)), (7_500, (100, 75))])
def test_the_decoders_own_scale_is_taken_from_two_thirds_of_the_pixels(allowed, shown, tmp_path):
    """Guards: throughput: nothing is resized that a JPEG's decoder makes nearly as large as is allowed."""
    put(tmp_path / "photo.jpg", jpeg(tmp_path, 400, 300))
    assert load_image(tmp_path / "photo.jpg", max_pixels=allowed).size == shown


def test_pillow_is_left_as_it_was():
    """Guards: the process that loads images keeps its own Pillow settings."""
    from PIL import ImageFile

    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert Image.MAX_IMAGE_PIXELS is not None
    assert pytest.approx(MAX_SOURCE_PIXELS, abs=2) == Image.MAX_IMAGE_PIXELS * 2


def test_a_jpeg_of_thousands_of_scans_is_refused_at_once(tmp_path):
    """Guards: a JPEG with 6,400 scans, which takes 99 s to decode, costs a count of its markers."""
    path = tmp_path / "scans.jpg"
    picture(64, 48).save(path, progressive=True)
    data = path.read_bytes()
    last = data.rindex(b"\xff\xda")
    path.write_bytes(data[:last] + data[last:-2] * 6400 + data[-2:])
    with pytest.raises(ImageError, match="scans") as refused:
        load_image(path, max_pixels=1 << 20)
    assert refused.value.kind == "too_large"


@pytest.mark.parametrize("turned", [1, 3, 6, 8])
def test_a_picture_is_turned_once(turned, tmp_path):
    """Guards: a processor that looks for an orientation finds none any more."""
    exif = Image.Exif()
    exif[0x0112] = turned
    picture(64, 48).save(tmp_path / "turned.jpg", exif=exif)
    image = load_image(tmp_path / "turned.jpg", max_pixels=1 << 20)
    assert ImageOps.exif_transpose(image).tobytes() == image.tobytes()
    assert 0x0112 not in image.getexif()


@pytest.mark.parametrize("kind", [one for one in FORMATS if one != "TGA"])  # which begins with no signature
def test_a_file_is_recognised_by_what_is_in_it(kind, tmp_path):
    """Guards: a picture without a suffix, or with another's, is loaded, and is told from what is none."""
    path = tmp_path / "no-suffix"
    picture(64, 48).save(path, kind)
    assert recognised_format(path.read_bytes()[:32]) == kind
    assert load_image(path, max_pixels=1 << 20).mode == "RGB"


@pytest.mark.parametrize(
    "head", [b"", b"<html>", b"%PDF-1.7", b"property_id,price\n", b"Portland is", b"\x7fELF"]
)
def test_what_is_no_image_is_not_recognised(head):
    """Guards: text, pages and programs are not taken for images."""
    assert recognised_format(head) is None


def test_a_file_that_grows_while_it_is_read_is_bounded(monkeypatch):
    """Whoever appends to an image fills no worker's memory, and no shard of an export."""
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(images, "_PIECE_BYTES", 10)
    assert b"".join(read_pieces(io.BytesIO(bytes(100)), "p.jpg")) == bytes(100)
    endless = io.BytesIO(bytes(1000))
    with pytest.raises(images.ImageError, match="grew beyond 100 bytes"):
        list(read_pieces(endless, "p.jpg"))
    assert endless.tell() <= 110

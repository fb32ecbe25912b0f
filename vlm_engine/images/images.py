"""One image file to pixels, as a person would see it, and the records that carry a property's images.

This module reads a file without ever blocking, decodes it (Pillow), and sets orientation, colour and size. It
names the reasons why an image cannot be shown, and defines the outputs that a worker can make of a property's
images (``Output``). The processes that do it are in ``worker``. Neither NumPy nor torch is imported, so that
a worker starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from PIL import Image, UnidentifiedImageError, features

if TYPE_CHECKING:
    import numpy.typing as npt

ImageErrorKind = Literal[
    "missing",
    "denied",
    "not_a_file",
    "empty",
    "unreadable",
    "too_large",
    "io_error",
    "out_of_memory",
    "timed_out",
    "kills_worker",
    "no_decoder",
]

TRANSIENT_IMAGE_KINDS: Final[frozenset[ImageErrorKind]] = frozenset(
    {"io_error", "out_of_memory", "timed_out", "kills_worker", "no_decoder"}
)
"""Kinds that another try may cure; the others stay as they are until a person changes the file."""

MAX_FILE_BYTES: Final = 512 << 20
_PIECE_BYTES: Final = 4 << 20
"""Most photographs are one piece, which is not copied."""

MAX_JPEG_SCANS: Final = 500
"""A progressive JPEG has about ten. Each is decoded over the whole image: 6,400 took 99 s."""

MAX_SOURCE_PIXELS: Final = 178_956_970
"""Largest width times height that is decoded: the size at which Pillow itself refuses to open a file."""

MAX_SIDES_RATIO: Final = 100
"""Longer side of an image over its shorter one. Thinner images get a white border: Qwen's processors refuse
200, and their refusal would cost the whole property."""

ENOUGH_PIXELS: Final = 2 / 3
"""An image with at least this share of the allowed pixels is shown as its decoder scales it. A JPEG's decoder
halves each side once, twice or three times: a photograph of 12 megapixels is decoded to 0.75 megapixels in 30
ms. To 1.05 megapixels it took 68 ms, half of that for making 3 megapixels smaller."""

DECODING: Final = 3
"""Part of the fingerprint: raised when a version makes other pixels of the same file, here or in the image
processors."""

PIXELS_AHEAD: Final = 256_000_000
"""With so many pixels waiting for the model, no further batch is begun, at each stage before it: 768 MB as
RGB, and some 330,000 vision tokens of 28 x 28 pixels."""

FORMATS: Final = (
    *("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "HEIF", "JPEG2000", "ICO", "PCX", "TGA"),
)
"""Formats that are read. MPO is among them: Pillow knows it as JPEG, and fails on the name. HEIF is what
phones call HEIC. Left out on purpose: formats that run a program (EPS starts Ghostscript) and those that are
no picture."""

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
_HEIF_SIZE = re.compile(rb"ispe\0{4}(.{4})(.{4})", re.DOTALL)
_HEIF_BYTES_A_PIXEL: Final = 10
"""Memory that libheif takes: 100 MB for 12 megapixels."""

_OPTIONAL_DECODERS: Final = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}
"""Formats that a build of Pillow may lack, and its name for each."""

_SIGNATURES: Final = {
    "JPEG": [(0, b"\xff\xd8\xff")],
    "PNG": [(0, b"\x89PNG\r\n\x1a\n")],
    "GIF": [(0, b"GIF87a"), (0, b"GIF89a")],
    "WEBP": [(8, b"WEBP")],
    "TIFF": [(0, b"II*\0"), (0, b"MM\0*"), (0, b"II+\0"), (0, b"MM\0+")],
    "AVIF": [(4, b"ftypavif"), (4, b"ftypavis")],
    "HEIF": [(4, b"ftyp" + brand) for brand in _HEIF_BRANDS],
    "JPEG2000": [(0, b"\0\0\0\x0cjP  \r\n\x87\n"), (0, b"\xff\x4f\xff\x51")],
    "BMP": [(0, b"BM")],
    "ICO": [(0, b"\0\0\1\0")],
}

HEAD_BYTES: Final = 32
"""So many bytes of a file tell its format."""

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_DENIED = {errno.EACCES, errno.EPERM}
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(Exception):
    """An image that cannot be shown to the model: ``kind`` for counting, the message for a person."""

    def __init__(self, kind: ImageErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ImageErrorKind = kind


@dataclass(frozen=True)
class PropertyJob:
    """The images of one property that are to be loaded."""

    property_id: str
    ordinal: int
    image_uris: tuple[str, ...]
    """In the order of the catalogue: names that the pool's ``ImageSource`` locates, or paths without one."""


@dataclass(frozen=True)
class ImageFailure:
    """One image of a property that could not be shown, and why, as a sentence."""

    uri: str
    kind: ImageErrorKind
    error: str


@dataclass
class LoadedProperty:
    """A property ready for the model, as a worker made it (see ``Output``)."""

    property_id: str
    ordinal: int
    images: Sequence[npt.NDArray[Any]]
    """The output of each readable image, in the order of the catalogue: RGB pixels [height, width, 3], or the
    bytes of a file. Empty where the output is tensors."""
    seen: int
    """Number of readable images, whatever the output."""
    failed: tuple[ImageFailure, ...]
    seconds: float
    """Seconds of reading and decoding, summed over the images."""
    reading_seconds: float = 0.0
    """The part of these seconds for reading files."""
    processing_seconds: float = 0.0
    """Seconds for making the output of the decoded images."""
    tensors: Mapping[str, tuple[npt.NDArray[Any], str]] = field(default_factory=dict)
    """The output of all images together. See ``Made``."""
    refusal: str | None = None
    """Why no output can be made of these images, such as a processor's error."""
    with_images: Callable[[int], LoadedProperty] | None = None
    """Loads the property again with its first so many readable images."""


class Made(NamedTuple):
    """The output of one property's images.

    images: an array for each image, in order. tensors: arrays of the property as a whole, by name, and how
    each is joined with those of other properties (see ``vlm_engine.transformers.collation``).
    """

    images: Sequence[npt.NDArray[Any]] = ()
    tensors: Mapping[str, tuple[npt.NDArray[Any], str]] = {}


Maker = Callable[[Sequence[Image.Image]], Made]
"""Makes an output of a property's readable images: RGB, one or more."""


class Output(Protocol):
    """A kind of output. It is pickled and sent to the process from which all workers are forked."""

    def load(self) -> Maker:
        """Import and load everything that it needs, once for all workers. Starts no thread."""


@dataclass(frozen=True)
class Pixels:
    """The images as arrays [height, width, 3] of bytes."""

    def load(self) -> Maker:
        """See Output."""
        import numpy as np

        return lambda images: Made([np.asarray(image) for image in images])


def load_image(
    path: Path | str,
    *,
    max_pixels: int,
    when_read: Callable[[], None] = lambda: None,
    content: bytes | None = None,
) -> Image.Image:
    """Read one image: RGB, upright, over white where it is transparent, at most ``max_pixels`` in area.

    Images are never enlarged. An animated file gives its first frame. A JPEG is decoded at a reduced scale
    where that suffices (see ENOUGH_PIXELS), which saves most of the time of a photograph. A file that is cut
    short is refused, not filled up with grey. ``when_read`` is called between reading the file and decoding
    it. ``content``: of a file that was read already; then ``path`` is only its name.

    Raises:
        ImageError: with the kind and a sentence that names the file; nothing else for any content.
    """
    file_bytes = b""
    try:
        file_bytes = _read_regular_file(path) if content is None else content
        when_read()
        _refuse_many_scans(file_bytes, path)
        with Image.open(io.BytesIO(file_bytes), formats=_formats_of(file_bytes, path)) as image:
            return _pixels(image, path, max_pixels)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError("too_large", f"{path} has too many pixels to be decoded safely: {error}") from error
    except MemoryError as error:
        raise ImageError(
            "out_of_memory",
            f"There was not enough memory to decode {path}; set fewer VLM_ASSETS_DECODE_WORKERS.",
        ) from error
    except UnidentifiedImageError as error:
        if (missing := _missing_decoder(file_bytes)) is not None:
            raise ImageError("no_decoder", f"Pillow was built without {missing}: {path} needs it.") from error
        raise ImageError(
            "unreadable", f"{path} is not an image that can be read here ({_looks_like(file_bytes)})."
        ) from error
    except Exception as error:
        # For a broken file Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error,
        # zlib.error, KeyError … For people these are one fault.
        reason = str(error).strip().rstrip(".") or type(error).__name__  # libheif's text ends with a newline.
        raise ImageError(
            "unreadable", f"{path} is damaged or cut short and cannot be decoded: {reason}."
        ) from error


def recognised_format(head: bytes) -> str | None:
    """The format of a file that begins with these bytes, whatever its name; None: no image.

    HEAD_BYTES of them are enough. TGA is not recognised: it has no signature.
    """
    if head[4:12] in (b"ftypmif1", b"ftypmsf1") and b"avi" in head[16:]:
        return "AVIF"  # Such a file may be HEIF or AVIF; its other brands decide.
    for name, signatures in _SIGNATURES.items():
        if any(head.startswith(signature, offset) for offset, signature in signatures):
            return name
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace():
        return "PPM"
    if head[:1] == b"\x0a" and head[1:2] in b"\x00\x02\x03\x04\x05" and head[2:3] == b"\x01":
        return "PCX"
    return None


def common_name(name: str) -> str:
    """The name of a format that people know."""
    return "HEIC" if name == "HEIF" else name


def fitted_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest size of about the same shape with width times height at most ``max_pixels``."""
    if width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    fitted_width = min(max(1, int(width * scale)), max_pixels)
    return fitted_width, min(max(1, int(height * scale)), max_pixels // fitted_width)


@contextlib.contextmanager
def open_image(path: Path | str) -> Iterator[io.FileIO]:
    """Open the file of an image without ever blocking: regular, with at most MAX_FILE_BYTES.

    Raises ImageError.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:
        raise ImageError("missing", f"{path!r} cannot be the name of a file: {error}.") from error
    except OSError as error:
        raise _open_error(path, error) from error
    try:
        try:
            status = os.fstat(descriptor)
        except OSError as error:
            raise _read_error(path, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("not_a_file", f"{path} is {_kind_of_entry(status.st_mode)}, not an image file.")
        if status.st_size > MAX_FILE_BYTES:
            raise ImageError(
                "too_large", f"{path} is {status.st_size:,} bytes; more than {MAX_FILE_BYTES:,} is not read."
            )
        with io.FileIO(descriptor, closefd=False) as stream:
            yield stream
    finally:
        os.close(descriptor)


def read_pieces(stream: io.RawIOBase | io.BytesIO, path: Path | str) -> Iterator[bytes]:
    """The bytes of an open image in pieces, MAX_FILE_BYTES at most: a file may grow while it is read.

    Raises ImageError where it cannot be read, is empty, or has more.
    """
    count = 0
    try:
        while piece := stream.read(_PIECE_BYTES):
            count += len(piece)
            if count > MAX_FILE_BYTES:
                raise ImageError("too_large", f"{path} grew beyond {MAX_FILE_BYTES:,} bytes as it was read.")
            yield piece
    except OSError as error:
        raise _read_error(path, error) from error
    if not count:
        raise ImageError("empty", f"{path} has no bytes in it.")


def _read_regular_file(path: Path | str) -> bytes:
    with open_image(path) as stream:
        return b"".join(read_pieces(stream, path))


def _read_error(path: Path | str, error: OSError) -> ImageError:
    return ImageError("io_error", f"{path} could not be read: {error.strerror}.")


def _open_error(path: Path | str, error: OSError) -> ImageError:
    if error.errno in _MISSING:
        return ImageError("missing", f"{path} is not there: {error.strerror}.")
    if error.errno in _DENIED:
        return ImageError("denied", f"{path} may not be read by this user: {error.strerror}.")
    if error.errno == errno.ENXIO:
        return ImageError("not_a_file", f"{path} is a socket or a device, not an image file.")
    return ImageError("io_error", f"{path} could not be opened: {error.strerror}.")


def _kind_of_entry(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a device"


def _looks_like(file_bytes: bytes) -> str:
    if (name := recognised_format(file_bytes[:HEAD_BYTES])) is not None:
        return f"it begins as {common_name(name)} does, and is damaged or cut short"
    if file_bytes[4:8] == b"ftyp":
        return "it looks like a video"
    if file_bytes.lstrip()[:1] in (b"<", b"{"):
        return "it looks like text, perhaps a web page saved in place of the image; fetch it again"
    return f"it begins with {file_bytes[:8].hex(' ')}"


def _missing_decoder(file_bytes: bytes) -> str | None:
    """The format of an image, where this Pillow has no decoder for it; else None."""
    name = recognised_format(file_bytes[:HEAD_BYTES])
    return name if name in _OPTIONAL_DECODERS and not features.check(_OPTIONAL_DECODERS[name]) else None


def _formats_of(file_bytes: bytes, path: Path | str) -> tuple[str, ...]:
    """The formats that Pillow tries. For HEIC this checks the size first, and loads the decoder."""
    if recognised_format(file_bytes[:HEAD_BYTES]) != "HEIF":
        return tuple(name for name in FORMATS if name != "HEIF")
    try:
        import pillow_heif
    except ImportError as error:
        raise ImageError(
            "no_decoder",
            f"{path} is HEIC and was not read, for the extra 'heic' is not installed:"
            " pip install -c constraints.txt -e '.[heic]'",
        ) from error
    if "HEIF" not in Image.OPEN:
        # One thread; and the picture itself, never a smaller one, which may show something else.
        pillow_heif.register_heif_opener(
            decode_threads=0, thumbnails=False, depth_images=False, aux_images=False
        )
    # The decoded picture may be far larger than the part of it that is shown, and Pillow knows only that
    # part.
    sizes = [
        int.from_bytes(width, "big") * int.from_bytes(height, "big")
        for width, height in _HEIF_SIZE.findall(file_bytes)
    ]
    most = max(sizes, default=0)
    if most > MAX_SOURCE_PIXELS:
        raise ImageError(
            "too_large", f"{path} has {most:,} pixels; over {MAX_SOURCE_PIXELS:,} is not decoded."
        )
    try:
        # Allocated and freed: without enough memory libheif would call the image damaged.
        mmap.mmap(-1, _HEIF_BYTES_A_PIXEL * max(1, most)).close()
    except OSError as error:
        raise MemoryError from error
    return ("HEIF",)


def _refuse_many_scans(file_bytes: bytes, path: Path | str) -> None:
    # Compressed data never contains this marker: there a zero follows each byte of 0xff.
    if file_bytes.startswith(b"\xff\xd8") and (scans := file_bytes.count(b"\xff\xda")) > MAX_JPEG_SCANS:
        raise ImageError(
            "too_large", f"{path} has {scans:,} scans; a JPEG with more than {MAX_JPEG_SCANS} is not decoded."
        )


def _pixels(image: Image.Image, path: Path | str, max_pixels: int) -> Image.Image:
    if image.width * image.height > MAX_SOURCE_PIXELS:
        raise ImageError(
            "too_large",
            f"{path} is {image.width} x {image.height} pixels; over {MAX_SOURCE_PIXELS:,} is not decoded.",
        )
    width, height = fitted_size(image.width, image.height, max_pixels)
    if width < image.width:
        # A decoder never makes an image smaller than the requested size.
        image.draft("RGB", tuple(int(side * math.sqrt(ENOUGH_PIXELS)) for side in (width, height)))  # type: ignore[arg-type]  # two
    image.load()
    # After load(): Pillow's TIFF reader turns the image itself, and then changes the tag.
    upright = _UPRIGHT.get(_orientation(image))
    # The size again: load() may have turned the image or, in an icon, chosen a frame.
    rgb = _rgb(image)
    size = fitted_size(*rgb.size, max_pixels)
    if size != rgb.size:
        rgb = rgb.resize(size, Image.Resampling.HAMMING, reducing_gap=2.0)
    rgb = _no_thread(rgb, max_pixels)
    if upright is not None:
        rgb = rgb.transpose(upright)
    # Without its EXIF data: a processor that reads the orientation there would turn the image once more.
    rgb.info = {}
    return rgb


def _no_thread(rgb: Image.Image, max_pixels: int) -> Image.Image:
    """The image on white, if it is so thin that models would refuse it."""
    long, thin = max(rgb.size), min(rgb.size)
    if long <= thin * MAX_SIDES_RATIO:
        return rgb
    fitted = min(long, math.isqrt(max_pixels * MAX_SIDES_RATIO))
    wide = max(thin * fitted // long, fitted // MAX_SIDES_RATIO, 1)
    lies = rgb.width > rgb.height
    canvas = Image.new("RGB", (fitted, wide) if lies else (wide, fitted), "white")
    thin = max(1, thin * fitted // long)
    canvas.paste(rgb.resize((fitted, thin) if lies else (thin, fitted), Image.Resampling.LANCZOS))
    return canvas


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        # Damaged EXIF is common, and viewers ignore it too: no reason to lose the picture.
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    """To RGB; transparency over white, and more than 8 bits a channel scaled down instead of clipped."""
    if image.mode.startswith("I;16"):
        # Through 32 bits: Pillow calculates with 16 bits in one byte order only.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif image.mode in ("I", "F"):
        image = _stretched(image)
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _stretched(image: Image.Image) -> Image.Image:
    # 32-bit integers and floats name no range of their own: 0 to 255 where it fits, else darkest to lightest.
    low, high = (float(value) for value in image.getextrema())  # type: ignore[arg-type]  # one channel: two numbers
    if low >= 0 and 1 < high <= 255:
        return image.convert("L")
    scale = 255.0 / (high - low) if high > low else 0.0
    return image.convert("F").point(lambda value: value * scale - low * scale).convert("L")

"""How the images of a property reach a model server: as data URIs inside the request, wherever it runs.

What lives here: encoding, which workers do, and the URIs. What does not: loading and the cap on pixels
(``images/images.py``), and the request (``chat_completions.py``).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from PIL import Image

from resources.images.outputs import Made, Maker

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    EncodedImage = npt.NDArray[np.uint8]
    """The bytes of a PNG or JPEG file."""

JPEG_QUALITY: Final = 92
"""With colour at full resolution: the loss of a second compression is below what a model's resizing loses."""

_SMALL_PIXELS: Final = 128 * 128
"""A smaller image is sent as PNG: exact, and hardly larger."""

_LONGEST_JPEG_SIDE: Final = 65_500
"""Pixels. Pillow's JPEG has this limit; PNG has none."""


@dataclass(frozen=True)
class EncodedImages:
    """The images as files. See ``outputs.Output``."""

    def load(self) -> Maker:
        """See Output."""
        import numpy as np

        return lambda images: Made([np.frombuffer(encoded(image), np.uint8) for image in images])


def encoded(image: Image.Image) -> bytes:
    """An image as the bytes of a file: JPEG, or PNG where it is small or too long for JPEG."""
    stream = io.BytesIO()
    if image.width * image.height < _SMALL_PIXELS or max(image.size) > _LONGEST_JPEG_SIDE:
        image.save(stream, "PNG", compress_level=1)
    else:
        image.save(stream, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return stream.getvalue()


def _media_type(data: bytes) -> str:
    return "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"


def data_uris(images: Sequence[EncodedImage]) -> list[str]:
    """A data URI an image, in order."""
    files = [image.tobytes() for image in images]
    return [f"data:{_media_type(file)};base64,{base64.b64encode(file).decode()}" for file in files]

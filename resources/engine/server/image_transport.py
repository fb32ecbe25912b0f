"""How the images of a property reach a model server: inside the request, or as files that it may read.

What lives here: encoding (which workers do), data URIs, and a folder of short-lived files. What does not:
loading and the cap on pixels (``images/images.py``), and the request (``chat_completions.py``).
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from PIL import Image

from resources.engine.protocol import EngineLostError
from resources.images.outputs import Made, Maker
from resources.storage.lock_files import LockFile, taken

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

_SUFFIXES: Final = {"image/jpeg": ".jpg", "image/png": ".png"}


class ImageFolderError(EngineLostError):
    """The folder for images cannot be written, and no property could be asked about; the message names it."""


class ImageTransport(Protocol):
    """Makes URLs of images that the server can open. Called from several threads."""

    def urls(self, images: Sequence[EncodedImage]) -> list[str]:
        """A URL an image, in order."""

    def forget(self, urls: Sequence[str]) -> None:
        """They are not needed any more."""

    def close(self) -> None:
        """Leave nothing behind."""


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


class DataUris:
    """Images inside the request: works with every server, wherever it runs."""

    def urls(self, images: Sequence[EncodedImage]) -> list[str]:
        """A data URI an image."""
        files = [image.tobytes() for image in images]
        return [f"data:{_media_type(file)};base64,{base64.b64encode(file).decode()}" for file in files]

    def forget(self, urls: Sequence[str]) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing is left behind."""


class ImageFiles:
    """Images as files in a folder of this process below ``folder``, which the server was told it may read.

    Saves the third that base64 adds, and the parsing of megabytes of JSON. What a killed process left in
    ``folder`` is removed by the next. Raises ImageFolderError.
    """

    def __init__(self, folder: Path) -> None:
        self._numbers = itertools.count()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_left_behind(folder)
            self._folder = Path(tempfile.mkdtemp(prefix="images-", dir=folder))
            self._lock = LockFile(self._folder / ".lock")
            self._lock.wait()
            self._folder.chmod(0o755)  # the server may be another user's
        except OSError as error:
            raise _unwritable(folder, error) from error

    def urls(self, images: Sequence[EncodedImage]) -> list[str]:
        """A file URL an image. Raises ImageFolderError."""
        urls: list[str] = []
        for image in images:
            data = image.tobytes()
            path = self._folder / f"{next(self._numbers)}{_SUFFIXES[_media_type(data)]}"
            urls.append(path.as_uri())
            try:
                path.write_bytes(data)
            except OSError as error:
                self.forget(urls)
                raise _unwritable(self._folder, error) from error
        return urls

    def forget(self, urls: Sequence[str]) -> None:
        """Remove the files."""
        for url in urls:
            with contextlib.suppress(OSError):  # the folder's end removes it, or the next process
                (self._folder / url.rpartition("/")[2]).unlink()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def _remove_left_behind(folder: Path) -> None:
    for path in folder.glob("images-*/.lock"):
        with contextlib.suppress(OSError):  # another process removes it at this moment
            lock = taken(path)
            if lock is not None:  # its process is gone
                shutil.rmtree(path.parent, ignore_errors=True)
                lock.close()


def _unwritable(folder: Path, error: OSError) -> ImageFolderError:
    return ImageFolderError(
        f"images for the model server cannot be put into {folder}: {error}. Give a folder that this user may"
        " write and the server may read, with room, in VLM_ASSETS_SERVER_IMAGE_FOLDER; or unset it to send"
        " images inside the requests."
    )

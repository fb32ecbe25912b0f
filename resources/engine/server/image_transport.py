"""How the pixels of a property reach a model server: inside the request, or as files that it may read.

What lives here: encoding, data URIs, and a folder of short-lived files. What does not: loading and the cap on
pixels (``images.py``: the engine is handed pixels), and the request (``chat_request.py``).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from PIL import Image

from resources.engine.protocol import EngineLostError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

JPEG_QUALITY: Final = 92
"""With colour at full resolution: the loss of a second compression is below what a model's resizing loses."""

_SMALL_PIXELS: Final = 128 * 128
"""An image of fewer goes as PNG: exact, and hardly larger."""

_LONGEST_JPEG_SIDE: Final = 65_500
"""Pixels; Pillow's JPEG takes no longer one, PNG does."""

_SUFFIXES: Final = {"image/jpeg": ".jpg", "image/png": ".png"}


class ImageFolderError(EngineLostError):
    """The folder for images cannot be written, and no property could be asked about; the message names it."""


class ImageTransport(Protocol):
    """Makes URLs of images that the server can open. Called from several threads."""

    def urls(self, images: Sequence[Pixels]) -> list[str]:
        """A URL an image, in order; each image RGB of shape (height, width, 3)."""

    def forget(self, urls: Sequence[str]) -> None:
        """They are not needed any more."""

    def close(self) -> None:
        """Leave nothing behind."""


def encoded(image: Pixels) -> tuple[bytes, str]:
    """An image as a file's bytes, and its media type."""
    height, width = image.shape[:2]
    stream = io.BytesIO()
    if height * width < _SMALL_PIXELS or max(height, width) > _LONGEST_JPEG_SIDE:
        Image.fromarray(image).save(stream, "PNG", compress_level=1)
        return stream.getvalue(), "image/png"
    Image.fromarray(image).save(stream, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return stream.getvalue(), "image/jpeg"


class DataUris:
    """Images inside the request: works with every server, wherever it runs."""

    def urls(self, images: Sequence[Pixels]) -> list[str]:
        """A data URI an image."""
        pairs = map(encoded, images)
        return [f"data:{kind};base64,{base64.b64encode(data).decode()}" for data, kind in pairs]

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
            self._lock = os.open(self._folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._folder.chmod(0o755)  # the server may be another user's
        except OSError as error:
            raise _unwritable(folder, error) from error

    def urls(self, images: Sequence[Pixels]) -> list[str]:
        """A file URL an image. Raises ImageFolderError."""
        urls: list[str] = []
        for image in images:
            data, kind = encoded(image)
            path = self._folder / f"{next(self._numbers)}{_SUFFIXES[kind]}"
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
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _remove_left_behind(folder: Path) -> None:
    for lock in folder.glob("images-*/.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its process lives
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> ImageFolderError:
    return ImageFolderError(
        f"images for the model server cannot be put into {folder}: {error}. Give a folder that this user may"
        " write and the server may read, with room, in VLM_ASSETS_SERVER_IMAGE_FOLDER; or unset it to send"
        " images inside the requests."
    )

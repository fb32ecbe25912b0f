"""The image root: the folder, or folders, that a catalogue's images lie in, on disk or S3, and may not leave.

A path from a listing becomes an image URI: relative to the root, with forward slashes, nothing escaped. A
path that leads out of the root is refused (path traversal). Decoding images is in `vlm_engine.images.images`.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from vlm_durable.mirror.bucket import NoObjectError, ObjectDeniedError, Place, S3Folder
from vlm_engine.images.fetching import image_of

# A relative path of plain ASCII with nothing in it to refuse or to normalize: nearly all of millions.
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_. -]*(?:/[A-Za-z0-9_-][A-Za-z0-9_. -]*)*")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class InvalidImagePathError(ValueError):
    """A path that names no image: empty, with a NUL byte, not UTF-8, a folder, or another kind of address."""


class ImageOutsideRootError(InvalidImagePathError):
    """A path that leaves the image root by ``..``, by being absolute, or through a symbolic link."""


@dataclass(frozen=True)
class ImageRoot:
    """A folder of images. ``path`` is absolute and as given; ``real`` has its symbolic links resolved."""

    path: str
    real: str
    _folders: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    fetch: ClassVar[None] = None
    """Reads an image's bytes; None: from the file that ``locate`` names."""

    @property
    def advice(self) -> str:
        """What to check where no image can be read."""
        return f"Is the disk of {self.path} mounted, and may this user read it?"

    @classmethod
    def at(cls, path: Path) -> ImageRoot:
        """The root at ``path``, which need not exist (a home may be opened before its disk is mounted)."""
        absolute = str(path.absolute())
        return cls(path=absolute, real=os.path.realpath(absolute))

    @property
    def places(self) -> tuple[Place, ...]:
        """The folder."""
        return (Path(self.path),)

    def as_written(self, uri: str) -> str:
        """A path for which ``uri`` gives this URI."""
        return uri

    def uri(self, written: str) -> str:
        """The image URI of a path from a listing, relative to the root or absolute inside it.

        Links are not resolved here, except where the text alone cannot say where the path leads (``..``).
        Raises InvalidImagePathError, or ImageOutsideRootError where it leaves the root.
        """
        if _PLAIN.fullmatch(written):
            return written
        check_text(written)
        if _SCHEME.match(written):
            if written[:5].lower() == "s3://":
                raise InvalidImagePathError(f"it is on S3, and this source's images lie under {self.path}")
            raise InvalidImagePathError("an image is given as a path, not as a URL")
        if written.startswith("/"):
            for root in (self.path, self.real):
                if written.startswith(_within(root)):
                    written = written[len(_within(root)) :].lstrip("/")
                    break
            else:
                written = self._resolved(written)
        if ".." in written.split("/"):
            written = self._resolved(f"{self.real}/{written}")
        uri = posixpath.normpath(written)
        if uri == ".":
            raise InvalidImagePathError("the path names the image root itself, not an image")
        return uri

    def locate(self, uri: str) -> Path:
        """The path of an image, links resolved, whether it exists or not. Raises ImageOutsideRootError."""
        check_text(uri)
        return Path(_within(self.real) + self._resolved(f"{self.real}/{uri}"))

    def size(self, uri: str) -> int | None:
        """Bytes of an image, or None where none can be read there. One ``lstat`` in the plain case.

        Raises ImageOutsideRootError where a link leads out, InvalidImagePathError where it is no file.
        """
        folder, _, name = uri.rpartition("/")
        real_folder = self._folder(folder)
        if real_folder is None:
            raise ImageOutsideRootError(f"a link leads out of {self.path}")
        try:
            status = os.lstat(f"{real_folder}/{name}")
            if stat.S_ISLNK(status.st_mode):
                status = self.locate(uri).stat()
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise InvalidImagePathError("it is a folder or a device, not a file")
        return status.st_size

    def read_error(self, uri: str) -> str | None:
        """Why an image cannot be read now; None where it can."""
        try:
            descriptor = os.open(self.locate(uri), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return "it is no file"
                os.read(descriptor, 1)
            finally:
                os.close(descriptor)
        except OSError as error:
            return os.strerror(error.errno or errno.EIO)
        except InvalidImagePathError as error:
            return str(error)
        return None

    def _folder(self, folder: str) -> str | None:
        """The real path of a folder under the root, None where it lies outside; remembered."""
        if folder not in self._folders:
            real = os.path.realpath(f"{self.real}/{folder}")
            self._folders[folder] = real if f"{real}/".startswith(_within(self.real)) else None
        return self._folders[folder]

    def _resolved(self, absolute: str) -> str:
        """A path's place under the root once its links are resolved. Raises ImageOutsideRootError."""
        try:
            real = os.path.realpath(absolute)
        except OSError as error:
            raise InvalidImagePathError(f"the path cannot be followed: {error.strerror}") from error
        if not f"{real}/".startswith(_within(self.real)):
            raise ImageOutsideRootError(f"it leads to {real}, outside {self.path}")
        return real[len(_within(self.real)) :]


@dataclass(frozen=True)
class S3ImageRoot:
    """A folder of images on S3. A URI is the rest of an object's key: a store resolves no ``..`` or links."""

    folder: S3Folder

    @property
    def path(self) -> str:
        """Its address."""
        return str(self.folder)

    real = path

    @property
    def advice(self) -> str:
        """What to look at where no image can be read."""
        return f"Is {self.path} there, and may these credentials read it?"

    @property
    def places(self) -> tuple[Place, ...]:
        """The folder."""
        return (self.folder,)

    def as_written(self, uri: str) -> str:
        """An address for which ``uri`` gives this URI."""
        return uri

    def uri(self, written: str) -> str:
        """The image URI of a key relative to the root, or of a full address inside it.

        Raises InvalidImagePathError, or ImageOutsideRootError where it leaves the root.
        """
        if _PLAIN.fullmatch(written):
            return written
        check_text(written)
        if _SCHEME.match(written):
            if not written.startswith(start := self.folder.address("")):
                raise ImageOutsideRootError(f"it is not below {start}")
            written = written.removeprefix(start)
        # What lies between client and store may resolve these as a browser does.
        if written.startswith("/") or not {".", ".."}.isdisjoint(written.split("/")):
            raise ImageOutsideRootError(f"it has a part that may lead out of {self.path}")
        if not written or written.endswith("/"):
            raise InvalidImagePathError("the address names a folder, not an image")
        return written

    def locate(self, uri: str) -> str:
        """The address of an image, there or not. Raises InvalidImagePathError."""
        return self.folder.address(self.uri(uri))

    def size(self, uri: str) -> int | None:
        """Bytes of an image, or None where none can be read there. Raises StoreAwayError."""
        try:
            return self.folder.peek(uri)[1]
        except (NoObjectError, ObjectDeniedError):
            return None

    def read_error(self, uri: str) -> str | None:
        """Why an image cannot be read now; None where it can. Raises StoreAwayError."""
        try:
            self.folder.peek(uri)
        except (NoObjectError, ObjectDeniedError) as error:
            return str(error)
        return None

    def fetch(self, address: str) -> bytes:
        """The bytes of an image that ``locate`` named. Raises ImageError, StoreAwayError."""
        return image_of(self.folder, address.removeprefix(self.folder.address("")))


@dataclass(frozen=True)
class ImageRoots:
    """Several folders of images. URIs of the first are as in ImageRoot; those of the Nth begin with ``/N/``.

    searched: positions of the roots in which a relative path is looked up, in this order.
    """

    roots: tuple[ImageRoot, ...]
    searched: tuple[int, ...]
    fetch: ClassVar[None] = None

    @property
    def path(self) -> str:
        """All of them, for messages."""
        return " and ".join(root.path for root in self.roots)

    @property
    def real(self) -> str:
        """All of them, links resolved."""
        return " and ".join(root.real for root in self.roots)

    @property
    def places(self) -> tuple[Place, ...]:
        """The folders."""
        return tuple(Path(root.path) for root in self.roots)

    @property
    def advice(self) -> str:
        """What to look at where no image can be read."""
        return f"Are the disks of {self.path} mounted, and may this user read them?"

    def uri(self, written: str) -> str:
        """As ``ImageRoot.uri``. A relative path belongs to the root that has the file; else to the first."""
        if written.startswith("/"):
            for position, root in enumerate(self.roots):
                try:
                    return _numbered(position, root.uri(written))
                except ImageOutsideRootError:
                    continue
            raise ImageOutsideRootError(f"it lies in none of {self.path}")
        uris = {position: self.roots[position].uri(written) for position in self.searched}
        positions = [
            position
            for position, uri in uris.items()
            if os.path.lexists(f"{self.roots[position].real}/{uri}")
        ]
        if len(positions) > 1:
            places = " and in ".join(self.roots[position].path for position in positions)
            raise InvalidImagePathError(f"the image is in {places}: write its whole path")
        position = positions[0] if positions else self.searched[0]
        return _numbered(position, uris[position])

    def as_written(self, uri: str) -> str:
        """A path for which ``uri`` gives this URI."""
        root, uri = self._root_of(uri)
        return f"{root.path}/{uri}"

    def locate(self, uri: str) -> Path:
        """As ``ImageRoot.locate``."""
        root, uri = self._root_of(uri)
        return root.locate(uri)

    def size(self, uri: str) -> int | None:
        """As ``ImageRoot.size``."""
        root, uri = self._root_of(uri)
        return root.size(uri)

    def read_error(self, uri: str) -> str | None:
        """As ``ImageRoot.read_error``."""
        root, uri = self._root_of(uri)
        return root.read_error(uri)

    def _root_of(self, uri: str) -> tuple[ImageRoot, str]:
        if not uri.startswith("/"):
            return self.roots[0], uri
        number, _, rest = uri[1:].partition("/")
        if not number.isdecimal() or not 2 <= int(number) <= len(self.roots) or not rest:
            raise ImageOutsideRootError(f"the catalogue has no image root of {uri!r}")
        return self.roots[int(number) - 1], rest


AnyImageRoot = ImageRoot | S3ImageRoot | ImageRoots


def roots_at(places: Sequence[Place]) -> AnyImageRoot:
    """The image root at one or several places, which need not exist. Raises InvalidImagePathError."""
    if len(places) == 1:
        return S3ImageRoot(places[0]) if isinstance(places[0], S3Folder) else ImageRoot.at(places[0])
    folders = [place for place in places if isinstance(place, Path)]
    if len(folders) != len(places):
        raise InvalidImagePathError(
            "of several image roots each is a folder of this machine; of images on S3, name the one folder"
            " above them"
        )
    return ImageRoots(tuple(map(ImageRoot.at, folders)), tuple(range(len(folders))))


def _numbered(position: int, uri: str) -> str:
    return f"/{position + 1}/{uri}" if position else uri


def check_text(text: str) -> None:
    """Refuse text that is no path: empty, with a NUL byte, or not UTF-8 (read with surrogateescape)."""
    if not text:
        raise InvalidImagePathError("the path is empty")
    if "\0" in text:
        raise InvalidImagePathError("the path holds a NUL byte")
    if not is_utf8(text):
        raise InvalidImagePathError("the path is not UTF-8")


def is_utf8(text: str) -> bool:
    """Whether text can be written as UTF-8: bytes that could not be decoded leave lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _within(root: str) -> str:
    return root.rstrip("/") + "/"

"""Images of an export: where its rows say that they are, their copies in its folder, their bytes in rows.

A name is the catalogue's: relative to the image root. A URI opens, from the export's folder, or is null.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import pyarrow as pa

from vlm_assets.services.command_error import CommandError
from vlm_catalog.catalog import Catalog
from vlm_catalog.image_root import InvalidImagePathError
from vlm_catalog.ranges import InvalidRangeError, PropertyRange
from vlm_durable.commands import given_command
from vlm_durable.files.files import TemporaryFile, make_directory, publish_replacing, sync_directory
from vlm_engine.images.fetching import THREADS
from vlm_engine.images.images import (
    HEAD_BYTES,
    ImageError,
    ImageErrorKind,
    open_image,
    read_pieces,
    recognised_format,
)


class Images(StrEnum):
    """How rows give their images on."""

    link = "link"
    copy = "copy"
    embed = "embed"
    none = "none"


FOLDER: Final = "images"
"""Folder of the copies in an export: one for each shard, each image under its SHA-256."""

EMBEDDED_BYTES: Final = 16 << 20
"""Largest image that is embedded."""

IMAGES_TOGETHER: Final = 32
"""Images to embed that are read at a time: as many rows as have them, or one."""

_ROW_BYTES: Final = 1 << 30
"""Embedded bytes of one property, at most: further images count as too large."""

_GROUP_BYTES: Final = 64 << 20
"""Embedded bytes of a row group, about. A reader holds a whole one."""

_SETTLED: Final[frozenset[ImageErrorKind]] = frozenset({"too_large", "unreadable", "empty"})
"""Kinds of failure of a file that can be read: it is not tried again at the next export."""

_FORMATS: Final = {
    "JPEG": (".jpg", "image/jpeg"),
    "PNG": (".png", "image/png"),
    "GIF": (".gif", "image/gif"),
    "WEBP": (".webp", "image/webp"),
    "TIFF": (".tif", "image/tiff"),
    "AVIF": (".avif", "image/avif"),
    "HEIF": (".heic", "image/heic"),
    "JPEG2000": (".jp2", "image/jp2"),
    "BMP": (".bmp", "image/bmp"),
    "ICO": (".ico", "image/x-icon"),
    "PPM": (".ppm", "image/x-portable-pixmap"),
    "PCX": (".pcx", "image/x-pcx"),
    "TGA": (".tga", "image/x-tga"),
}
"""The suffix of a copy and its media type, by what the file is and not by its name."""

EMBEDDED: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An image as Hugging Face's ``Image()`` has it."""

_Done = TypeVar("_Done")

_FAILURE: Final = pa.struct([("name", pa.string()), ("kind", pa.string()), ("error", pa.string())])


@dataclass
class ShardImages:
    """The images of one shard. uris: by name. failed: those without a URI or without bytes, and why.

    copies: files in the shard's folder, with their sizes.
    """

    uris: dict[str, str | None] = field(default_factory=dict)
    failed: dict[str, ImageErrorKind] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)

    def note(self) -> dict[str, Any]:
        """What the shard's note keeps: counts, names to be tried again, and a digest of the copies."""
        return {
            "images": len(self.uris) - len(self.failed),
            "images_missing": len(self.failed),
            "unread": sorted(name for name, kind in self.failed.items() if kind not in _SETTLED),
            "copies": _copies_digest(self.copies),
        }


class ExportedImages:
    """The images of one export.

    base_url: stands before a name, or before the path of a copy; None: paths of this machine, addresses on
    S3, and of copies the path from the export's folder.
    """

    def __init__(self, catalog: Catalog, folder: Path, mode: Images, base_url: str | None = None) -> None:
        if base_url is not None and mode is Images.none:
            raise CommandError("--image-base-url says where images are, and --images none names no image.")
        if base_url is not None and (not base_url.isprintable() or not base_url.strip()):
            raise CommandError(f"--image-base-url {base_url!r} is no address.")
        self.mode = mode
        self._root = catalog.images
        self._folder = folder / FOLDER
        self._base = base_url if base_url is None or base_url.endswith(("/", "=")) else f"{base_url}/"

    @property
    def roots(self) -> list[str]:
        """The folders, or the address on S3, that names are relative to; ``/2/`` begins one of the second."""
        return [] if self.mode is Images.none else [str(place) for place in self._root.places]

    @property
    def question(self) -> tuple[Images, str | None]:
        """What was asked of the images."""
        return self.mode, self._base

    def refuse_away(self) -> None:
        """Raise CommandError where a folder of images is away: all of its images would count as missing."""
        if self.mode is Images.none or (self.mode is Images.link and self._base is not None):
            return  # No file of this machine is looked at, and no object.
        for place in self._root.places:
            if isinstance(place, Path) and not _has_entries(place):
                raise CommandError(
                    f"There is nothing in {place}, which has the images. Nothing was changed."
                    f" {self._root.advice} To export without images:"
                    f" {given_command('--images', 'none')}."
                )

    def readable(self, names: Iterable[str]) -> bool:
        """Whether one of these images, which could not be read, can be now. Raises StoreAwayError."""
        return any(self._root.read_error(name) is None for name in names)

    def place(self, table: pa.Table, key: str) -> tuple[pa.Table, ShardImages]:
        """Say in each row where its images are; in the mode ``copy``, copy them first.

        table: has ``image_names``, ``images_used`` and ``images_failed`` as published. An image that fails
        has no URI. Raises StoreAwayError, OSError (the export's disk).
        """
        shard = ShardImages()
        if self.mode is Images.none:
            return table.drop_columns(["image_names", "images_used", "images_failed"]), shard
        listed, used = table["image_names"].to_pylist(), table["images_used"].to_pylist()
        names = list(dict.fromkeys(chain.from_iterable(row or () for row in (*listed, *used))))
        if self.mode is Images.copy:
            make_directory((self._folder / key).absolute())
        with ThreadPoolExecutor(THREADS) as pool:
            for name, outcome in zip(
                names, pool.map(_guarded(partial(self._placed, key)), names), strict=True
            ):
                if isinstance(outcome, ImageError):
                    shard.uris[name], shard.failed[name] = None, outcome.kind
                else:
                    shard.uris[name], copied = outcome
                    shard.copies |= copied
        for column, rows in (("image_uris", listed), ("images_used", used)):
            uris = [None if row is None else [shard.uris[name] for name in row] for row in rows]
            table = _with_column(table, column, pa.array(uris, pa.list_(pa.string())))
        failed = [
            None if row is None else [{"name": failure.pop("uri"), **failure} for failure in row]
            for row in table["images_failed"].to_pylist()
        ]
        return _with_column(table, "images_failed", pa.array(failed, pa.list_(_FAILURE))), shard

    def embedded(self, table: pa.Table, shard: ShardImages, *, as_text: bool) -> Iterator[pa.Table]:
        """The rows with their images' bytes in the column ``images``, a row group at a time.

        as_text: as ``data:`` URIs. An image that fails is null, and counted in the shard.
        """
        type_ = pa.list_(pa.string() if as_text else EMBEDDED)
        waiting: list[pa.Table] = []
        with ThreadPoolExecutor(THREADS) as pool:
            for rows in _few_images_each(table):
                listed = [row or () for row in rows["image_names"].to_pylist()]
                names = list(dict.fromkeys(chain.from_iterable(listed)))
                contents: dict[str, object] = dict.fromkeys(names)
                room = _ROW_BYTES
                for start in range(0, len(names), IMAGES_TOGETHER):
                    few = names[start : start + IMAGES_TOGETHER] if room else ()
                    for name, outcome in zip(few, pool.map(_guarded(self._read), few), strict=True):
                        if isinstance(outcome, ImageError):
                            shard.failed[name] = outcome.kind
                        elif len(outcome[1]) <= room:
                            contents[name] = (
                                f"data:{outcome[0]};base64,{b64encode(outcome[1]).decode()}"
                                if as_text
                                else {"bytes": outcome[1], "path": name}
                            )
                            room -= len(outcome[1])
                        else:
                            room = 0
                for name, content in contents.items():
                    if content is None:
                        shard.failed.setdefault(name, "too_large")
                column = pa.array([[contents[name] for name in row] for row in listed], type_)
                waiting.append(rows.append_column("images", column))
                if sum(part["images"].nbytes for part in waiting) >= _GROUP_BYTES:
                    yield pa.concat_tables(waiting)
                    waiting = []
        if waiting:
            yield pa.concat_tables(waiting)

    def holds(self, key: str, note: Mapping[str, Any]) -> bool:
        """Whether the copies of a shard are those of its note, by their names and sizes, and no other."""
        return bool(note["copies"] == _copies_digest(_sizes(self._folder / key)))

    def remove_others(self, key: str, shard: ShardImages) -> None:
        """Remove copies that no row of the shard names: of earlier rows, or begun and not finished."""
        _remove(self._folder / key, except_for=shard.copies)

    def copied_keys(self) -> list[str]:
        """The shards that have a folder of copies."""
        with contextlib.suppress(FileNotFoundError):
            return [path.name for path in self._folder.iterdir() if _is_key(path.name)]
        return []

    def remove(self, key: str) -> None:
        """Remove all copies of a shard."""
        folder = self._folder / key
        _remove(folder)
        with contextlib.suppress(OSError):  # A person's own file is in it.
            folder.rmdir()

    def _placed(self, key: str, name: str) -> tuple[str, dict[str, int]]:
        """The URI of an image, and its copy. Raises ImageError, InvalidImagePathError."""
        if self.mode is Images.copy:
            file, size = self._copy(key, name)
            return f"{self._base or ''}{FOLDER}/{key}/{file}", {file: size}
        if self._base is not None:
            return self._base + quote(name.lstrip("/")), {}
        # Of millions of objects it would cost a request each to know which are gone.
        if self._root.fetch is None and self._root.size(name) is None:
            raise ImageError("missing", f"{name} is not there.")
        return str(self._root.locate(name)), {}

    def _copy(self, key: str, name: str) -> tuple[str, int]:
        """Copy one image into the folder of a shard. Returns the file's name and size."""
        with self._opened(name) as pieces:
            copy = TemporaryFile(self._folder / key / "copy")
            try:
                suffix = ""
                for piece in pieces:
                    suffix = suffix or _format_of(piece, name)[0]
                    copy.write(piece)
                file = f"{copy.seal()}{suffix}"
                publish_replacing(copy.path, self._folder / key / file)
            except BaseException:
                copy.discard()
                raise
        return file, copy.size

    def _read(self, name: str) -> tuple[str, bytes]:
        """The media type and the bytes of an image that is small enough to be embedded."""
        content = b""
        with self._opened(name) as pieces:
            for piece in pieces:
                content += piece
                if len(content) > EMBEDDED_BYTES:
                    raise ImageError("too_large", f"{name} is too large to be embedded.")
        return _format_of(content, name)[1], content

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Iterator[bytes]]:
        place = self._root.locate(name)
        if self._root.fetch is not None:
            yield read_pieces(io.BytesIO(self._root.fetch(str(place))), place)
            return
        with open_image(place) as stream:
            # It was inside the root a moment ago. A link that was put there since is not followed.
            if Path(f"/proc/self/fd/{stream.fileno()}").readlink() != place:
                raise ImageError("denied", f"{name} was exchanged while it was opened.")
            yield read_pieces(stream, place)


def _guarded(act: Callable[[str], _Done]) -> Callable[[str], _Done | ImageError]:
    """The same, with the ImageError returned: it costs the image, any other error the export."""

    def guarded(name: str) -> _Done | ImageError:
        try:
            return act(name)
        except ImageError as error:
            return error
        except InvalidImagePathError as error:
            return ImageError("denied", f"{name} is not opened: {error}.")

    return guarded


def huggingface_features(schema: pa.Schema) -> pa.Schema:
    """The schema with a note by which Hugging Face's datasets decode the embedded images."""
    note = {"info": {"features": {"images": [{"_type": "Image"}]}}}
    return schema.with_metadata({"huggingface": json.dumps(note)})


def _few_images_each(table: pa.Table) -> Iterator[pa.Table]:
    """The rows in parts of at most IMAGES_TOGETHER images, or of one row."""
    start = images = 0
    for at, row in enumerate(table["image_names"].to_pylist()):
        count = len(row or ())
        if images and images + count > IMAGES_TOGETHER:
            yield table.slice(start, at - start)
            start, images = at, 0
        images += count
    if start < table.num_rows:
        yield table.slice(start)


def _with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.append_column(name, column) if at < 0 else table.set_column(at, name, column)


def _format_of(head: bytes, name: str) -> tuple[str, str]:
    """The suffix and the media type of a file that begins like this. Raises ImageError: it is no image."""
    format_ = recognised_format(head[:HEAD_BYTES]) or ("TGA" if name.lower().endswith(".tga") else "")
    if format_ not in _FORMATS:
        raise ImageError("unreadable", f"{name} is not an image that is known here.")
    return _FORMATS[format_]


def _copies_digest(copies: Mapping[str, int]) -> str:
    lines = "".join(f"{file} {size}\n" for file, size in sorted(copies.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    """The size of each file of a folder; -1 for what is none."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return {
            entry.name: entry.stat().st_size if entry.is_file(follow_symlinks=False) else -1
            for entry in entries
        }
    return {}


def _remove(folder: Path, except_for: Collection[str] = ()) -> None:
    others = [name for name in _sizes(folder) if name not in except_for]
    for name in others:
        (folder / name).unlink()
    if others:
        sync_directory(folder)


def _has_entries(place: Path) -> bool:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        return next(entries, None) is not None
    return False


def _is_key(name: str) -> bool:
    with contextlib.suppress(InvalidRangeError):
        PropertyRange.from_key(name)
        return True
    return False

"""Sources of properties and their images: folder trees, CSV, JSONL and parquet, read record by record.

- A folder: every folder in it is a property and its name the id, in the order of the names' code points;
  the image files in it are its images, in natural order (2.jpg before 10.jpg, any case). If it has no image
  but a single folder, those in that folder are (ID/photos/1.jpg). Other folders in it are counted in the
  report, since REGION/ID/1.jpg looks like that too; with ``nested`` their images are taken. A file with one
  of IMAGE_SUFFIXES is an image; any other is recognised by its first bytes, whatever its name. Hidden names
  are passed over; files that are no images are named in the report.
- A folder on S3, in the same way: ``s3://BUCKET/PREFIX`` with ID/IMAGE below it, the ids in the order of the
  store. Sizes come with the listing, so that no object is asked for twice.
- ``.csv``, ``.tsv``, ``.txt`` with a header; delimiter and encoding are detected (``text_listing.py``):
  ``property_id`` (or ``id``) and either ``images`` (or ``image_uris``), one row a property, the images
  separated by ``|`` or as a JSON array; or ``image`` (or ``image_uri``, ``image_path``), one row an image,
  the rows of an id anywhere in the file.
- ``.jsonl`` or ``.ndjson``: one object a property, ``property_id`` and ``images``, an array of strings.
- ``.parquet``: ``property_id`` and ``images`` (list<string>), or one row an image with ``image``.

Other columns are not looked at. Ids are text exactly as written (CSV 00123 stays 00123); a whole number in
JSONL or parquet is taken as its digits. Lines count from 1, a CSV's header included; parquet counts rows.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from io import TextIOWrapper
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_catalog.image_root import is_utf8
from vlm_catalog.text_listing import (
    IMAGES_IN_ROW,
    LIKELY_ENCODING,
    Encoding,
    Lines,
    LongRowError,
    csv_rows,
    find_delimiter,
    find_encoding,
    likely_reading,
    open_text,
)
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory
from vlm_durable.files.processes import memory_limit
from vlm_durable.mirror.bucket import NoObjectError, ObjectDeniedError, Place, S3Folder
from vlm_durable.wording import counted
from vlm_engine.images.images import recognised_format

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".tif", ".tiff", ".bmp", ".gif"}
    | {".tga", ".heic", ".heif"}
)
"""Files with these suffixes are not opened: opening 12 million files takes hours on a network disk. If one is
no image, its row says so. TGA has no signature to look for."""

_LISTINGS = frozenset({".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".parquet"})

ID_COLUMNS = ("property_id", "id")
LIST_COLUMNS = ("images", "image_uris")
SINGLE_COLUMNS = ("image", "image_uri", "image_path")

LIKELY_ID_COLUMNS = (
    "listing_id", "listing", "property", "property_ref", "mls_id", "mls_number", "mls", "object_id",
    "ad_id", "reference", "ref",
)  # fmt: skip
LIKELY_LIST_COLUMNS = ("photos", "pictures", "image_paths", "image_files", "photo_paths", "photo_files")
LIKELY_SINGLE_COLUMNS = (
    "photo", "picture", "image_file", "photo_path", "photo_file", "file_name", "file", "path",
)  # fmt: skip
"""Names that are taken where none of those above is there, and the report says so."""

MAX_ID = 1000
"""Characters."""

MAX_IMAGES = 10_000
"""Images of one property."""

MAX_PATH = 4096
"""Characters of an image's path: PATH_MAX of Linux."""

_MAX_COLUMNS = 1000
_MAX_ROW_GROUPS = 100_000
_MAX_FOOTER_BYTES = 16 << 20
_ROWS_AT_ONCE = 1024
_IMAGES_AT_ONCE = 16_384
_PARQUET_BYTES = 1 << 30
"""Memory that unpacking a part of a parquet file may take."""

_UNPACKED_SHARE = 200
_UNPACKED_BYTES = 128 << 20
_ENTRY_BYTES = 64
"""Limits of what a listing may unpack to, by its size and in bytes: 138 KB once took 3.5 GB."""

INNER_FOLDERS = "folders inside property folders"
"""A kind of the notes: `--nested` takes the images in them."""

NOT_IMAGES = "files that are not images"
"""A kind of the notes, whose first files are named too."""

BESIDE = "files beside the property folders"

HIDDEN = "hidden files or folders"

SINGULAR: Final = {
    INNER_FOLDERS: "folder inside a property folder",
    NOT_IMAGES: "file that is not an image",
    BESIDE: "file beside the property folders",
    HIDDEN: "hidden file or folder",
}
"""The singular of each kind of what is passed over."""

_NAMED_PROBLEMS = 20
_NAMED_NOT_IMAGES = 10
_SIGNATURE_BYTES = 32
_FOLDERS_AT_ONCE = 4096
FOLDERS_DEEP = 8
"""Folders below a property's own, one in the other, that are looked into."""
_DIGITS = re.compile(r"([0-9]+)")


class ListingError(Exception):
    """A source of properties that is refused as a whole; nothing was changed."""


class Listed(NamedTuple):
    """One record: a property with its images as they were written, or one image of it."""

    property_id: str
    images: Sequence[str]
    line: int
    sizes: Sequence[int] | None = None
    """Bytes of the images, where the source says them."""


@dataclass(frozen=True)
class ReadingOptions:
    """How a text listing is read. None: detected. image_separator: between the images of one field."""

    delimiter: str | None = None
    encoding: str | None = None
    image_separator: str = "|"
    id_column: str | None = None
    image_column: str | None = None
    nested: bool = False

    def words(self) -> list[str]:
        """The options that were given, as words of a command."""
        words = []
        if self.delimiter is not None:
            words += ["--delimiter", "tab" if self.delimiter == "\t" else self.delimiter]
        if self.encoding is not None:
            words += ["--encoding", self.encoding]
        if self.image_separator != "|":
            words += ["--image-separator", self.image_separator]
        if self.id_column is not None:
            words += ["--id-column", self.id_column]
        if self.image_column is not None:
            words += ["--image-column", self.image_column]
        if self.nested:
            words.append("--nested")
        return words


DETECTED = ReadingOptions()
"""No option is given: everything is detected."""


@dataclass(frozen=True)
class IngestRequest:
    """The source of an ingest and how it is taken in. Messages suggest it again as a whole command.

    range_size: properties of a new range; None: as in the catalogue, at first 1,000. image_root: the folder,
    or the folders on disk, or the one on S3, that image paths are relative to and may not leave; default:
    the source's folder, or for a listing those of the catalogue if it has several. update: take changed
    images of known properties too. close: make a smaller range of the last properties. skip_bad: write
    entries that cannot be taken to a reject file in the home, and take the rest. options: how a source is
    read.
    """

    source: Place
    range_size: int | None = None
    image_root: Place | Sequence[Place] | None = None
    update: bool = False
    close: bool = False
    skip_bad: bool = False
    options: ReadingOptions = DETECTED

    @property
    def image_roots(self) -> tuple[Place, ...]:
        """The image roots that were given."""
        return (self.image_root,) if isinstance(self.image_root, Place) else tuple(self.image_root or ())

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command line, without the image roots."""
        words = ["ingest", str(self.source), *self.options.words()]
        words += [] if self.range_size is None else ["--range-size", str(self.range_size)]
        flags = {"--update": self.update, "--close": self.close, "--skip-bad": self.skip_bad}
        return (*words, *(name for name, is_set in flags.items() if is_set))

    def command(self, *more: object, image_roots: Sequence[object] = ()) -> str:
        """The same command with one more option; image_roots: in place of those that were given."""
        roots = [word for root in image_roots or self.image_roots for word in ("--image-root", root)]
        words = [*self.words, *roots]
        return command(*words, *(() if set(more) <= set(words) else more))


@dataclass
class Problems:
    """Entries of a source that cannot be taken: all of them counted, the first in words.

    rejects: a file that all of them are written to; then the rest of the source is taken.
    """

    source: Place
    request: IngestRequest
    rejects: Path | None = None
    count: int = 0
    _first: list[str] = field(default_factory=list)
    _reading: str | None = None
    _separator: str | None = None
    _is_on_s3: bool = False
    _stream: TextIO | None = None

    def add(self, line: int, reason: str, text: str, property_id: str = "") -> None:
        """Note that an entry cannot be taken. Line 0: a source without lines, the text says the place."""
        self.count += 1
        if self._reading is None:
            self._reading = likely_reading(text)
        self._is_on_s3 |= text[:5].lower() == "s3://"
        if len(self._first) < _NAMED_PROBLEMS:
            place = f"line {line}: " if line else ""
            self._first.append(f"  {place}{reason}: {_excerpt(text)}")
        if self.rejects is not None:
            if self._stream is None:
                make_directory(self.rejects.parent)
                self._stream = self.rejects.open("x", newline="", encoding="utf-8", errors="backslashreplace")
                csv.writer(self._stream).writerow(["line", "property_id", "reason", "entry"])
            csv.writer(self._stream).writerow([line or "", property_id, reason, text])

    def add_separator(self, line: int, separator: str, text: str, property_id: str) -> None:
        """Note that the images of an entry have another separator than the one that was given."""
        self._separator = self._separator or separator
        self.add(line, f"this looks like {separator}-separated images", text, property_id)

    def refuse(self) -> None:
        """Raise ListingError if there were any, and the rest is not to be taken without them."""
        if self.count and self.rejects is None:
            more = f"\n  and {self.count - len(self._first)} more" if self.count > len(self._first) else ""
            hint = ""
            if self._reading is not None:
                hint = (
                    f"\nSome of these are not UTF-8. They look like {LIKELY_ENCODING}, in which one reads:"
                    f" {_excerpt(self._reading)}\nIf that is right:"
                    f" {self.request.command('--encoding', LIKELY_ENCODING)}."
                )
            if self._separator is not None:
                hint += (
                    "\nIf images are separated so:"
                    f" {self.request.command('--image-separator', self._separator)}."
                )
            if self._is_on_s3:
                on_s3 = self.request.command(image_roots=["s3://BUCKET/PREFIX"])
                hint += f"\nIf the images lie on S3, name the folder of all: {on_s3}."
            raise ListingError(
                f"{self.source} was refused, nothing was changed: {self.count} of its entries cannot be "
                "taken:\n"
                + "\n".join(self._first)
                + f"{more}{hint}\nCorrect them and ingest again, or take the"
                f" rest now: {self.request.command('--skip-bad')}"
            )

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Make the reject file durable; remove it where the rest is not taken either."""
        if self._stream is not None and self.rejects is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            if error is not None:
                self.rejects.unlink(missing_ok=True)


@dataclass
class Listing:
    """A source opened for reading. ``notes`` fills while ``records`` is read: what was passed over, counted.

    ``row_is_property``: a record is a whole property, so that a second one of the same id is refused.
    ``total``: bytes, rows or folders. ``read``: rows or folders that were read. ``format``: a sentence on how
    it is read, where that is not what most listings are.
    """

    row_is_property: bool
    records: Iterator[Listed] = field(default_factory=lambda: iter(()))
    notes: Counter[str] = field(default_factory=Counter)
    total: int = 0
    read: int = 0
    stream: TextIOWrapper | None = None
    format: str | None = None
    not_images: list[str] = field(default_factory=list)

    def done(self) -> int:
        """How much of ``total`` is read."""
        if self.stream is None:
            return self.read
        # A text stream gives no position while it is iterated over.
        return self.total if self.stream.closed else os.lseek(self.stream.fileno(), 0, os.SEEK_CUR)


def open_listing(
    source: Place,
    *,
    image_root: str,
    pool: Executor,
    problems: Problems,
    options: ReadingOptions = DETECTED,
) -> Listing:
    """Open a source of any kind. Records that cannot be read go to ``problems``, the rest is yielded.

    Raises ListingError, also while the records are read.
    """
    if isinstance(source, S3Folder):
        if Path(source.name).suffix.lower() in _LISTINGS:
            raise ListingError(
                f"{source}: a listing is read from a local disk. Copy it here and ingest the copy; its images"
                " may lie on S3, under an image root s3://BUCKET/PREFIX."
            )
        return _open_store(source, pool, nested=options.nested)
    if source.is_dir():
        prefix = "" if str(source.absolute()) == image_root else f"{source.absolute()}/"
        return _open_folders(source, prefix, pool, problems, nested=options.nested)
    if not source.is_file():
        raise ListingError(f"There is no folder or listing at {source}.")
    try:
        match source.suffix.lower():
            case ".csv" | ".tsv" | ".txt":
                return _open_csv(source, problems, options)
            case ".jsonl" | ".ndjson":
                return _open_jsonl(source, problems, options)
            case ".parquet":
                return _open_parquet(source, problems, options)
    except MemoryError as error:
        raise _too_large(source) from error
    except (OSError, pa.ArrowException, UnicodeError) as error:
        raise ListingError(f"{source} cannot be read: {error}") from error
    except LookupError as error:
        again = problems.request.command("--encoding", "NAME")
        raise ListingError(f"{source} cannot be read: {error}. Name another one: {again}.") from error
    raise ListingError(
        f"{source} is not a listing that can be read: give a folder, or a .csv, .tsv, .jsonl or .parquet"
        f" file. {command('ingest', '--help')} shows what belongs in one."
    )


def _readable(source: Path, records: Iterator[Listed]) -> Iterator[Listed]:
    """The records, where the source can be read to its end. Raises ListingError."""
    try:
        yield from records
    except MemoryError as error:
        raise _too_large(source) from error
    except (OSError, pa.ArrowException, UnicodeError) as error:
        raise ListingError(f"{source} cannot be read: {error}") from error


def _open_folders(source: Path, prefix: str, pool: Executor, problems: Problems, *, nested: bool) -> Listing:
    notes: Counter[str] = Counter()
    names = []
    try:
        with os.scandir(source) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    notes[HIDDEN] += 1
                elif not _is_folder(entry):
                    notes[BESIDE] += 1
                elif not is_utf8(entry.name):
                    problems.add(0, "a folder's name is not UTF-8", entry.path)
                else:
                    names.append(entry.name)
    except OSError as error:
        raise ListingError(f"{source} cannot be read: {error}") from error
    listing = Listing(True, notes=notes, total=len(names))

    def records() -> Iterator[Listed]:
        # Sorted as code points: an order that no locale and no file system changes.
        remaining = iter(sorted(names))
        while folders := list(islice(remaining, _FOLDERS_AT_ONCE)):
            listed = pool.map(partial(_list_folder, nested=nested), (f"{source}/{name}" for name in folders))
            for name, content in zip(folders, listed, strict=True):
                listing.read += 1
                if isinstance(content, OSError):
                    problems.add(0, f"a folder cannot be read ({content.strerror})", f"{source}/{name}")
                    continue
                images, not_images, passed_over = content
                notes.update(passed_over)
                room = _NAMED_NOT_IMAGES - len(listing.not_images)
                listing.not_images += [f"{name}/{file}" for file in not_images[:room]]
                yield Listed(name, [f"{prefix}{name}/{image}" for image in images], 0)

    listing.records = _readable(source, records())
    return listing


def _list_folder(folder: str, *, nested: bool) -> tuple[list[str], list[str], Counter[str]] | OSError:
    """A folder's images, its files that are no images, and how many of each kind were passed over.

    Names are relative to the folder. A link to a folder is not followed: it may lead back.
    """
    images: list[str] = []
    not_images: list[str] = []
    passed_over: Counter[str] = Counter()
    below = [""]
    try:
        while below:
            path, inner = below.pop(), list[str]()
            with os.scandir(f"{folder}/{path}") as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        passed_over["hidden files or folders"] += 1
                    elif _is_folder(entry):
                        if entry.is_symlink():
                            passed_over["links to folders inside property folders"] += 1
                        else:
                            inner.append(f"{path}{entry.name}/")
                    elif _is_image(entry):
                        images.append(path + entry.name)
                    else:
                        not_images.append(path + entry.name)
                        passed_over[NOT_IMAGES] += 1
            if (nested or (len(inner) == 1 and not images)) and path.count("/") < FOLDERS_DEEP:
                below += inner
            elif inner:
                passed_over[INNER_FOLDERS] += len(inner)
    except OSError as error:
        return error
    return sorted(images, key=_natural), sorted(not_images, key=_natural), passed_over


def _open_store(source: S3Folder, pool: Executor, *, nested: bool) -> Listing:
    listing = Listing(True)

    def records() -> Iterator[Listed]:
        for property_id, objects in groupby(_images_in_store(source, listing), lambda image: image[0]):
            listing.read += 1
            sizes = {name: size for _, name, size in objects}
            images, not_images, passed_over = _list_in_store(source, property_id, sizes, pool, nested=nested)
            listing.notes.update(passed_over)
            room = _NAMED_NOT_IMAGES - len(listing.not_images)
            listing.not_images += [f"{property_id}/{file}" for file in not_images[:room]]
            yield Listed(
                property_id,
                [source.address(f"{property_id}/{name}") for name in images],
                0,
                [sizes[name] for name in images],
            )

    listing.records = records()
    return listing


def _list_in_store(
    source: S3Folder, property_id: str, names: Collection[str], pool: Executor, *, nested: bool
) -> tuple[list[str], list[str], Counter[str]]:
    """As ``_list_folder``, from the names of all objects below a property's folder. Raises StoreAwayError."""
    folders: dict[str, list[str]] = {}
    inner: dict[str, set[str]] = {}
    for name in names:
        path = name[: name.rfind("/") + 1]
        folders.setdefault(path, []).append(name)
        while path:
            above = path[: path.rfind("/", 0, -1) + 1]
            inner.setdefault(above, set()).add(path)
            path = above
    images: list[str] = []
    not_images: list[str] = []
    passed_over: Counter[str] = Counter()
    below = [""]
    while below:
        path = below.pop()
        files = folders.get(path, [])
        unknown = [name for name in files if not _is_named_as_image(name)]
        keys = [f"{property_id}/{name}" for name in unknown]
        recognised = pool.map(partial(_is_image_in_store, source), keys)
        others = {name for name, is_image in zip(unknown, recognised, strict=True) if not is_image}
        images += [name for name in files if name not in others]
        not_images += others
        further = inner.get(path, set())
        if (nested or (len(further) == 1 and not images)) and path.count("/") < FOLDERS_DEEP:
            below += further
        elif further:
            passed_over[INNER_FOLDERS] += len(further)
    if not_images:
        passed_over[NOT_IMAGES] = len(not_images)
    return sorted(images, key=_natural), sorted(not_images, key=_natural), passed_over


def _images_in_store(source: S3Folder, listing: Listing) -> Iterator[tuple[str, str, int]]:
    """Each object that may be an image of a property: the id, the image's name, its bytes."""
    for key, size in source.names():
        property_id, _, name = key.partition("/")
        if key.endswith("/"):
            continue  # What some tools put in place of a folder.
        if not name:
            listing.notes[BESIDE] += 1
        elif any(part.startswith(".") for part in key.split("/")):
            listing.notes[HIDDEN] += 1
        else:
            yield property_id, name, size


def _is_image_in_store(source: S3Folder, key: str) -> bool:
    """Whether an object is an image, by its first bytes; also one that may not be read, as ``_is_image``.

    Raises StoreAwayError.
    """
    try:
        return recognised_format(source.peek(key, _SIGNATURE_BYTES)[0]) is not None
    except (NoObjectError, ObjectDeniedError):
        return True


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Whether a file is an image: by its suffix, else by its first bytes.

    A file that this user may not read counts as one, so that its row says why it was not seen. Raises OSError
    if the disk fails.
    """
    if _is_named_as_image(entry.name):
        return True
    try:
        if not entry.is_file():
            return False  # a pipe or a socket, or a link that leads nowhere
        with open(entry.path, "rb", buffering=0) as file:  # noqa: PTH123 (millions of them)
            return recognised_format(file.read(_SIGNATURE_BYTES)) is not None
    except PermissionError:
        return True
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _is_named_as_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - millions of them


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder. A link that leads nowhere or in a circle counts as a missing image.

    Raises OSError where the storage fails: otherwise a folder would be passed over.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _natural(name: str) -> tuple[list[str | int], str]:
    """Sort key: digits by their value, letters in any case; the plain name decides between equals."""
    parts: list[str | int] = list(_DIGITS.split(name.casefold()))
    parts[1::2] = [int(digits) for digits in parts[1::2]]
    return parts, name


def _open_csv(source: Path, problems: Problems, options: ReadingOptions) -> Listing:
    encoding = find_encoding(source, options.encoding)
    delimiter, header = find_delimiter(
        source,
        encoding,
        options.delimiter,
        lambda names: len(names) <= _MAX_COLUMNS and None not in _positions(names, options),
    )
    if not header:
        raise ListingError(f"{source} is empty: it has not even a header.")
    looks = ("tab" if delimiter == "\t" else delimiter) + "-separated"
    id_at, images_at, row_is_property = _columns(
        source, header, options, problems.request, f"; this looks like {looks} text"
    )
    row_is_property |= _holds_lists(source, encoding, delimiter, images_at, options)
    stream = open_text(source, encoding)

    def records() -> Iterator[Listed]:
        rows = csv_rows(stream, delimiter, problems.add)
        next(rows)
        for line, row in rows:
            if len(row) != len(header):
                reason = f"{counted(len(row), 'fields')} where the header has {len(header)}"
                problems.add(line, reason, ",".join(row))
            elif not row_is_property:
                yield Listed(row[id_at], (row[images_at],), line)
            elif (images := _split_images(row[images_at], options.image_separator)) is None:
                problems.add(line, "the images are no JSON array of strings", row[images_at], row[id_at])
            elif len(images) == 1 and (separator := IMAGES_IN_ROW.search(images[0])) is not None:
                problems.add_separator(line, separator[1], row[images_at], row[id_at])
            else:
                yield Listed(row[id_at], images, line)

    listing = _of_text(source, stream, records(), row_is_property)
    if delimiter != "," or encoding.label != "UTF-8":
        listing.format = f"This looks like {looks} text in {encoding.label}, and was read so."
    return _with_guess(listing, header[id_at], header[images_at], options)


def _holds_lists(
    source: Path, encoding: Encoding, delimiter: str, images_at: int, options: ReadingOptions
) -> bool:
    """Whether a CSV's first rows have several images in a field, whatever the column is called."""
    with open_text(source, encoding) as stream:
        rows = csv_rows(stream, delimiter, lambda *_: None)
        header = next(rows)[1]
        if _plain(header[images_at]) in _plain_names(SINGLE_COLUMNS):
            return False
        cells = (row[images_at] for _, row in islice(rows, 100) if len(row) == len(header))
        return any(cell.startswith("[") or options.image_separator in cell for cell in cells)


def _with_guess(listing: Listing, id_name: str, images_name: str, options: ReadingOptions) -> Listing:
    """Say which columns were taken, where their names are not the ones of the documentation."""
    if _plain(id_name) not in _plain_names(ID_COLUMNS) or _plain(images_name) not in _plain_names(
        LIST_COLUMNS + SINGLE_COLUMNS
    ):
        taken = (
            f"The id is taken from the column {_excerpt(id_name)}, the images from {_excerpt(images_name)}."
        )
        listing.format = f"{listing.format} {taken}" if listing.format else taken
    return listing


def _of_text(
    source: Path, stream: TextIOWrapper, records: Iterator[Listed], row_is_property: bool
) -> Listing:
    def closing() -> Iterator[Listed]:
        with stream:
            yield from _readable(source, records)

    return Listing(row_is_property, closing(), total=source.stat().st_size, stream=stream)


def _split_images(cell: str, separator: str) -> list[str] | None:
    if not cell:
        return []
    if not cell.startswith("["):
        return cell.split(separator, MAX_IMAGES)
    try:
        images = json.loads(cell)
    except (ValueError, RecursionError):
        return None
    return images if _is_list_of_strings(images) else None


def _open_jsonl(source: Path, problems: Problems, options: ReadingOptions) -> Listing:
    encoding = find_encoding(source, options.encoding)
    stream = open_text(source, encoding, newline="\n")

    def records() -> Iterator[Listed]:
        lines = Lines(stream)
        while True:
            lines.begin_row()
            line = lines.line + 1
            try:
                data = next(lines, None)
            except LongRowError as error:
                problems.add(line, "too long", str(error))
                continue
            if data is None:
                return
            text = data.rstrip("\r\n")
            if not text.strip():
                continue
            if not is_utf8(text):
                problems.add(line, "not UTF-8", text)
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                problems.add(line, f"no valid JSON ({error})", text)
                continue
            keys = record if isinstance(record, dict) else {}
            if len(keys) > _MAX_COLUMNS:
                problems.add(line, f"more than {_MAX_COLUMNS:,} fields", text)
                continue
            names = list(keys)
            id_at, images_at = _positions(names, options, lists_only=True)
            property_id = None if id_at is None else keys[names[id_at]]
            images = None if images_at is None else keys[names[images_at]]
            if isinstance(property_id, int) and not isinstance(property_id, bool):
                property_id = str(property_id)
            if not isinstance(property_id, str):
                problems.add(line, "no object with a property_id of text", text)
            elif images is None or not _is_list_of_strings(images):
                problems.add(line, "no images, an array of strings", text, property_id)
            else:
                yield Listed(property_id, images, line)

    listing = _of_text(source, stream, records(), True)
    if encoding.label != "UTF-8":
        listing.format = f"This looks like text in {encoding.label}, and was read so."
    return listing


def _too_large(source: Path) -> ListingError:
    return ListingError(
        f"{source} was refused, nothing was changed: a part of it would take more than"
        f" {_PARQUET_BYTES >> 20:,} MiB to unpack. Write it again with smaller row groups and pages."
    )


def _open_parquet(source: Path, problems: Problems, options: ReadingOptions) -> Listing:
    with source.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        footer = int.from_bytes(stream.read(8)[:4], "little")
    if size > 12 and footer > min(size, _MAX_FOOTER_BYTES):
        raise ListingError(
            f"{source} cannot be read: its footer would have {footer:,} bytes;"
            f" {_MAX_FOOTER_BYTES:,} are read at most."
        )
    with memory_limit(_PARQUET_BYTES):
        # Page by page: a row group may be larger than the memory.
        file = pq.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
    if file.metadata.num_row_groups > _MAX_ROW_GROUPS:
        raise ListingError(
            f"{source} has {counted(file.metadata.num_row_groups, 'row groups')}; {_MAX_ROW_GROUPS:,}"
            f" are read at most."
        )
    schema = file.schema_arrow
    id_at, images_at, row_is_property = _columns(source, schema.names, options, problems.request)
    id_type, images_type = schema.field(id_at).type, schema.field(images_at).type
    if pa.types.is_list(images_type) or pa.types.is_large_list(images_type):
        row_is_property = True
    elif _plain(schema.names[images_at]) not in _plain_names(LIST_COLUMNS):
        row_is_property = False
    if row_is_property:
        is_list = pa.types.is_list(images_type) or pa.types.is_large_list(images_type)
        item_type = images_type.value_type if is_list else pa.null()
    else:
        item_type = images_type
    if not (_is_text(id_type) or pa.types.is_integer(id_type)) or not _is_text(item_type):
        raise ListingError(
            f"{source}: {schema.names[id_at]} is {id_type} and {schema.names[images_at]} is {images_type}; "
            "needed are text (or whole numbers) and list<string>, or one image a row as text."
        )
    names = [schema.names[id_at], schema.names[images_at]]
    listing = Listing(row_is_property, total=file.metadata.num_rows)

    def records() -> Iterator[Listed]:
        unpacked, most = 0, max(_UNPACKED_BYTES, _UNPACKED_SHARE * source.stat().st_size)
        with file:
            batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names, use_threads=False)
            while True:
                with memory_limit(_PARQUET_BYTES):
                    batch = next(batches, None)
                if batch is None:
                    return
                for part in _small_parts(batch, names[1] if row_is_property else None):
                    with memory_limit(_PARQUET_BYTES):
                        ids, images = (_bytes_for_text(part.column(name)).to_pylist() for name in names)
                    for id_cell, cell in zip(ids, images, strict=True):
                        listing.read += 1
                        listed = cell if row_is_property else [cell]
                        if id_cell is None or listed is None or None in listed:
                            problems.add(listing.read, "a null where an id or an image belongs", str(id_cell))
                            continue
                        property_id = str(id_cell) if isinstance(id_cell, int) else _decoded(id_cell)
                        unpacked += (
                            len(property_id) + sum(map(len, listed)) + _ENTRY_BYTES * (1 + len(listed))
                        )
                        if unpacked > most:
                            raise ListingError(
                                f"{source} was refused, nothing was changed: it is {source.stat().st_size:,}"
                                f" bytes and unpacks to more than {most:,}. Is it a listing? If so, write it"
                                " as a CSV."
                            )
                        yield Listed(property_id, [_decoded(image) for image in listed], listing.read)

    listing.records = _readable(source, records())
    return _with_guess(listing, names[0], names[1], options)


def _small_parts(batch: Any, lists: str | None) -> Iterator[Any]:
    """A batch in parts of few images. lists: the column of lists, if there is one."""
    if lists is None:
        yield batch
        return
    counts = pc.fill_null(pc.list_value_length(batch.column(lists)), 0).to_pylist()
    first = images = 0
    for row, count in enumerate(counts):
        if images and images + min(count, MAX_IMAGES) > _IMAGES_AT_ONCE:
            yield batch.slice(first, row - first)
            first, images = row, 0
        images += min(count, MAX_IMAGES)
    yield batch.slice(first)


def _bytes_for_text(column: Any) -> Any:
    """A column with its text as plain bytes, which can be read whether they are UTF-8 or not.

    Text that is longer than an id or a path may be is cut just behind that limit, and so are lists. The
    entry is refused all the same, but no gigabyte is unpacked for it.
    """
    kind = column.type
    if pa.types.is_integer(kind):
        return column
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        short = pc.list_slice(column, 0, MAX_IMAGES + 1)
        values = _bytes_for_text(short.flatten())
        counts = pc.fill_null(pc.list_value_length(short), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate(([0], np.cumsum(counts))), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, values, mask=short.is_null())
    if pa.types.is_dictionary(kind):
        return pc.take(_bytes_for_text(column.dictionary), column.indices)
    return pc.binary_slice(column.cast(pa.large_binary()), 0, 4 * MAX_PATH + 1)


def _decoded(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _plain(name: str) -> str:
    """A column's name without case, spaces and underscores, in which spreadsheets differ."""
    return re.sub(r"[\s_.-]+", "", name.casefold())


def _plain_names(names: Sequence[str]) -> frozenset[str]:
    return frozenset(map(_plain, names))


def _positions(
    names: Sequence[str], options: ReadingOptions, *, lists_only: bool = False
) -> tuple[int | None, int | None]:
    """Positions of the columns of ids and of images; None where not exactly one fits."""
    plain = [_plain(name) for name in names]

    def position(named: str | None, *tiers: Sequence[str]) -> int | None:
        if named is not None:
            exact = [at for at, name in enumerate(names) if name == named]
            tiers, matching = ((named,),), exact
            if len(exact) == 1:
                return exact[0]
        for tier in tiers:
            tier_names = _plain_names(tier)
            matching = [at for at, name in enumerate(plain) if name in tier_names]
            if matching:
                return matching[0] if len(matching) == 1 else None
        return None

    singles: Sequence[str] = () if lists_only else SINGLE_COLUMNS
    likely_singles: Sequence[str] = () if lists_only else LIKELY_SINGLE_COLUMNS
    return (
        position(options.id_column, ID_COLUMNS, LIKELY_ID_COLUMNS),
        position(options.image_column, (*LIST_COLUMNS, *singles), (*LIKELY_LIST_COLUMNS, *likely_singles)),
    )


def _columns(
    source: Path, names: Sequence[str], options: ReadingOptions, request: IngestRequest, looks: str = ""
) -> tuple[int, int, bool]:
    """Positions of the ids and the images, and whether a row is a property (otherwise it is an image)."""
    if len(names) > _MAX_COLUMNS:
        raise ListingError(
            f"{source} has {counted(len(names), 'columns')}; {_MAX_COLUMNS:,} are read at most."
        )
    id_at, images_at = _positions(names, options)
    if id_at is None or images_at is None:
        raise ListingError(
            f"{source} has the columns {', '.join(map(_excerpt, names))}{looks}. Needed are exactly one of "
            f"{', '.join(ID_COLUMNS)} for the id, and exactly one of {', '.join(LIST_COLUMNS)} (one row a "
            f"property) or {', '.join(SINGLE_COLUMNS)} (one row an image). If they have other names, give"
            f" them: {request.command('--id-column', 'NAME', '--image-column', 'NAME')}."
        )
    lists = _plain_names((*LIST_COLUMNS, *LIKELY_LIST_COLUMNS))
    return id_at, images_at, _plain(names[images_at]) in lists


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _excerpt(text: str) -> str:
    """Text fit for one line of a message: escaped where it is not printable, and short."""
    shown = text if text.isprintable() else text.encode("unicode_escape", "backslashreplace").decode()
    return shown if len(shown) <= 120 else shown[:117] + "..."

"""Sources of properties and their images: folder trees, CSV, JSONL and parquet, read record by record.

- A folder: every folder in it is a property and its name the id, in the order of the names' code points;
  the image files in it are its images, in natural order (2.jpg before 10.jpg, any case). A file with one of
  IMAGE_SUFFIXES is an image; any other is recognised by its first bytes, whatever its name. Hidden names are
  passed over; files that are no images are named, and folders deeper down are counted, in the report.
- A folder on S3, in the same way: ``s3://BUCKET/PREFIX`` with ID/IMAGE below it, the ids in the order of the
  store. Sizes come with the listing, so that no object is asked for twice.
- ``.csv``, ``.tsv``, ``.txt`` with a header; delimiter and encoding are found out (``text_listing.py``):
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
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from io import TextIOWrapper
from itertools import compress, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from resources.images.images import recognised_format
from resources.storage.files import make_directory
from resources.store.bucket import NoObjectError, ObjectDeniedError, Place, S3Folder
from vlm_assets.catalog.image_root import is_utf8
from vlm_assets.catalog.text_listing import (
    csv_rows,
    encoding_hint,
    find_delimiter,
    find_encoding,
    images_separator_in,
    likely_reading,
    open_text,
)

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".tif", ".tiff", ".bmp", ".gif"}
    | {".tga", ".heic", ".heif"}
)
"""Files with these suffixes are not opened: opening 12 million files takes hours on a network disk. If one is
no image, its row says so; so it does of HEIC, which cannot be read here. TGA has no signature to look for."""

_LISTINGS = frozenset({".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".parquet"})

ID_COLUMNS = ("property_id", "id")
LIST_COLUMNS = ("images", "image_uris")
SINGLE_COLUMNS = ("image", "image_uri", "image_path")

NOT_IMAGES = "files that are not images"
"""A kind of the notes, whose first files are named too."""

_NAMED_PROBLEMS = 20
_NAMED_NOT_IMAGES = 10
_SIGNATURE_BYTES = 32
_FOLDERS_AT_ONCE = 4096
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
    """How a text listing is read. None: found out. image_separator: between the images of one field."""

    delimiter: str | None = None
    encoding: str | None = None
    image_separator: str = "|"


FOUND_OUT = ReadingOptions()
"""What a person says nothing about is found out."""


@dataclass
class Problems:
    """Entries of a source that cannot be taken: all of them counted, the first in words.

    rejects: a file that all of them are written to; then the rest of the source is taken.
    """

    source: Place
    rejects: Path | None = None
    count: int = 0
    _first: list[str] = field(default_factory=list)
    _reading: str | None = None
    _stream: TextIO | None = None

    def add(self, line: int, reason: str, text: str, property_id: str = "") -> None:
        """Note that an entry cannot be taken. Line 0: a source without lines, the text says the place."""
        self.count += 1
        if self._reading is None:
            self._reading = likely_reading(text)
        if len(self._first) < _NAMED_PROBLEMS:
            place = f"line {line}: " if line else ""
            self._first.append(f"  {place}{reason}: {_excerpt(text)}")
        if self.rejects is not None:
            if self._stream is None:
                make_directory(self.rejects.parent)
                self._stream = self.rejects.open("x", newline="", encoding="utf-8", errors="backslashreplace")
                csv.writer(self._stream).writerow(["line", "property_id", "reason", "entry"])
            csv.writer(self._stream).writerow([line or "", property_id, reason, text])

    def refuse(self) -> None:
        """Raise ListingError if there were any, and the rest is not to be taken without them."""
        if self.count and self.rejects is None:
            more = f"\n  and {self.count - len(self._first)} more" if self.count > len(self._first) else ""
            hint = f"\n{encoding_hint(_excerpt(self._reading))}" if self._reading is not None else ""
            command = shlex.join(["vlm-assets", "ingest", str(self.source), "--skip-bad"])
            raise ListingError(
                f"{self.source} was refused, nothing was changed: {self.count} of its entries cannot be "
                "taken:\n"
                + "\n".join(self._first)
                + f"{more}{hint}\nCorrect them and ingest again, or take the"
                f" rest now: {command}"
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
        # The text stream itself says no position while it is iterated over.
        return self.total if self.stream.closed else os.lseek(self.stream.fileno(), 0, os.SEEK_CUR)


def open_listing(
    source: Place,
    *,
    image_root: str,
    pool: Executor,
    problems: Problems,
    options: ReadingOptions = FOUND_OUT,
) -> Listing:
    """Open a source by what it is. Records that cannot be read go to ``problems``, the rest is yielded.

    Raises ListingError, also while the records are read.
    """
    if isinstance(source, S3Folder):
        if Path(source.name).suffix.lower() in _LISTINGS:
            raise ListingError(
                f"{source}: a listing is read from a local disk. Copy it here and ingest the copy; its images"
                " may lie on S3: --image-root s3://BUCKET/PREFIX."
            )
        return _open_store(source, pool)
    if source.is_dir():
        prefix = "" if str(source.absolute()) == image_root else f"{source.absolute()}/"
        return _open_folders(source, prefix, pool, problems)
    if not source.is_file():
        raise ListingError(f"There is no folder or listing at {source}.")
    try:
        match source.suffix.lower():
            case ".csv" | ".tsv" | ".txt":
                return _open_csv(source, problems, options)
            case ".jsonl" | ".ndjson":
                return _open_jsonl(source, problems, options)
            case ".parquet":
                return _open_parquet(source, problems)
    except (OSError, pa.ArrowException, UnicodeError) as error:
        raise ListingError(f"{source} cannot be read: {error}") from error
    except LookupError as error:
        raise ListingError(f"{source} cannot be read: {error}. Give another --encoding.") from error
    raise ListingError(
        f"{source} is not a listing that can be read: give a folder, or a .csv, .tsv, .jsonl or .parquet"
        " file. `vlm-assets ingest --help` shows what belongs in one."
    )


def _readable(source: Path, records: Iterator[Listed]) -> Iterator[Listed]:
    """The records, where the source can be read to its end. Raises ListingError."""
    try:
        yield from records
    except (OSError, pa.ArrowException, UnicodeError) as error:
        raise ListingError(f"{source} cannot be read: {error}") from error


def _open_folders(source: Path, prefix: str, pool: Executor, problems: Problems) -> Listing:
    notes: Counter[str] = Counter()
    names = []
    try:
        with os.scandir(source) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    notes["hidden files or folders"] += 1
                elif not _is_folder(entry):
                    notes["files beside the property folders"] += 1
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
        while some := list(islice(remaining, _FOLDERS_AT_ONCE)):
            listed = pool.map(_list_folder, (f"{source}/{name}" for name in some))
            for name, found in zip(some, listed, strict=True):
                listing.read += 1
                if isinstance(found, OSError):
                    problems.add(0, f"a folder cannot be read ({found.strerror})", f"{source}/{name}")
                    continue
                images, not_images, passed_over = found
                notes.update(passed_over)
                room = _NAMED_NOT_IMAGES - len(listing.not_images)
                listing.not_images += [f"{name}/{one}" for one in not_images[:room]]
                yield Listed(name, [f"{prefix}{name}/{image}" for image in images], 0)

    listing.records = _readable(source, records())
    return listing


def _list_folder(folder: str) -> tuple[list[str], list[str], Counter[str]] | OSError:
    """Its images, its files that are no images, and how many of each kind were passed over."""
    images: list[str] = []
    not_images: list[str] = []
    passed_over: Counter[str] = Counter()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    passed_over["hidden files or folders"] += 1
                elif _is_folder(entry):
                    passed_over["folders inside property folders"] += 1
                elif _is_image(entry):
                    images.append(entry.name)
                else:
                    not_images.append(entry.name)
                    passed_over[NOT_IMAGES] += 1
    except OSError as error:
        return error
    return sorted(images, key=_natural), sorted(not_images, key=_natural), passed_over


def _open_store(source: S3Folder, pool: Executor) -> Listing:
    read = Listing(True)

    def records() -> Iterator[Listed]:
        for property_id, objects in groupby(_images_in_store(source, read), lambda one: one[0]):
            read.read += 1
            found = sorted(((name, size) for _, name, size in objects), key=lambda one: _natural(one[0]))
            known = [os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name, _ in found]  # noqa: PTH122
            if not all(known):
                keys = [f"{property_id}/{name}" for name, _ in found]
                known = list(pool.map(partial(_is_image_in_store, source), keys, known))
            for (name, _), is_image in zip(found, known, strict=True):
                if not is_image:
                    read.notes[NOT_IMAGES] += 1
                    if len(read.not_images) < _NAMED_NOT_IMAGES:
                        read.not_images.append(f"{property_id}/{name}")
            images = list(compress(found, known))
            yield Listed(
                property_id,
                [source.address(f"{property_id}/{name}") for name, _ in images],
                0,
                [size for _, size in images],
            )

    read.records = records()
    return read


def _images_in_store(source: S3Folder, listing: Listing) -> Iterator[tuple[str, str, int]]:
    """Each object that may be an image of a property: the id, the image's name, its bytes."""
    for key, size in source.names():
        property_id, _, name = key.partition("/")
        if key.endswith("/"):
            continue  # What some tools put in place of a folder.
        if not name:
            listing.notes["files beside the property folders"] += 1
        elif "/" in name:
            listing.notes["files in folders inside property folders"] += 1
        elif key.startswith(".") or name.startswith("."):
            listing.notes["hidden files or folders"] += 1
        else:
            yield property_id, name, size


def _is_image_in_store(source: S3Folder, key: str, known: bool) -> bool:
    """As ``_is_image``. Raises StoreAwayError."""
    try:
        return known or recognised_format(source.peek(key, _SIGNATURE_BYTES)[0]) is not None
    except (NoObjectError, ObjectDeniedError):
        return True


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Whether a file is an image: by its suffix, else by its first bytes.

    A file that this user may not read counts as one, so that its row says why it was not seen. Raises OSError
    if the disk fails.
    """
    if os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:  # noqa: PTH122 (millions of them)
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


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """A link that leads nowhere or in a circle is none: as an image it is one that is missing.

    Raises OSError where the storage does not say: a folder would be passed over for it.
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
    delimiter, header = find_delimiter(source, encoding, options.delimiter, _fits)
    if not header:
        raise ListingError(f"{source} is empty: it has not even a header.")
    looks = ("tab" if delimiter == "\t" else delimiter) + "-separated"
    id_at, images_at, row_is_property = _columns(source, header, f"; this looks like {looks} text")
    stream = open_text(source, encoding)

    def records() -> Iterator[Listed]:
        rows = csv_rows(stream, delimiter, problems.add)
        next(rows)
        for line, row in rows:
            if len(row) != len(header):
                reason = f"{len(row)} fields where the header has {len(header)}"
                problems.add(line, reason, ",".join(row))
            elif not row_is_property:
                yield Listed(row[id_at], (row[images_at],), line)
            elif (images := _split_images(row[images_at], options.image_separator)) is None:
                problems.add(line, "the images are no JSON array of strings", row[images_at], row[id_at])
            elif len(images) == 1 and (other := images_separator_in(images[0])) is not None:
                reason = (
                    f"this looks like {other}-separated images: ingest with"
                    f" --image-separator {shlex.quote(other)}"
                )
                problems.add(line, reason, row[images_at], row[id_at])
            else:
                yield Listed(row[id_at], images, line)

    listing = _of_text(source, stream, records(), row_is_property)
    if delimiter != "," or encoding.label != "UTF-8":
        listing.format = f"This looks like {looks} text in {encoding.label}, and was read so."
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
        return cell.split(separator)
    try:
        images = json.loads(cell)
    except (ValueError, RecursionError):
        return None
    return images if _is_list_of_strings(images) else None


def _open_jsonl(source: Path, problems: Problems, options: ReadingOptions) -> Listing:
    encoding = find_encoding(source, options.encoding)
    stream = open_text(source, encoding, newline="\n")

    def records() -> Iterator[Listed]:
        for line, data in enumerate(stream, start=1):
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
            property_id = next((keys[name] for name in ID_COLUMNS if name in keys), None)
            images = next((keys[name] for name in LIST_COLUMNS if name in keys), None)
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


def _open_parquet(source: Path, problems: Problems) -> Listing:
    file = pq.ParquetFile(source)
    schema = file.schema_arrow
    id_at, images_at, row_is_property = _columns(source, schema.names)
    id_type, images_type = schema.field(id_at).type, schema.field(images_at).type
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
        with file:
            for batch in file.iter_batches(batch_size=8192, columns=names):
                ids, images = (_bytes_for_text(batch.column(name)).to_pylist() for name in names)
                for one_id, some in zip(ids, images, strict=True):
                    listing.read += 1
                    listed = some if row_is_property else [some]
                    if one_id is None or listed is None or None in listed:
                        problems.add(listing.read, "a null where an id or an image belongs", str(one_id))
                        continue
                    property_id = str(one_id) if isinstance(one_id, int) else _decoded(one_id)
                    yield Listed(property_id, [_decoded(image) for image in listed], listing.read)

    listing.records = _readable(source, records())
    return listing


def _bytes_for_text(column: Any) -> Any:
    """A column with its text as plain bytes, which read whether they are UTF-8 or not."""
    kind = column.type
    if pa.types.is_integer(kind):
        return column
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return column.cast(pa.large_list(pa.large_binary()))
    return column.cast(pa.large_binary())


def _decoded(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _fits(names: Sequence[str]) -> bool:
    """Whether a listing with these columns can be read: one column of ids, one of images."""
    images = LIST_COLUMNS + SINGLE_COLUMNS
    return sum(name in ID_COLUMNS for name in names) == sum(name in images for name in names) == 1


def _columns(source: Path, names: Sequence[str], looks: str = "") -> tuple[int, int, bool]:
    """Positions of the ids and the images, and whether a row is a property (otherwise it is an image)."""
    if not _fits(names):
        raise ListingError(
            f"{source} has the columns {', '.join(map(_excerpt, names))}{looks}. Needed are exactly one of "
            f"{', '.join(ID_COLUMNS)} for the id, and exactly one of {', '.join(LIST_COLUMNS)} (one row a "
            f"property) or {', '.join(SINGLE_COLUMNS)} (one row an image)."
        )
    (id_at,) = (at for at, name in enumerate(names) if name in ID_COLUMNS)
    (images_at,) = (at for at, name in enumerate(names) if name in LIST_COLUMNS + SINGLE_COLUMNS)
    return id_at, images_at, names[images_at] in LIST_COLUMNS


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _excerpt(text: str) -> str:
    """Text fit for one line of a message: escaped where it is not printable, and short."""
    shown = text if text.isprintable() else text.encode("unicode_escape", "backslashreplace").decode()
    return shown if len(shown) <= 120 else shown[:117] + "..."

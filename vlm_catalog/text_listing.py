"""Text listings: the encoding of a file, the delimiter of a CSV, and its rows.

Encodings are detected only where the bytes prove them (a byte order mark, UTF-16, valid UTF-8). Anything else
is named and left to the person: an id read in the wrong encoding would be in the catalogue for ever.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from vlm_catalog.image_root import is_utf8

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}

_LOOKED_AT = 1 << 16
LONGEST_ROW = 4 << 20
"""Most characters of a row: enough for a thousand of the longest paths. A line of 1 GB is never held."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig", "UTF-8 with a byte order mark"),
    (codecs.BOM_UTF32_LE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16", "UTF-16"),
)
LIKELY_ENCODING = "windows-1252"
"""The encoding of text files that Excel and most Western programs write where they do not write UTF-8."""

IMAGES_IN_ROW = re.compile(
    r"\.(?:jpe?g|png|webp|avif|tiff?|bmp|gif|heic|heif)\s*([;,\t\n])\s*\S", re.IGNORECASE
)
"""Several images in a cell, with another separator than ``|``."""


@dataclass(frozen=True)
class Encoding:
    """How a text file is decoded. ``name``: a codec; ``label``: for people."""

    name: str
    label: str


def find_encoding(source: Path, requested: str | None) -> Encoding:
    """The encoding of a text file: the one asked for, or else what its first bytes prove; UTF-8 otherwise.

    Raises LookupError if there is no encoding of that name, OSError.
    """
    if requested is not None:
        name = codecs.lookup(requested).name
        return Encoding("utf-8-sig" if name == "utf-8" else name, requested)
    with source.open("rb") as stream:
        start = stream.read(_LOOKED_AT)
    for mark, name, label in _MARKS:
        if start.startswith(mark):
            return Encoding(name, label)
    # ASCII in UTF-16 has a NUL in every other byte; no UTF-8 listing has one in its header.
    for name, zeros in (("utf-16-le", start[1:200:2]), ("utf-16-be", start[0:200:2])):
        if zeros and zeros.count(0) > len(zeros) // 2:
            return Encoding(name, "UTF-16")
    return Encoding("utf-8-sig", "UTF-8")


def open_text(source: Path, encoding: Encoding, *, newline: str = "") -> TextIOWrapper:
    """Open a text listing. Bytes that are not of the encoding come through as lone surrogates, by line."""
    is_wide = encoding.name.startswith(("utf-16", "utf-32"))
    errors = "strict" if is_wide else "surrogateescape"
    return source.open(newline=newline, encoding=encoding.name, errors=errors)


def likely_reading(text: str) -> str | None:
    """Text with undecoded bytes (lone surrogates) in the likeliest encoding; None if it has none."""
    try:
        data = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return None  # Half a surrogate pair, escaped in JSON: no byte of the file.
    return None if is_utf8(text) else data.decode(LIKELY_ENCODING, errors="replace")


def find_delimiter(
    source: Path, encoding: Encoding, requested: str | None, fits: Callable[[list[str]], bool]
) -> tuple[str, list[str]]:
    """The delimiter of a CSV and its header, split: the one at which ``fits`` holds for the header.

    If it holds for none, the one that cuts the header into most columns. An empty file has an empty header.
    """
    widest: tuple[str, list[str]] = (",", [])
    for delimiter in [requested] if requested is not None else DELIMITERS:
        with open_text(source, encoding) as stream:
            try:
                header = next(csv.reader(Lines(stream), strict=True, delimiter=delimiter), [])
            except csv.Error:
                continue
        if fits(header):
            return delimiter, header
        if len(header) > len(widest[1]):
            widest = (delimiter, header)
    return widest


class LongRowError(csv.Error):
    """A row with more characters than are held in memory; the reading can go on behind it."""


class Lines:
    """The lines of a text. Each line, and all lines of one row together, have at most LONGEST_ROW characters.

    line: the number of the last line, from 1. After an error the next line follows.
    """

    def __init__(self, stream: TextIOWrapper) -> None:
        self.line = 0
        self._stream = stream
        self._held = 0

    def begin_row(self) -> None:
        """Count characters from here on."""
        self._held = 0

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        text = self._stream.readline(LONGEST_ROW)
        if not text:
            raise StopIteration
        self.line += 1
        self._held += len(text)
        rest = text
        while len(rest) == LONGEST_ROW and not rest.endswith(("\n", "\r")):
            rest = self._stream.readline(LONGEST_ROW)
            self._held += LONGEST_ROW
        if self._held > LONGEST_ROW:
            self._held = 0
            raise LongRowError(f"a row has more than {LONGEST_ROW:,} characters")
        return text


def csv_rows(
    stream: TextIOWrapper, delimiter: str, refuse: Callable[[int, str, str], None]
) -> Iterator[tuple[int, list[str]]]:
    """Rows with the number of their first line. A line that is no CSV is refused, and reading goes on."""
    csv.field_size_limit(LONGEST_ROW)
    lines = Lines(stream)
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    while True:
        line = lines.line + 1
        lines.begin_row()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            refuse(line, "no valid CSV", str(error))
            continue
        if row:
            yield line, row

"""The format of ``catalog.parquet``: its columns, its header, the digests of its rows, and its writer.

One row per property, in ordinal order: ``ordinal`` int64 (= row number), ``property_id`` string,
``image_uris`` list<string> (relative to the image root), ``image_bytes`` list<int64> (null: the image could
not be read at ingest), ``inputs_digest`` string (over the property's images, see ``inputs_digest``).

The parquet footer holds a header (JSON, with its own SHA-256): format version, catalogue id, image root, the
ranges with the digest of the rows of each, and the unfilled tail. So the ranges cost one read of the footer,
and every reader of rows can verify them.

A withdrawn property leaves a tombstone: a row with the same ordinal, no images, and a keyed digest for an id.
Nothing of the property is left, and an ingest still knows that it was withdrawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_catalog.ranges import PropertyRange
from vlm_durable.files.sealed_json import FormatVersionError, refuse_newer_format
from vlm_durable.wording import counted

FORMAT = 2
"""Raised with every change of the file. Format 1, which had no tail and no ``inputs_digest``, is read too."""

SCHEMA = pa.schema(
    [
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("property_id", pa.string(), nullable=False),
        pa.field("image_uris", pa.list_(pa.string()), nullable=False),
        pa.field("image_bytes", pa.list_(pa.int64()), nullable=False),
        pa.field("inputs_digest", pa.string(), nullable=False),
    ]
)

_SCHEMA_1 = SCHEMA.remove(4)

ROW_GROUP_ROWS = 4096
"""Rows of a row group, at most: the least that a reader of one range reads."""

UNREADABLE = (OSError, pa.ArrowException, ValueError, LookupError, TypeError)
"""What pyarrow and the header's parser raise for a file that is no sound catalogue."""

_HEADER_KEY = b"vlm_assets.catalog"
_HEADER_DIGEST_KEY = b"vlm_assets.catalog.sha256"

WITHDRAWN = "withdrawn"
"""The kind of failure of a withdrawn property's row, and how its id begins."""

DIGITS = 32
"""Hex digits of the digest in a tombstone's id."""


class CatalogError(Exception):
    """A catalogue that cannot be used as asked; the message says what to do."""


class CatalogFormatError(CatalogError):
    """The catalogue was written by a newer version of this program. It is not damaged."""


@dataclass(frozen=True)
class Tail:
    """The last properties of a catalogue, too few for a range yet.

    since: unix seconds at which the first of them was ingested.
    """

    range: PropertyRange
    digest: str
    since: float


@dataclass(frozen=True)
class CatalogHeader:
    """The header in the footer.

    ``image_root`` is relative to the home, absolute, or an address on S3; ``more_roots`` are folders of
    images beside it. ``sequence`` counts the changes of the catalogue, from 1. ``digests``: SHA-256 of the
    rows of each range. ``sha256``: of the header as it stands in the file, which covers all rows; empty
    before it is written.
    """

    catalog_id: str
    sequence: int
    image_root: str
    range_size: int
    ranges: tuple[PropertyRange, ...] = field(repr=False)
    digests: tuple[str, ...] = field(repr=False)
    tail: Tail | None = None
    more_roots: tuple[str, ...] = ()
    sha256: str = field(default="", compare=False, repr=False)

    @property
    def rows(self) -> int:
        """The number of properties, those of the tail included."""
        if self.tail is not None:
            return self.tail.range.stop
        return self.ranges[-1].stop if self.ranges else 0

    def slices(self, *, with_tail: bool = False) -> Iterator[tuple[PropertyRange, str]]:
        """Each range with the digest of its rows, in order; the tail last, where it is asked for."""
        yield from zip(self.ranges, self.digests, strict=True)
        if with_tail and self.tail is not None:
            yield self.tail.range, self.tail.digest

    def metadata(self) -> dict[bytes, bytes]:
        """The key-value pairs of the footer."""
        tail = self.tail
        body = json.dumps(
            {
                "format": FORMAT,
                "catalog_id": self.catalog_id,
                "sequence": self.sequence,
                "image_root": self.image_root,
                **({"more_roots": self.more_roots} if self.more_roots else {}),
                "range_size": self.range_size,
                "ranges": [[part.start, part.stop, digest] for part, digest in self.slices()],
                "tail": tail and [tail.range.start, tail.range.stop, tail.digest, tail.since],
            },
            separators=(",", ":"),
        ).encode()
        return {_HEADER_KEY: body, _HEADER_DIGEST_KEY: hashlib.sha256(body).hexdigest().encode()}

    @classmethod
    def from_footer(cls, footer: Any) -> CatalogHeader:
        """Read the header of a parquet footer. Raises ValueError if it is damaged, CatalogFormatError."""
        pairs: dict[bytes, bytes] = footer.metadata or {}
        body = pairs.get(_HEADER_KEY)
        if body is None:
            raise ValueError("it is a parquet file, but not a catalogue")
        sha256 = hashlib.sha256(body).hexdigest()
        if sha256.encode() != pairs.get(_HEADER_DIGEST_KEY):
            raise ValueError("its header is not what was written")
        fields = json.loads(body)
        try:
            refuse_newer_format(fields["format"], FORMAT, Path("The catalogue"))
        except FormatVersionError as error:
            raise CatalogFormatError(str(error)) from None
        ranges = tuple(PropertyRange(start, stop) for start, stop, _ in fields["ranges"])
        tail = fields.get("tail")
        header = cls(
            catalog_id=fields["catalog_id"],
            sequence=fields["sequence"],
            image_root=fields["image_root"],
            range_size=fields["range_size"],
            ranges=ranges,
            digests=tuple(digest for _, _, digest in fields["ranges"]),
            tail=tail and Tail(PropertyRange(tail[0], tail[1]), tail[2], tail[3]),
            more_roots=tuple(fields.get("more_roots", ())),
            sha256=sha256,
        )
        stop = 0
        for property_range, _ in header.slices(with_tail=True):
            if property_range.start != stop:
                raise ValueError(f"its ranges do not follow each other at {property_range.key}")
            stop = property_range.stop
        if stop != footer.num_rows:
            raise ValueError(f"it has {counted(footer.num_rows, 'rows')}, but its ranges cover {stop}")
        return header


def read_header(file: Path | Any) -> CatalogHeader:
    """The header of a catalogue file, or of an open one. Raises UNREADABLE and CatalogFormatError."""
    return CatalogHeader.from_footer(pq.read_metadata(file))


def verify_file(path: Path | Any) -> CatalogHeader:
    """Read every row of a catalogue file, or of an open one, and compare with the digests; gives the header.

    Raises UNREADABLE if anything is not as it was written, and CatalogFormatError.
    """
    with pq.ParquetFile(path) as file:
        header = CatalogHeader.from_footer(file.metadata)
        for _ in stream_rows(file, header):
            pass
    return header


def stream_rows(file: Any, header: CatalogHeader) -> Iterator[tuple[PropertyRange, pa.Table]]:
    """The ranges and the tail of an open parquet file with their verified rows; reads a row group once.

    Raises UNREADABLE.
    """
    held, held_start, groups = file.schema_arrow.empty_table(), 0, count()
    for property_range, digest in header.slices(with_tail=True):
        while held_start + held.num_rows < property_range.stop:
            held = pa.concat_tables([held, file.read_row_group(next(groups))])
        yield (
            property_range,
            verified_range(
                held.slice(property_range.start - held_start, len(property_range)), property_range, digest
            ),
        )
        held, held_start = held.slice(property_range.stop - held_start), property_range.stop


def read_range(file: Any, property_range: PropertyRange, digest: str) -> pa.Table:
    """The verified rows of a range of an open parquet file; reads its row groups only. Raises UNREADABLE."""
    groups: list[int] = []
    first = start = 0
    for index in range(file.metadata.num_row_groups):
        stop = start + file.metadata.row_group(index).num_rows
        if start < property_range.stop and property_range.start < stop:
            first = first if groups else start
            groups.append(index)
        start = stop
    rows = file.read_row_groups(groups).slice(property_range.start - first, len(property_range))
    return verified_range(rows, property_range, digest)


def verified_range(table: pa.Table, property_range: PropertyRange, digest: str) -> pa.Table:
    """The rows without metadata. Raises ValueError if they are not those of the digest."""
    table = table.replace_schema_metadata(None)
    if table.schema not in (SCHEMA, _SCHEMA_1) or rows_digest(table) != digest:
        raise ValueError(f"the rows of {property_range.key} are not what was ingested")
    return table if table.schema == SCHEMA else with_inputs_digest(table)


def rows_digest(table: pa.Table) -> str:
    """SHA-256 over rows of the catalogue: length and bytes of every value, in any Arrow encoding."""
    format_ = FORMAT if "inputs_digest" in table.column_names else 1
    digest = hashlib.sha256(f"catalogue rows {format_}\n".encode())
    _digest_integers(digest, table["ordinal"])
    _digest_strings(digest, table["property_id"])
    _digest_integers(digest, pc.list_value_length(table["image_uris"]))
    _digest_strings(digest, pc.list_flatten(table["image_uris"]))
    _digest_integers(digest, pc.list_value_length(table["image_bytes"]))
    _digest_integers(digest, pc.fill_null(pc.list_flatten(table["image_bytes"]), -1))
    if format_ > 1:
        _digest_strings(digest, table["inputs_digest"])
    return digest.hexdigest()


def inputs_digest(uris: Sequence[str], sizes: Sequence[int | None]) -> str:
    """128 bits, in hex, over the images of one property: their URIs in order, and their sizes at ingest.

    The size belongs to it: another photo under the same name is another input.
    """
    images = "".join(f"{uri}\0{size}\0" for uri, size in zip(uris, sizes, strict=True))
    return hashlib.sha256(images.encode()).hexdigest()[:32]


def with_inputs_digest(table: pa.Table) -> pa.Table:
    """A table of the first four columns of SCHEMA, with ``inputs_digest`` as the fifth."""
    images = (table["image_uris"].to_pylist(), table["image_bytes"].to_pylist())
    digests = [inputs_digest(uris, sizes) for uris, sizes in zip(*images, strict=True)]
    return table.append_column(SCHEMA.field("inputs_digest"), pa.array(digests, pa.string()))


def _digest_integers(digest: Any, values: Any) -> None:
    digest.update(np.asarray(values.to_numpy(), dtype="<i8").tobytes())


def _digest_strings(digest: Any, values: Any) -> None:
    _digest_integers(digest, pc.binary_length(values))
    digest.update("".join(values.to_pylist()).encode())


class CatalogWriter:
    """Writes a catalogue in memory: ranges in, bytes out. Small ranges share a row group."""

    def __init__(self) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(
            self._sink, SCHEMA, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._ranges: list[PropertyRange] = []
        self._digests: list[str] = []
        self._tail: Tail | None = None

    def add(self, property_range: PropertyRange, table: pa.Table) -> None:
        """Add the rows of the next range."""
        self._ranges.append(property_range)
        self._digests.append(rows_digest(table))
        self._append(table)

    def add_tail(self, property_range: PropertyRange, table: pa.Table, *, since: float) -> None:
        """Add the rows of the tail, after all ranges."""
        self._tail = Tail(property_range, rows_digest(table), since)
        self._append(table)

    def finish(self, header: CatalogHeader) -> bytes:
        """The bytes of the file. header: ranges, digests and tail are filled in here."""
        self._write()
        header = replace(header, ranges=tuple(self._ranges), digests=tuple(self._digests), tail=self._tail)
        self._writer.add_key_value_metadata(header.metadata())
        self._writer.close()
        data: bytes = self._sink.getvalue().to_pybytes()
        return data

    def _append(self, table: pa.Table) -> None:
        if self._pending_rows + table.num_rows > ROW_GROUP_ROWS:
            self._write()
        self._pending.append(table)
        self._pending_rows += table.num_rows

    def _write(self) -> None:
        if self._pending:
            table = pa.concat_tables(self._pending).combine_chunks()
            self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        self._pending, self._pending_rows = [], 0


def is_tombstone(property_id: str) -> bool:
    """Whether an id of the catalogue is that of a withdrawn property's row."""
    return property_id.startswith(f"{WITHDRAWN}-") and len(property_id) == len(WITHDRAWN) + 1 + DIGITS


def withdrawal_note(state_directory: Path) -> Path:
    """The file that says what a withdrawal has to do; it stands there until all is done."""
    return state_directory / "withdrawal.json"

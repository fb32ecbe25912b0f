"""The property catalogue: one row a property, in an order that never changes, and the ranges over it.

What lives here: the file's format and reading it. What does not: making or growing one
(`ingest.py`), where images may lie (`image_root.py`). Look up: parquet footer, row group.

The file is ``HOME/property_catalog/catalog.parquet``: ``ordinal`` int64 (= row number), ``property_id``
string, ``image_uris`` list<string> (relative to the image root), ``image_bytes`` list<int64> (null: could not
be read at ingest). Its footer holds a header (JSON, with its own SHA-256): the catalogue's id, the image
root, and the ranges with the digest of each one's rows. So the ranges, and whether a range has changed,
cost the footer alone, and rows that are not what was ingested are noticed whenever they are read.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_assets.catalog.image_root import ImageRoot, is_utf8
from vlm_assets.catalog.ranges import PropertyRange

FORMAT = 1

SCHEMA = pa.schema(
    [
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("property_id", pa.string(), nullable=False),
        pa.field("image_uris", pa.list_(pa.string()), nullable=False),
        pa.field("image_bytes", pa.list_(pa.int64()), nullable=False),
    ]
)

_HEADER_KEY = b"vlm_assets.catalog"
_HEADER_DIGEST_KEY = b"vlm_assets.catalog.sha256"


# What reading a file that is no sound catalogue raises; LookupError and TypeError come from its header.
_UNREADABLE = (OSError, pa.ArrowException, ValueError, LookupError, TypeError)


class CatalogError(Exception):
    """Something about a catalogue that a person has to know; the message says what to do."""


class CatalogMissingError(CatalogError):
    """This home has no catalogue yet."""


class CatalogUnreadableError(CatalogError):
    """There is a catalogue, and it cannot be read or is not what was ingested. Never the same as empty."""


class CatalogChangedError(CatalogError):
    """The catalogue was updated after it was opened, and the rows asked for are among the changed ones."""


class UnknownRangeError(CatalogError):
    """A range that this catalogue does not have."""


@dataclass(frozen=True)
class CatalogHeader:
    """What the footer says. ``digests`` has one SHA-256 a range; ``image_root`` is relative to the home, or
    absolute; ``sequence`` counts the ingests that changed the catalogue, from 1."""

    catalog_id: str
    sequence: int
    image_root: str
    range_size: int
    ranges: tuple[PropertyRange, ...] = field(repr=False)
    digests: tuple[str, ...] = field(repr=False)

    def slices(self) -> Iterator[tuple[PropertyRange, str]]:
        """Each range with the digest of its rows, in order."""
        return zip(self.ranges, self.digests, strict=True)

    def metadata(self) -> dict[bytes, bytes]:
        """The footer's key-value pairs."""
        body = json.dumps(
            {
                "format": FORMAT,
                "catalog_id": self.catalog_id,
                "sequence": self.sequence,
                "image_root": self.image_root,
                "range_size": self.range_size,
                "ranges": [[one.start, one.stop, digest] for one, digest in self.slices()],
            },
            separators=(",", ":"),
        ).encode()
        return {_HEADER_KEY: body, _HEADER_DIGEST_KEY: hashlib.sha256(body).hexdigest().encode()}

    @classmethod
    def from_footer(cls, footer: Any) -> CatalogHeader:
        """Read the header of a parquet footer. Raises ValueError where it is not a sound one."""
        pairs: dict[bytes, bytes] = footer.metadata or {}
        body = pairs.get(_HEADER_KEY)
        if body is None:
            raise ValueError("it is a parquet file, but not a catalogue")
        if hashlib.sha256(body).hexdigest().encode() != pairs.get(_HEADER_DIGEST_KEY):
            raise ValueError("its header is not what was written")
        fields = json.loads(body)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']}, this version reads {FORMAT}")
        header = cls(
            catalog_id=fields["catalog_id"],
            sequence=fields["sequence"],
            image_root=fields["image_root"],
            range_size=fields["range_size"],
            ranges=tuple(PropertyRange(start, stop) for start, stop, _ in fields["ranges"]),
            digests=tuple(digest for _, _, digest in fields["ranges"]),
        )
        stop = 0
        for one in header.ranges:
            if one.start != stop:
                raise ValueError(f"its ranges do not follow each other at {one.key}")
            stop = one.stop
        if stop != footer.num_rows:
            raise ValueError(f"it has {footer.num_rows} rows where its ranges cover {stop}")
        return header


@dataclass(frozen=True)
class CatalogRow:
    """One property. ``image_bytes`` runs alongside ``image_uris``; None: not readable at ingest."""

    ordinal: int
    property_id: str
    range: PropertyRange
    image_uris: tuple[str, ...]
    image_bytes: tuple[int | None, ...]


@dataclass(frozen=True)
class Catalog:
    """A catalogue as it stood when it was opened. Cheap to open and to hold: rows are read when asked for."""

    home: Path
    path: Path
    header: CatalogHeader

    @classmethod
    def open(cls, home: Path) -> Catalog:
        """Open the catalogue of a home by its footer alone.

        Raises CatalogMissingError where this home never had one, and CatalogUnreadableError where it cannot
        be read, naming the backups.
        """
        path = catalog_path(home)
        if not path.exists():
            if any(backup.exists() for backup in backup_paths(home)):
                raise _unreadable(home, "it is gone")
            raise CatalogMissingError(
                f"There is no catalogue in {home}. Make one: vlm-assets ingest SOURCE --home {home}"
            )
        try:
            return cls(home=home.absolute(), path=path.absolute(), header=_header_at(path))
        except _UNREADABLE as error:
            raise _unreadable(home, str(error)) from error

    @classmethod
    def open_backup(cls, home: Path, path: Path) -> Catalog:
        """Open one of ``backup_paths(home)`` as a catalogue. Raises CatalogUnreadableError."""
        try:
            return cls(home=home.absolute(), path=path.absolute(), header=_header_at(path))
        except _UNREADABLE as error:
            raise CatalogUnreadableError(f"the backup {path} cannot be read: {error}") from error

    def verify(self) -> None:
        """Read all rows and compare them with their digests. Raises CatalogUnreadableError."""
        for _ in self.slices():
            pass

    @property
    def catalog_id(self) -> str:
        """The UUID given at the first ingest; the same through every later one."""
        return self.header.catalog_id

    @property
    def ranges(self) -> tuple[PropertyRange, ...]:
        """All ranges, in order; together they cover ``[0, rows)``."""
        return self.header.ranges

    @property
    def rows(self) -> int:
        """How many properties there are."""
        return self.ranges[-1].stop if self.ranges else 0

    @property
    def image_root(self) -> str:
        """The folder of the images, absolute."""
        return self.images.path

    @cached_property
    def images(self) -> ImageRoot:
        """The folder of the images, as that which confines them."""
        return ImageRoot.at(self.home / self.header.image_root)

    def image_path(self, uri: str) -> Path:
        """Where an image lies, links resolved, there or not. Raises ImageOutsideRootError."""
        return self.images.locate(uri)

    def range_of(self, ordinal: int) -> PropertyRange:
        """The range that an ordinal lies in. Raises UnknownRangeError."""
        if not 0 <= ordinal < self.rows:
            raise UnknownRangeError(f"{self.path} has no ordinal {ordinal}: it has {self.rows} properties")
        return self.ranges[bisect_right(self.ranges, ordinal, key=lambda one: one.start) - 1]

    def slice_digest(self, wanted: PropertyRange) -> str:
        """SHA-256 over a range's rows, from the footer; it changes when the range is stale.

        Raises UnknownRangeError.
        """
        return self.header.digests[self._position(wanted)]

    def slice(self, wanted: PropertyRange) -> pa.Table:
        """A range's rows, ordered by ordinal, in the catalogue's schema; verified against their digest.

        Raises UnknownRangeError, CatalogChangedError and CatalogUnreadableError.
        """
        digest = self.slice_digest(wanted)
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                self._check_unchanged(CatalogHeader.from_footer(file.metadata), wanted, digest)
                groups, first = _row_groups(file.metadata, wanted)
                table = file.read_row_groups(groups).slice(wanted.start - first, len(wanted))
        except _UNREADABLE as error:
            raise _unreadable(self.home, f"the rows of {wanted.key} do not read: {error}") from error
        return self._verified(wanted, digest, table)

    def slices(self) -> Iterator[tuple[PropertyRange, pa.Table]]:
        """All ranges with their rows as ``slice`` gives them; each row group is read once."""
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                if CatalogHeader.from_footer(file.metadata) != self.header:
                    raise CatalogChangedError(f"{self.path} was updated while it was in use. Start again.")
                held, held_start, groups = SCHEMA.empty_table(), 0, count()
                for wanted, digest in self.header.slices():
                    while held_start + held.num_rows < wanted.stop:
                        held = pa.concat_tables([held, file.read_row_group(next(groups))])
                    table = held.slice(wanted.start - held_start, len(wanted))
                    yield wanted, self._verified(wanted, digest, table)
                    held, held_start = held.slice(wanted.stop - held_start), wanted.stop
        except _UNREADABLE as error:
            raise _unreadable(self.home, f"its rows do not read: {error}") from error

    def find(self, property_id: str) -> CatalogRow | None:
        """The row of one property, or None where there is none. Reads the column of ids."""
        ordinal = self._ordinal_of(property_id)
        if ordinal is None:
            return None
        wanted = self.range_of(ordinal)
        row = self.slice(wanted).slice(ordinal - wanted.start, 1).to_pylist()[0]
        return CatalogRow(
            ordinal=ordinal,
            property_id=row["property_id"],
            range=wanted,
            image_uris=tuple(row["image_uris"]),
            image_bytes=tuple(row["image_bytes"]),
        )

    def _ordinal_of(self, property_id: str) -> int | None:
        if not is_utf8(property_id):
            return None  # As typed in another encoding: no id of a catalogue, and no fault of it.
        start = 0
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(columns=["property_id"]):
                    position: int = pc.index(batch.column(0), property_id).as_py()
                    if position >= 0:
                        return start + position
                    start += batch.num_rows
        except _UNREADABLE as error:
            raise _unreadable(self.home, f"its ids do not read: {error}") from error
        return None

    def _position(self, wanted: PropertyRange) -> int:
        position = bisect_right(self.ranges, wanted) - 1
        if position < 0 or self.ranges[position] != wanted:
            raise UnknownRangeError(
                f"{self.path} has no range {wanted.key}; it has {len(self.ranges)} others, "
                "which vlm-assets status lists."
            )
        return position

    def _check_unchanged(self, now: CatalogHeader, wanted: PropertyRange, digest: str) -> None:
        if now.catalog_id != self.catalog_id or dict(now.slices()).get(wanted) != digest:
            raise CatalogChangedError(
                f"{self.path} was updated while it was in use, and {wanted.key} is among the ranges that "
                "changed. Start again: the new rows are taken then."
            )

    def _verified(self, wanted: PropertyRange, digest: str, table: pa.Table) -> pa.Table:
        if table.schema.remove_metadata() != SCHEMA or rows_digest(table) != digest:
            raise _unreadable(self.home, f"the rows of {wanted.key} are not what was ingested")
        return table.replace_schema_metadata(None)


def catalog_path(home: Path) -> Path:
    """Where a home's catalogue stands."""
    return home / "property_catalog" / "catalog.parquet"


def backup_paths(home: Path) -> tuple[Path, Path]:
    """The second copy of the catalogue, and the catalogue before the last ingest that changed it.

    Their names do not end in ``.parquet``: a reader's ``*.parquet`` finds the catalogue alone.
    """
    path = catalog_path(home)
    return path.with_name(path.name + ".copy"), path.with_name(path.name + ".previous")


def rows_digest(table: pa.Table) -> str:
    """SHA-256 over rows of the catalogue: every value's length and bytes, however they are encoded."""
    digest = hashlib.sha256(f"catalogue rows {FORMAT}\n".encode())
    _digest_integers(digest, table["ordinal"])
    _digest_strings(digest, table["property_id"])
    _digest_integers(digest, pc.list_value_length(table["image_uris"]))
    _digest_strings(digest, pc.list_flatten(table["image_uris"]))
    _digest_integers(digest, pc.list_value_length(table["image_bytes"]))
    _digest_integers(digest, pc.fill_null(pc.list_flatten(table["image_bytes"]), -1))
    return digest.hexdigest()


def _digest_integers(digest: Any, values: Any) -> None:
    digest.update(np.asarray(values.to_numpy(), dtype="<i8").tobytes())


def _digest_strings(digest: Any, values: Any) -> None:
    _digest_integers(digest, pc.binary_length(values))
    digest.update("".join(values.to_pylist()).encode())


def _row_groups(footer: Any, wanted: PropertyRange) -> tuple[list[int], int]:
    """The row groups that a range lies in, and the ordinal that the first of them starts at."""
    groups: list[int] = []
    first = start = 0
    for index in range(footer.num_row_groups):
        stop = start + footer.row_group(index).num_rows
        if start < wanted.stop and wanted.start < stop:
            if not groups:
                first = start
            groups.append(index)
        start = stop
    return groups, first


def _header_at(path: Path) -> CatalogHeader:
    return CatalogHeader.from_footer(pq.read_metadata(path))


def _unreadable(home: Path, reason: str) -> CatalogUnreadableError:
    """Say what is wrong and what there is to go back to: each backup by what its own footer says."""
    found, readable = [], []
    for backup in backup_paths(home):
        if not backup.exists():
            continue
        try:
            header = _header_at(backup)
        except _UNREADABLE:
            found.append(f"{backup} (does not read either)")
            continue
        rows = header.ranges[-1].stop if header.ranges else 0
        readable.append(backup)
        found.append(f"{backup} (ingest {header.sequence}, {rows} properties)")
    path = catalog_path(home)
    advice = (
        f"Put one back: {shlex.join(['cp', str(readable[0]), str(path)])}"
        if readable
        else "Bring it back from a copy of your own: a new ingest would number the properties anew."
    )
    return CatalogUnreadableError(
        f"{path} cannot be read: {reason}. Nothing was changed. "
        f"Backups: {', '.join(found) if found else 'none'}. {advice}"
    )

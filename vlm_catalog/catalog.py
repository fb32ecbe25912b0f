"""The property catalogue of a home: one row per property, in an order that never changes.

A catalogue has ranges (the partitions), an unfilled tail, and verified rows. A reader that meets a damaged or
older catalogue puts it back from its second copy. ``catalog_file.py`` has the format, ``ingest.py`` makes and
extends the catalogue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_catalog.catalog_copies import (
    CatalogUnreadableError,
    catalog_path,
    has_catalog,
    newest_header,
    put_back,
    unreadable,
)
from vlm_catalog.catalog_file import (
    UNREADABLE,
    CatalogError,
    CatalogHeader,
    read_range,
    stream_rows,
)
from vlm_catalog.image_root import AnyImageRoot, is_utf8, roots_at
from vlm_catalog.ranges import PropertyRange
from vlm_durable.commands import command
from vlm_durable.mirror.bucket import place_of
from vlm_durable.wording import counted

_start = attrgetter("start")
_Read = TypeVar("_Read")
_ROWS_TOGETHER = 65_536


class CatalogMissingError(CatalogError):
    """This home has no catalogue yet."""


@dataclass(frozen=True)
class CatalogRow:
    """One property. ``image_bytes`` runs alongside ``image_uris``; None: not readable at ingest.

    range: its partition, or the unfilled tail of the catalogue.
    """

    ordinal: int
    property_id: str
    range: PropertyRange
    image_uris: tuple[str, ...]
    image_bytes: tuple[int | None, ...]


@dataclass(frozen=True)
class Catalog:
    """A catalogue as it was when it was opened. Cheap to open and to hold: rows are read when asked for."""

    home: Path
    path: Path
    header: CatalogHeader

    @classmethod
    def open(cls, home: Path) -> Catalog:
        """Open the catalogue of a home by its footer alone; a damaged or older one is put back first.

        Raises CatalogMissingError if this home never had one, CatalogUnreadableError, which names the
        backups, if neither it nor its second copy is whole and the newest version, and CatalogFormatError.
        """
        path = catalog_path(home)
        if not has_catalog(home):
            raise CatalogMissingError(
                f"There is no catalogue in {home}. Make one: {command('ingest', 'SOURCE', '--home', home)}"
            )
        return cls(home=home.absolute(), path=path.absolute(), header=newest_header(home))

    def verify(self) -> None:
        """Read all rows and compare them with their digests. Raises CatalogUnreadableError."""
        for _ in self.slices(with_tail=True):
            pass

    @property
    def catalog_id(self) -> str:
        """The UUID given at the first ingest; the same through every later one."""
        return self.header.catalog_id

    @property
    def ranges(self) -> tuple[PropertyRange, ...]:
        """The partitions, in order, from ordinal 0 without a gap."""
        return self.header.ranges

    @property
    def tail(self) -> PropertyRange | None:
        """The properties after the last range, too few for a partition yet."""
        return self.header.tail.range if self.header.tail is not None else None

    @property
    def waiting(self) -> int:
        """The number of properties in the tail."""
        return len(self.tail) if self.tail is not None else 0

    @property
    def rows(self) -> int:
        """The number of properties, those of the tail included."""
        return self.header.rows

    @property
    def image_root(self) -> str:
        """The folders of the images, for messages: absolute paths, or an address on S3."""
        return self.images.path

    @cached_property
    def images(self) -> AnyImageRoot:
        """The folder, or folders, that all images lie in."""
        places = map(place_of, (self.header.image_root, *self.header.more_roots))
        return roots_at([self.home / place if isinstance(place, Path) else place for place in places])

    def image_path(self, uri: str) -> Path | str:
        """The path or address of an image, links resolved, there or not. Raises ImageOutsideRootError."""
        return self.images.locate(uri)

    def range_of(self, ordinal: int) -> PropertyRange:
        """The range, or the tail, that an ordinal lies in. Raises CatalogError."""
        if not 0 <= ordinal < self.rows:
            raise CatalogError(
                f"{self.path} has no ordinal {ordinal}: it has {counted(self.rows, 'properties')}"
            )
        if self.tail is not None and ordinal in self.tail:
            return self.tail
        return self.ranges[bisect_right(self.ranges, ordinal, key=_start) - 1]

    def slice_digest(self, property_range: PropertyRange) -> str:
        """SHA-256 over the rows of a range, or of the tail, from the header. Raises CatalogError."""
        if self.header.tail is not None and self.header.tail.range == property_range:
            return self.header.tail.digest
        position = bisect_right(self.ranges, property_range.start, key=_start) - 1
        if position < 0 or self.ranges[position] != property_range:
            raise CatalogError(
                f"{self.path} has no range {property_range.key}; it has"
                f" {counted(len(self.ranges), 'others')}, which {command('status')} lists."
            )
        return self.header.digests[position]

    def slice(self, property_range: PropertyRange) -> pa.Table:
        """The verified rows of a range, or of the tail, ordered by ordinal, in the schema of the file.

        Raises CatalogError and CatalogUnreadableError.
        """
        digest = self.slice_digest(property_range)

        def read(file: Any) -> pa.Table:
            now = CatalogHeader.from_footer(file.metadata)
            if (property_range, digest) not in now.slices(with_tail=True):
                raise CatalogError(
                    f"{self.path} was updated while it was in use, and {property_range.key} is among the"
                    " ranges that changed. Start again: the new rows are taken then."
                )
            return read_range(file, property_range, digest)

        return self._read(read, f"the rows of {property_range.key}")

    def slices(self, *, with_tail: bool = False) -> Iterator[tuple[PropertyRange, pa.Table]]:
        """All ranges with their verified rows, each row group read once. with_tail: the tail too."""
        count = len(self.ranges) + (1 if with_tail and self.tail is not None else 0)
        done = 0
        try:
            for range_and_rows in self._stream(count):
                done += 1
                yield range_and_rows
        except UNREADABLE as error:
            put_back(self.home, f"its rows do not read: {error}")
            try:
                yield from islice(self._stream(count), done, None)
            except UNREADABLE as again:
                raise unreadable(self.home, f"cannot be read: its rows do not read: {again}") from again

    def image_counts(self) -> npt.NDArray[np.int64]:
        """The number of images of each property, by ordinal; reads one column."""

        def read(file: Any) -> npt.NDArray[np.int64]:
            # The sizes tell the number of images as well as the names do, in a fraction of the bytes.
            batches = file.iter_batches(columns=["image_bytes"], batch_size=_ROWS_TOGETHER)
            lengths = [pc.list_value_length(batch.column(0)).to_numpy() for batch in batches]
            counts = np.concatenate(lengths) if lengths else np.zeros(0)
            self._refuse_fewer(len(counts))
            return counts[: self.rows].astype(np.int64)

        return self._read(read, "its images")

    def find(self, property_id: str) -> CatalogRow | None:
        """The row of one property, or None if there is none. Reads the column of ids."""
        # An id that was typed in another encoding is simply not in the catalogue.
        ordinal = next(iter(self.ordinals_of([property_id])), None)
        if ordinal is None:
            return None
        property_range = self.range_of(ordinal)
        row = self.slice(property_range).slice(ordinal - property_range.start, 1).to_pylist()[0]
        return CatalogRow(
            ordinal=ordinal,
            property_id=row["property_id"],
            range=property_range,
            image_uris=tuple(row["image_uris"]),
            image_bytes=tuple(row["image_bytes"]),
        )

    def images_of(self, ordinals: Sequence[int]) -> list[list[str]]:
        """The image URIs of some properties, in the order given; each range is read once."""
        uris: dict[int, list[str]] = {}
        for property_range, group in groupby(sorted(set(ordinals)), self.range_of):
            column = self.slice(property_range)["image_uris"]
            uris |= {ordinal: column[ordinal - property_range.start].as_py() for ordinal in group}
        return [uris[ordinal] for ordinal in ordinals]

    def ordinals_of(self, ids: Collection[str]) -> list[int]:
        """The ordinals of those ids that the catalogue has, in order. Reads the column of ids."""
        requested = pa.array(sorted(property_id for property_id in ids if is_utf8(property_id)), pa.string())

        def read(file: Any) -> list[int]:
            ordinals: list[int] = []
            start = 0
            for batch in file.iter_batches(columns=["property_id"]):
                is_requested = pc.is_in(batch.column(0), value_set=requested).to_numpy(zero_copy_only=False)
                ordinals += [start + int(at) for at in np.flatnonzero(is_requested)]
                start += batch.num_rows
            self._refuse_fewer(start)
            return ordinals

        return self._read(read, "its ids")

    def _refuse_fewer(self, rows: int) -> None:
        """Raise ValueError for a column with too few rows: more are a catalogue that has grown since."""
        if rows < self.rows:
            raise ValueError(f"it has {counted(rows, 'rows')}, but its ranges cover {self.rows}")

    def file(self) -> Any:
        """The parquet file, open."""
        return pq.ParquetFile(self.path, page_checksum_verification=True)

    def _read(self, read: Callable[[Any], _Read], part: str) -> _Read:
        """Read from the open parquet file; put a damaged one back and read again."""

        def attempt() -> _Read:
            with self.file() as file:
                return read(file)

        return _healed(self.home, attempt, part)

    def _stream(self, count: int) -> Iterator[tuple[PropertyRange, pa.Table]]:
        with self.file() as file:
            if CatalogHeader.from_footer(file.metadata) != self.header:
                raise CatalogError(f"{self.path} was updated while it was in use. Start again.")
            yield from islice(stream_rows(file, self.header), count)


def _healed(home: Path, read: Callable[[], _Read], part: str) -> _Read:
    """Read; if that meets damage, put the second copy back and read again. Raises CatalogUnreadableError."""
    try:
        return read()
    except UNREADABLE as error:
        gone = isinstance(error, FileNotFoundError)
        put_back(home, "it is gone" if gone else f"{part} cannot be read ({error})")
    try:
        return read()
    except UNREADABLE as error:
        raise unreadable(home, f"cannot be read: {part} cannot be read ({error})") from error


__all__ = [
    "Catalog",
    "CatalogError",
    "CatalogMissingError",
    "CatalogRow",
    "CatalogUnreadableError",
    "catalog_path",
]

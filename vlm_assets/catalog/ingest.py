"""Making and growing the catalogue: append-only, one ingest at a time, whole or not at all.

What lives here: comparing a listing with the catalogue, writing the next one, its backups and the lock. What
does not: reading listings (`listing.py`), the file's format (`catalog.py`), durable writes
(`resources.storage.files`). Look up: advisory lock (flock).
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from resources.storage.files import make_directory, sha256_of, write_replacing
from vlm_assets.catalog.catalog import (
    SCHEMA,
    Catalog,
    CatalogHeader,
    CatalogMissingError,
    backup_paths,
    catalog_path,
    rows_digest,
)
from vlm_assets.catalog.image_root import ImageRoot
from vlm_assets.catalog.listed_images import Codes, ListedImages, gather
from vlm_assets.catalog.listing import (
    EmptyListingError,
    ListingError,
    ListingUnreadableError,
    Problems,
    open_listing,
)
from vlm_assets.catalog.ranges import ORDINAL_LIMIT, PropertyRange, cut_ranges
from vlm_assets.catalog.report import IngestReport

DEFAULT_RANGE_SIZE = 1000
"""Properties a range where nobody says otherwise: minutes to hours of work for most models."""

ROW_GROUP_ROWS = 4096
"""Rows of one row group at most: what is read at least for a range."""

# Threads that wait for the disk; on a network file system they hide its latency.
_THREADS = 16
_NAMED = 10


class IngestBusyError(Exception):
    """Another ingest is at work in this home."""


class ImageRootChangedError(ListingError):
    """The source's images lie under another root than the catalogue's."""


def ingest(
    source: Path,
    home: Path,
    *,
    range_size: int | None = None,
    image_root: Path | None = None,
    update: bool = False,
) -> IngestReport:
    """Take the properties of a source into the catalogue of a home.

    New properties get new ordinals in new ranges of ``range_size`` (default: the catalogue's own, at first
    1,000); what is in the catalogue stays where it is. Properties whose images changed (another list, other
    sizes) are taken only with ``update``. ``image_root`` is the folder that image paths are relative to and
    may not leave; default: the source's folder. Nothing is written where nothing changed.

    Raises ListingError (a family: what is wrong with the source, by line), IngestBusyError,
    CatalogUnreadableError, and DurableWriteError where the disk refuses; the catalogue then is as it was.
    """
    if range_size is not None and range_size < 1:
        raise ValueError(f"the range size is 1 or more, not {range_size}")
    root = _image_root(source, image_root)
    problems = Problems(source)
    with ThreadPoolExecutor(_THREADS) as pool:
        listing = open_listing(source, image_root=Path(root.path), pool=pool, problems=problems)
        make_directory(catalog_path(home).parent)
        with _only_ingest(home, source):
            for left in catalog_path(home).parent.glob(".catalog.parquet*.tmp"):
                left.unlink()
            try:
                known = Catalog.open(home)
            except CatalogMissingError:
                known = None
            _check_root(known, root, update)
            listed = gather(listing, root, pool=pool, problems=problems)
            problems.refuse()
            _check_not_empty(listed, source)

            merge = _Merge(listed, update)
            header = _header(known, home, root, range_size)
            moved = known is not None and header.image_root != known.header.image_root
            data = merge.next_catalog(known, header)
            _check_images_there(merge, root)
            written = bool(merge.new_ranges or merge.stale or moved)
            if written:
                _publish(home, data)
            else:
                _keep_second_copy(home)
            report = _report(Catalog.open(home), merge, written=written, moved=moved, notes=listing.notes)
            if known is None or range_size in (None, known.header.range_size):
                return report
            return replace(report, range_size_before=known.header.range_size, range_size_asked=range_size)


@dataclass
class _Merge:
    """A listing laid over a catalogue: what is new, changed and gone, and the catalogue that follows."""

    listed: ListedImages
    update: bool
    unchanged: int = 0
    readable_before: bool = False
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    stale: list[PropertyRange] = field(default_factory=list)
    new_ranges: tuple[PropertyRange, ...] = ()

    def next_catalog(self, known: Catalog | None, header: CatalogHeader) -> bytes:
        """The bytes of the catalogue that follows, as parquet; equal in rows where nothing changed."""
        writer = _CatalogWriter()
        new = np.ones(len(self.listed.codes), dtype=bool)
        rows = 0
        for one, table in known.slices() if known is not None else ():
            codes = np.array(
                [self.listed.codes.get(name, -1) for name in table["property_id"].to_pylist()], dtype=np.int64
            )
            new[codes[codes >= 0]] = False
            writer.add(one, self._with_changes(one, table, codes))
            rows = one.stop
        codes = np.flatnonzero(new)
        stop = rows + len(codes)
        if stop > ORDINAL_LIMIT:
            raise ListingError(f"a catalogue holds {ORDINAL_LIMIT} properties at most; this makes {stop}")
        ids = list(self.listed.codes)
        self.new_ranges = cut_ranges(rows, stop, header.range_size)
        for one in self.new_ranges:
            some = codes[one.start - rows : one.stop - rows]
            uris, sizes = self.listed.images_of(some)
            ordinals = pa.array(np.arange(one.start, one.stop))
            names = pa.array([ids[code] for code in some], pa.string())
            writer.add(one, pa.table([ordinals, names, uris, sizes], schema=SCHEMA))
        return writer.finish(header)

    def _with_changes(self, one: PropertyRange, table: Any, codes: Codes) -> Any:
        """A known range's rows as they are to be from now on; what is new about them is noted."""
        here = np.flatnonzero(codes >= 0)
        self.readable_before |= bool(pc.any(pc.is_valid(pc.list_flatten(table["image_bytes"]))).as_py())
        names = table["property_id"].to_pylist()
        self.gone += [names[row] for row in np.flatnonzero(codes < 0)]
        before = table.take(pa.array(here)).combine_chunks()
        uris, sizes = self.listed.images_of(codes[here])
        after = before.set_column(2, SCHEMA.field(2), uris).set_column(3, SCHEMA.field(3), sizes)
        if after.equals(before):
            self.unchanged += len(here)
            return table
        images = list(zip(*(table[name].to_pylist() for name in ("image_uris", "image_bytes")), strict=True))
        found = list(zip(uris.to_pylist(), sizes.to_pylist(), strict=True))
        changed = [(row, now) for row, now in zip(here, found, strict=True) if images[row] != now]
        self.unchanged += len(here) - len(changed)
        self.changed += [names[row] for row, _ in changed]
        if not (self.update and changed):
            return table
        self.stale.append(one)
        for row, now in changed:
            images[row] = now
        columns = [table["ordinal"], table["property_id"], *map(list, zip(*images, strict=True))]
        return pa.table(columns, schema=SCHEMA)


class _CatalogWriter:
    """Ranges in, the bytes of a catalogue out: row groups of whole ranges where these are small enough."""

    def __init__(self) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(
            self._sink, SCHEMA, compression="zstd", use_dictionary=False, write_page_checksum=True
        )
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._ranges: list[PropertyRange] = []
        self._digests: list[str] = []

    def add(self, one: PropertyRange, table: Any) -> None:
        self._ranges.append(one)
        self._digests.append(rows_digest(table))
        if self._pending_rows + len(one) > ROW_GROUP_ROWS:
            self._write()
        self._pending.append(table)
        self._pending_rows += len(one)

    def finish(self, header: CatalogHeader) -> bytes:
        self._write()
        header = replace(header, ranges=tuple(self._ranges), digests=tuple(self._digests))
        self._writer.add_key_value_metadata(header.metadata())
        self._writer.close()
        data: bytes = self._sink.getvalue().to_pybytes()
        return data

    def _write(self) -> None:
        if self._pending:
            table = pa.concat_tables(self._pending).combine_chunks()
            self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        self._pending, self._pending_rows = [], 0


@contextmanager
def _only_ingest(home: Path, source: Path) -> Iterator[None]:
    """Hold the home's ingest lock, which the kernel frees however this process ends."""
    path = catalog_path(home).parent / ".ingest.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "one that just began"
            raise IngestBusyError(
                f"Another ingest is at work in {home}: {holder}. Wait for it to end, then ingest again."
            ) from error
        os.ftruncate(descriptor, 0)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        os.pwrite(
            descriptor,
            f"process {os.getpid()}, source {source}, since {started}\n".encode("utf-8", "replace"),
            0,
        )
        yield
    finally:
        os.close(descriptor)


def _publish(home: Path, data: bytes) -> None:
    """Put a new catalogue in place. At every moment the one that it replaces has an intact second copy."""
    path = catalog_path(home)
    second_copy, previous = backup_paths(home)
    if not path.exists():
        # The copy comes last here: a copy without a catalogue means one that was lost, and stops everything.
        write_replacing(path, data)
        Catalog.open(home).verify()
        write_replacing(second_copy, data)
        return
    write_replacing(previous, path.read_bytes())
    Catalog.open_backup(home, previous).verify()
    write_replacing(second_copy, data)
    Catalog.open_backup(home, second_copy).verify()
    write_replacing(path, data)


def _keep_second_copy(home: Path) -> None:
    """Renew a second copy that is lost, damaged or of another ingest (one that was killed at the end)."""
    path, second_copy = catalog_path(home), backup_paths(home)[0]
    if not second_copy.exists() or sha256_of(second_copy) != sha256_of(path):
        write_replacing(second_copy, path.read_bytes())


def _image_root(source: Path, image_root: Path | None) -> ImageRoot:
    if image_root is None:
        return ImageRoot.at(source if source.is_dir() else source.parent)
    if not image_root.is_dir():
        raise ListingUnreadableError(f"There is no image root at {image_root}: it is a folder of images.")
    return ImageRoot.at(image_root)


def _check_root(known: Catalog | None, root: ImageRoot, update: bool) -> None:
    if known is not None and known.images.real != root.real and not update:
        raise ImageRootChangedError(
            f"The images of this catalogue lie under {known.image_root}, those of this source under "
            f"{root.path}. If the source's images are among the catalogue's, name the folder: ingest with "
            f"--image-root {known.image_root}, or set VLM_ASSETS_IMAGE_ROOT to it. If all images have moved: "
            f"ingest with --image-root {root.path} --update."
        )


def _header(known: Catalog | None, home: Path, root: ImageRoot, range_size: int | None) -> CatalogHeader:
    """The next header, its ranges not yet known. A root inside the home is kept relative: homes move."""
    place = Path(root.path)
    inside = place.is_relative_to(home.absolute())
    stored = str(place.relative_to(home.absolute()) if inside else place)
    if known is None:
        return CatalogHeader(str(uuid.uuid4()), 1, stored, range_size or DEFAULT_RANGE_SIZE, (), ())
    return replace(
        known.header,
        sequence=known.header.sequence + 1,
        image_root=known.header.image_root if known.images.real == root.real else stored,
        range_size=range_size or known.header.range_size,
    )


def _check_not_empty(listed: ListedImages, source: Path) -> None:
    if source.is_dir() and not len(listed.sizes):
        raise EmptyListingError(
            f"{source} holds no property: needed are folders with images in them, ID/*.jpg."
        )
    if not listed.codes:
        raise EmptyListingError(f"{source} lists no property.")


def _check_images_there(merge: _Merge, root: ImageRoot) -> None:
    """An unmounted disk looks like images that are all gone; taking that would make every range stale."""
    images = len(merge.listed.sizes)
    if merge.update and merge.readable_before and images and len(merge.listed.missing()) == images:
        raise ListingError(
            f"Not one of the {images} images can be read under {root.path}, so nothing was updated. Is the "
            "disk there, and is this the image root?"
        )


def _report(
    catalog: Catalog, merge: _Merge, *, written: bool, moved: bool, notes: dict[str, int]
) -> IngestReport:
    listed = merge.listed
    missing = listed.missing()
    return IngestReport(
        catalog=catalog.path,
        catalog_id=catalog.catalog_id,
        written=written,
        moved=moved,
        rows=catalog.rows,
        range_size=catalog.header.range_size,
        image_root=catalog.image_root,
        listed=len(listed.codes),
        new=sum(map(len, merge.new_ranges)),
        unchanged=merge.unchanged,
        changed_taken=len(merge.changed) if merge.update else 0,
        changed_not_taken=0 if merge.update else len(merge.changed),
        changed_ids=tuple(merge.changed[:_NAMED]),
        gone=len(merge.gone),
        gone_ids=tuple(merge.gone[:_NAMED]),
        without_images=int((listed.counts == 0).sum()),
        images_listed=len(listed.sizes),
        images_missing=len(missing),
        missing_uris=tuple(listed.uris.take(pa.array(missing[:_NAMED])).to_pylist()),
        new_ranges=merge.new_ranges,
        stale_ranges=tuple(merge.stale),
        notes=dict(notes),
    )

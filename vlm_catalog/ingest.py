"""Making and extending the catalogue: append-only, one ingest at a time, all of it or nothing.

``listing.py`` reads listings, ``catalog_file.py`` has the file's format, ``catalog_copies.py`` publishes it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_catalog.catalog import Catalog, CatalogMissingError
from vlm_catalog.catalog_copies import catalog_folders, catalog_path, check_copies
from vlm_catalog.catalog_file import (
    SCHEMA,
    CatalogHeader,
    CatalogWriter,
    inputs_digest,
    is_tombstone,
    with_inputs_digest,
)
from vlm_catalog.image_root import AnyImageRoot, ImageRoots, InvalidImagePathError, roots_at
from vlm_catalog.listed_images import Codes, ListedImages, gather
from vlm_catalog.listing import (
    FOLDERS_DEEP,
    INNER_FOLDERS,
    NOT_IMAGES,
    SINGULAR,
    IngestRequest,
    Listing,
    ListingError,
    Problems,
    open_listing,
)
from vlm_catalog.published_ids import (
    PublishedIds,
    numbered_as_published,
    refuse_unlisted,
    unlisted_ids,
)
from vlm_catalog.ranges import ORDINAL_LIMIT, PropertyRange, cut_around
from vlm_catalog.stored_catalog import extend_catalog, pull_catalog
from vlm_catalog.withdrawn_ids import (
    WithdrawnIds,
    lost_list,
    read_withdrawn,
    restore_withdrawn,
    save_withdrawn,
    share_withdrawn,
)
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory
from vlm_durable.files.home_claim import claim_home
from vlm_durable.files.layout import Home
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.mirror.bucket import Place, S3Folder, StoredObject
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror
from vlm_durable.wording import counted

DEFAULT_RANGE_SIZE = 1000
"""Properties a range where nobody says otherwise: minutes to hours of work for most models."""

# Threads that wait for the disk; on a network file system they hide its latency.
_THREADS = 16
_NAMED = 10


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingest is: ``done`` of ``total`` bytes, rows or folders of the source are read."""

    stage: str
    done: int
    total: int
    properties: int
    images: int


Progress = Callable[[IngestProgress], None]

BeforeUpdate = Callable[[Catalog, Sequence[PropertyRange]], None]
"""Called with the next catalogue and those of its ranges whose images change."""


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """Counts are of properties unless they say otherwise. Up to ten ids are named; the counts are complete.

    ``written``: whether the catalogue changed; ``moved``: whether its image root did. ``waiting``: properties
    in the unfilled tail, which is no partition yet. ``new_ranges``: partitions that did not exist before;
    ``stale_ranges``: existing ones with replaced images. ``notes``: what was passed over, counted by kind.
    ``not_images``: the first files of a folder tree that are no images. ``format``: a sentence on how an
    unusual source was read. ``refused``: entries that were left out and are listed in ``rejects``.
    ``more_images``: properties with more than ``max_images``. ``range_size_asked``: the requested range size,
    where it differs from ``range_size_before``. ``withdrawn``: listed properties that were withdrawn, and
    stay out. ``restored``: sentences about the list of withdrawn ids, where it was restored.
    """

    home: Path
    request: IngestRequest
    catalog: Path
    catalog_id: str
    written: bool = False
    moved: bool = False
    rows: int
    range_size: int
    image_root: str
    listed: int
    new: int
    waiting: int
    unchanged: int
    changed_taken: int
    changed_not_taken: int
    changed_ids: tuple[str, ...]
    gone: int
    gone_ids: tuple[str, ...]
    without_images: int
    images_listed: int
    images_missing: int
    missing_uris: tuple[str, ...]
    new_ranges: tuple[PropertyRange, ...]
    stale_ranges: tuple[PropertyRange, ...]
    notes: Mapping[str, int]
    not_images: tuple[str, ...] = ()
    format: str | None = None
    refused: int = 0
    rejects: Path | None = None
    max_images: int | None = None
    more_images: int = 0
    range_size_before: int | None = None
    range_size_asked: int | None = None
    withdrawn: int = 0
    restored: tuple[str, ...] = ()

    def sentences(self) -> tuple[str, ...]:
        """The report in words, the most important first."""
        sentences = [self.format] if self.format else []
        sentences.append(
            f"{counted(self.listed, 'properties')} with"
            f" {counted(self.images_listed, 'images were', 'image was')} listed: {self.new} new, "
            f"{self.unchanged} unchanged, {self.changed_taken + self.changed_not_taken} changed. "
            f"The catalogue {'now holds' if self.written else 'stays as it was, with'} "
            f"{counted(self.rows, 'properties')}."
        )
        sentences += self.restored
        if self.withdrawn:
            sentences.append(
                f"{counted(self.withdrawn, 'listed properties were', 'listed property was')} withdrawn"
                f" and stay out."
                f" {command('withdraw', '--undo', 'ID')} lets one in again."
            )
        if self.refused:
            sentences.append(
                f"{counted(self.refused, 'entries were', 'entry was')} refused and left out, and what else"
                " is listed of the same property; of a property that is listed twice the first entry stays."
                f" The reasons are in {self.rejects}. Put them right, and ingest again:"
                f" {self.request.command()}."
            )
        if self.new_ranges:
            sentences.append(
                f"{counted(len(self.new_ranges), 'new partitions')}: {_named(_keys(self.new_ranges))}."
            )
        if self.waiting:
            sentences.append(
                f"Waiting: {self.waiting}, too few for a partition of {self.range_size}."
                f" {command('run', '--missing')} makes a smaller partition of them and runs it;"
                f" {self.request.command('--close')} only makes it."
            )
        if self.range_size_asked is not None:
            sentences.append(
                f"The existing ranges keep their size of {self.range_size_before} properties, because what is"
                f" catalogued never moves. Only new ranges have {self.range_size_asked}. To change the size"
                " of all ranges, before their first run: remove"
                f" {', '.join(map(str, catalog_folders(self.home)))}, and ingest again."
            )
        if self.changed_not_taken:
            sentences.append(
                f"{counted(self.changed_not_taken, 'known properties have', 'known property has')}"
                f" other images than in the catalogue. They "
                f"were not taken ({_named(self.changed_ids, self.changed_not_taken)}):"
                f" {self.request.command('--update')} takes them, which makes their ranges stale."
            )
        if self.stale_ranges:
            sentences.append(
                f"The images of {counted(self.changed_taken, 'known properties')} were replaced "
                f"({_named(self.changed_ids, self.changed_taken)})."
                f" {counted(len(self.stale_ranges), 'ranges are', 'range is')} "
                f"stale now: {_named(_keys(self.stale_ranges))}."
            )
        if self.moved:
            sentences.append(f"The catalogue's images lie under {self.image_root} from now on.")
        if self.gone:
            sentences.append(
                f"{counted(self.gone, 'known properties are', 'known property is')} not in this source"
                f" ({_named(self.gone_ids, self.gone)}). "
                "They stay in the catalogue."
            )
        if self.images_missing:
            sentences.append(
                f"{self.images_missing} of {counted(self.images_listed, 'images')} could not be found or"
                " read "
                f"({_named(self.missing_uris, self.images_missing)}). Their properties are described without "
                "them."
            )
            if self.images_missing == self.images_listed:
                sentences.append(
                    f"Not one image lies where it should, under {self.image_root}: if they lie elsewhere, "
                    f"{self.request.command('--update', image_roots=['FOLDER'])}."
                )
        if self.more_images:
            sentences.append(
                f"{counted(self.more_images, 'properties have', 'property has')} more than"
                f" {counted(self.max_images or 0, 'images')}"
                " (VLM_ASSETS_MAX_IMAGES). The model is shown the first of them that can be read; each row"
                " lists the images that were used and those that were not."
            )
        if self.without_images:
            sentences.append(
                f"{counted(self.without_images, 'properties have', 'property has')} no image:"
                f" {'they will be failed rows' if self.without_images > 1 else 'it will be a failed row'}."
            )
        for kind, count in sorted(self.notes.items()):
            names = f" ({_named(self.not_images, count)})" if kind == NOT_IMAGES else ""
            if kind == INNER_FOLDERS:
                nested = f"{self.request.command('--nested')} takes the images in them"
                deep = f"more than {FOLDERS_DEEP} folders deep"
                names = f" ({deep if self.request.options.nested else nested})"
            sentences.append(f"Passed over: {counted(count, kind, SINGULAR.get(kind))}{names}.")
        return tuple(sentences)


@dataclass(frozen=True)
class NextCatalog(Catalog):
    """The catalogue that an ingest is about to write, before it is written."""

    data: bytes = field(repr=False)

    def file(self) -> Any:
        """The parquet file, open."""
        return pq.ParquetFile(pa.BufferReader(self.data))


class IngestBusyError(Exception):
    """Another ingest is at work in this home."""


def ingest(
    source: Place,
    home: Path,
    *,
    range_size: int | None = None,
    image_root: Place | Sequence[Place] | None = None,
    update: bool = False,
    close: bool = False,
    store: Mirror = NO_MIRROR,
) -> IngestReport:
    """Take the properties of a source into the catalogue of a home: ``take_in`` with the usual options.

    ``IngestRequest`` says what they mean. Raises what ``take_in`` raises.
    """
    return take_in(IngestRequest(source, range_size, image_root, update, close), home, store=store)


def take_in(
    request: IngestRequest,
    home: Path,
    *,
    max_images: int | None = None,
    progress: Progress = lambda now: None,
    before_update: BeforeUpdate = lambda catalog, stale: None,
    store: Mirror = NO_MIRROR,
) -> IngestReport:
    """Take the properties of a source into the catalogue of a home.

    New properties get new ordinals after the known ones. As many as fill a range become a new range; the
    rest waits in the tail until it is full, or the request closes it. What is in the catalogue stays where it
    is. Properties whose images changed (another list, other sizes) are taken only if the request updates.
    ``max_images``: the report counts the properties that have more. ``progress`` is told how far it
    is. ``before_update`` is asked before known properties get other images, without the ingest lock; what it
    raises ends the ingest with nothing changed. ``store``: where the catalogue of several machines lies; it
    is extended first. Nothing is written where nothing changed.

    Raises ListingError (a family: what is wrong with the source, by line), IngestBusyError,
    CatalogUnreadableError, StoreAwayError, and DurableWriteError where the disk refuses; then the catalogue
    is as it was.
    """
    source, range_size = request.source, request.range_size
    if range_size is not None and range_size < 1:
        raise ValueError(f"the range size is 1 or more, not {range_size}")
    requested_roots = _asked_roots(request)
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    rejects = home / "rejected" / f"{source.name}-{now}.csv" if request.skip_bad else None
    work = f"source {source}"
    with (
        Problems(source, request, rejects) as problems,
        ThreadPoolExecutor(_THREADS) as pool,
        ExitStack() as stack,
    ):
        # With several roots, each path is looked up by its whole name.
        prefix = str(requested_roots[0]) if len(requested_roots) == 1 else ""
        listing = open_listing(
            source, image_root=prefix, pool=pool, problems=problems, options=request.options
        )
        stack.enter_context(only_ingest(home, work))
        restored = [restore_withdrawn(home)]
        before = stored, current, withdrawn = _standing(home, store)
        root = _roots_for(current, requested_roots, request)

        def advance(done: int, properties: int, images: int) -> None:
            progress(IngestProgress("reading", done, listing.total, properties, images))

        listed = gather(listing, root, pool=pool, problems=problems, advance=advance)
        problems.refuse()
        _check_not_empty(listed, source, problems)
        counts = len(listed.codes), len(listed.sizes)
        progress(IngestProgress("writing the catalogue", listing.total, listing.total, *counts))

        unlisted = unlisted_ids(home, current, store)
        merge = _Merge(listed, request.update, request.close, unlisted, source, withdrawn)
        header = _header(current, home, root, range_size, unlisted)
        roots, roots_before = _roots(header), _roots(current.header) if current is not None else ()
        moved = current is not None and roots != roots_before
        is_wider = roots[: len(roots_before)] == roots_before
        data = merge.next_catalog(current, header)
        _refuse_unsafe(merge, root, home, request, changes_roots=moved and not is_wider)
        if merge.stale:
            next_header = CatalogHeader.from_footer(pq.read_metadata(pa.BufferReader(data)))
            path = catalog_path(home).absolute()
            stack.close()  # A person who is asked may be away for hours: nobody else waits for the lock.
            before_update(NextCatalog(home.absolute(), path, next_header, data), merge.stale)
            stack.enter_context(only_ingest(home, work))
            if _standing(home, store) != before:
                raise IngestBusyError(
                    f"The catalogue of {home} was changed while you were asked. This ingest changed nothing."
                    f" Do it again: {request.command()}."
                )
        if merge.withdrawn is not None and merge.unknown_tombstones:
            save_withdrawn(home, merge.withdrawn)
            share_withdrawn(home, store)
            restored.append(
                f"{counted(merge.unknown_tombstones, 'properties were', 'property was')} missing from"
                " the list of withdrawn ids,"
                " and were restored from the tombstones of the catalogue."
            )
        written = bool(merge.new or merge.new_ranges or merge.stale or merge.changed_in_tail or moved)
        if written:
            extend_catalog(home, data, store=store, over=stored)
        else:
            check_copies(home)
        size_before = header.range_size if current is None else current.header.range_size
        report = _report(Catalog.open(home), request, merge, listing, problems, max_images)
        return replace(
            report,
            written=written,
            moved=moved,
            withdrawn=merge.left_out,
            restored=tuple(filter(None, restored)),
            range_size_before=size_before,
            range_size_asked=None if range_size in (None, size_before) else range_size,
        )


def _refuse_unsafe(
    merge: _Merge, root: AnyImageRoot, home: Path, request: IngestRequest, *, changes_roots: bool
) -> None:
    """Refuse a merge that would lose all images, or bring withdrawn properties back.

    changes_roots: the image roots of the catalogue are replaced. Raises ListingError, WithdrawnListError.
    """
    if changes_roots and merge.gone and not (merge.unchanged or merge.changed):
        raise ListingError(
            f"Not one property of this catalogue is in {merge.source}, so nothing was changed: with the image"
            f" root {root.path} all would lose their images. Give these properties a home of their own:"
            f" {request.command('--home', 'DIR')}."
        )
    if merge.tombstones and merge.withdrawn is None:
        raise lost_list(home, len(merge.tombstones))
    images = len(merge.listed.sizes)
    if merge.update and merge.readable_before and images and len(merge.listed.missing()) == images:
        # If no image can be read, assume the disk is missing: otherwise every range would be stale.
        raise ListingError(
            f"Not one of {counted(images, 'images')} can be read under {root.path}, so nothing was updated."
            " Is the disk there, and is this the image root?"
        )


def close_tail(home: Path, store: Mirror = NO_MIRROR) -> PropertyRange | None:
    """Make a range of the catalogue's unfilled tail; gives it, or None if there is no tail.

    store: as in ``ingest``. Raises CatalogError, IngestBusyError, StoreError, DurableWriteError.
    """
    if Catalog.open(home).tail is None:
        return None
    with only_ingest(home, "closing the tail"):
        stored = pull_catalog(home, store)
        current = Catalog.open(home)
        if current.tail is None:
            return None
        refuse_unlisted(home, current)
        writer = CatalogWriter()
        for property_range, table in current.slices(with_tail=True):
            writer.add(property_range, table)
        data = writer.finish(replace(current.header, sequence=current.header.sequence + 1))
        extend_catalog(home, data, store=store, over=stored)
        return current.tail


@dataclass
class _Merge:
    """Merges a listing into a catalogue: what is new, changed and gone, and the next catalogue."""

    listed: ListedImages
    update: bool
    close: bool
    unlisted: Sequence[PublishedIds]
    source: Place
    withdrawn: WithdrawnIds | None
    unknown_tombstones: int = 0
    left_out: int = 0
    unchanged: int = 0
    new: int = 0
    readable_before: bool = False
    changed_in_tail: bool = False
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    tombstones: set[str] = field(default_factory=set)
    stale: list[PropertyRange] = field(default_factory=list)
    new_ranges: tuple[PropertyRange, ...] = ()

    def next_catalog(self, current: Catalog | None, header: CatalogHeader) -> bytes:
        """The bytes of the next catalogue, as parquet; with equal rows where nothing changed."""
        writer = CatalogWriter()
        is_new = np.ones(len(self.listed.codes), dtype=bool)
        rows = closed = 0
        before_tail = SCHEMA.empty_table()
        for property_range, table in current.slices(with_tail=True) if current is not None else ():
            codes = np.array(
                [self.listed.codes.get(name, -1) for name in table["property_id"].to_pylist()], dtype=np.int64
            )
            is_new[codes[codes >= 0]] = False
            in_tail = current is not None and property_range == current.tail
            table = self._with_changes(property_range, table, codes, in_tail=in_tail)
            rows = property_range.stop
            if in_tail:
                before_tail = table
            else:
                writer.add(property_range, table)
                closed = property_range.stop
        self.tombstones |= {
            name for published in self.unlisted for name in published.ids if is_tombstone(name)
        }
        if self.withdrawn is not None:
            before = len(self.withdrawn.changes)
            self.withdrawn = self.withdrawn.with_tombstones(self.tombstones)
            self.unknown_tombstones = len(self.withdrawn.changes) - before
            for name, code in self.listed.codes.items():
                if is_new[code] and name in self.withdrawn:
                    is_new[code] = False
                    self.left_out += 1
        ids = numbered_as_published(
            self.unlisted,
            list(compress(self.listed.codes, is_new)),
            tail=before_tail["property_id"].to_pylist(),
            start=rows,
            source=self.source,
        )
        self.new = len(ids)
        stop = rows + len(ids)
        if stop > ORDINAL_LIMIT:
            raise ListingError(f"a catalogue holds {ORDINAL_LIMIT} properties at most; this makes {stop}")

        def rows_of(property_range: PropertyRange) -> Any:
            first, end = property_range.start, property_range.stop
            known_rows = before_tail.slice(first - closed, max(0, min(end, rows) - first))
            new_ids = ids[max(0, first - rows) : max(0, end - rows)]
            return pa.concat_tables([known_rows, self._new_rows(end - len(new_ids), new_ids)])

        published_ranges = [published.range for published in self.unlisted]
        cut = cut_around(closed, stop, header.range_size, published_ranges)
        unfilled = bool(cut) and len(cut[-1]) < header.range_size and not self.close
        unfilled = unfilled and cut[-1] not in published_ranges
        self.new_ranges = cut[:-1] if unfilled else cut
        for property_range in self.new_ranges:
            writer.add(property_range, rows_of(property_range))
        if unfilled:
            tail = cut[-1]
            known_tail = current.header.tail if current is not None else None
            since = known_tail.since if known_tail is not None and tail.start < rows else time.time()
            writer.add_tail(tail, rows_of(tail), since=since)
        return writer.finish(header)

    def _new_rows(self, start: int, ids: Sequence[str]) -> Any:
        """The rows of new properties from this ordinal on. A published tombstone has no images."""
        listed = [id_ for id_ in ids if id_ in self.listed.codes]
        images = self.listed.images_of(np.array([self.listed.codes[id_] for id_ in listed], dtype=np.int64))
        if len(listed) < len(ids):
            of_id = dict(
                zip(listed, zip(*(column.to_pylist() for column in images), strict=True), strict=True)
            )
            uris, sizes = zip(*(of_id.get(id_, ([], [])) for id_ in ids), strict=True)
            images = pa.array(uris, SCHEMA.field(2).type), pa.array(sizes, SCHEMA.field(3).type)
        ordinals = pa.array(np.arange(start, start + len(ids)))
        return _rows([ordinals, pa.array(ids, pa.string()), *images])

    def _with_changes(self, property_range: PropertyRange, table: Any, codes: Codes, *, in_tail: bool) -> Any:
        """The rows of an existing range, or of the tail, in the next catalogue; notes what changed."""
        listed_rows = np.flatnonzero(codes >= 0)
        self.readable_before |= bool(pc.any(pc.is_valid(pc.list_flatten(table["image_bytes"]))).as_py())
        names = table["property_id"].to_pylist()
        missing = [names[row] for row in np.flatnonzero(codes < 0)]
        self.tombstones |= {name for name in missing if is_tombstone(name)}
        self.gone += [name for name in missing if name not in self.listed.left_out and not is_tombstone(name)]
        before = table.take(pa.array(listed_rows)).combine_chunks()
        uris, sizes = self.listed.images_of(codes[listed_rows])
        after = before.set_column(2, SCHEMA.field(2), uris).set_column(3, SCHEMA.field(3), sizes)
        if after.equals(before):
            self.unchanged += len(listed_rows)
            return table
        images = list(zip(*(table[name].to_pylist() for name in ("image_uris", "image_bytes")), strict=True))
        listed_images = list(zip(uris.to_pylist(), sizes.to_pylist(), strict=True))
        changed = [
            (row, now) for row, now in zip(listed_rows, listed_images, strict=True) if images[row] != now
        ]
        self.unchanged += len(listed_rows) - len(changed)
        self.changed += [names[row] for row, _ in changed]
        if not (self.update and changed):
            return table
        self.changed_in_tail |= in_tail
        if not in_tail:
            self.stale.append(property_range)
        digests = table["inputs_digest"].to_pylist()
        for row, now in changed:
            images[row] = now
            digests[row] = inputs_digest(*now)
        uris, sizes = map(list, zip(*images, strict=True))
        return pa.table([table["ordinal"], table["property_id"], uris, sizes, digests], schema=SCHEMA)


def _rows(columns: list[Any]) -> Any:
    """Rows of the catalogue from ordinals, ids, URIs and sizes."""
    return with_inputs_digest(pa.table(columns, schema=pa.schema([SCHEMA.field(at) for at in range(4)])))


def _standing(home: Path, store: Mirror) -> tuple[StoredObject | None, Catalog | None, WithdrawnIds | None]:
    """The catalogue in the store, the one in the home, and the list of withdrawn ids."""
    stored = pull_catalog(home, store)
    try:
        current = Catalog.open(home)
    except CatalogMissingError:
        current = None
    return stored, current, read_withdrawn(home)


@contextmanager
def only_ingest(home: Path, doing: str) -> Iterator[None]:
    """Hold the home's ingest lock, which the kernel frees however this process ends.

    Raises IngestBusyError, UnusableHomeError, OSError.
    """
    claim_home(Home(home))
    path = Home(home).state / "ingest.lock"
    make_directory(path.parent)
    lock = acquire_lock(path)
    if lock is None:
        holder = path.read_text(errors="replace").strip() or "one that just began"
        raise IngestBusyError(
            f"Another ingest is at work in {home}: {holder}. Wait for it to end, then ingest again."
        )
    try:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()}, {doing}, since {started}\n", errors="replace")
        yield
    finally:
        lock.close()


def _asked_roots(request: IngestRequest) -> list[Place]:
    """The image roots that were given; or the source's own folder."""
    source = request.source
    if not request.image_roots:
        return [source.parent if isinstance(source, Path) and not source.is_dir() else source]
    for place in request.image_roots:
        if isinstance(place, Path) and not place.is_dir():
            raise ListingError(f"There is no image root at {place}: it is a folder of images.")
    return list(request.image_roots)


def _roots_for(current: Catalog | None, requested: Sequence[Place], request: IngestRequest) -> AnyImageRoot:
    """The roots of the next catalogue; relative paths of this source are looked up in ``requested``.

    Raises ListingError where the catalogue's images lie elsewhere.
    """
    source = request.source
    try:
        root = roots_at(requested)
        if current is None or current.images.real == root.real:
            return root
        before = _reals(current.images.places)
        if not request.image_roots and len(before) > 1 and isinstance(source, Path) and not source.is_dir():
            return current.images
        named = _reals(requested)
        is_wider = set(before) < set(named)
        if set(named) <= set(before) or is_wider:
            added = [place for place, real in zip(requested, named, strict=True) if real not in before]
            wider = roots_at([*current.images.places, *added])
            if isinstance(wider, ImageRoots):
                reals = _reals(wider.places)
                return replace(wider, searched=tuple(map(reals.index, named)))
            return wider
    except InvalidImagePathError as error:
        raise ListingError(f"The image roots cannot be taken: {error}.") from error
    if request.update and len(before) == len(named):
        return root
    places = current.images.places
    raise ListingError(
        f"The images of this catalogue lie under {current.image_root}, those of this source under"
        f" {root.path}. Nothing was changed. If these are other properties, give them a home of their"
        f" own: {request.command('--home', 'DIR')}. If the source's images are among the catalogue's,"
        f" name that folder: {request.command(image_roots=places)}. If they lie in a further folder of"
        f" this machine: {request.command(image_roots=[*places, *requested])}. If all images of the catalogue"
        f" have moved there: {request.command('--update', image_roots=requested)}."
    )


def _reals(places: Sequence[Place]) -> list[str]:
    return [roots_at([place]).real for place in places]


def _roots(header: CatalogHeader) -> tuple[str, ...]:
    return header.image_root, *header.more_roots


def _header(
    current: Catalog | None,
    home: Path,
    root: AnyImageRoot,
    range_size: int | None,
    unlisted: Sequence[PublishedIds],
) -> CatalogHeader:
    """The next header, without its ranges. A root inside the home is kept relative, because homes are moved.

    A home that lost its catalogue keeps the id that its published partitions name.
    """
    root_names = [
        str(place.relative_to(home.absolute()))
        if isinstance(place, Path) and place.is_relative_to(home.absolute())
        else str(place)
        for place in root.places
    ]
    if current is None:
        id_before = next((published.catalog_id for published in unlisted if published.catalog_id), None)
        return CatalogHeader(
            id_before or str(uuid.uuid4()),
            1,
            root_names[0],
            range_size or DEFAULT_RANGE_SIZE,
            (),
            (),
            more_roots=tuple(root_names[1:]),
        )
    if current.images.real == root.real:
        root_names = list(_roots(current.header))
    return replace(
        current.header,
        sequence=current.header.sequence + 1,
        image_root=root_names[0],
        more_roots=tuple(root_names[1:]),
        range_size=range_size or current.header.range_size,
    )


def _check_not_empty(listed: ListedImages, source: Place, problems: Problems) -> None:
    if problems.count and not listed.codes:
        raise ListingError(
            f"{source}: not one of its properties can be taken"
            f" ({counted(problems.count, 'entries are', 'entry is')} refused), so nothing was changed. The"
            f" first of them are listed by {replace(problems.request, skip_bad=False).command()}."
        )
    is_folder = isinstance(source, S3Folder) or source.is_dir()
    if is_folder and not len(listed.sizes):
        raise ListingError(
            f"{source} holds no property: each needs a folder of its own with images in it, such as ID/1.jpg."
        )
    if not listed.codes:
        raise ListingError(f"{source} lists no property.")


def _report(
    catalog: Catalog,
    request: IngestRequest,
    merge: _Merge,
    listing: Listing,
    problems: Problems,
    max_images: int | None,
) -> IngestReport:
    listed = merge.listed
    missing = listed.missing()
    return IngestReport(
        home=catalog.home,
        request=request,
        catalog=catalog.path,
        catalog_id=catalog.catalog_id,
        rows=catalog.rows,
        range_size=catalog.header.range_size,
        image_root=catalog.image_root,
        listed=len(listed.codes),
        new=merge.new,
        waiting=catalog.waiting,
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
        notes=dict(listing.notes),
        not_images=tuple(listing.not_images),
        format=listing.format,
        refused=problems.count,
        rejects=problems.rejects if problems.count else None,
        max_images=max_images,
        more_images=int((listed.counts > max_images).sum()) if max_images is not None else 0,
    )


def _keys(ranges: Sequence[PropertyRange]) -> list[str]:
    return [property_range.key for property_range in ranges]


def _named(names: Sequence[str], count: int | None = None) -> str:
    more = (len(names) if count is None else count) - len(names[:_NAMED])
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

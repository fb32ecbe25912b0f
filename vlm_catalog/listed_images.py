"""A listing read to its end: each property once, its images as URIs with their sizes on disk.

Records are grouped to properties here, and entries that cannot be taken are refused. Millions of images stay
in Arrow and numpy buffers; Python objects hold the ids alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlm_catalog.image_root import AnyImageRoot, InvalidImagePathError, is_utf8
from vlm_catalog.listing import MAX_ID, MAX_IMAGES, MAX_PATH, Listing, Problems

_IMAGES_AT_ONCE = 1 << 18
_IMAGES_A_TASK = 2048
_PROPERTIES_AT_ONCE = 8192

_RECORDS_A_TICK = 8192

_MISSING = -1
_REFUSED = -2

Codes = npt.NDArray[np.int64]

Advance = Callable[[int, int, int], None]
"""Called with how much of a listing is read (of its ``total``), and the properties and images so far."""


@dataclass
class ListedImages:
    """Properties of a listing, numbered from 0 in its order ("codes"), and their images."""

    codes: dict[str, int]
    uris: Any  # pa.ChunkedArray of large_string, one an image, in the order of reading
    sizes: Codes  # bytes, or -1 where the image could not be read
    lines: Codes
    _order: Codes = field(repr=False)  # positions of images, property by property
    _starts: Codes = field(repr=False)  # where each property's images start in _order
    counts: Codes = field(repr=False)  # images of each property
    left_out: frozenset[str] = frozenset()  # ids of properties with an entry that was refused

    def images_of(self, codes: Codes) -> tuple[Any, Any]:
        """The URIs (list<string>) and the sizes (list<int64>, null: missing) of some properties."""
        positions, offsets = self._positions(codes)
        sizes = self.sizes[positions]
        return (
            pa.ListArray.from_arrays(
                offsets, self.uris.take(pa.array(positions)).cast(pa.string()).combine_chunks()
            ),
            pa.ListArray.from_arrays(offsets, pa.array(sizes, mask=sizes == _MISSING)),
        )

    def missing(self) -> Codes:
        """Positions of the images that could not be read."""
        return np.flatnonzero(self.sizes == _MISSING)

    def repeated(self) -> Iterator[tuple[int, str]]:
        """Images that a property lists twice, as position and URI."""
        for first in range(0, len(self.codes), _PROPERTIES_AT_ONCE):
            codes = np.arange(first, min(first + _PROPERTIES_AT_ONCE, len(self.codes)))
            positions, offsets = self._positions(codes)
            uris = self.uris.take(pa.array(positions)).to_pylist()
            ends = offsets.to_pylist()
            for start, stop in pairwise(ends):
                if len(set(uris[start:stop])) == stop - start:
                    continue
                seen: set[str] = set()
                for position in range(start, stop):
                    if uris[position] in seen:
                        yield int(positions[position]), uris[position]
                    seen.add(uris[position])

    def _positions(self, codes: Codes) -> tuple[Codes, Any]:
        counts = self.counts[codes]
        ends = np.cumsum(counts)
        within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        offsets = pa.array(np.concatenate(([0], ends)), pa.int32())
        return self._order[np.repeat(self._starts[codes], counts) + within], offsets


def gather(
    listing: Listing, root: AnyImageRoot, *, pool: Executor, problems: Problems, advance: Advance
) -> ListedImages:
    """Read a listing to its end. Entries that cannot be taken go to ``problems``.

    A property with such an entry is left out entirely, so that none is described from a part of its images.
    Of a repeated id or image the first is kept. advance: called with how much of the listing is read.
    """
    codes: dict[str, int] = {}
    refused: set[int] = set()
    counted: dict[int, int] = {}
    first_lines = array("q")
    owners, lines, sizes = array("q"), array("q"), array("q")
    chunks: list[Any] = []
    block: list[tuple[str, int | None]] = []

    def measure_block() -> None:
        start = len(sizes)
        parts = [block[at : at + _IMAGES_A_TASK] for at in range(0, len(block), _IMAGES_A_TASK)]
        for part in pool.map(lambda part: [_measure(root, *image) for image in part], parts):
            for size in part:
                if isinstance(size, str):
                    at = len(sizes)
                    problems.add(lines[at], size, block[at - start][0])
                    refused.add(owners[at])
                sizes.append(_REFUSED if isinstance(size, str) else size)
            advance(listing.done(), len(codes), len(sizes))
        chunks.append(pa.array([uri for uri, _ in block], pa.large_string()))
        block.clear()

    for number, (property_id, images, line, image_sizes) in enumerate(listing.records):
        if number % _RECORDS_A_TICK == 0:
            advance(listing.done(), len(codes), len(sizes) + len(block))
        code = codes.get(property_id)
        if code is None:
            if reason := _refused_id(property_id):
                problems.add(line, reason, property_id, property_id)
                continue
            code = codes[property_id] = len(codes)
            first_lines.append(line)
        elif listing.row_is_property:
            first = f"line {first_lines[code]}" if line else "the source"
            reason = f"the id stands in {first} already; that first entry is kept, and this one left out"
            problems.add(line, reason, property_id, property_id)
            continue
        if code in refused:
            continue
        counted[code] = counted.get(code, 0) + len(images)
        if counted[code] > MAX_IMAGES:
            problems.add(line, f"more than {MAX_IMAGES:,} images in one property", property_id, property_id)
            refused.add(code)
            continue
        for written, size in zip(images, image_sizes or repeat(None), strict=False):
            try:
                if len(written) > MAX_PATH:
                    raise InvalidImagePathError(f"the path has more than {MAX_PATH:,} characters")
                uri = root.uri(written)
            except InvalidImagePathError as error:
                problems.add(line, str(error), written, property_id)
                refused.add(code)
                continue
            block.append((uri, size))
            owners.append(code)
            lines.append(line)
        if len(block) >= _IMAGES_AT_ONCE:
            measure_block()
    measure_block()
    advance(listing.total, len(codes), len(sizes))

    uris = pa.chunked_array(chunks, pa.large_string())
    gathered = _grouped(codes, uris, np.asarray(owners), np.asarray(sizes), np.asarray(lines))
    keep = np.ones(len(sizes), dtype=bool)
    for at, uri in gathered.repeated():
        problems.add(int(gathered.lines[at]), "the same image twice in one property", uri)
        keep[at] = False
    if not refused and keep.all():
        return gathered
    return _kept(gathered, np.asarray(owners), keep, refused)


def _grouped(codes: dict[str, int], uris: Any, owner: Codes, sizes: Codes, lines: Codes) -> ListedImages:
    counts = np.bincount(owner, minlength=len(codes)).astype(np.int64)
    return ListedImages(
        codes=codes,
        uris=uris,
        sizes=sizes,
        lines=lines,
        _order=np.argsort(owner, kind="stable"),
        _starts=np.cumsum(counts) - counts,
        counts=counts,
    )


def _kept(
    gathered: ListedImages, owner: Codes, keep: npt.NDArray[np.bool_], refused: set[int]
) -> ListedImages:
    """The same without the refused properties, and without the images that are not kept."""
    names = list(gathered.codes)
    kept_codes = [code for code in range(len(names)) if code not in refused]
    number = np.full(len(names), -1, dtype=np.int64)
    number[kept_codes] = np.arange(len(kept_codes))
    owner = number[owner]
    keep = keep & (owner >= 0)
    kept = _grouped(
        {names[code]: at for at, code in enumerate(kept_codes)},
        gathered.uris.filter(pa.array(keep)),
        owner[keep],
        gathered.sizes[keep],
        gathered.lines[keep],
    )
    kept.left_out = frozenset(names[code] for code in refused)
    return kept


def _measure(root: AnyImageRoot, uri: str, known_size: int | None) -> int | str:
    """An image's size, -1 where it cannot be read, or why it is refused."""
    try:
        size = root.size(uri) if known_size is None else known_size
    except InvalidImagePathError as error:
        return str(error)
    return _MISSING if size is None else size


def _refused_id(property_id: str) -> str | None:
    if len(property_id) > MAX_ID:
        return f"the id has more than {MAX_ID:,} characters"
    if not property_id.strip():
        return "the id is empty"
    if "\0" in property_id:
        return "the id holds a NUL byte"
    if not is_utf8(property_id):
        return "the id is not UTF-8"
    return None

"""What a listing says, gathered: each property once, its images as URIs with their sizes, ready to be cut.

What lives here: grouping records to properties, asking the disk for sizes, and refusing what cannot be taken.
What does not: reading records (`listing.py`), comparing with a catalogue (`ingest.py`).
Millions of images stay in Arrow and numpy buffers; Python holds the ids alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlm_assets.catalog.image_root import ImageRoot, InvalidImagePathError, is_utf8
from vlm_assets.catalog.listing import Listing, Problems

_IMAGES_AT_ONCE = 1 << 18
_IMAGES_A_TASK = 2048
_PROPERTIES_AT_ONCE = 8192

_MISSING = -1
_REFUSED = -2

Codes = npt.NDArray[np.int64]


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
        """Images that a property lists twice, as line and URI."""
        for first in range(0, len(self.codes), _PROPERTIES_AT_ONCE):
            some = np.arange(first, min(first + _PROPERTIES_AT_ONCE, len(self.codes)))
            positions, offsets = self._positions(some)
            uris = self.uris.take(pa.array(positions)).to_pylist()
            ends = offsets.to_pylist()
            for start, stop in pairwise(ends):
                if len(set(uris[start:stop])) == stop - start:
                    continue
                seen: set[str] = set()
                for at in range(start, stop):
                    if uris[at] in seen:
                        yield int(self.lines[positions[at]]), uris[at]
                    seen.add(uris[at])

    def _positions(self, codes: Codes) -> tuple[Codes, Any]:
        counts = self.counts[codes]
        ends = np.cumsum(counts)
        within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        offsets = pa.array(np.concatenate(([0], ends)), pa.int32())
        return self._order[np.repeat(self._starts[codes], counts) + within], offsets


def gather(listing: Listing, root: ImageRoot, *, pool: Executor, problems: Problems) -> ListedImages:
    """Read a listing to its end. What cannot be taken goes to ``problems``: the result then is not whole."""
    codes: dict[str, int] = {}
    first_lines = array("q")
    owners, lines, sizes = array("q"), array("q"), array("q")
    chunks: list[Any] = []
    block: list[str] = []

    def measure_block() -> None:
        start = len(sizes)
        parts = [block[at : at + _IMAGES_A_TASK] for at in range(0, len(block), _IMAGES_A_TASK)]
        for part in pool.map(lambda part: [_measure(root, uri) for uri in part], parts):
            for size in part:
                if isinstance(size, str):
                    problems.add(lines[len(sizes)], size, block[len(sizes) - start])
                sizes.append(_REFUSED if isinstance(size, str) else size)
        chunks.append(pa.array(block, pa.large_string()))
        block.clear()

    for property_id, images, line in listing.records:
        code = codes.get(property_id)
        if code is None:
            if reason := _refused_id(property_id):
                problems.add(line, reason, property_id)
                continue
            code = codes[property_id] = len(codes)
            first_lines.append(line)
        elif listing.row_is_property:
            problems.add(line, f"the id stands in line {first_lines[code]} already", property_id)
            continue
        for written in images:
            try:
                uri = root.uri(written)
            except InvalidImagePathError as error:
                problems.add(line, str(error), written)
                continue
            block.append(uri)
            owners.append(code)
            lines.append(line)
        if len(block) >= _IMAGES_AT_ONCE:
            measure_block()
    measure_block()

    owner = np.asarray(owners, dtype=np.int64)
    counts = np.bincount(owner, minlength=len(codes)).astype(np.int64)
    gathered = ListedImages(
        codes=codes,
        uris=pa.chunked_array(chunks, pa.large_string()),
        sizes=np.asarray(sizes, dtype=np.int64),
        lines=np.asarray(lines, dtype=np.int64),
        _order=np.argsort(owner, kind="stable"),
        _starts=np.cumsum(counts) - counts,
        counts=counts,
    )
    for line, uri in gathered.repeated():
        problems.add(line, "the same image twice in one property", uri)
    return gathered


def _measure(root: ImageRoot, uri: str) -> int | str:
    """An image's size, -1 where it cannot be read, or why it is refused."""
    try:
        size = root.size(uri)
    except InvalidImagePathError as error:
        return str(error)
    return _MISSING if size is None else size


def _refused_id(property_id: str) -> str | None:
    if not property_id.strip():
        return "the id is empty"
    if "\0" in property_id:
        return "the id holds a NUL byte"
    if not is_utf8(property_id):
        return "the id is not UTF-8"
    return None

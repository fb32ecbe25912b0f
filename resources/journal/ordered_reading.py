"""Reading a journal in the order of its catalogue, whatever order its rows were committed in.

An index of the order column (16 bytes a row) says where each row lies; decoded segments pass through a
small cache. Fast where segments are nearly ordered, correct where they are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from resources.journal.segments import Segment, SegmentRecord, read_rows

_CACHE_BYTES = 64 << 20


class _SegmentCache:
    """The most recently used decoded segments, up to a number of bytes, never fewer than one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tables: OrderedDict[str, Any] = OrderedDict()
        self._bytes = 0

    def rows(self, record: SegmentRecord) -> Any:
        table = self._tables.pop(record.name, None)
        if table is None:
            table = read_rows(self._directory / record.name, record)
            self._bytes += table.nbytes
        self._tables[record.name] = table
        while self._bytes > _CACHE_BYTES and len(self._tables) > 1:
            _, oldest = self._tables.popitem(last=False)
            self._bytes -= oldest.nbytes
        return table


def _counting(segments: Sequence[Segment]) -> list[bool]:
    """Of each row of all segments, whether it counts: the last one of its id does."""
    ids = [one for segment in segments for one in segment.ids]
    last = {one: number for number, one in enumerate(ids)}
    return [last[one] == number for number, one in enumerate(ids)]


def read_in_order(
    directory: Path, segments: Sequence[Segment], schema: Any, batch_rows: int
) -> Iterator[Any]:
    """The rows of verified segments as pyarrow record batches of up to ``batch_rows``, by order column.

    ``segments`` in the order of their commits: of an id's rows the last one counts.

    Memory: the index, one batch and the cache. Raises SegmentUnreadableError where a segment has changed.
    """
    if not segments:
        return
    orders = pa.concat_arrays([segment.orders for segment in segments])
    owners = pa.concat_arrays([pa.repeat(n, len(s.orders)) for n, s in enumerate(segments)])
    places = pa.concat_arrays([pa.array(range(len(s.orders)), pa.int32()) for s in segments])
    order = pc.sort_indices(orders)
    if any(segment.record.superseding for segment in segments):
        order = order.filter(pa.array(_counting(segments)).take(order))
    cache = _SegmentCache(directory)
    for start in range(0, len(order), batch_rows):
        chosen = order.slice(start, batch_rows)
        wanted = pa.table(
            {
                "owner": owners.take(chosen),
                "place": places.take(chosen),
                "at": pa.array(range(len(chosen)), pa.int32()),
            }
        )
        parts, at = [], []
        for owner in pc.unique(wanted["owner"]).to_pylist():
            mine = wanted.filter(pc.equal(wanted["owner"], owner))
            parts.append(cache.rows(segments[owner].record).take(mine["place"]))
            at.append(mine["at"].combine_chunks())
        gathered = pa.concat_tables(parts).take(pc.sort_indices(pa.concat_arrays(at)))
        yield from gathered.cast(schema).combine_chunks().to_batches()

"""Segments: immutable parquet files of committed rows, named by their content.

Which segments count is in commits.py, what happens to one that does not verify in recovery.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_durable.journal.journal_errors import JournalError, SegmentUnreadableError

SEGMENT_NAME = re.compile(r"segment-(?P<epoch>\d{6,})-(?P<number>\d{8,})-(?P<sha256>[0-9a-f]{32})\.parquet")
_OWNER = b"vlm_assets.journal"
_KEYS = b"vlm_assets.keys"
_KEYS_START = b"vlm_assets.keys/2 "
_KEYS_END = b"\n"
_CACHE_BYTES = 64 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode

ID, ORDER = "property_id", "ordinal"
"""Columns of every journal: whose row it is, and its place among the others."""

STATUS, OK = "status", "ok"
TRIES = "tries"
"""Columns by which a row says that it may be superseded: it failed, and this was its n-th try (from 1)."""


_LATER = b"vlm_assets.later"


def later_column(name: str, kind: pa.DataType) -> pa.Field:
    """A column that files of earlier versions lack. Their rows have null there, and are not refused."""
    return pa.field(name, kind, metadata={_LATER: b""})


def is_later(column: pa.Field) -> bool:
    """Whether files of earlier versions may lack a column."""
    return _LATER in (column.metadata or {})


def with_later_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows of a file, perhaps of an earlier version, with all columns of ``schema`` and no others."""
    columns = [
        pa.nulls(table.num_rows, column.type)
        if is_later(column) and column.name not in table.column_names
        else table.column(column.name)
        for column in schema
    ]
    return pa.table(columns, names=schema.names).cast(schema)


@dataclass(frozen=True)
class JournalIdentity:
    """Whose rows a journal holds; only the identity that began it continues it.

    ``schema`` is a pyarrow schema; of its metadata only ``later_column`` counts.
    """

    key: str
    generation: str
    fingerprints: Mapping[str, str]
    schema: Any
    expected_ids: frozenset[str]
    described: Mapping[str, Any] = field(init=False)
    """The same as plain JSON values: what stands in manifests and in each segment's footer."""

    def __post_init__(self) -> None:
        for column, is_type in ((ID, pa.types.is_string), (ORDER, pa.types.is_int64)):
            if column not in self.schema.names or not is_type(self.schema.field(column).type):
                raise JournalError(
                    f"{self.key}: the schema needs {ID!r} as string and {ORDER!r} "
                    f"as int64; it has {self.schema.names}"
                )
        described = {
            "key": self.key,
            "generation": self.generation,
            "fingerprints": dict(sorted(self.fingerprints.items())),
            "schema": _without_metadata(self.schema),
            "id_column": ID,
            "order_column": ORDER,
            "expected_rows": len(self.expected_ids),
            "expected_ids_sha256": key_set_digest(self.expected_ids),
        }
        object.__setattr__(self, "described", described)

    @cached_property
    def earlier_schema(self) -> pa.Schema:
        """The schema without the columns that files of earlier versions lack."""
        return pa.schema([column for column in self.schema if not is_later(column)])

    def failed_tries(self, table: Any) -> list[int]:
        """The number of the try that failed, for each row; 0 where the row is final.

        Without the two columns every row is final. Raises ValueError for a failed row without a number.
        """
        if STATUS not in self.schema.names or TRIES not in self.schema.names:
            return [0] * table.num_rows
        rows = zip(table.column(STATUS).to_pylist(), table.column(TRIES).to_pylist(), strict=True)
        numbers = [0 if status == OK else tries for status, tries in rows]
        if any(number is None or number < 0 for number in numbers):
            raise ValueError(f"a failed row does not say in {TRIES!r} which try it was")
        return numbers

    @property
    def segment_metadata(self) -> bytes:
        """What a segment's footer says about its owner: enough to adopt it without a manifest."""
        names = ("key", "generation", "fingerprints", "expected_ids_sha256")
        return json.dumps({name: self.described[name] for name in names}, sort_keys=True).encode()

    def check(self, on_disk: Mapping[str, Any], where: str) -> None:
        """Compare with what stands on disk. Raises JournalError naming every difference."""
        differences = []
        for name, expected in self.described.items():
            actual = on_disk.get(name)
            if actual == expected or (name == "schema" and actual == _without_metadata(self.earlier_schema)):
                continue
            if isinstance(expected, dict) and isinstance(actual, dict):
                differences += [
                    f"{part} is {actual.get(part)!r} there and {expected.get(part)!r} here"
                    for part in sorted({*expected, *actual})
                    if actual.get(part) != expected.get(part)
                ]
            else:
                differences.append(f"{name} is {actual!r} there and {expected!r} here")
        if differences:
            raise JournalError(
                f"{where} belongs to other work than {self.key} (generation {self.generation}): "
                f"{'; '.join(differences)}. Nothing was mixed. Open another generation for other settings, "
                "or put the settings and the catalogue back that began this one."
            )


def _without_metadata(schema: pa.Schema) -> str:
    text: str = schema.remove_metadata().to_string(show_field_metadata=False)
    return text


def key_set_digest(ids: Iterable[str]) -> str:
    """SHA-256, in hex, over the sorted ids: equal counts hide a swapped id, equal digests do not.

    Each id is prefixed by its length, so none can imitate two.
    """
    return hashlib.sha256("".join(f"{len(id_)}:{id_}" for id_ in sorted(ids)).encode()).hexdigest()


@dataclass(frozen=True)
class SegmentRecord:
    """What a manifest says about a segment. Orders are the lowest and highest value of the order column.

    superseding: how many of its rows take the place of failed rows in earlier segments.
    """

    name: str
    size: int
    rows: int
    sha256: str
    key_set_digest: str
    order_min: int
    order_max: int
    superseding: int = 0

    @cached_property
    def json(self) -> str:
        """The record as JSON, rendered once: a manifest may list thousands."""
        # Not asdict: it copies each value deeply, which for thousands of records is a tenth of a re-open.
        return _encode({name: getattr(self, name) for name in _RECORD_FIELDS})

    @property
    def number(self) -> int:
        """The place of the segment in the order of commits."""
        return segment_number(self.name)


_RECORD_FIELDS = tuple(record_field.name for record_field in fields(SegmentRecord))


@dataclass(frozen=True)
class Segment:
    """A verified segment: its record, the ids in it, and its order column (pyarrow int64 array).

    failed_tries: for each row, 0 where it is final, else the number of the try that failed.
    """

    record: SegmentRecord
    ids: tuple[str, ...]
    orders: Any
    failed_tries: tuple[int, ...]

    def superseding(self, rows: int) -> Segment:
        """The same segment, with the number of its rows that take the place of earlier ones."""
        return replace(self, record=replace(self.record, superseding=rows))


def may_supersede(tries: int, committed: int) -> bool:
    """Whether a row may take the place of a committed row of its id; both as in ``Segment.failed_tries``.

    Only a failed row is superseded, by an ok row or by a later try.
    """
    return committed > 0 and (tries == 0 or tries > committed)


def segment_name(*, epoch: int, number: int, sha256: str) -> str:
    """Build a segment's name. It holds the content's digest, so it verifies without a readable manifest."""
    return f"segment-{epoch:06d}-{number:08d}-{sha256[:32]}.parquet"


def segment_paths(directory: Path) -> list[Path]:
    """The segments in a journal's directory, verified or not, in the order of their commits."""
    return sorted(path for path in directory.glob("segment-*") if SEGMENT_NAME.fullmatch(path.name))


def segment_number(name: str) -> int:
    """The number in a segment's name; 0 where the name is none."""
    match = SEGMENT_NAME.fullmatch(name)
    return int(match["number"]) if match else 0


def encode(table: Any, identity: JournalIdentity) -> bytes:
    """Rows (pyarrow table) as parquet bytes: zstd, page checksums, the owner's identity in the footer.

    The footer also repeats ids, orders and failed tries as one line of JSON, so that a re-open, which has
    the SHA-256 of the whole file to go by, need not decode thousands of small files to learn them.
    """
    owned = table.replace_schema_metadata({_OWNER: identity.segment_metadata})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, owned.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(owned)
        keys = _encode(_keys_of(owned, identity)).encode()
        writer.add_key_value_metadata({_KEYS: _KEYS_START + keys + _KEYS_END})
    data: bytes = sink.getvalue().to_pybytes()
    return data


_Keys = tuple[list[str], list[int], list[int]]


def _keys_of(table: Any, identity: JournalIdentity) -> _Keys:
    ids, orders = (table.column(name).to_pylist() for name in (ID, ORDER))
    return ids, orders, identity.failed_tries(table)


def _keys_in(data: bytes) -> _Keys:
    """Ids, orders and failed tries as a segment's footer repeats them.

    Raises SegmentUnreadableError without them.
    """
    try:
        start = data.rindex(_KEYS_START) + len(_KEYS_START)
        ids, orders, failed_tries = json.loads(data[start : data.index(_KEYS_END, start)])
    except ValueError as error:
        raise SegmentUnreadableError(f"the footer does not repeat the segment's ids: {error}") from error
    return ids, orders, failed_tries


def decode(data: bytes, where: Path) -> Any:
    """Parquet bytes as a pyarrow table, page checksums verified. Raises SegmentUnreadableError."""
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            return file.read(use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise SegmentUnreadableError(f"{where} cannot be decoded: {error}") from error


def describe(name: str, data: bytes, sha256: str, table: Any, identity: JournalIdentity) -> Segment:
    """The segment that these bytes and rows are."""
    ids = tuple(table.column(ID).to_pylist())
    orders = table.column(ORDER).combine_chunks()
    span = pc.min_max(orders)
    record = SegmentRecord(
        name=name,
        size=len(data),
        rows=table.num_rows,
        sha256=sha256,
        key_set_digest=key_set_digest(ids),
        order_min=span["min"].as_py(),
        order_max=span["max"].as_py(),
    )
    return Segment(record=record, ids=ids, orders=orders, failed_tries=tuple(identity.failed_tries(table)))


def verify_listed(path: Path, record: SegmentRecord, identity: JournalIdentity) -> Segment:
    """Verify a segment that a manifest lists: its bytes are the ones that were read back at the commit.

    An equal SHA-256 means that these bytes were fully decoded at the commit, so the ids come from the
    footer's line; the manifest's key-set digest proves those ids.
    """
    data = _read(path)
    if len(data) != record.size or hashlib.sha256(data).hexdigest() != record.sha256:
        raise SegmentUnreadableError(f"{path} is not what was committed: its SHA-256 or size differs")
    ids, orders, failed_tries = _keys_in(data)
    if len(orders) != record.rows or key_set_digest(ids) != record.key_set_digest:
        raise SegmentUnreadableError(f"{path} does not hold the ids that its manifest says")
    return Segment(record, tuple(ids), pa.array(orders, pa.int64()), tuple(failed_tries))


def verify_unlisted(path: Path, identity: JournalIdentity, *, name: str | None = None) -> Segment:
    """Verify an unlisted segment, or a segment just written: digest, full decode, owner, ids, schema.

    ``name`` is the final name where ``path`` is still temporary. Raises SegmentUnreadableError.
    """
    data = _read(path)
    sha256 = hashlib.sha256(data).hexdigest()
    final = name or path.name
    match = SEGMENT_NAME.fullmatch(final)
    if match is None or match["sha256"] != sha256[:32]:
        raise SegmentUnreadableError(f"{path}: its SHA-256 is not the one in its name")
    table = decode(data, path)
    if (table.schema.metadata or {}).get(_OWNER) != identity.segment_metadata:
        raise SegmentUnreadableError(f"{path} belongs to another journal")
    if not any(table.schema.equals(schema) for schema in (identity.schema, identity.earlier_schema)):
        raise SegmentUnreadableError(f"{path} has another schema")
    try:
        keys = _keys_of(table, identity)
    except ValueError as error:
        raise SegmentUnreadableError(f"{path}: {error}") from error
    if _keys_in(data) != keys:
        raise SegmentUnreadableError(f"{path}: its footer names other ids than its rows")
    segment = describe(final, data, sha256, table, identity)
    if not segment.ids or len(set(segment.ids)) != table.num_rows:
        raise SegmentUnreadableError(f"{path} has no rows, or an id twice")
    if not identity.expected_ids.issuperset(segment.ids):
        raise SegmentUnreadableError(f"{path} has ids that this journal does not expect")
    return segment


def verified_rows(path: Path) -> Any:
    """All rows of one segment (pyarrow table), whichever journal it is of and listed or not.

    Superseded rows are among them.

    Raises SegmentUnreadableError where it is not, to the byte, what its name says.
    """
    data = _read(path)
    match = SEGMENT_NAME.fullmatch(path.name)
    if match is None or match["sha256"] != hashlib.sha256(data).hexdigest()[:32]:
        raise SegmentUnreadableError(f"{path}: its SHA-256 is not the one in its name")
    return decode(data, path).replace_schema_metadata(None)


def read_rows(path: Path, record: SegmentRecord) -> Any:
    """All rows of a committed segment (pyarrow table), its digest and page checksums verified again."""
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise SegmentUnreadableError(
            f"{path} has changed since this journal was opened. Open the journal again: recovery says what "
            "can be restored"
        )
    return decode(data, path).replace_schema_metadata(None)


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
    """Whether each row counts, for the rows of all segments: the last row of an id does."""
    ids = [property_id for segment in segments for property_id in segment.ids]
    last = {property_id: number for number, property_id in enumerate(ids)}
    return [last[property_id] == number for number, property_id in enumerate(ids)]


def read_in_order(
    directory: Path, segments: Sequence[Segment], schema: Any, batch_rows: int
) -> Iterator[Any]:
    """The rows of verified segments as pyarrow record batches of up to ``batch_rows``, by order column.

    ``segments`` are in the order of their commits: the last row of an id counts. An index of the order
    column (16 bytes a row) says where each row lies. Reading is fast where segments are nearly ordered, and
    correct where they are not. Memory: the index, one batch and the cache. Raises SegmentUnreadableError
    where a segment has changed.
    """
    if not segments:
        return
    orders = pa.concat_arrays([segment.orders for segment in segments])
    owners = pa.concat_arrays(
        [pa.repeat(number, len(segment.orders)) for number, segment in enumerate(segments)]
    )
    places = pa.concat_arrays([pa.array(range(len(segment.orders)), pa.int32()) for segment in segments])
    order = pc.sort_indices(orders)
    if any(segment.record.superseding for segment in segments):
        order = order.filter(pa.array(_counting(segments)).take(order))
    cache = _SegmentCache(directory)
    for start in range(0, len(order), batch_rows):
        chosen = order.slice(start, batch_rows)
        locations = pa.table(
            {
                "owner": owners.take(chosen),
                "place": places.take(chosen),
                "at": pa.array(range(len(chosen)), pa.int32()),
            }
        )
        parts, positions = [], []
        for owner in pc.unique(locations["owner"]).to_pylist():
            owned = locations.filter(pc.equal(locations["owner"], owner))
            rows = cache.rows(segments[owner].record).take(owned["place"])
            parts.append(with_later_columns(rows, schema))
            positions.append(owned["at"].combine_chunks())
        gathered = pa.concat_tables(parts).take(pc.sort_indices(pa.concat_arrays(positions)))
        yield from gathered.combine_chunks().to_batches()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SegmentUnreadableError(f"{path} cannot be read: {error.strerror or error}") from error

"""What changed: properties that are new, changed or withdrawn since a snapshot, each told once.

A snapshot is a file that the caller keeps beside what follows: the ids that were told, each with a digest of
its row. It is the only place where a withdrawn id can be known by: the home forgets withdrawn ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.partition import CONFIDENCE, INPUTS, NOT_ASKED
from vlm_assets.config.settings import Settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.progress import doing
from vlm_assets.services.withdrawal import pending_withdrawal
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import is_tombstone
from vlm_durable.files.files import TemporaryFile, make_directory, publish_replacing
from vlm_durable.files.layout import VERSION_NUMBERS, AssetFolders
from vlm_durable.files.sealed_json import BrokenSealError, sealed, unsealed
from vlm_durable.versions.partition_files import PartitionFiles, PublishedRecord, highest
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_results.guarantee import RAW, Guarantee, shown_rows
from vlm_results.joined_rows import (
    FurtherRows,
    ShownAnswers,
    beside,
    further_records,
    further_sets,
    shown_version,
)
from vlm_results.published_table import (
    DescribedRows,
    answer_digest,
    are_vectors_of,
    published_records,
    read_described,
)

_FORMAT: Final = 1
_HEADER: Final = b"vlm_assets.snapshot"
_DIGEST_BYTES: Final = 16
_COLUMNS: Final = ("property_id", "ordinal", "status", "description", INPUTS)

_SCHEMA: Final = pa.schema(
    [("ordinal", pa.int64()), ("property_id", pa.string()), ("row", pa.binary(_DIGEST_BYTES))]
)


class Kind(StrEnum):
    """What happened to a property."""

    new = "new"
    changed = "changed"
    withdrawn = "withdrawn"


@dataclass(frozen=True)
class Change:
    """A property that is new, changed or withdrawn.

    property_id: None for a withdrawn one whose id nobody knows any more; its ordinal is its own for ever.
    has_vector: whether a vector of the published description is published.
    """

    change: Kind
    property_id: str | None
    ordinal: int
    status: str | None = None
    has_vector: bool = False


class Row(NamedTuple):
    """A property's published row. digest: of its status, its answer with what decided it, and its vector."""

    property_id: str
    digest: bytes
    status: str | None = None
    has_vector: bool = False


Rows = Mapping[int, Row]
"""The rows of one partition, by ordinal."""

Version = tuple[str, str | None]
"""The digest of a partition's descriptions, with those of further question sets, and of its vectors.

None: it is not embedded.
"""

_NOT_TOLD: Final[Version] = ("", None)
"""The version of no file: the partition is compared next time."""


@dataclass(frozen=True)
class PublishedFiles:
    """The records of a partition's files. further: of further question sets, by their names.

    shown: see ``shown_version``.
    """

    described: PublishedRecord
    embedded: PublishedRecord | None
    further: Mapping[str, PublishedRecord]
    shown: str

    @property
    def version(self) -> Version:
        """What the shown rows are made from, and the digest of the vectors."""
        return self.shown, None if self.embedded is None else self.embedded.sha256


class _NotKeptError(Exception):
    """A version that was published once is kept no more."""


class Since:
    """What was told before; of itself nothing, so that everything is new.

    versions: which version of each partition was told, as far as that is written down.
    """

    versions: Mapping[str, Version] = MappingProxyType({})

    def has(self, files: PublishedFiles) -> bool:
        """Whether this version of a partition was told."""
        return False

    def rows(self, key: str) -> Rows | None:
        """The rows of a partition that were told; None: nobody knows any more."""
        return {}


class PointInTime(Since):
    """What was published at a time, as far as its versions are kept.

    not_compared: partitions whose version of that time is kept no more.
    """

    def __init__(self, settings: Settings, time: datetime) -> None:
        self._settings = settings
        self._time = time
        self.not_compared: list[str] = []

    def has(self, files: PublishedFiles) -> bool:
        """Whether all were published by then."""
        records = (files.described, files.embedded, *files.further.values())
        return all(self._is_before(record) for record in records if record is not None)

    def rows(self, key: str) -> Rows | None:
        """The rows as they were published then."""
        try:
            described = self._file(self._settings.descriptions, key)
            embedded = self._file(self._settings.embeddings, key)
            answered = [(of_set, self._file(of_set.asset, key)) for of_set in further_sets(self._settings)]
        except _NotKeptError:
            self.not_compared.append(key)
            return None
        if described is None:
            return {}
        record, path = described
        vectors = None
        if embedded is not None and are_vectors_of(embedded[0], record):
            vectors = PartitionRows(embedded[1]).to_table(["ordinal", "embedding"])
        rows = self._shown(record, path)
        further = tuple(
            FurtherRows(of_set.name, file[0], beside(rows, self._shown(*file)), of_set.fills)
            for of_set, file in answered
            if file is not None
        )
        return _rows_of(DescribedRows(rows, vectors, record, embedded and embedded[0], further))

    def _shown(self, record: PublishedRecord, path: Path) -> pa.Table:
        rows = PartitionRows(path).to_table([*_COLUMNS, CONFIDENCE])
        return shown_rows(rows, Guarantee.read(self._settings).thresholds_for(record))

    def _file(self, asset: AssetFolders, key: str) -> tuple[PublishedRecord, Path] | None:
        """The version that was published then, and its file; None: none was. Raises _NotKeptError."""
        files = PartitionFiles(asset, key)
        record = highest(files.whole_records())
        versions = record.versions if record is not None else ()
        until_then = [version for version in versions if version.published_at and self._is_before(version)]
        if not until_then:
            if min((version.sequence for version in versions), default=1) > 1:
                raise _NotKeptError
            return None
        version = max(until_then, key=lambda version: version.sequence)
        for path in (files.published, *map(files.slot, VERSION_NUMBERS)):
            if files.holds(path, version):
                return version, path
        raise _NotKeptError

    def _is_before(self, record: PublishedRecord) -> bool:
        return datetime.fromisoformat(record.published_at) <= self._time


class RowSnapshot(Since):
    """What a caller was told until then, in a file: one row group a partition. Raises CommandError."""

    def __init__(self, path: Path, catalog: Catalog) -> None:
        self.path = path
        try:
            # One file for all partitions: its footer is large, and is read with each opening.
            self._file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
            content = unsealed(self._file.metadata.metadata[_HEADER], path, format_=_FORMAT)
            if content["catalog_id"] != catalog.catalog_id:
                raise CommandError(f"{path} is a snapshot of another catalogue than {catalog.path}.")
            self.versions: dict[str, Version] = {}
            self._groups: dict[str, int] = {}
            for key, described, embedded, rows in content["versions"]:
                self.versions[key] = described, embedded
                if rows:
                    self._groups[key] = len(self._groups)
        except (OSError, pa.ArrowException, BrokenSealError, LookupError, TypeError) as error:
            raise self._unreadable(error) from error

    def has(self, files: PublishedFiles) -> bool:
        """Whether this version was told."""
        return self.versions.get(files.described.key) == files.version

    def rows(self, key: str) -> Rows:
        """The rows of a partition that were told."""
        if key not in self._groups:
            return {}
        try:
            table = self._file.read_row_group(self._groups[key])
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        columns = (column.to_pylist() for column in table.columns)
        return {ordinal: Row(*row) for ordinal, *row in zip(*columns, strict=True)}

    def _unreadable(self, error: Exception) -> CommandError:
        return CommandError(
            f"{self.path} is no snapshot that can be read: {error}. Name an earlier one, or none: then every"
            " property is new."
        )


class SnapshotWriter:
    """Writes a snapshot, a partition at a time. It has its name once it is finished, whole."""

    def __init__(self, path: Path, catalog: Catalog) -> None:
        make_directory(path.absolute().parent)
        self._path = path
        self._catalog_id = catalog.catalog_id
        self._file = TemporaryFile(path.absolute(), mode=0o600)
        self._writer = pq.ParquetWriter(self._file, _SCHEMA, compression="zstd", write_page_checksum=True)
        self._versions: list[tuple[str, str, str | None, int]] = []

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path | None, catalog: Catalog) -> Iterator[Self | None]:
        """A writer for this path; without a path none. Nothing is left of one that was not finished."""
        if path is None:
            yield None
            return
        writer = cls(path, catalog)
        try:
            yield writer
        finally:
            writer._discard()

    def add(self, key: str, version: Version, rows: Rows) -> None:
        """Add a partition; nothing of withdrawn properties."""
        rows = {at: row for at, row in rows.items() if not is_tombstone(row.property_id)}
        self._versions.append((key, *version, len(rows)))
        if rows:
            ordinals = sorted(rows)
            columns = [ordinals, *([rows[at][part] for at in ordinals] for part in (0, 1))]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
            self._writer.write_table(pa.table(arrays, schema=_SCHEMA), row_group_size=len(rows))

    def finish(self) -> None:
        """Give the file its name, durably. Raises OSError."""
        header = sealed({"catalog_id": self._catalog_id, "versions": self._versions}, format_=_FORMAT)
        self._writer.add_key_value_metadata({_HEADER: header})
        self._writer.close()
        self._file.seal()
        publish_replacing(self._file.path, self._path.absolute())

    def _discard(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):  # A full disk fails once more.
            self._writer.close()
        self._writer.is_open = False
        self._file.discard()


def changes(
    settings: Settings, catalog: Catalog, since: Since, following: SnapshotWriter | None = None
) -> Iterator[Change]:
    """What changed since then; one partition is in memory at a time. following: gets what is told then.

    Raises CommandError, PublishedError, OSError.
    """
    guarantee = Guarantee.read(settings)

    def files_of(
        record: PublishedRecord, vectors: PublishedRecord | None, further: Mapping[str, PublishedRecord]
    ) -> PublishedFiles:
        shown = shown_version(settings, guarantee, record, further)
        return PublishedFiles(record, vectors, further, shown)

    described = published_records(settings.descriptions, catalog)
    embedded = published_records(settings.embeddings, catalog)
    keys = sorted({*described, *since.versions})
    for number, key in enumerate(keys):
        doing("comparing partitions", number, len(keys))
        record, vectors = described.get(key), embedded.get(key)
        # A partition that was told and has no record is a case for the audit: nothing of it is told.
        files = None if record is None else files_of(record, vectors, further_records(settings, key))
        if files is None or since.has(files):
            if following is not None:
                version = since.versions[key] if files is None else files.version
                following.add(key, version, since.rows(key) or {})
            continue
        read, before = read_described(settings, key, _COLUMNS), since.rows(key)
        files = files_of(read.described, read.embedded, read.further_records)
        version, current = files.version, _rows_of(read)
        if read.vectors is None and read.embedded is not None and _is_being_withdrawn(settings, key):
            # Until its vectors are rewritten too, all rows look as if they had lost theirs: told next time.
            version, current = _NOT_TOLD, before or {}
        if following is not None:
            following.add(key, version, current)
        yield from compared(before, current)


def _is_being_withdrawn(settings: Settings, key: str) -> bool:
    withdrawal = pending_withdrawal(settings)
    return withdrawal is not None and key in withdrawal.slices


def compared(before: Rows | None, current: Rows) -> Iterator[Change]:
    """What changed in one partition. before: None if nobody knows: then everything may have."""
    for ordinal, row in current.items():
        earlier = None if before is None else before.get(ordinal)
        if is_tombstone(row.property_id):
            if before is None or (earlier is not None and not is_tombstone(earlier.property_id)):
                yield Change(Kind.withdrawn, earlier and earlier.property_id, ordinal)
        elif earlier is None or earlier.digest != row.digest:
            kind = Kind.new if before is not None and earlier is None else Kind.changed
            yield Change(kind, row.property_id, ordinal, row.status, row.has_vector)


def line_of(change: Change) -> str:
    """A change as a line of JSON."""
    return json.dumps(asdict(change), ensure_ascii=False)


def _rows_of(read: DescribedRows) -> Rows:
    vectors = {} if read.vectors is None else vector_bytes(read.vectors)
    rows = {}
    of_sets = [(of_set.name, of_set.rows.to_pylist()) for of_set in read.further]
    shown = ShownAnswers.from_rows(read.rows, read.further)
    filled = {of_set.name: shown.filled(of_set) for of_set in read.further}
    for number, row in enumerate(read.rows.to_pylist()):
        ordinal, vector = row["ordinal"], vectors.get(row["ordinal"], b"")
        answer = answer_digest({INPUTS: None, **row})
        further = {
            name: [
                answered[number]["status"],
                answer_digest(answered[number]),
                _shown(answered[number]),
                *filled[name][number],
            ]
            for name, answered in of_sets
            if answered[number]["status"] not in (None, NOT_ASKED)
        }
        rows[ordinal] = row_of(row["property_id"], row["status"], answer, vector, _shown(row), further)
    return rows


def _shown(row: Mapping[str, Any]) -> str:
    """A digest of what is shown of an answer where that may be less than the answer."""
    return digest_of(row["description"]) if RAW in row else ""


def row_of(
    property_id: str,
    status: str,
    answer: str | None,
    vector: bytes,
    shown: str,
    further: Mapping[str, Sequence[Any]],
) -> Row:
    """A row as it is told. answer: the digest of what was answered. shown: what is shown of it.

    further: the same of further question sets that were asked, with the row's status and the fields that it
    fills, by their names.
    """
    of_sets = f"\0{digest_of(sorted(further.items()))}" if further else ""
    content = f"{status}\0{answer}\0{shown}{of_sets}".encode() + vector
    return Row(property_id, hashlib.sha256(content).digest()[:_DIGEST_BYTES], status, bool(vector))


def vector_bytes(vectors: pa.Table) -> dict[int, bytes]:
    """The bytes of each vector, by ordinal."""
    valid = vectors.filter(pc.is_valid(vectors["embedding"]))
    if not valid.num_rows:
        return {}
    numbers = np.asarray(valid["embedding"].combine_chunks().flatten()).reshape(valid.num_rows, -1)
    ordinals = valid["ordinal"].to_pylist()
    return {ordinal: row.tobytes() for ordinal, row in zip(ordinals, numbers, strict=True)}


def told_before(text: str | None, settings: Settings, catalog: Catalog) -> Since:
    """A snapshot, a time or nothing. Raises CommandError."""
    if text is None:
        return Since()
    if Path(text).exists():
        return RowSnapshot(Path(text), catalog)
    return PointInTime(settings, time_of(text))


def time_of(text: str) -> datetime:
    """The time that --since names, UTC unless it says. Raises CommandError."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"--since {text!r} is neither a snapshot nor a time such as 2026-11-01T12:00."
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)

"""What the published rows tell: how many are ok, which failed and why, when and on which device.

What lives here: one query over the files of descriptions, and a note of its answer for files that did not
change, so that the next look reads only what is new. What does not: whether the rows are whole
(``audit/rows.py``). The note may be deleted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resources.journal.errors import SegmentUnreadableError
from resources.journal.segments import segment_paths, verified_rows
from resources.publishing.record import PublishedRecord
from resources.storage.layout import AssetFolders, PartitionPaths
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed

if TYPE_CHECKING:
    import duckdb

FIRST = 5
"""How many failed properties are named."""

_COLUMNS = ("property_id", "ordinal", "status", "error_kind", "error")


@dataclass(frozen=True)
class FailedRow:
    """One property that could not be described, and why."""

    property_id: str
    kind: str
    error: str

    def sentence(self) -> str:
        """The property and the reason, for people."""
        return f"{self.property_id}: {self.kind}: {self.error}"


@dataclass(frozen=True)
class FailedRows:
    """The failed rows of so many. first: of the lowest ordinals."""

    rows: int
    kinds: Mapping[str, int]
    first: tuple[FailedRow, ...]

    @property
    def failed(self) -> int:
        """How many have failed."""
        return sum(self.kinds.values())

    def sentence(self) -> str:
        """How many failed, of which kinds, and the first of them with the reason."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        said = f"{self.failed} of {self.rows} properties failed" + (f" ({kinds})" if kinds else "")
        return said + (f". First: {self.first[0].sentence()}" if self.first else "")


def unpublished_failures(paths: PartitionPaths) -> FailedRows:
    """The failed rows of a partition's latest journal. A segment that does not read is left out."""
    journals = [(path.stat().st_mtime_ns, path) for path in paths.journals.glob("*") if path.is_dir()]
    last: dict[str, dict[str, Any]] = {}
    for path in segment_paths(max(journals)[1]) if journals else []:
        try:
            table = verified_rows(path)
        except SegmentUnreadableError:
            continue
        names = [name for name in _COLUMNS if name in table.schema.names]
        # A later segment's row takes the place of a failed one.
        last |= {row["property_id"]: row for row in table.select(names).to_pylist()}
    failed = sorted(
        (row for row in last.values() if row.get("status", "ok") != "ok"), key=lambda row: row["ordinal"]
    )
    kinds = Counter(str(row.get("error_kind")) for row in failed)
    first = (
        FailedRow(row["property_id"], str(row.get("error_kind")), str(row.get("error")))
        for row in failed[:FIRST]
    )
    return FailedRows(len(last), dict(kinds.most_common()), tuple(first))


STRETCH_SECONDS = 600
"""Rows of one device are told in stretches of ten minutes at most: a month of them is still a small file."""

_ABOUT = "May be deleted: what the published rows of each file say, by the file's digest. It is read anew."
_FORMAT = 3

_QUERY = """
    SELECT filename, device, histogram(coalesce(error_kind, 'ok')), count(DISTINCT described_at),
        sum(images_seen)::BIGINT, min(epoch(described_at)), max(epoch(described_at))
    FROM read_parquet($files, filename = true)
    GROUP BY filename, device, floor(epoch(described_at) / $stretch)
    ORDER BY filename, 6
"""


_FIRST_FAILED = """
    SELECT filename, property_id, error_kind, error
    FROM read_parquet($files, filename = true)
    WHERE status <> 'ok'
    QUALIFY row_number() OVER (PARTITION BY filename ORDER BY ordinal) <= $first
    ORDER BY filename, ordinal
"""


@dataclass(frozen=True)
class Stretch:
    """Rows of one partition that one device made one after the other.

    first, last: when its first and its last batch were done, unix seconds. images: shown to the model.
    """

    device: str
    first: float
    last: float
    rows: int
    images: int
    batches: int


@dataclass(frozen=True)
class PublishedRows:
    """The rows of one published file of descriptions. failed: by kind. sha256: of the file.

    began: when the run that published it was launched, in unix seconds; None if it does not say.
    """

    sha256: str
    ok: int
    failed: Mapping[str, int]
    stretches: tuple[Stretch, ...]
    first_failed: tuple[FailedRow, ...] = ()
    began: float | None = None


class PublishedRowsNote:
    """What is known of files already, in ``.state/published_rows.json``."""

    def __init__(self, state_directory: Path) -> None:
        self._path = state_directory / "published_rows.json"

    def read(self) -> dict[str, PublishedRows]:
        """What was written last, by partition key; nothing where it is missing or not what was written."""
        try:
            found = read_sealed(self._path)
            if found["format"] != _FORMAT:
                return {}
            return {key: _from_json(one) for key, one in found["partitions"].items()}
        except (OSError, BrokenSealError, KeyError, TypeError):
            return {}

    def write(self, rows: Mapping[str, PublishedRows]) -> None:
        """Replace the note. Raises OSError."""
        partitions = {key: asdict(one) for key, one in rows.items()}
        write_sealed(self._path, {"about": _ABOUT, "format": _FORMAT, "partitions": partitions})


def read_published_rows(
    asset: AssetFolders, records: Iterable[PublishedRecord], known: Mapping[str, PublishedRows]
) -> dict[str, PublishedRows]:
    """The rows of each published partition of descriptions, by key. A file that does not read is left out.

    known: what an earlier look found; files that are still those are not read again.
    """
    wanted = {record.key: record for record in records}
    found = {
        key: known[key]
        for key, record in wanted.items()
        if key in known and known[key].sha256 == record.sha256
    }
    unread = {asset.partition(key).published: record for key, record in wanted.items() if key not in found}
    for path, rows in _read(unread).items():
        found[path.stem] = rows
    return found


def _read(files: Mapping[Path, PublishedRecord]) -> dict[Path, PublishedRows]:
    import duckdb

    if not files:
        return {}
    with duckdb.connect() as connection:
        try:
            answer, failed = _ask(connection, list(files))
        except duckdb.Error:
            # One of them does not read: its state says so, the audit says what is wrong, the others count.
            answer, failed = [], []
            for path in files:
                try:
                    of_file, failed_of_file = _ask(connection, [path])
                except duckdb.Error:
                    continue
                answer += of_file
                failed += failed_of_file
    kinds: defaultdict[Path, Counter[str]] = defaultdict(Counter)
    stretches: defaultdict[Path, list[Stretch]] = defaultdict(list)
    for name, device, of_kind, batches, images, first, last in answer:
        path = Path(name)
        kinds[path].update(of_kind)
        stretches[path].append(Stretch(device, first, last, sum(of_kind.values()), images, batches))
    named: defaultdict[Path, list[FailedRow]] = defaultdict(list)
    for name, *row in failed:
        named[Path(name)].append(FailedRow(*map(str, row)))
    return {
        path: PublishedRows(
            files[path].sha256,
            of_file.pop("ok", 0),
            dict(of_file),
            tuple(stretches[path]),
            tuple(named[path]),
            files[path].metadata.get("began"),
        )
        for path, of_file in kinds.items()
    }


def _ask(
    connection: duckdb.DuckDBPyConnection, files: Iterable[Path]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The stretches, and the first failed rows of each file."""
    names = [str(path) for path in files]
    stretches = connection.execute(_QUERY, {"files": names, "stretch": STRETCH_SECONDS}).fetchall()
    return stretches, connection.execute(_FIRST_FAILED, {"files": names, "first": FIRST}).fetchall()


def _from_json(found: Mapping[str, Any]) -> PublishedRows:
    stretches = tuple(Stretch(**one) for one in found["stretches"])
    first = tuple(FailedRow(**one) for one in found["first_failed"])
    return PublishedRows(found["sha256"], found["ok"], found["failed"], stretches, first, found["began"])

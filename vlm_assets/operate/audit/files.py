"""A look at the files of one asset: record, published file, copies, and what else lies in the folders.

What lives here: reading and comparing; nothing is written, no lock is taken. What does not: the rows inside
the files (``rows.py``), and putting anything right (``repair.py``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from resources.journal.high_water_mark import read_marks
from resources.publishing.errors import RecordDamagedError
from resources.publishing.partition_files import PartitionFiles
from resources.publishing.record import PartitionManifest, PublishedRecord
from resources.publishing.verification import FindingKind, judge
from resources.storage.files import TEMPORARY_SUFFIX
from resources.storage.layout import VERSION_NUMBERS, AssetFolders, PartitionPaths
from vlm_assets.operate.audit.findings import Kind, Problem

_LOOKS = 3
"""A publication moves files while we look: findings count only if the record stood still meanwhile."""

_COUNTABLE = frozenset({FindingKind.DIGEST_DIFFERS, FindingKind.ROWS_DIFFER})


@dataclass(frozen=True)
class LookedAt:
    """One partition's files. record: what readers see; None: not published. countable: the rows can be."""

    asset: str
    key: str
    path: Path
    record: PublishedRecord | None
    problems: tuple[Problem, ...]
    countable: bool


@dataclass(frozen=True)
class RecordReading:
    """The record as it stands: its content, and the copies of it that are not whole.

    unsettled: a change of it is under way or was interrupted; both copies are whole.
    """

    manifest: PartitionManifest | None
    content: tuple[bytes | None, ...]
    damaged: tuple[str, ...]
    unsettled: bool


def read_record(partition: PartitionFiles) -> RecordReading:
    """Read a partition's record without settling or locking anything."""
    manifest: PartitionManifest | None = None
    content: list[bytes | None] = []
    damaged: list[str] = []
    unsettled = False
    for path in partition.record_paths:
        data: bytes | None = None
        try:
            data = path.read_bytes()
            found = PartitionManifest.from_bytes(data, key=partition.key)
        except FileNotFoundError:
            damaged.append(f"{path} is missing")
        except (RecordDamagedError, OSError) as error:
            damaged.append(f"{path}: {error}")
        else:
            manifest = manifest or found
            if found.pending or (found != manifest and found.published == manifest.published):
                unsettled = True
            elif found != manifest and not manifest.pending:
                damaged.append(f"{path} is not the same as {partition.record_path}")
        content.append(data)
    return RecordReading(manifest, tuple(content), tuple(damaged), unsettled)


def look_at(paths: PartitionPaths, *, deep: bool) -> LookedAt:
    """Compare the files of one partition with its record. ``deep`` reads every byte."""
    partition = PartitionFiles(paths.asset, paths.key)
    for _ in range(_LOOKS):
        reading = read_record(partition)
        looked = _compare(partition, reading, deep=deep)
        if not looked.problems or read_record(partition).content == reading.content:
            break
    return looked


def _compare(partition: PartitionFiles, reading: RecordReading, *, deep: bool) -> LookedAt:
    asset = partition.paths.asset.name

    def problem(kind: Kind, sentence: str) -> Problem:
        return Problem(kind, asset, partition.key, sentence, str(partition.published))

    def looked(record: PublishedRecord | None, *problems: Problem, countable: bool = False) -> LookedAt:
        return LookedAt(asset, partition.key, partition.published, record, problems, countable)

    manifest = reading.manifest
    if manifest is None:
        there = partition.published.exists()
        if any(path.exists() for path in partition.record_paths):
            sentence = f"Neither copy of its record reads: {'; '.join(reading.damaged)}."
            return looked(None, problem(Kind.RECORD, sentence), countable=there)
        if there:
            sentence = f"{partition.published} has no record: it was not published here."
            return looked(None, problem(Kind.UNRECORDED, sentence), countable=True)
    if manifest is None or (manifest.published is None and manifest.pending is None):
        marks = read_marks(partition.paths.high_water_marks, partition.key)
        vanished = next((one.rows for one in marks if one.retired), None)
        if vanished is None:
            return looked(None)
        sentence = (
            f"{vanished} rows were published once, says its high-water mark, and neither its record nor"
            " its file is there."
        )
        return looked(None, problem(Kind.VANISHED, sentence))
    problems: list[Problem] = []
    if reading.unsettled:
        sentence = (
            "A publication is under way or was interrupted; the next start of it, or repair, settles it."
        )
        problems.append(problem(Kind.PENDING, sentence))
    if reading.damaged and not manifest.pending:
        problems.append(problem(Kind.RECORD_COPY, f"{'; '.join(reading.damaged)}. The other copy is whole."))
    record = partition.peek() if manifest.pending else manifest.published
    if record is None:
        return looked(None, *problems)
    judged = judge(partition.published, record, deep=deep)
    if judged:
        problems.append(problem(Kind.FILE, judged[1]))
    if not manifest.pending:
        for number, version in zip(VERSION_NUMBERS, (record, *manifest.previous), strict=False):
            backup = judge(partition.slot(number), version, deep=deep)
            if backup:
                kind = Kind.EARLIER_VERSION if number else Kind.SECOND_COPY
                problems.append(
                    problem(kind, f"{'Earlier version' if number else 'Second copy'}: {backup[1]}")
                )
    return looked(record, *problems, countable=judged is None or judged[0] in _COUNTABLE)


def foreign_files(asset: AssetFolders, keys: Collection[str]) -> Iterator[Problem]:
    """What lies in an asset's folders and belongs to no partition of the catalogue."""
    known = keys if isinstance(keys, (set, frozenset)) else frozenset(keys)
    for path in _entries(asset.published):
        if path.suffix != ".parquet":
            yield _unknown(asset.name, path)
        elif path.stem not in known:
            sentence = (
                f"{path} is no partition of the catalogue, but whoever reads {asset.published}/*.parquet"
                " reads it too."
            )
            yield Problem(Kind.FOREIGN_FILE, asset.name, None, sentence, str(path))
    for folder, pattern in (
        (asset.versions, r"(?P<key>[^.]+)(\.copy)?\.json|(?P<version_of>[^.]+)\.[012]\.parquet"),
        (asset.staging, rf"\.(?P<key>[^.]+)\..*{re.escape(TEMPORARY_SUFFIX)}"),
        (asset.journals, r"(?P<key>.+)"),
    ):
        for path in _entries(folder):
            match = re.fullmatch(pattern, path.name)
            owners = match.groupdict() if match else {}
            if not known.intersection(filter(None, owners.values())):
                yield _unknown(asset.name, path)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _unknown(asset: str, path: Path) -> Problem:
    return Problem(Kind.UNKNOWN_FILE, asset, None, f"{path} belongs to no partition.", str(path))

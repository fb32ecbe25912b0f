"""The commit of one group of rows: segment, manifest, high-water mark, each durable before the next.

Manifests are numbered lists of committed segments, each written once and never replaced. A thread commits a
group when it is due, so that the caller never waits for the disk.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlm_durable.files import files
from vlm_durable.files.sealed_json import BrokenSealError, check_seal, seal, unsealed
from vlm_durable.journal.high_water_mark import HighWaterMark, write_mark
from vlm_durable.journal.journal_errors import FencedError, SegmentUnreadableError
from vlm_durable.journal.segments import (
    ORDER,
    JournalIdentity,
    Segment,
    SegmentRecord,
    encode,
    segment_name,
    segment_number,
    verify_unlisted,
)
from vlm_durable.journal.writer_lock import WriterLock

FORMAT = 2
KEPT = 3
"""The current manifest and the two before it."""
_NAME = re.compile(r"manifest-(\d{12,})\.json")


@dataclass(frozen=True)
class Manifest:
    """One state of a journal. Sequence orders states, whatever the clock says; epoch numbers writers."""

    sequence: int
    epoch: int
    identity: Mapping[str, Any]
    segments: tuple[SegmentRecord, ...]
    previous_sequence: int | None
    previous_sha256: str | None
    events: tuple[Mapping[str, Any], ...] = ()
    """What each recovery adopted, quarantined and gave up, oldest first."""
    given_up: tuple[str, ...] = ()
    """Names of segments whose loss a person accepted: no older manifest that lists them counts as broken."""
    plan: Mapping[str, Any] | None = None
    """How the caller divides its work, set from the first rows on: a resume divides it alike."""
    retired: bool = False
    """True once the rows are published and read back: the segments may go."""
    file_sha256: str = ""
    """Digest of the whole file; empty while the manifest is not on disk yet."""

    @property
    def rows(self) -> int:
        """Rows that count: one for each id."""
        return sum(record.rows - record.superseding for record in self.segments)

    @property
    def mark(self) -> HighWaterMark:
        """The high-water mark of this state."""
        return HighWaterMark(
            key=self.identity["key"],
            generation=self.identity["generation"],
            rows=self.rows,
            sequence=self.sequence,
            epoch=self.epoch,
            last_segment=self.segments[-1].name if self.segments else None,
            given_up=self.given_up,
            retired=self.retired,
            superseded=sum(record.superseding for record in self.segments),
        )

    def encode(self) -> bytes:
        """The file's bytes: sealed JSON."""
        head = {
            "format": FORMAT,
            "sequence": self.sequence,
            "epoch": self.epoch,
            "retired": self.retired,
            "rows": self.rows,
            "identity": dict(self.identity),
            "previous": {"sequence": self.previous_sequence, "sha256": self.previous_sha256},
            "given_up": list(self.given_up),
            "plan": None if self.plan is None else dict(self.plan),
            "events": [dict(event) for event in self.events],
        }
        opened = json.dumps(head, separators=(",", ":"))[:-1]
        return seal(f'{opened},"segments":[{",".join(r.json for r in self.segments)}]}}'.encode())


def manifest_path(directory: Path, sequence: int) -> Path:
    """The path of the manifest with a sequence number."""
    return directory / f"manifest-{sequence:012d}.json"


def sequence_of(name: str) -> int | None:
    """The sequence number in a manifest's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def sequences(directory: Path) -> list[int]:
    """The sequence numbers on disk, newest first, readable or not."""
    numbers = (sequence_of(path.name) for path in directory.iterdir())
    return sorted((number for number in numbers if number is not None), reverse=True)


def read_manifest(directory: Path, sequence: int) -> Manifest:
    """Read and verify one manifest. Raises BrokenSealError, OSError, or FormatVersionError (newer)."""
    path = manifest_path(directory, sequence)
    manifest = decode_manifest(path.read_bytes(), path)
    if manifest.sequence != sequence:
        raise BrokenSealError(f"the manifest inside says sequence {manifest.sequence}")
    return manifest


def decode_manifest(data: bytes, where: Path | str) -> Manifest:
    """Decode a manifest from a file's bytes. Raises BrokenSealError, FormatVersionError."""
    content = unsealed(data, where, format_=FORMAT)
    try:
        return Manifest(
            sequence=content["sequence"],
            epoch=content["epoch"],
            identity=content["identity"],
            segments=tuple(SegmentRecord(**record) for record in content["segments"]),
            previous_sequence=content["previous"]["sequence"],
            previous_sha256=content["previous"]["sha256"],
            events=tuple(content["events"]),
            given_up=tuple(content["given_up"]),
            plan=content["plan"] if content["format"] > 1 else None,
            retired=content["retired"],
            file_sha256=hashlib.sha256(data).hexdigest(),
        )
    except (KeyError, TypeError) as error:
        raise BrokenSealError(f"the manifest lacks a part: {error}") from error


def newest_manifest(directory: Path) -> Manifest | None:
    """The newest readable manifest, its segments unverified; None where there is none.

    For status: reads only, takes no lock.
    """
    if not directory.is_dir():
        return None
    for sequence in sequences(directory):
        try:
            return read_manifest(directory, sequence)
        except (BrokenSealError, OSError):
            continue
    return None


def publish_manifest(directory: Path, manifest: Manifest) -> str:
    """Write a manifest durably under its own number. Returns the file's SHA-256.

    Raises FencedError where that number, or a later one, exists: somebody else is the writer now.
    The check before the link catches the usual case. The link decides between two writers at one number.
    The check after it catches a number that was taken and pruned while this writer was paused.
    """
    data = manifest.encode()
    path = manifest_path(directory, manifest.sequence)
    temporary = files.write_temporary(path, data)
    try:
        refuse_if_overtaken(directory, manifest.sequence - 1)
        files.publish_new(temporary, path)
    except FileExistsError as error:
        raise FencedError(f"{path} was written by another writer: this one was taken over") from error
    finally:
        temporary.unlink(missing_ok=True)
    refuse_if_overtaken(directory, manifest.sequence)
    return hashlib.sha256(data).hexdigest()


def refuse_if_overtaken(directory: Path, sequence: int) -> None:
    """Raise FencedError where a manifest newer than ``sequence`` is on disk."""
    newest = sequences(directory)
    if newest and newest[0] > sequence:
        raise FencedError(
            f"{directory} is at sequence {newest[0]} where this writer knows {sequence}: another writer took "
            "it over while this one was paused. Stop this process; the other one goes on."
        )


def prune(directory: Path, current: int) -> None:
    """Remove the manifests before the newest ``KEPT``, but only while each of these still verifies."""
    numbers = [number for number in sequences(directory) if number <= current]
    kept, old = numbers[:KEPT], numbers[KEPT:]
    if not old or not _all_verify(directory, kept):
        return
    for number in old:
        manifest_path(directory, number).unlink(missing_ok=True)


def _all_verify(directory: Path, numbers: Iterable[int]) -> bool:
    try:
        for number in numbers:
            check_seal(manifest_path(directory, number).read_bytes())
    except (BrokenSealError, OSError):
        return False
    return True


class Committer:
    """Writes groups of rows into a journal's directory, one after the other. Used from one thread only."""

    def __init__(
        self,
        directory: Path,
        identity: JournalIdentity,
        manifest: Manifest,
        lock: WriterLock,
        high_water_mark: Path,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._manifest = manifest
        self._lock = lock
        self._high_water_mark = high_water_mark
        self.plan = manifest.plan
        """How the caller divides its work; what is set here goes into the next manifest."""
        listed_numbers = [record.number for record in manifest.segments]
        numbers_on_disk = [segment_number(path.name) for path in directory.iterdir()]
        self._next_number = 1 + max([0, *listed_numbers, *numbers_on_disk])

    def commit(self, tables: Iterable[Any], *, superseding: int = 0) -> Segment:
        """Commit the rows of several pyarrow tables as one segment; durable when it returns.

        superseding: how many of the rows take the place of committed failed ones.

        Raises FencedError (taken over), SegmentUnreadableError (read back wrong) or OSError; then nothing
        of the group counts as committed, though a later recovery may find and adopt it whole.
        """
        table = pa.concat_tables(tables).sort_by(ORDER)
        segment = self._publish_segment(table).superseding(superseding)
        self._advance(segments=(*self._manifest.segments, segment.record))
        return segment

    def retire(self) -> None:
        """Publish a retired manifest, then remove segments and manifests, the retired one last."""
        self._advance(retired=True)
        remove_retired(self._directory, self._manifest)

    def _publish_segment(self, table: Any) -> Segment:
        data = encode(table, self._identity)
        sha256 = hashlib.sha256(data).hexdigest()
        name = segment_name(epoch=self._manifest.epoch, number=self._next_number, sha256=sha256)
        path = self._directory / name
        temporary = files.write_temporary(path, data)
        try:
            segment = verify_unlisted(temporary, self._identity, name=name)
            if segment.record.size != len(data) or segment.record.rows != table.num_rows:
                raise SegmentUnreadableError(f"{temporary} reads back other than it was written")
            self._lock.check()
            refuse_if_overtaken(self._directory, self._manifest.sequence)
            files.publish_new(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._next_number += 1
        return segment

    def _advance(self, **changes: Any) -> None:
        """Publish the next manifest and the mark; only then does the change count."""
        following = replace(
            self._manifest,
            sequence=self._manifest.sequence + 1,
            previous_sequence=self._manifest.sequence,
            previous_sha256=self._manifest.file_sha256,
            plan=self.plan,
            file_sha256="",
            **changes,
        )
        self._lock.check()
        sha256 = publish_manifest(self._directory, following)
        self._manifest = replace(following, file_sha256=sha256)
        write_mark(self._high_water_mark, self._manifest.mark)
        prune(self._directory, self._manifest.sequence)


def remove_retired(directory: Path, retired: Manifest) -> None:
    """Remove what a retired manifest lists, then the manifests, the retired one last; safe to repeat."""
    for record in retired.segments:
        (directory / record.name).unlink(missing_ok=True)
    for sequence in sorted(sequences(directory)):
        if sequence != retired.sequence:
            manifest_path(directory, sequence).unlink(missing_ok=True)
    files.sync_directory(directory)
    manifest_path(directory, retired.sequence).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Waiting:
    table: Any
    since: float


@dataclass(frozen=True)
class CommitPace:
    """A commit is due when so many rows wait, or when the oldest has waited so many seconds by the clock."""

    seconds: float = 30.0
    rows: int = 2000
    clock: Callable[[], float] = time.monotonic


DEFAULT_PACE = CommitPace()


class CommitThread:
    """Groups submitted tables until their commit is due.

    After an error nothing more is committed; the error is raised by every later call. The thread is a
    daemon: a caller that dies without closing is not held up by it.
    """

    def __init__(self, commit: Callable[[Sequence[Any]], None], pace: CommitPace) -> None:
        self._commit = commit
        self._pace = pace
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._submitted = 0
        self._done = 0
        self._flush_to = 0
        self._stopping = False
        self._error: BaseException | None = None
        self.wait_seconds = 0.0
        """Seconds that callers spent inside submit, flush and stop."""
        self._thread = threading.Thread(target=self._run, name="journal-commits", daemon=True)
        self._thread.start()

    def submit(self, table: Any) -> None:
        """Queue a table. Raises the error of an earlier commit."""
        started = time.monotonic()
        with self._changed:
            self._raise_error()
            self._waiting.append(_Waiting(table, self._pace.clock()))
            self._submitted += 1
            self._changed.notify_all()
        self.wait_seconds += time.monotonic() - started

    def flush(self) -> None:
        """Wait until everything submitted before is committed. Raises the error where it is not."""
        started = time.monotonic()
        with self._changed:
            goal = self._flush_to = self._submitted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= goal or self._error is not None)
            self.wait_seconds += time.monotonic() - started
            self._raise_error()

    def stop(self) -> None:
        """Commit the waiting tables, then end the thread. Does not raise: flush first to see errors."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while group := self._next_group():
            try:
                self._commit([waiting.table for waiting in group])
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._done += len(group)
                self._changed.notify_all()

    def _next_group(self) -> list[_Waiting]:
        """The tables of the next commit, when it is due; empty when there is nothing left to do."""
        with self._changed:
            while not self._is_due():
                if self._stopping and not self._waiting:
                    return []
                self._changed.wait(self._seconds_left())
            group = self._waiting
            self._waiting = []
            return group

    def _is_due(self) -> bool:
        if not self._waiting:
            return False
        rows = sum(waiting.table.num_rows for waiting in self._waiting)
        is_flushing = self._stopping or self._flush_to > self._done
        return is_flushing or rows >= self._pace.rows or (self._seconds_left() or 0.0) <= 0.0

    def _seconds_left(self) -> float | None:
        """Seconds until the oldest waiting table is due; None where none waits."""
        if not self._waiting:
            return None
        return self._waiting[0].since + self._pace.seconds - self._pace.clock()

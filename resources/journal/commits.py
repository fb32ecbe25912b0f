"""The commit of one group of rows: segment, manifest, high-water mark, each durable before the next.

What lives here: the order of the steps, and the thread beside the caller, who never waits for the disk, in
which a group is committed when it is due. What does not: what a crash between two steps leaves (recovery.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from resources.journal import manifests
from resources.journal.high_water_mark import write_mark
from resources.journal.identity import JournalIdentity
from resources.journal.journal_errors import SegmentUnreadableError
from resources.journal.manifests import Manifest
from resources.journal.recovery import mark_of
from resources.journal.segments import Segment, encode, segment_name, segment_number, verify_unlisted
from resources.journal.writer_lock import WriterLock
from resources.storage import files


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
        listed = [record.number for record in manifest.segments]
        standing = [segment_number(path.name) for path in directory.iterdir()]
        self._next_number = 1 + max([0, *listed, *standing])

    def commit(self, tables: Iterable[Any], *, superseding: int = 0) -> Segment:
        """Commit the rows of several pyarrow tables as one segment; durable when it returns.

        superseding: how many of the rows take the place of committed failed ones.

        Raises FencedError (taken over), SegmentUnreadableError (read back wrong) or OSError; then nothing
        of the group counts as committed, though a later recovery may find and adopt it whole.
        """
        table = pa.concat_tables(tables).sort_by(self._identity.order_column)
        segment = self._publish_segment(table).superseding(superseding)
        self._advance(segments=(*self._manifest.segments, segment.record))
        return segment

    def retire(self) -> None:
        """Write down that the rows are published, then remove segments and manifests, that one last."""
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
            manifests.refuse_if_overtaken(self._directory, self._manifest.sequence)
            files.publish_new(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._next_number += 1
        return segment

    def _advance(self, **changes: Any) -> None:
        """Publish the next manifest and the mark; only then does the change count."""
        following = dataclasses.replace(
            self._manifest,
            sequence=self._manifest.sequence + 1,
            previous_sequence=self._manifest.sequence,
            previous_sha256=self._manifest.file_sha256,
            plan=self.plan,
            file_sha256="",
            **changes,
        )
        self._lock.check()
        sha256 = manifests.publish(self._directory, following)
        self._manifest = dataclasses.replace(following, file_sha256=sha256)
        write_mark(self._high_water_mark, mark_of(self._manifest))
        manifests.prune(self._directory, self._manifest.sequence)


def remove_retired(directory: Path, retired: Manifest) -> None:
    """Remove what a retired manifest lists, then the manifests, the retired one last; safe to repeat."""
    for record in retired.segments:
        (directory / record.name).unlink(missing_ok=True)
    for sequence in sorted(manifests.sequences(directory)):
        if sequence != retired.sequence:
            manifests.manifest_path(directory, sequence).unlink(missing_ok=True)
    files.sync_directory(directory)
    manifests.manifest_path(directory, retired.sequence).unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove what killed writers left half written or half named. Only for the journal's one writer."""
    for left in directory.glob(f".*{files.TEMPORARY_SUFFIX}"):
        left.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class _Waiting:
    table: Any
    since: float


class CommitThread:
    """Groups submitted tables until ``commit_rows`` rows wait or the oldest waits ``commit_seconds``.

    After an error nothing more is committed; the error is raised by every later call. The thread is a
    daemon: a caller that dies without closing is not held up by it.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Any]], None],
        *,
        commit_seconds: float,
        commit_rows: int,
        clock: Callable[[], float],
    ) -> None:
        self._commit = commit
        self._commit_seconds = commit_seconds
        self._commit_rows = commit_rows
        self._clock = clock
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
            self._waiting.append(_Waiting(table, self._clock()))
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
        """Commit what waits, then end the thread. Does not raise: flush first to learn of errors."""
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
        asked = self._stopping or self._flush_to > self._done
        return asked or rows >= self._commit_rows or (self._seconds_left() or 0.0) <= 0.0

    def _seconds_left(self) -> float | None:
        """Seconds until the oldest waiting table is due; None where none waits."""
        if not self._waiting:
            return None
        return self._waiting[0].since + self._commit_seconds - self._clock()

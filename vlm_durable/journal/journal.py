"""The journal of one partition's work under way: submitted rows are never lost and never doubled.

Opening is resuming: rows that verify on disk are done. The steps of a commit are in commits.py, recovery from
a crash is in recovery.py, the terms are in docs/durability.md.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vlm_durable.files import files
from vlm_durable.journal import commits
from vlm_durable.journal.commits import DEFAULT_PACE, CommitPace, Committer, CommitThread, remove_retired
from vlm_durable.journal.high_water_mark import clear_temporaries, read_mark, write_mark
from vlm_durable.journal.journal_errors import (
    CrossDeviceError,
    FencedError,
    JournalError,
    RowsRefusedError,
    SegmentUnreadableError,
    sample,
    storage_error,
)
from vlm_durable.journal.recovery import Recovery, refuse_loss, settle, survey_journal
from vlm_durable.journal.segments import (
    ID,
    ORDER,
    JournalIdentity,
    Segment,
    SegmentRecord,
    may_supersede,
    read_in_order,
)
from vlm_durable.journal.writer_lock import LOCK_NAME, WriterLock

_TAKEOVER_ATTEMPTS = 3

_log = logging.getLogger(__name__)


class Journal:
    """Rows of one key and generation, committed beside the caller. Open it with ``Journal.open``."""

    recovery: Recovery
    """What this open restored."""

    def __init__(
        self,
        directory: Path,
        identity: JournalIdentity,
        lock: WriterLock,
        committer: Committer,
        recovery: Recovery,
        segments: Sequence[Segment],
        pace: CommitPace,
    ) -> None:
        self.recovery = recovery
        self._directory = directory
        self._identity = identity
        self._lock = lock
        self._committer = committer
        self._segments = list(segments)
        # The number of the try that failed, 0 for a final row, by the id of each committed row.
        self._done = {
            property_id: tries
            for segment in segments
            for property_id, tries in zip(segment.ids, segment.failed_tries, strict=True)
        }
        self._waiting: set[str] = set()
        self._guard = threading.Lock()
        self._closed = False
        self._commit_listeners: list[Callable[[int], None]] = []
        self._thread = CommitThread(self._commit, pace)

    @classmethod
    def open(
        cls,
        directory: Path,
        identity: JournalIdentity,
        *,
        high_water_mark: Path,
        quarantine: Path | None = None,
        accept_loss: str | None = None,
        pace: CommitPace = DEFAULT_PACE,
    ) -> Journal:
        """Recover what is on disk, verify it, and become its one writer.

        ``directory`` is this generation's alone; ``high_water_mark`` a file of its own for each key and
        generation, kept apart from it. ``quarantine`` (default: a folder in ``directory``) takes what does
        not verify; it must be on the same device.
        ``accept_loss``: a person's reason for giving up rows that cannot be restored; it is recorded.

        Raises JournalLossError, JournalLockedError, JournalError, FormatVersionError,
        CrossDeviceError, DirectoryNotWritableError, DiskFullError; each says what to do.
        """
        quarantine = quarantine or directory / "quarantine"
        try:
            for folder in (directory, quarantine.parent, high_water_mark.parent):
                files.make_directory(folder)
            _refuse_two_devices(directory, quarantine)
            lock = WriterLock(directory)
        except OSError as error:
            raise storage_error(error, doing="opening the journal", where=directory) from error
        try:
            for attempt in range(_TAKEOVER_ATTEMPTS):
                lock.check()
                survey = survey_journal(directory, identity, high_water_mark)
                if accept_loss is None:
                    refuse_loss(survey, directory, quarantine, identity)
                try:
                    manifest, recovery = settle(
                        survey,
                        directory=directory,
                        quarantine=quarantine,
                        high_water_mark=high_water_mark,
                        identity=identity,
                        accept_loss=accept_loss,
                    )
                    break
                except FencedError:
                    # An older writer without the lock just took this number: survey again, with its rows.
                    if attempt + 1 == _TAKEOVER_ATTEMPTS:
                        raise
            committer = Committer(directory, identity, manifest, lock, high_water_mark)
        except (OSError, JournalError) as error:
            # Files that vanished while they were read may be a loss, or another writer may have moved them.
            named = lock.named_error(error, doing="recovering the journal")
            lock.release()
            raise named from (None if named is error else error)
        except BaseException:
            lock.release()
            raise
        return cls(directory, identity, lock, committer, recovery, survey.segments, pace)

    @property
    def generation(self) -> str:
        """The generation whose rows these are."""
        return self._identity.generation

    @property
    def schema(self) -> Any:
        """The pyarrow schema of the rows."""
        return self._identity.schema

    @property
    def done_ids(self) -> frozenset[str]:
        """Ids whose rows are committed."""
        with self._guard:
            return frozenset(self._done)

    @property
    def failed_tries(self) -> dict[str, int]:
        """The number of the failed try, by id, of each committed failed row. A later try may supersede it."""
        with self._guard:
            return {property_id: tries for property_id, tries in self._done.items() if tries}

    @property
    def missing_ids(self) -> frozenset[str]:
        """Expected ids whose rows are not committed yet (submitted ones may be waiting)."""
        return self._identity.expected_ids - self.done_ids

    @property
    def committed_rows(self) -> int:
        """Rows that are committed and durable, one for each id."""
        with self._guard:
            return len(self._done)

    @property
    def records(self) -> tuple[SegmentRecord, ...]:
        """The record of each committed segment, in the order of the commits."""
        with self._guard:
            return tuple(segment.record for segment in self._segments)

    @property
    def commit_wait_seconds(self) -> float:
        """Seconds that the caller has spent waiting for this journal since it was opened."""
        return self._thread.wait_seconds

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """How the work is divided (JSON values), as committed with the first rows, or as set since."""
        return self._committer.plan

    @plan.setter
    def plan(self, plan: Mapping[str, Any] | None) -> None:
        """Set it before the first rows by it are submitted: it becomes durable with them."""
        self._committer.plan = plan

    def on_commit(self, listener: Callable[[int], None]) -> None:
        """Call ``listener`` after each commit with the number of committed rows, in the thread that commits.

        Its errors are logged: the commit stands.
        """
        with self._guard:
            self._commit_listeners.append(listener)

    def submit(self, table: Any) -> None:
        """Queue the rows of a whole planned batch (pyarrow table); does not wait for the disk.

        A row may supersede a committed failed row of its id by a later try, never an ok row.

        Raises RowsRefusedError (nothing of the table is taken), or the error of an earlier commit.
        """
        self._refuse_closed()
        if table.num_rows == 0:
            return
        ids = self._checked_ids(table)
        with self._guard:
            self._waiting |= ids
        self._thread.submit(table)

    def flush(self) -> None:
        """Return when every submitted row is committed and durable. Raises the commit's error if not."""
        self._refuse_closed()
        self._thread.flush()

    def read_ordered(self, batch_rows: int = 1024) -> Iterator[Any]:
        """The committed rows, as record batches in the order of the order column; memory stays bounded."""
        self._refuse_closed()
        with self._guard:
            segments = tuple(self._segments)
        return self._read(segments, batch_rows)

    def retire(self) -> None:
        """Remove the journal, after its rows were published and read back. Closes it.

        A crash inside is finished by ``clear_retired``. The high-water mark stays and says 'retired'.
        Raises JournalError where expected rows are missing.
        """
        self.flush()
        if missing := self.missing_ids:
            raise JournalError(
                f"{self._identity.key}: {len(missing)} of {len(self._identity.expected_ids)} rows are not "
                f"committed ({sample(missing)}): the journal stays until they are published"
            )
        self._thread.stop()
        self._closed = True
        try:
            self._committer.retire()
            self._lock.release(remove=True)
            _remove_empty(self._directory)
        except OSError as error:
            raise self._lock.named_error(error, doing="retiring the journal") from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Commit all submitted rows and release the lock. Raises the error of a failed commit."""
        if self._closed:
            return
        try:
            self._thread.flush()
        finally:
            self._closed = True
            self._thread.stop()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(f"While closing the journal: {failure}")

    def _checked_ids(self, table: Any) -> set[str]:
        identity = self._identity
        if not table.schema.remove_metadata().equals(identity.schema.remove_metadata()):
            raise RowsRefusedError(
                f"{identity.key}: the rows' columns {table.schema.names} differ in name or type from the "
                "journal's; nothing of the table was taken"
            )
        for name in (ID, ORDER):
            if table.column(name).null_count:
                raise RowsRefusedError(f"{identity.key}: column {name!r} holds nulls; nothing was taken")
        listed = table.column(ID).to_pylist()
        ids = set(listed)
        if foreign := ids - identity.expected_ids:
            raise RowsRefusedError(f"{identity.key}: these ids are not of this range: {sample(foreign)}")
        try:
            tries = dict(zip(listed, identity.failed_tries(table), strict=True))
        except ValueError as error:
            raise RowsRefusedError(f"{identity.key}: {error}; nothing was taken") from error
        doubled = {i for i in ids if listed.count(i) > 1} if len(ids) < len(listed) else set()
        with self._guard:
            doubled |= ids & self._waiting
            doubled |= {i for i in ids & self._done.keys() if not may_supersede(tries[i], self._done[i])}
        if doubled:
            raise RowsRefusedError(
                f"{identity.key}: these ids are committed or submitted already: {sample(doubled)}"
            )
        return ids

    def _read(self, segments: Sequence[Segment], batch_rows: int) -> Iterator[Any]:
        try:
            yield from read_in_order(self._directory, segments, self._identity.schema, batch_rows)
        except SegmentUnreadableError as error:
            named = self._lock.named_error(error, doing="reading the rows")
            raise named from (None if named is error else error)

    def _commit(self, tables: Sequence[Any]) -> None:
        """Runs in the commit thread, which alone writes ``_done``."""
        ids = {property_id for table in tables for property_id in table.column(ID).to_pylist()}
        try:
            segment = self._committer.commit(tables, superseding=len(ids & self._done.keys()))
        except (OSError, SegmentUnreadableError) as error:
            named = self._lock.named_error(error, doing="a commit")
            raise named from (None if named is error else error)
        with self._guard:
            self._segments.append(segment)
            self._done.update(zip(segment.ids, segment.failed_tries, strict=True))
            self._waiting -= ids
            listeners, rows = tuple(self._commit_listeners), len(self._done)
        for listener in listeners:
            try:
                listener(rows)
            except Exception:
                _log.exception(
                    "A listener failed after a commit of %s; the commit stands.", self._identity.key
                )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise JournalError(f"{self._identity.key}: the journal is closed; open it again to go on")


def clear_retired(directory: Path, high_water_mark: Path) -> bool:
    """Finish a retirement that a crash cut short. False, and nothing touched, for a journal in use."""
    if not directory.is_dir():
        return False
    head = commits.newest_manifest(directory)
    names = {path.name for path in directory.iterdir() if path.suffix != files.TEMPORARY_SUFFIX}
    if not (head.retired if head is not None else names <= {LOCK_NAME}):
        return False
    try:
        lock = WriterLock(directory)
        try:
            # A kill between naming the retired manifest and removing its temporary name leaves that name.
            for temporary in directory.glob(f".*{files.TEMPORARY_SUFFIX}"):
                temporary.unlink(missing_ok=True)
            clear_temporaries(high_water_mark)
            if head is not None:
                # A killed process may not have made the visible names durable. A power cut now must leave
                # neither a mark that forbids a journal which goes on, nor a mark that promises the rows of a
                # journal which is gone.
                files.sync_directory(directory)
                retired = head.mark
                mark_on_disk = read_mark(high_water_mark, key=retired.key, generation=retired.generation).mark
                if mark_on_disk is not None and mark_on_disk.sequence == retired.sequence:
                    retired = mark_on_disk
                write_mark(high_water_mark, retired)
                remove_retired(directory, head)
            lock.release(remove=True)
            _remove_empty(directory)
        finally:
            lock.release()
    except OSError as error:
        raise storage_error(error, doing="clearing the retired journal", where=directory) from error
    return True


def _remove_empty(directory: Path) -> None:
    """Remove the journal's directory unless something (quarantined files, another opener) is in it."""
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        return
    files.sync_directory(directory.parent)


def _refuse_two_devices(directory: Path, quarantine: Path) -> None:
    existing = quarantine if quarantine.is_dir() else quarantine.parent
    if directory.stat().st_dev != existing.stat().st_dev:
        raise CrossDeviceError(
            f"{directory} and {existing} are on different devices: files cannot move between them in one "
            "step. Keep the home directory on one file system."
        )

"""Discarding a journal whose rows a person gave up: it is marked as retired first, then removed.

What lives here: the order of the steps. What does not: the decision to give the rows up.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vlm_durable.files import files
from vlm_durable.journal import commits
from vlm_durable.journal.commits import Manifest
from vlm_durable.journal.high_water_mark import read_mark, write_mark
from vlm_durable.journal.journal import clear_retired
from vlm_durable.journal.journal_errors import storage_error
from vlm_durable.journal.writer_lock import LOCK_NAME, WriterLock


def discard(directory: Path, *, key: str, generation: str, high_water_mark: Path) -> bool:
    """Remove a journal and the rows in it. False, and nothing touched, where no manifest of it is readable.

    Its high-water mark is set to 'retired' first: the rows never count as lost, and the generation is never
    continued. After a kill anywhere, calling it again finishes the work. Raises JournalLockedError where
    another process writes the journal, JournalError, FormatVersionError.
    """
    head = commits.newest_manifest(directory)
    if head is None and not {path.name for path in directory.iterdir()} <= {LOCK_NAME}:
        return False
    try:
        lock = WriterLock(directory)
        try:
            sequence = _retire_mark(directory, head, key, generation, high_water_mark)
            lock.check()
            if head is not None:
                commits.publish_manifest(directory, _retired(head, sequence))
                for path in directory.iterdir():
                    # Also files that no manifest lists: damaged ones, or a killed process's. Folders stay.
                    if path.is_file() and path.name != LOCK_NAME and not commits.sequence_of(path.name):
                        path.unlink(missing_ok=True)
        finally:
            lock.release()
    except OSError as error:
        raise storage_error(error, doing="discarding the journal", where=directory) from error
    return clear_retired(directory, high_water_mark)


def _retire_mark(
    directory: Path, head: Manifest | None, key: str, generation: str, high_water_mark: Path
) -> int:
    """Set the mark to 'retired', under a sequence number that follows all others. Returns that number."""
    mark = read_mark(high_water_mark, key=key, generation=generation).mark
    sequence = 1 + max([*commits.sequences(directory), mark.sequence if mark else 0])
    if head is not None:
        retired = _retired(head, sequence).mark
        rows = max(retired.rows, mark.rows if mark else 0)
        files.make_directory(high_water_mark.parent)
        write_mark(high_water_mark, dataclasses.replace(retired, rows=rows))
    elif mark is not None:
        write_mark(high_water_mark, dataclasses.replace(mark, sequence=sequence, retired=True))
    return sequence


def _retired(head: Manifest, sequence: int) -> Manifest:
    return dataclasses.replace(
        head,
        sequence=sequence,
        epoch=head.epoch + 1,
        retired=True,
        previous_sequence=head.sequence,
        previous_sha256=head.file_sha256,
        file_sha256="",
    )

"""Ending a generation without publishing it: it is set aside, or discarded. Nobody ever goes on with it.

To set it aside, a note is written first, which stays for good; then the journal's folder moves into the
quarantine, with its rows. The copied journal in a store (``vlm_durable/mirror/stored_journal.py``) is closed
between the two steps. To discard it, it is marked as retired first; then its rows are removed.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from pathlib import Path

from vlm_durable.files import files
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.files.sealed_json import write_sealed
from vlm_durable.journal import commits
from vlm_durable.journal.commits import Manifest
from vlm_durable.journal.high_water_mark import read_mark, slots, write_mark
from vlm_durable.journal.journal import clear_retired
from vlm_durable.journal.journal_errors import storage_error
from vlm_durable.journal.writer_lock import LOCK_NAME, WriterLock


def is_set_aside(paths: PartitionPaths, generation: str) -> bool:
    """Whether a generation was set aside: none of its rows may be used. An unreadable note counts too."""
    return paths.set_aside_note(generation).exists()


def note_set_aside(paths: PartitionPaths, generation: str, why: str) -> None:
    """Note, durably, that no row of a generation may be used. Its name is never used again."""
    if not is_set_aside(paths, generation):
        try:
            write_sealed(paths.set_aside_note(generation), {"generation": generation, "why": why})
        except OSError as error:
            raise storage_error(error, doing="setting the journal aside", where=paths.journals) from error


def unmoved(paths: PartitionPaths) -> Iterator[str]:
    """The generations that are noted as set aside but still have a folder or a mark, after a kill."""
    for note in sorted(paths.set_aside_note("").parent.glob("*.json")):
        mark = paths.high_water_mark(note.stem)
        if paths.journal(note.stem).is_dir() or any(slot.exists() for slot in slots(mark)):
            yield note.stem


def move_set_aside(paths: PartitionPaths, generation: str) -> Path | None:
    """Move the journal of a generation that is noted as set aside into the quarantine.

    Returns its new path; None where it has no folder. Its high-water mark is removed first, so that its rows
    do not count as lost. After a kill anywhere, calling it again finishes the work. Raises JournalLockedError
    where another process writes the journal, JournalStorageError.
    """
    directory, aside = paths.journal(generation), None
    try:
        lock = WriterLock(directory) if directory.is_dir() else None
        try:
            for slot in slots(paths.high_water_mark(generation)):
                if slot.exists():
                    slot.unlink()
                    files.sync_directory(slot.parent)
            if lock is not None:
                files.make_directory(paths.quarantine)
                aside = paths.quarantine / f"{generation}.{uuid.uuid4().hex[:12]}"
                directory.rename(aside)
                files.sync_directory(paths.quarantine)
                files.sync_directory(directory.parent)
        finally:
            if lock is not None:
                lock.release()
    except OSError as error:
        raise storage_error(error, doing="setting the journal aside", where=directory) from error
    return aside


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

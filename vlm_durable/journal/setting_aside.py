"""Setting a generation aside: its rows are kept, and none of them is ever resumed, adopted or published.

What lives here: the order of the steps. First a note is written, which stays for good; then the journal's
folder moves into the quarantine. What does not: deciding that rows are in doubt, and the copied journal in a
store (``vlm_durable/mirror/stored_journal.py``), which is closed between the two steps.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

from vlm_durable.files import files
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.files.sealed_json import write_sealed
from vlm_durable.journal.high_water_mark import slots
from vlm_durable.journal.journal_errors import storage_error
from vlm_durable.journal.writer_lock import WriterLock


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

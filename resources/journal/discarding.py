"""Discarding a journal whose rows a person does not want any more: written down first, then removed.

What lives here: the order of the steps. What does not: deciding that the rows are not wanted.
"""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

from resources.journal import files, manifests
from resources.journal.commits import remove_retired
from resources.journal.errors import storage_error
from resources.journal.high_water_mark import read_mark, write_mark
from resources.journal.recovery import mark_of
from resources.journal.writer_lock import LOCK_NAME, WriterLock


def discard(directory: Path, high_water_mark: Path) -> int:
    """Remove a journal and all in it; returns the bytes that it held. 0 and untouched: it cannot be read.

    Its high-water mark comes first and says 'retired' from then on: the rows are never missed, and the
    generation is never continued. Killed anywhere, it is finished by doing it again. Raises
    JournalLockedError where somebody writes it, JournalMismatchError, ManifestVersionError.
    """
    head = manifests.newest_manifest(directory)
    if head is None:
        return 0
    try:
        lock = WriterLock(directory)
        try:
            mark = read_mark(
                high_water_mark, key=head.identity["key"], generation=head.identity["generation"]
            ).mark
            newest = max(*manifests.sequences(directory), mark.sequence if mark else 0)
            epoch = 1 + max(head.epoch, mark.epoch if mark else 0)
            retired = dataclasses.replace(
                head,
                sequence=newest + 1,
                epoch=epoch,
                retired=True,
                previous_sequence=head.sequence,
                previous_sha256=head.file_sha256,
                file_sha256="",
            )
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            files.make_directory(high_water_mark.parent)
            write_mark(high_water_mark, mark_of(retired))
            lock.check()
            manifests.publish(directory, retired)
            for path in sorted(directory.iterdir()):
                # What no manifest lists: left by a kill, or damaged. Quarantined files are a folder and stay.
                listed = path.name == LOCK_NAME or manifests.sequence_of(path.name) is not None
                if path.is_file() and not listed:
                    path.unlink(missing_ok=True)
            remove_retired(directory, retired)
            lock.release(remove=True)
            _remove_empty(directory)
        finally:
            lock.release()
    except OSError as error:
        raise storage_error(error, doing="discarding the journal", where=directory) from error
    return size


def _remove_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        return
    files.sync_directory(directory.parent)

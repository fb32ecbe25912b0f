"""vlm_durable/journal/writer_lock.py: one holder, and the file that is locked is the one that stands
there."""

import errno
import fcntl
import os

import pytest

from vlm_durable.journal.journal_errors import DiskFullError, FencedError, JournalLockedError
from vlm_durable.journal.writer_lock import LOCK_NAME, WriterLock


def test_the_second_is_told_who_holds_it(tmp_path):
    """The message carries process and machine, so that a person can look."""
    first = WriterLock(tmp_path)
    with pytest.raises(JournalLockedError, match=r"process \d+ on"):
        WriterLock(tmp_path)
    first.release()
    WriterLock(tmp_path).release()


def test_a_file_removed_while_it_was_being_locked_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """A retiring writer removes the file between our open and our lock: we lock the new one."""
    real, calls = fcntl.flock, []

    def removed_first(descriptor, how):
        if not calls:
            (tmp_path / LOCK_NAME).unlink()
        calls.append(how)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    lock = WriterLock(tmp_path)
    assert len(calls) == 2
    lock.check()
    with pytest.raises(JournalLockedError):
        WriterLock(tmp_path)
    lock.release()


@pytest.mark.parametrize("taken", [lambda path: path.unlink(), lambda path: path.write_text("process 2\n")])
def test_a_lock_that_was_taken_is_noticed(tmp_path, taken):
    """Removed, or another's name in it: check says fenced."""
    lock = WriterLock(tmp_path)
    lock.check()
    taken(tmp_path / LOCK_NAME)
    with pytest.raises(FencedError):
        lock.check()


def test_storage_that_fails_the_look_at_the_lock_too_keeps_its_first_error(tmp_path, monkeypatch):
    """Whether it was a takeover cannot be seen then: the error that came first is the one that is named."""
    lock = WriterLock(tmp_path)

    def fails(*_):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "pread", fails)
    named = lock.named_error(OSError(errno.ENOSPC, "no space"), doing="a commit")
    assert isinstance(named, DiskFullError)
    lock.release()

"""Locks that a dead process holds no more, and a forked child never."""

import errno
import fcntl
import os
import subprocess
import threading

import pytest

from vlm_durable.files.lock_files import LockFile, acquire_lock, is_held, locked


@pytest.fixture
def path(tmp_path):
    return tmp_path / "one.lock"


def test_one_holder_at_a_time_and_looking_changes_nothing(path):
    """Held is seen by others, free is free again, and what is gone is told apart."""
    assert is_held(path) is None
    one, other = LockFile(path), LockFile(path)
    assert one.try_lock()
    assert not other.try_lock()
    assert not other.try_lock(shared=True)
    assert is_held(path) is True
    one.close()
    assert is_held(path) is False
    assert other.try_lock()
    other.close()


def test_who_ends_well_while_somebody_looks_is_not_taken_for_dead(path, monkeypatch):
    """It removes its file and frees the lock between the look's opening and its lock."""
    holder = LockFile(path)
    assert holder.try_lock()
    try_lock = LockFile.try_lock

    def ended(self, **options):
        path.unlink()
        holder.close()
        return try_lock(self, **options)

    monkeypatch.setattr(LockFile, "try_lock", ended)
    assert is_held(path) is None


def test_a_file_system_that_locks_only_what_is_open_to_write_is_enough(path, monkeypatch):
    """NFSv4 on Linux gives no exclusive lock on a file that was opened to read."""
    flock = fcntl.flock

    def of_nfs(descriptor, how):
        if how & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    with locked(path):
        assert acquire_lock(path) is None


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
def test_the_lock_of_another_user_is_taken_all_the_same(path, monkeypatch, reason):
    """Who may read the file may lock it, on a local disk; one that is mounted to read too."""
    path.touch()
    opened = os.open

    def refused(name, flags, *rest):
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(reason, os.strerror(reason))
        return opened(name, flags, *rest)

    monkeypatch.setattr(os, "open", refused)
    with locked(path):
        assert is_held(path)


def test_closing_twice_frees_no_lock_but_its_own(path, tmp_path):
    """The number of a closed descriptor is soon another file's."""
    first = LockFile(path)
    first.close()
    second = LockFile(tmp_path / "another.lock")
    assert second.try_lock()
    first.close()
    assert is_held(tmp_path / "another.lock")
    second.close()


def test_a_forked_child_holds_nothing_of_its_parents(path):
    """It neither keeps what a dead parent held nor frees what a living one holds."""
    file = LockFile(path)
    assert file.try_lock()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"open" if file.is_open else b"closed")
        file.close()
        os._exit(0 if is_held(path) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the parent's lock stands while the child looks"
    assert os.read(reading, 10) == b"closed"
    assert is_held(path)
    file.close()
    os.close(reading)
    os.close(writing)


def test_who_waits_goes_on_when_the_other_is_done(path):
    """Threads of one process exclude each other like processes."""
    entered = threading.Event()

    def enter():
        with locked(path):
            entered.set()

    with locked(path):
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.2)
    assert entered.wait(20)
    waiting.join()
    assert is_held(path) is False


def test_a_lock_that_was_handed_to_a_child_is_the_childs(path):
    """There is no moment in between at which another could take it, and waiting for it is bounded."""
    file = acquire_lock(path)
    assert file is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(file.fileno(),)) as child:
        file.close()
        assert acquire_lock(path, seconds=0.1) is None
        child.communicate()
    after = acquire_lock(path)
    assert after is not None
    after.close()

"""Lock files (flock): whoever dies, however, holds none any more, and a child made by fork holds none at all.

What lives here: opening, taking, looking, and closing them in a forked child, which would otherwise keep what
its dead parent held. What does not: what each lock means, and the journal's own lock, for the journal stands
on nothing else (``vlm_durable/journal/writer_lock.py``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from vlm_durable.files.files import temporary_name
from vlm_durable.files.processes import open_descriptors

_LOOK_SECONDS = 0.05


class LockFile:
    """An open lock file of this process; never inherited through exec."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open it, unlocked; to write, for NFS locks exclusively nothing else. Raises OSError."""
        flags = os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._descriptor: int | None
        try:
            self._descriptor = os.open(path, flags | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            # Another user's, or mounted to read: on a local disk that is enough to lock.
            self._descriptor = os.open(path, flags | os.O_RDONLY, 0o600)
        _open.add(self)

    @property
    def is_open(self) -> bool:
        """False after ``close``, and in a forked child."""
        return self._descriptor is not None

    def take(self, *, shared: bool = False) -> bool:
        """Try to lock without waiting; whether it worked. Raises OSError where the file system cannot."""
        assert self._descriptor is not None, "it is closed"
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Lock, however long another has it. Raises OSError."""
        assert self._descriptor is not None, "it is closed"
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def fileno(self) -> int:
        """For a child that is handed the lock (``pass_fds``): it is free when all who have it closed it."""
        assert self._descriptor is not None, "it is closed"
        return self._descriptor

    def is_at(self, path: Path) -> bool:
        """Whether the file still has this name. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.fileno()), path.stat())
        return False

    def close(self) -> None:
        """Free the lock. Safe to call twice."""
        if self._descriptor is not None:
            _open.discard(self)
            # Before the descriptor: its number may be another file's a moment later.
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


_open: set[LockFile] = set()
"""Those of this process."""


def taken(path: Path, *, seconds: float = 0.0) -> LockFile | None:
    """The lock, or None where another has it for so long. Raises OSError."""
    deadline = time.monotonic() + seconds
    file = LockFile(path)
    try:
        while not file.take():
            if time.monotonic() >= deadline:
                file.close()
                return None
            # flock knows no limit of time, and who holds it may be a stopped process.
            time.sleep(_LOOK_SECONDS)
    except BaseException:
        file.close()
        raise
    return file


def created(path: Path, text: str = "") -> LockFile:
    """A new file that holds ``text``, locked before it has its name: found unlocked, it is a dead process's.

    Raises OSError.
    """
    temporary = temporary_name(path)
    file = LockFile(temporary)
    try:
        file.take()
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file


def is_held(path: Path) -> bool | None:
    """Whether any process has the lock at this moment; None where the file is gone. Raises OSError.

    Who ends well removes its file and then frees the lock: the free lock of a file that is gone says nothing.
    """
    try:
        file = LockFile(path, create=False)
    except FileNotFoundError:
        return None
    try:
        if not file.take(shared=True):
            return True
        return False if file.is_at(path) else None
    finally:
        file.close()


def holders(path: Path) -> list[int]:
    """The processes of this machine that have the lock alone, those that inherited it too.

    Who only looks is none of them. Another user's processes are not seen.
    """
    pids = []
    for pid, descriptor in open_descriptors(path):
        with contextlib.suppress(OSError):  # closed since it was listed
            # The kernel names a lock at each descriptor that has it, whoever took it.
            descriptor_info = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
            if re.search(r"^lock:.*FLOCK.*WRITE", descriptor_info, re.MULTILINE):
                pids.append(pid)
    return pids


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time, over processes and threads; any death frees it. Raises OSError."""
    file = LockFile(path)
    try:
        file.wait()
        yield
    finally:
        file.close()


def _forget_in_forked_child() -> None:
    for file in tuple(_open):
        file.close()


os.register_at_fork(after_in_child=_forget_in_forked_child)

"""Lock files (flock): a dead process holds no lock any more, and a forked child holds none at all.

A forked child would otherwise keep its dead parent's locks. The journal depends on no other module of locks,
and has its own (``vlm_durable/journal/writer_lock.py``).
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
        """Open the file, unlocked, for writing: NFS locks only such files exclusively. Raises OSError."""
        flags = os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._descriptor: int | None
        try:
            self._descriptor = os.open(path, flags | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            # Another user's file, or mounted read-only: on a local disk reading is enough to lock.
            self._descriptor = os.open(path, flags | os.O_RDONLY, 0o600)
        _open.add(self)

    @property
    def is_open(self) -> bool:
        """False after ``close``, and in a forked child."""
        return self._descriptor is not None

    def try_lock(self, *, shared: bool = False) -> bool:
        """Lock without waiting. Returns whether it worked. Raises OSError where the file system cannot."""
        assert self._descriptor is not None, "it is closed"
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Lock, waiting as long as another process holds the lock. Raises OSError."""
        assert self._descriptor is not None, "it is closed"
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def fileno(self) -> int:
        """The descriptor, to pass the lock to a child (``pass_fds``): all copies must close to free it."""
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
            # Forgotten before it is closed: a moment later the number may be another file's.
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


_open: set[LockFile] = set()
"""The open lock files of this process."""


def acquire_lock(path: Path, *, seconds: float = 0.0, shared: bool = False) -> LockFile | None:
    """Acquire the lock; None where another process holds it for longer than ``seconds``. Raises OSError."""
    deadline = time.monotonic() + seconds
    file = LockFile(path)
    try:
        while not file.try_lock(shared=shared):
            if time.monotonic() >= deadline:
                file.close()
                return None
            # flock has no timeout, and the holder may be a stopped process.
            time.sleep(_LOOK_SECONDS)
    except BaseException:
        file.close()
        raise
    return file


def create_locked(path: Path, text: str = "") -> LockFile:
    """Create a file with ``text``, locked before it has its name: an unlocked one is a dead process's.

    Raises OSError.
    """
    temporary = temporary_name(path)
    file = LockFile(temporary)
    try:
        file.try_lock()
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file


def is_held(path: Path) -> bool | None:
    """Whether any process holds the lock at this moment; None where the file is gone. Raises OSError.

    A process that ends well removes its file and then frees the lock: then the free lock proves nothing.
    """
    try:
        file = LockFile(path, create=False)
    except FileNotFoundError:
        return None
    try:
        if not file.try_lock(shared=True):
            return True
        return False if file.is_at(path) else None
    finally:
        file.close()


def lock_holders(path: Path) -> list[int]:
    """The pids of this machine's processes that hold the lock exclusively, also by inheritance.

    A process that only has the file open is not among them. Another user's processes are not seen.
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
    """Hold the lock alone, among processes and threads; any death frees it. Raises OSError."""
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

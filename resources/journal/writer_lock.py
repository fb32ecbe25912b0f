"""One writer a journal: an operating-system lock that a dead process frees by itself.

Where the lock does not hold (some network file systems, a deleted lock file), the numbered manifests
fence the older writer off; see manifests.publish.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from resources.journal.errors import FencedError, JournalLockedError

LOCK_NAME = "writer.lock"


class WriterLock:
    """An exclusive ``flock`` on a file in the journal's directory, held until released."""

    def __init__(self, directory: Path) -> None:
        """Take the lock now. Raises JournalLockedError (naming the holder) or OSError."""
        self._path = directory / LOCK_NAME
        self._descriptor = -1
        while self._descriptor < 0:
            self._descriptor = self._try()

    def _try(self) -> int:
        """The locked descriptor, or -1 where the file was removed while we took it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise JournalLockedError(
                f"{self._path.parent} is being written by {holder or 'another process'}. Wait for it, or end "
                "it; its committed rows stay."
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        if not self._is_at_path(descriptor):
            os.close(descriptor)
            return -1
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return descriptor

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            standing = self._path.stat()
        except FileNotFoundError:
            return False
        held = os.fstat(descriptor)
        return (standing.st_dev, standing.st_ino) == (held.st_dev, held.st_ino)

    def check(self) -> None:
        """Raise FencedError where the file we hold is no longer the one that others would lock."""
        if self._descriptor < 0 or not self._is_at_path(self._descriptor):
            raise FencedError(
                f"{self._path} was removed or replaced while this process held it: another writer may have "
                "taken over. Stop this process and start again."
            )

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back; ``remove`` takes the file away first (a retired journal)."""
        if self._descriptor < 0:
            return
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

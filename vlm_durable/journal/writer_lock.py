"""The lock of a journal's one writer: an operating-system lock, which a process's death frees.

Where the lock does not hold (some network file systems, a deleted lock file), the numbered manifests
fence the older writer off; see commits.publish_manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import uuid
from pathlib import Path

from vlm_durable.journal.journal_errors import FencedError, JournalError, JournalLockedError, storage_error

LOCK_NAME = "writer.lock"


class WriterLock:
    """An exclusive ``flock`` on a file in the journal's directory, held until released."""

    def __init__(self, directory: Path) -> None:
        """Take the lock now. Raises JournalLockedError (naming the holder) or OSError."""
        self._path = directory / LOCK_NAME
        self._descriptor = -1
        # The random part tells two locks of one process apart.
        self._name = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex[:8]})\n".encode()
        while self._descriptor < 0:
            self._descriptor = self._try()

    def _try(self) -> int:
        """The locked descriptor, or -1 where the file was removed while we took it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        keep = False
        try:
            self._lock(descriptor)
            if not self._is_at_path(descriptor):
                return -1
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._name, 0)
            keep = True
            return descriptor
        finally:
            # Without a name in it the file is locked by nobody: else this process would lock itself out.
            if not keep:
                os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise JournalLockedError(
                f"{self._path.parent} is being written by {holder or 'another process'}. Wait for it, or end "
                "it; its committed rows stay."
            ) from None

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            file_at_path = self._path.stat()
        except FileNotFoundError:
            return False
        locked_file = os.fstat(descriptor)
        return (file_at_path.st_dev, file_at_path.st_ino) == (locked_file.st_dev, locked_file.st_ino)

    def check(self) -> None:
        """Raise FencedError where another writer has, or could have, this journal by now.

        Two signs of that: the locked file is no longer the one at the path, or it holds another writer's name
        (on a file system where the lock does not hold).
        """
        held = self._descriptor >= 0 and self._is_at_path(self._descriptor)
        if held and os.pread(self._descriptor, len(self._name), 0) == self._name:
            return
        raise FencedError(
            f"{self._path} was removed or taken while this process held it: another writer may have taken "
            "over. What this process had not committed is left to that one. Stop this process."
        )

    def named_error(self, error: OSError | JournalError, *, doing: str) -> JournalError:
        """The journal's exception for an error while writing; FencedError where a takeover explains it.

        After a takeover the other writer clears this writer's files away, which then cannot be read back. A
        JournalError that no takeover explains is returned as it is.
        """
        where = self._path.parent
        named = error if isinstance(error, JournalError) else storage_error(error, doing=doing, where=where)
        try:
            if self._descriptor >= 0:
                self.check()
        except FencedError as fenced:
            return fenced
        except OSError:
            # The storage fails this check too; the first error says more.
            return named
        return named

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back; ``remove`` takes the file away first (a retired journal)."""
        if self._descriptor < 0:
            return
        if remove:
            self._path.unlink(missing_ok=True)
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            # Even after an error of close the descriptor is gone, and the lock with it.
            os.close(descriptor)

"""Durable files: every byte that must not be lost is written and renamed here, and nowhere else.

The order of the steps is the commit protocol of docs/durability.md; the power cuts on a simulated disk in
tests/faults/test_power_cuts.py test it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

_CHUNK = 1 << 20

_AT_CURRENT, _RENAME_EXCHANGE = -100, 2

TEMPORARY_SUFFIX = ".tmp"
"""Ending of every temporary name: never ``.parquet``, so that no reader's ``*.parquet`` finds one."""


class DurableWriteError(OSError):
    """A file could not be made durable. Nothing was acknowledged; the file before it is still there."""


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex, read in chunks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: without it a power cut leaves only the temporary name."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable that other code has written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(staged: Path, standing: Path) -> None:
    """Exchange the names of two folders in one durable step, so that readers always see one of them.

    Raises OSError where the file system cannot (EINVAL: some network file systems).
    """
    done = ctypes.CDLL(None, use_errno=True).renameat2(
        _AT_CURRENT, os.fsencode(staged), _AT_CURRENT, os.fsencode(standing), _RENAME_EXCHANGE
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(staged), None, str(standing))
    sync_directory(standing.parent)
    sync_directory(staged.parent)


def restrict_umask() -> None:
    """Let nobody else write what this process makes, whatever umask the person's shell has."""
    os.umask(os.umask(0o077) | 0o022)


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, each made durable in the one above it.

    A hidden directory is for this account alone: any account that can open a lock file can hold its lock, and
    so stop this program. An existing directory is made durable too: its creator may have died before that.
    """
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(mode=0o700 if directory.name.startswith(".") else 0o777, exist_ok=True)
    try:
        sync_directory(directory.parent)
    except PermissionError:
        # A parent that this account may not open (a shared file system's root): it created nothing there.
        if not os.access(directory, os.W_OK):
            raise


def temporary_name(path: Path, staging: Path | None = None) -> Path:
    """A new unique name for what will be ``path``: in ``staging``, or else in the folder of ``path``."""
    name = f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}"
    return (staging or path.parent) / name


class TemporaryFile:
    """A file of any size that will be ``path``: written in pieces under a temporary name in ``staging``.

    A binary sink (``write``, ``tell``, ``flush``, ``closed``) that pyarrow's writers take. ``seal`` makes
    it durable and reads it back; only then may it be given its final name with ``publish_new`` or
    ``publish_replacing``. Every failure is a DurableWriteError, after which the only way on is ``discard``.
    """

    def __init__(self, path: Path, staging: Path | None = None, *, mode: int = 0o644) -> None:
        self.target = path
        self.path = temporary_name(path, staging)
        self.size = 0
        self._digest = hashlib.sha256()
        try:
            self._descriptor: int | None = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode
            )
        except OSError as error:
            raise self._failed(error) from error

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._descriptor is None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data``, however many writes the system makes of it. Returns its size in bytes."""
        if self._descriptor is None:
            raise DurableWriteError(errno.EBADF, f"{self.path} is closed")
        whole = memoryview(data).cast("B")
        rest = whole
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise self._failed(error) from error
        self._digest.update(whole)
        self.size += len(whole)
        return len(whole)

    def tell(self) -> int:
        """How many bytes were written so far."""
        return self.size

    def flush(self) -> None:
        """Do nothing: no byte is buffered here."""

    def seal(self) -> str:
        """fsync, close, read back and compare. Returns the SHA-256 of the bytes, in hex.

        The descriptor is never used again after a failed fsync: the kernel may have dropped the pages, and a
        second fsync would falsely succeed.
        """
        if self._descriptor is None:
            raise DurableWriteError(errno.EBADF, f"{self.path} is closed")
        descriptor, self._descriptor = self._descriptor, None
        try:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sha256 = self._digest.hexdigest()
            verify_bytes(self.path, size=self.size, sha256=sha256)
        except OSError as error:
            raise self._failed(error) from error
        return sha256

    def discard(self) -> None:
        """Close and remove the temporary file, if it is still there."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> DurableWriteError:
        return DurableWriteError(
            error.errno or errno.EIO, f"could not write {self.target}: {error.strerror or error}"
        )


def write_temporary(path: Path, data: bytes, staging: Path | None = None, *, mode: int = 0o644) -> Path:
    """Write ``data`` under a temporary name in ``staging`` or beside ``path``, fsync it, and read it back.

    Raises DurableWriteError, with the temporary file removed, where any step fails.
    """
    file = TemporaryFile(path, staging, mode=mode)
    _fill(file, [data])
    return file.path


def copy_temporary(source: Path, path: Path, staging: Path | None = None) -> tuple[Path, str]:
    """Copy a file, byte for byte, to a temporary name in ``staging`` or beside ``path``, and read it back.

    A hard link would be no second copy: damage in place reaches both names. Returns the temporary name
    and the SHA-256 of the copy. Raises DurableWriteError, with the temporary file removed.
    """
    with source.open("rb") as stream:
        copy = TemporaryFile(path, staging)
        return copy.path, _fill(copy, iter(partial(stream.read, _CHUNK), b""))


def _fill(file: TemporaryFile, pieces: Iterable[bytes]) -> str:
    """Write all pieces and seal the file, or remove it. Returns the SHA-256 of the bytes, in hex."""
    try:
        for piece in pieces:
            file.write(piece)
        return file.seal()
    except BaseException:
        file.discard()
        raise


def set_aside(path: Path, directory: Path, *, keep: bool = False) -> Path:
    """Move a damaged or unknown file into ``directory`` under a new unique name, durably; never delete it.

    With ``keep`` its old name stays as well, until a following ``publish_replacing`` takes it over, so that
    readers always find a file there. The new name does not end in ``.parquet``. Returns the new name.
    """
    make_directory(directory)
    aside = directory / f"{path.name}.{uuid.uuid4().hex[:12]}"
    os.link(path, aside)
    sync_directory(directory)
    if not keep:
        path.unlink()
        sync_directory(path.parent)
    return aside


def verify_bytes(path: Path, *, size: int, sha256: str) -> None:
    """Read a file back and compare. Raises DurableWriteError where it is not what was written."""
    actual_size = path.stat().st_size
    if actual_size != size:
        raise DurableWriteError(errno.EIO, f"{path} has {actual_size} bytes where {size} were written")
    digest = sha256_of(path)
    if digest != sha256:
        raise DurableWriteError(
            errno.EIO, f"{path} reads back as {digest[:12]} where {sha256[:12]} was written"
        )


def publish_new(temporary: Path, path: Path) -> None:
    """Give a temporary file its final name, which must be free; then fsync the directory.

    ``os.link`` fails where the name exists (FileExistsError), so nothing committed can be overwritten.
    """
    os.link(temporary, path)
    temporary.unlink()
    sync_directory(path.parent)


def publish_replacing(temporary: Path, path: Path) -> None:
    """Give a temporary file its final name, replacing the file there; then fsync both directories.

    The final name is made durable first: a power cut between the two leaves a second name, never none.
    """
    temporary.replace(path)
    sync_directory(path.parent)
    if temporary.parent != path.parent:
        sync_directory(temporary.parent)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, durably. Raises FileExistsError, OSError."""
    _publish(publish_new, write_temporary(path, data), path)


def write_replacing(path: Path, data: bytes, staging: Path | None = None, *, mode: int = 0o644) -> None:
    """Write a file, replacing the one there, durably and in one step. Raises OSError.

    mode: who may read and write it.
    """
    _publish(publish_replacing, write_temporary(path, data, staging, mode=mode), path)


def _publish(publish: Callable[[Path, Path], None], temporary: Path, path: Path) -> None:
    try:
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise

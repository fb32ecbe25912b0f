"""Durable files: every byte this project must not lose is written and renamed here, and nowhere else.

What lives here: write, fsync, read back, publish under a name, fsync the directory. What does not: what
the bytes mean. The order of the steps is the commit protocol of docs/durability.md; a test records the
system calls and holds it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from pathlib import Path

_CHUNK = 1 << 20

TEMPORARY_SUFFIX = ".tmp"
"""Ending of every temporary name: never ``.parquet``, so that no reader's ``*.parquet`` finds one."""


class DurableWriteError(OSError):
    """A file could not be made durable. Nothing was acknowledged; what stood there still stands."""


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


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, each made durable in the one above it."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def temporary_beside(path: Path) -> Path:
    """A new unique name in the same directory, so that the rename that follows cannot cross devices."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")


def write_temporary(path: Path, data: bytes) -> Path:
    """Write ``data`` beside ``path`` under a temporary name, fsync it, and read it back.

    Raises DurableWriteError, with the temporary file removed, where any step fails. The descriptor is
    never used again after a failed fsync: the kernel may have dropped the pages, and a second fsync
    would falsely succeed.
    """
    temporary = temporary_beside(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        verify_bytes(temporary, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DurableWriteError(
            error.errno or errno.EIO, f"could not write {path}: {error.strerror or error}"
        ) from error
    return temporary


def verify_bytes(path: Path, *, size: int, sha256: str) -> None:
    """Read a file back and compare. Raises DurableWriteError where it is not what was written."""
    found_size = path.stat().st_size
    if found_size != size:
        raise DurableWriteError(errno.EIO, f"{path} has {found_size} bytes where {size} were written")
    found = sha256_of(path)
    if found != sha256:
        raise DurableWriteError(
            errno.EIO, f"{path} reads back as {found[:12]} where {sha256[:12]} was written"
        )


def publish_new(temporary: Path, path: Path) -> None:
    """Give a temporary file its final name, which must be free; then fsync the directory.

    ``os.link`` fails where the name exists (FileExistsError), so nothing committed can be overwritten.
    """
    os.link(temporary, path)
    temporary.unlink()
    sync_directory(path.parent)


def publish_replacing(temporary: Path, path: Path) -> None:
    """Give a temporary file its final name in place of what stands there; then fsync the directory."""
    temporary.replace(path)
    sync_directory(path.parent)


def write_new(path: Path, data: bytes) -> str:
    """Write a file that must not exist yet, durably. Returns its SHA-256."""
    publish_new(write_temporary(path, data), path)
    return hashlib.sha256(data).hexdigest()


def write_replacing(path: Path, data: bytes) -> str:
    """Write a file in place of what stands there, durably and in one step. Returns its SHA-256."""
    publish_replacing(write_temporary(path, data), path)
    return hashlib.sha256(data).hexdigest()

"""The file of everything that was ever told, ``alerts.jsonl``: lines are added, never changed.

What lives here: durable lines, each with its own digest, reading on from a position, and a new file where the
old one has grown long. What does not: what a line means (``outbox.py``). A line that a kill or a power cut
tore was never promised; it is passed over and can never run into the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resources.storage.files import (
    DurableWriteError,
    make_directory,
    publish_replacing,
    sync_directory,
    write_new,
    write_temporary,
)
from resources.storage.lock_files import locked

LINES = "alerts.jsonl"
OLDER_LINES = "alerts.1.jsonl"
_LOCK = "alerts.lock"
_ABOUT = (
    "Every alert and recovery, oldest first. Truth: what is not told yet stands only here. alerts.1.jsonl is"
    " the file before this one and may be deleted."
)
_SEALED = re.compile(rb',"seal":"([0-9a-f]{16})"}$')


class AlertLogError(DurableWriteError):
    """Alerts could not be written down. Nothing was promised; the message says where and what to do."""


@dataclass(frozen=True)
class Position:
    """How far a reader has read: which file (a digest of its first line), and the bytes of it."""

    file: str
    offset: int


@dataclass(frozen=True)
class Read:
    """What was read: whole lines, where to go on, and how many whole lines did not verify.

    began_with: bytes of the file's first lines, which repeat what the one before it held.
    """

    entries: list[dict[str, Any]]
    end: Position
    damaged: int = 0
    began_with: int = 0


class AlertLog:
    """The lines of one folder, for any number of processes; hold ``locked`` around every call."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / LINES

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process or thread at a time; held for milliseconds, and freed by any death. Raises OSError."""
        make_directory_once(self.directory)
        with locked(self.directory / _LOCK):
            yield

    def read(self, since: Position | None = None) -> Read:
        """The whole lines after a position; from the start where that was in another file. Raises OSError."""
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return Read([], Position("", 0))
        with stream:
            head = stream.readline()
            file = hashlib.sha256(head).hexdigest()[:16]
            offset = since.offset if since is not None and since.file == file else len(head)
            stream.seek(offset)
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        entries, damaged = [], 0
        for line in data[:whole].split(b"\n"):
            entry = _opened(line)
            if entry is not None:
                entries.append(entry)
            elif _SEALED.search(line):
                damaged += 1
        opened = _opened(head.rstrip(b"\n")) or {}
        return Read(entries, Position(file, offset + whole), damaged, opened.get("began_with", 0))

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add lines; durable when it returns. Raises AlertLogError, and then none of them stands there.

        ``files.py`` replaces whole files and nothing else, so this is the one place that adds to one.
        """
        if not self.path.exists():
            write_new(self.path, _head(began_with=0))
        lines = b"".join(_sealed(entry) for entry in entries)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                self._append(descriptor, lines)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise AlertLogError(
                error.errno or errno.EIO,
                f"could not add to {self.path}: {error.strerror or error}. Make room there, or see that the"
                " folder can be written; what was to be told is posted again at the next look",
            ) from error

    def _append(self, descriptor: int, lines: bytes) -> None:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        rest = memoryview(b"\n" + lines if torn else lines)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError:
            # A second fsync would falsely succeed, and who posts again would be told that it is known: the
            # lines go, so that they are written anew.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise

    def sync(self) -> None:
        """Make lines durable that another process wrote and may have died before syncing. Raises OSError."""
        if not self.path.exists():
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def start_anew(self, entries: Iterable[dict[str, Any]]) -> None:
        """Put the file aside as the older one, and begin another with these lines. Raises OSError."""
        lines = b"".join(_sealed(entry) for entry in entries)
        temporary = write_temporary(self.path, _head(began_with=len(lines)) + lines)
        older = self.directory / OLDER_LINES
        older.unlink(missing_ok=True)
        os.link(self.path, older)
        sync_directory(self.directory)
        publish_replacing(temporary, self.path)


def make_directory_once(directory: Path) -> None:
    """Create a folder durably where it is not there; one that is costs no sync."""
    if not directory.is_dir():
        make_directory(directory)


def _head(*, began_with: int) -> bytes:
    return _sealed({"event": "file", "about": _ABOUT, "file": uuid.uuid4().hex, "began_with": began_with})


def _sealed(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return text[:-1] + b',"seal":"' + hashlib.sha256(text).hexdigest()[:16].encode() + b'"}\n'


def _opened(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where a single bit of it differs from what was written."""
    sealed = _SEALED.search(line)
    if sealed is None:
        return None
    text = line[: sealed.start()] + b"}"
    if hashlib.sha256(text).hexdigest()[:16].encode() != sealed.group(1):
        return None
    entry = json.loads(text)
    return entry if isinstance(entry, dict) else None

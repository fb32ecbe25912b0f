"""The one fault harness: records the file operations of a process, and acts before any one of them.

Everything that kills, stops, fails or records at a file operation uses this module: the campaign, the fault
tests and the unit tests. What does not live here: the disk that loses what was not made durable
(``lossy_disk.py``).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRAPPED = (
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "close",
    "link",
    "unlink",
    "rename",
    "replace",
    "mkdir",
    "rmdir",
)
"""The functions of ``os`` that change a disk. ``rename`` is recorded as ``replace``."""


@dataclass(frozen=True)
class Operation:
    """One call that changes files or makes them durable; paths are relative to the root.

    name: ``create`` (a new file is opened), ``open`` (one that exists, with O_CREAT), ``fsync_directory``, or
    the name in ``os``. inode: the number of the file that a ``create``, ``write`` or ``fsync`` is about.
    """

    name: str
    paths: tuple[str, ...]
    inode: int = 0
    data: bytes = b""
    descriptor: int = field(default=-1, compare=False)

    def __str__(self) -> str:
        return " ".join((self.name, *self.paths))


Before = Callable[[Operation, "FileOperations"], None]


class FileOperations:
    """Wraps the functions of ``os`` that change files below ``root``. Reading is not recorded.

    ``before`` sees each operation before it is done and may raise, kill or stop. ``log`` has the operations
    that were done; ``count`` also counts the one at hand. ``longest_write`` cuts writes short, in bytes.
    """

    def __init__(
        self, root: Path, before: Before | None = None, after: Callable[[Operation], None] | None = None
    ) -> None:
        self.root = root
        self.before = before
        self.log: list[Operation] = []
        self.count = 0
        self.longest_write: int | None = None
        self.real: dict[str, Any] = {name: getattr(os, name) for name in WRAPPED}
        self._after = after
        self._prefix = f"{root}{os.sep}"
        self._files: dict[int, tuple[str, int]] = {}
        self._inodes = 0
        # The journal's commit thread and its caller must not mix up the log.
        self._one_at_a_time = threading.RLock()

    def install(self) -> None:
        """Record from now on, to the end of this process."""
        for name in WRAPPED:
            setattr(os, name, getattr(self, f"_{name}"))

    @contextmanager
    def watched(self) -> Iterator[FileOperations]:
        """Record while this holds."""
        self.install()
        try:
            yield self
        finally:
            for name, function in self.real.items():
                setattr(os, name, function)

    def _do(self, operation: Operation, *arguments: Any, call: str | None = None, **named: Any) -> Any:
        with self._one_at_a_time:
            self.count += 1
            if self.before is not None:
                self.before(operation, self)
            answer = self.real[call or operation.name](*arguments, **named)
            self.note(operation)
        return answer

    def note(self, operation: Operation) -> None:
        """Put an operation that was done into the log."""
        self.log.append(operation)
        if self._after is not None:
            self._after(operation)

    def _relative(self, path: Any) -> str | None:
        try:
            name = os.fspath(path)
        except TypeError:
            return None
        if name == str(self.root):
            return "."
        return name[len(self._prefix) :] if str(name).startswith(self._prefix) else None

    def _open(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        relative = self._relative(path)
        if relative is None or not flags & (os.O_CREAT | os.O_DIRECTORY):
            return int(self.real["open"](path, flags, *rest, **named))
        if flags & os.O_DIRECTORY:
            descriptor = int(self.real["open"](path, flags, *rest, **named))
            self._files[descriptor] = relative, 0
            return descriptor
        new = not os.path.lexists(path)
        with self._one_at_a_time:
            self._inodes += new
            inode = self._inodes if new else -1
            operation = Operation("create" if new else "open", (relative,), inode)
            descriptor = int(self._do(operation, path, flags, *rest, call="open", **named))
            self._files[descriptor] = relative, inode
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        whole = bytes(data)[: self.longest_write]
        opened = self._files.get(descriptor)
        if opened is None:
            return int(self.real["write"](descriptor, whole))
        return int(self._do(Operation("write", opened[:1], opened[1], whole, descriptor), descriptor, whole))

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        return int(self._on_descriptor("pwrite", descriptor, data, offset))

    def _ftruncate(self, descriptor: int, length: int) -> None:
        self._on_descriptor("ftruncate", descriptor, length)

    def _fsync(self, descriptor: int) -> None:
        directory = self._files.get(descriptor, ("", -1))[1] == 0
        self._on_descriptor("fsync_directory" if directory else "fsync", descriptor, call="fsync")

    def _close(self, descriptor: int) -> None:
        try:
            self._on_descriptor("close", descriptor)
        finally:
            self._files.pop(descriptor, None)

    def _on_descriptor(self, name: str, descriptor: int, *rest: Any, call: str | None = None) -> Any:
        opened = self._files.get(descriptor)
        if opened is None:
            return self.real[call or name](descriptor, *rest)
        return self._do(Operation(name, opened[:1], opened[1], b"", descriptor), descriptor, *rest, call=call)

    def _on_paths(self, name: str, *paths: Any, call: str | None = None, **named: Any) -> None:
        relative = [self._relative(path) for path in paths]
        names = [name_ for name_ in relative if name_ is not None]
        if len(names) == len(paths):
            self._do(Operation(name, tuple(names)), *paths, call=call, **named)
        else:
            self.real[call or name](*paths, **named)

    def _link(self, source: Any, target: Any, **named: Any) -> None:
        self._on_paths("link", source, target, **named)

    def _rename(self, source: Any, target: Any, **named: Any) -> None:
        self._on_paths("replace", source, target, call="rename", **named)

    def _replace(self, source: Any, target: Any, **named: Any) -> None:
        self._on_paths("replace", source, target, **named)

    def _unlink(self, path: Any, **named: Any) -> None:
        if self._relative(path) is not None and not os.path.lexists(path):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))
        self._on_paths("unlink", path, **named)

    def _mkdir(self, path: Any, mode: int = 0o777, **named: Any) -> None:
        relative = self._relative(path)
        if relative is None:
            self.real["mkdir"](path, mode, **named)
        else:
            self._do(Operation("mkdir", (relative,)), path, mode, **named)

    def _rmdir(self, path: Any, **named: Any) -> None:
        self._on_paths("rmdir", path, **named)


def die() -> None:
    """End this process as a power cut or the kernel's out-of-memory killer would: at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def strike_at(at: int, strike: Callable[[], None] = die, *, torn: bool = False, only: str = "") -> Before:
    """Call ``strike`` before the ``at``-th operation (from 1; 0: never), or the ``at``-th of one name.

    torn: if that one is a write, half of its bytes get through first.
    """
    seen = 0

    def before(operation: Operation, operations: FileOperations) -> None:
        nonlocal seen
        if only in ("", operation.name):
            seen += 1
            if seen == at:
                if torn and operation.name == "write":
                    half = operation.data[: len(operation.data) // 2]
                    operations.real["write"](operation.descriptor, half)
                    operations.note(Operation("write", operation.paths, operation.inode, half))
                strike()

    return before


def fail_at(at: int, code: int, *, only: str = "") -> Before:
    """Raise OSError with this code in place of the ``at``-th operation, or the ``at``-th of one name.

    A close that fails has closed all the same, as on Linux.
    """
    seen = 0

    def before(operation: Operation, operations: FileOperations) -> None:
        nonlocal seen
        if only in ("", operation.name):
            seen += 1
            if seen == at:
                if operation.name == "close":
                    operations.real["close"](operation.descriptor)
                raise OSError(code, os.strerror(code), *operation.paths)

    return before

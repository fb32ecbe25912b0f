"""The file operations a process makes under one folder: recorded, stopped at any one, and replayed on a disk
that loses what was not made durable. What is promised after each is said by the tests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Operation:
    """One call that changes files or makes them durable; paths are relative to the folder."""

    name: str
    paths: tuple[str, ...]
    inode: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        return " ".join((self.name, *self.paths))


class FileOperations:
    """Wraps the ``os`` functions that change files. ``before`` sees each operation and may raise or kill."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Operation] = []
        self.before: Callable[[Operation, FileOperations], None] = lambda operation, operations: None
        self.real: dict[str, Any] = {
            name: getattr(os, name)
            for name in ("open", "write", "fsync", "close", "link", "replace", "unlink", "mkdir")
        }
        self._files: dict[int, tuple[str, int]] = {}
        self._inodes = 0

    @contextmanager
    def watched(self) -> Iterator[FileOperations]:
        """Record while this holds."""
        for name in self.real:
            setattr(os, name, getattr(self, f"_{name}"))
        try:
            yield self
        finally:
            for name, function in self.real.items():
                setattr(os, name, function)

    def _relative(self, path: Any) -> str | None:
        try:
            return str(Path(os.fspath(path)).relative_to(self.root))
        except (ValueError, TypeError):
            return None

    def _note(self, name: str, *paths: str, inode: int = 0, data: bytes = b"") -> None:
        operation = Operation(name, paths, inode, data)
        self.before(operation, self)
        self.log.append(operation)

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        relative = self._relative(path)
        creates = relative is not None and flags & os.O_CREAT and not Path(path).exists()
        if relative is not None and creates:
            self._inodes += 1
            self._note("create", relative, inode=self._inodes)
        descriptor: int = self.real["open"](path, flags, *args, **kwargs)
        if relative is not None and (creates or flags & os.O_DIRECTORY):
            self._files[descriptor] = (relative, self._inodes if creates else 0)
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        if descriptor in self._files:
            path, inode = self._files[descriptor]
            self._note("write", path, inode=inode, data=bytes(data))
        written: int = self.real["write"](descriptor, data)
        return written

    def _fsync(self, descriptor: int) -> None:
        if descriptor in self._files:
            path, inode = self._files[descriptor]
            self._note("fsync" if inode else "fsync_directory", path, inode=inode)
        self.real["fsync"](descriptor)

    def _close(self, descriptor: int) -> None:
        self._files.pop(descriptor, None)
        self.real["close"](descriptor)

    def _paths(self, name: str, *paths: Any, **kwargs: Any) -> None:
        relative = [self._relative(path) for path in paths]
        if None not in relative:
            self._note(name, *(str(path) for path in relative))
        self.real[name](*paths, **kwargs)

    def _link(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._paths("link", source, target, **kwargs)

    def _replace(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._paths("replace", source, target, **kwargs)

    def _unlink(self, path: Any, **kwargs: Any) -> None:
        if self._relative(path) is not None and not os.path.lexists(path):
            raise FileNotFoundError(path)
        self._paths("unlink", path, **kwargs)

    def _mkdir(self, path: Any, mode: int = 0o777, **kwargs: Any) -> None:
        relative = self._relative(path)
        if relative is not None:
            self._note("mkdir", relative)
        self.real["mkdir"](path, mode, **kwargs)


@dataclass
class LossyDisk:
    """A disk that keeps, over a power cut, only what was made durable, and of the rest whatever it likes.

    A file's bytes are durable after its fsync, a name after the fsync of its directory. Names that were not
    may have reached the disk all the same, in their order, and before the bytes that they name.
    """

    contents: dict[int, bytes] = field(default_factory=dict)
    durable_contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    durable_names: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"."})
    durable_folders: set[str] = field(default_factory=lambda: {"."})
    waiting: dict[str, list[dict[str, int | None]]] = field(default_factory=dict)

    @classmethod
    def holding(cls, root: Path) -> LossyDisk:
        """A disk on which everything under ``root`` is durable."""
        disk = cls()
        for number, path in enumerate(sorted(root.rglob("*")), start=1):
            relative = str(path.relative_to(root))
            if path.is_dir():
                disk.folders.add(relative)
                disk.durable_folders.add(relative)
            else:
                for names, contents in (
                    (disk.names, disk.contents),
                    (disk.durable_names, disk.durable_contents),
                ):
                    names[relative] = -number
                    contents[-number] = path.read_bytes()
        return disk

    def apply(self, operation: Operation) -> None:
        """One operation more."""
        paths = operation.paths
        if operation.name == "create":
            self.contents[operation.inode] = self.durable_contents[operation.inode] = b""
            self._rename({paths[0]: operation.inode})
        elif operation.name == "write":
            self.contents[operation.inode] += operation.data
        elif operation.name == "fsync":
            self.durable_contents[operation.inode] = self.contents[operation.inode]
        elif operation.name == "fsync_directory":
            for change in self.waiting.pop(paths[0], []):
                self._change(self.durable_names, change)
            self.durable_folders |= {one for one in self.folders if str(Path(one).parent) == paths[0]}
        elif operation.name == "link":
            self._rename({paths[1]: self.names[paths[0]]})
        elif operation.name == "replace":
            self._rename({paths[1]: self.names[paths[0]]}, {paths[0]: None})
        elif operation.name == "unlink":
            self._rename({paths[0]: None})
        elif operation.name == "mkdir":
            self.folders.add(paths[0])

    def after_power_cut(self, target: Path, chance: random.Random | None, *, eager: bool = False) -> None:
        """Write what is left into ``target``: what is durable, and (eager) every name, or some by chance."""
        names = dict(self.durable_names)
        for changes in self.waiting.values():
            kept = chance.randint(0, len(changes)) if chance else len(changes) if eager else 0
            for change in changes[:kept]:
                self._change(names, change)
        folders = self.folders if eager or (chance and chance.random() < 0.5) else self.durable_folders
        for folder in sorted(folders):
            (target / folder).mkdir(parents=True, exist_ok=True)
        for name, inode in names.items():
            content = self.durable_contents[inode]
            if chance and len(self.contents[inode]) > len(content):
                content = self.contents[inode][: chance.randint(len(content), len(self.contents[inode]))]
            if (target / name).parent.is_dir():
                (target / name).write_bytes(content)

    def _rename(self, *changes: dict[str, int | None]) -> None:
        """Change names. A rename within one folder is one step; between two, each may be lost alone."""
        parents = [str(Path(next(iter(change))).parent) for change in changes]
        if len(set(parents)) == 1:
            changes, parents = (
                ({name: inode for change in changes for name, inode in change.items()},),
                parents[:1],
            )
        for change, parent in zip(changes, parents, strict=True):
            self._change(self.names, change)
            self.waiting.setdefault(parent, []).append(change)

    @staticmethod
    def _change(names: dict[str, int], change: dict[str, int | None]) -> None:
        for path, inode in change.items():
            if inode is None:
                names.pop(path, None)
            else:
                names[path] = inode

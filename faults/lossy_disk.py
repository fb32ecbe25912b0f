"""A simulated disk: a power cut leaves what was made durable, and of the rest whatever the disk likes.

It is harsher than ext4 and XFS, whose next sync of any file writes down older changes of names too: there a
missing sync of a directory can go unnoticed. POSIX promises no more than this disk keeps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from faults.file_operations import Operation

_FOLDER = 0
_Change = dict[str, int | None]
"""Names that change in one step: path to the inode's number, or None for a name that goes."""


@dataclass
class LossyDisk:
    """What is visible, and what a power cut leaves of it.

    A file's bytes are durable after its fsync. A name, of a file or a folder, is durable after the fsync of
    the folder it is in. What was not made durable may have reached the disk all the same: each change of a
    name alone, in no order, and before the bytes that it names. A rename between two folders is two changes.
    """

    contents: dict[int, bytes] = field(default_factory=dict)
    durable_contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    durable_names: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, list[_Change]] = field(default_factory=dict)
    """Changes of names by the folder whose fsync makes them durable, in the order of their making."""
    _offset: int = 0

    @classmethod
    def holding(cls, root: Path) -> LossyDisk:
        """A disk on which everything under ``root`` is durable."""
        disk = cls()
        for number, path in enumerate(sorted(root.rglob("*")), start=2):
            relative = str(path.relative_to(root))
            if path.is_dir():
                disk.names[relative] = _FOLDER
            else:
                disk.names[relative] = -number
                disk.contents[-number] = path.read_bytes()
        disk.durable_names = dict(disk.names)
        disk.durable_contents = dict(disk.contents)
        return disk

    def apply_all(self, operations: Iterable[Operation]) -> None:
        """The operations of one process. Each process counts its inodes anew."""
        self._offset = max([0, *self.contents])
        for operation in operations:
            self.apply(operation)

    def apply(self, operation: Operation) -> None:
        """One operation more."""
        paths = operation.paths
        inode = operation.inode + self._offset if operation.inode > 0 else operation.inode
        match operation.name:
            case "create":
                self.contents[inode] = self.durable_contents[inode] = b""
                self._rename({paths[0]: inode})
            case "write" if inode in self.contents:
                self.contents[inode] += operation.data
            case "fsync" if inode in self.contents:
                self.durable_contents[inode] = self.contents[inode]
            case "fsync_directory":
                for change in self.waiting.pop(paths[0], []):
                    self._change(self.durable_names, change)
            case "link":
                self._rename({paths[1]: self.names[paths[0]]})
            case "replace":
                self._rename({paths[1]: self.names[paths[0]]}, {paths[0]: None})
            case "unlink" | "rmdir":
                self._rename({paths[0]: None})
            case "mkdir" if paths[0] != ".":
                self._rename({paths[0]: _FOLDER})

    def after_power_cut(
        self, target: Path, chance: random.Random | None = None, *, eager: bool = False
    ) -> None:
        """Write what is left into ``target``: what is durable, and of the rest all (eager) or some."""
        names = dict(self.durable_names)
        for changes in self.waiting.values():
            for change in _kept(changes, chance, eager=eager):
                self._change(names, change)
        target.mkdir(parents=True, exist_ok=True)
        for name, inode in sorted(names.items()):
            if not (target / name).parent.is_dir():
                continue
            if inode == _FOLDER:
                (target / name).mkdir()
                continue
            content = self.durable_contents[inode]
            if chance and len(self.contents[inode]) > len(content):
                content = self.contents[inode][: chance.randint(len(content), len(self.contents[inode]))]
            (target / name).write_bytes(content)

    def _rename(self, *changes: _Change) -> None:
        """Change names. Within one folder it is one step; between two, each may be lost alone."""
        parents = [str(Path(next(iter(change))).parent) for change in changes]
        if len(set(parents)) == 1:
            parents, changes = parents[:1], ({name: pair[name] for pair in changes for name in pair},)
        for change, parent in zip(changes, parents, strict=True):
            self._change(self.names, change)
            self.waiting.setdefault(parent, []).append(change)

    @staticmethod
    def _change(names: dict[str, int], change: _Change) -> None:
        for path, inode in change.items():
            if inode is not None:
                names[path] = inode
            elif names.pop(path, None) == _FOLDER:
                for inside in [name for name in names if name.startswith(f"{path}/")]:
                    del names[inside]


def _kept(changes: list[_Change], chance: random.Random | None, *, eager: bool) -> list[_Change]:
    """Which changes of names reached the disk though nobody made them durable."""
    if chance is None:
        return changes if eager else []
    if chance.random() < 0.5:
        return changes[: chance.randint(0, len(changes))]
    return [change for change in changes if chance.random() < 0.5]

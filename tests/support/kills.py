"""What kills leave: the files of a process as they are before one of its file operations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from faults.file_operations import FileOperations, Operation
from tests.support.shares import count_share


def killed_homes(
    home: Path, work: Callable[[], object], into: Path, *, parts: int = 1
) -> list[tuple[Path, Operation]]:
    """Do the work in ``home``, and copy what a kill before each of its operations would leave there.

    Of a write half of the bytes are let through. parts: take another share of the operations each day.
    """
    homes: list[tuple[Path, Operation]] = []
    numbers = count_share(1, parts)
    struck = next(numbers)

    def copy(operation: Operation, operations: FileOperations) -> None:
        nonlocal struck
        if operations.count < struck:
            return
        struck, killed = next(numbers), into / str(operations.count)
        if home.exists():
            shutil.copytree(home, killed, symlinks=True)
        if operation.name == "write":
            with (killed / operation.paths[0]).open("ab") as file:
                file.write(operation.data[: len(operation.data) // 2])
        homes.append((killed, operation))

    with FileOperations(home, copy).watched():
        work()
    return homes

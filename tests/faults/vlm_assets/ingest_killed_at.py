"""Run one ingest again and again, each time killed by SIGKILL before another file operation of it.

Started by test_ingest_killed.py as a process of its own: it forks for every kill, before pyarrow has
started a thread. Prints one line a kill, "N OPERATION", and "N completed" for the first that ran through.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import vlm_assets.catalog.ingest as under_test
from faults.file_operations import FileOperations, Operation, strike_at


def kill_before(home: Path, number: int) -> None:
    """Record this process, which says the name of its ``number``-th file operation and dies before it."""
    dies = strike_at(number, torn=True)

    def before(operation: Operation, operations: FileOperations) -> None:
        if operations.count == number:
            print(number, operation.name, flush=True)
        dies(operation, operations)

    FileOperations(home, before).install()


def main(source: Path, home: Path, results: Path) -> None:
    """Leave the home of kill N in ``results/N``."""
    number = 0
    while True:
        number += 1
        killed_home = results / str(number)
        shutil.copytree(home, killed_home)
        child = os.fork()
        if child == 0:
            kill_before(killed_home, number)
            under_test.ingest(source, killed_home, update=True)
            print(number, "completed", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Run one ingest again and again, each time killed by SIGKILL before another file operation of it.

Started by test_ingest_killed.py as a process of its own: it forks for every kill, before pyarrow has
started a thread. Prints one line a kill, "N OPERATION", and "N completed" for the first that ran through.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vlm_assets.catalog.ingest as under_test

PUBLISHING = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "pwrite", "ftruncate")


def kill_before(number: int) -> Callable[[], int]:
    """Wrap the os functions that change files, so that call ``number`` never happens; count the calls."""
    count = 0

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if name == "open" and not arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                return original(*arguments, **options)
            count += 1
            if count == number:
                print(number, name, flush=True)
                if name == "write":
                    # A write that is cut short: the worst moment to die.
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    for name in PUBLISHING:
        setattr(os, name, wrapped(name, getattr(os, name)))
    return lambda: count


def main(source: Path, home: Path, results: Path) -> None:
    """Leave the home of kill N in ``results/N``."""
    number = 0
    while True:
        number += 1
        killed_home = results / str(number)
        shutil.copytree(home, killed_home)
        child = os.fork()
        if child == 0:
            kill_before(number)
            under_test.ingest(source, killed_home, update=True)
            print(number, "completed", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

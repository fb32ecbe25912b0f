"""A server that forks processes which fail on purpose (fork_server.py). FAULTS_DIR: on which storage."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest


class ForkServer:
    """A running fork_server.py, and homes for its children."""

    def __init__(self, module: Path, root: Path) -> None:
        self._root = root
        self._homes = itertools.count()
        script = Path(__file__).with_name("fork_server.py")
        checkout = str(script.parents[2])
        own = {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system", "PYTHONPATH": checkout}
        self._process = subprocess.Popen(
            [sys.executable, script, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | own,
            start_new_session=True,
        )

    def new_home(self) -> Path:
        """An empty home for one child, or for several after one another."""
        return self._root / f"home-{next(self._homes):05d}"

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send one order, and wait until its child ended: killed, said."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def kill_at(self, operation: int, **order: Any) -> dict[str, Any] | None:
        """Have a child killed at one of its file operations; its answer, or None if it had ended by then."""
        answer = self.ask(at=operation, **order)
        assert answer["killed"] or not answer["said"], answer["said"]
        return answer if answer["killed"] else None

    def close(self) -> None:
        """End it, and a child that a failed test left."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


StartForkServer = Callable[[Path], AbstractContextManager[ForkServer]]


@pytest.fixture(scope="session")
def fork_server() -> StartForkServer:
    """A function that starts a fork server for a module, on the storage under test."""
    # A kill leaves the page cache alone, so memory shows the same states as a disk, without its waits.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    chosen = os.environ.get("FAULTS_DIR", memory)

    @contextmanager
    def started(module: Path) -> Iterator[ForkServer]:
        with tempfile.TemporaryDirectory(prefix="faults-", dir=chosen) as root:
            server = ForkServer(module, Path(root))
            yield server
            server.close()

    return started

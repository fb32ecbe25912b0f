"""A process that ends at its Nth file operation, or meets an error there: what the campaign does to a life.

What lives here: counting the calls that change a disk, and acting before one of them. What does not: what is
promised afterwards (ledger.py). Only ever used in a forked child.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

OPERATIONS = (
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


def die() -> None:
    """End this process as a power cut or the kernel's out-of-memory killer would: at once."""
    os.kill(os.getpid(), signal.SIGKILL)


class Failpoint:
    """Wraps the ``os`` functions that change a disk and calls ``strike`` before the ``at``-th call (from 1).

    ``torn``: half of the bytes of a write get through first. Reading opens are not counted.
    """

    def __init__(self, at: int, strike: Callable[[], None], *, torn: bool = False) -> None:
        self.operations = 0
        self._at, self._strike, self._torn = at, strike, torn
        self._guard = threading.Lock()
        for name in OPERATIONS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **named)
            with self._guard:
                self.operations += 1
                struck = self.operations == self._at
            if struck:
                if self._torn and name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                self._strike()
            return real(*arguments, **named)

        return call

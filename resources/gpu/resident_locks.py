"""Locks of a device's resident, held by a descriptor that a child process may be handed with the lock on it.

What lives here: taking, freeing and looking. What does not: what each lock means (``residents.py``). The lock
(flock) belongs to the open file: it is free when the last process that has the descriptor is gone.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_LOOK_SECONDS = 0.05

_descriptors: set[int] = set()
"""Locks of this process: what a child made by fork must close, or it would keep them from its dead parent."""


def take(path: Path, *, wait_seconds: float = 0.0) -> int | None:
    """A descriptor with the lock on it, or None where another has it for ``wait_seconds``. Raises OSError."""
    deadline = time.monotonic() + wait_seconds
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _descriptors.add(descriptor)
    try:
        while not _locked(descriptor):
            if time.monotonic() >= deadline:
                free(descriptor)
                return None
            # flock knows no limit of time, and the holder may be a stopped process.
            time.sleep(_LOOK_SECONDS)
    except BaseException:
        free(descriptor)
        raise
    return descriptor


def free(descriptor: int) -> None:
    """Close a descriptor of ``take``. Safe to call twice."""
    if descriptor in _descriptors:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether any process has the lock. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget_in_forked_child() -> None:
    for descriptor in tuple(_descriptors):
        free(descriptor)


os.register_at_fork(after_in_child=_forget_in_forked_child)

"""Processes that a test started. Each may end while the test asks about it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """The words a process was started with; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
        return list(process.cmdline())
    return []


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. A zombie has: its parent reaps it when it likes."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, and theirs; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill all that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)

"""The identity of processes: pid and start; their children, their states and how they ended.

Whether a materialization lives is said by its lock (``vlm_durable/state/workers.py``). Runs are ended by
``sensors/run_end.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

KILL_SECONDS = 30.0
"""How long to wait until killed processes are gone. One that hangs in a driver or storage may never be."""

_PR_SET_PDEATHSIG = 1
_SLACK_SECONDS = 60.0
"""The slack between a process's start and its first message. Wall clocks cannot order two closer moments."""


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process."""
    try:
        return int(_stat(pid)[19])  # field 22
    except OSError:
        return None


@cache
def boot_id() -> str:
    """What tells this boot of the machine from every other; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot. start: clock ticks since boot."""

    pid: int
    start: int
    boot_id: str

    @classmethod
    def from_pid(cls, pid: int) -> Self | None:
        """The process that has this pid now; None where there is none."""
        start = process_start(pid)
        return None if start is None else cls(pid, start, boot_id())

    @classmethod
    def started_before(cls, pid: int, at: float, *, clock: Callable[[], float] = time.time) -> Self | None:
        """The process that has this pid, if it started before ``at`` (unix seconds); None: it is gone.

        For a process that stated its pid at ``at``. After this call its start and its boot identify it,
        whatever the clocks do.
        """
        process = cls.from_pid(pid)
        if process is None:
            return None
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = now - process.start / os.sysconf("SC_CLK_TCK")
        # A process that began well after ``at`` has inherited the number.
        return process if clock() - age <= at + _SLACK_SECONDS else None

    def lives(self) -> bool:
        """Whether it still runs. A zombie does not: it waits only to be counted."""
        return (
            self.boot_id == boot_id()
            and process_start(self.pid) == self.start
            and _state(self.pid) not in "ZX"
        )

    def has_open(self, path: Path) -> bool:
        """Whether it has this file open; False where it is gone, or is another user's."""
        try:
            file_stat = path.stat()
            descriptors = list(Path(f"/proc/{self.pid}/fd").iterdir())
        except OSError:
            return False
        return any(_is_file(descriptor, file_stat) for descriptor in descriptors) and self.lives()

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this process, never to a later one with its pid. False where it is gone.

        Raises PermissionError where it is another user's.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # With the descriptor open, the pid cannot pass to another process unnoticed.
            if not self.lives():
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def has_ended(self, seconds: float) -> bool:
        """Wait up to so many seconds for its end; whether it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.lives():
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        finally:
            os.close(descriptor)


def end_processes(
    send: Callable[[signal.Signals], object],
    have_ended: Callable[[float], bool],
    *,
    grace: float | None,
    kill_seconds: float = KILL_SECONDS,
) -> bool:
    """End processes: SIGTERM, wait the grace, SIGKILL. Returns False if even that has not ended them.

    For processes that are no runs, and for all processes of a machine that stops. send: sends a signal to all
    of them. have_ended: waits up to so many seconds for their end, and says whether they have ended. grace:
    seconds; None kills at once. kill_seconds: to wait after SIGKILL.
    """
    if grace is not None:
        send(signal.SIGTERM)
        if have_ended(grace):
            return True
    send(signal.SIGKILL)
    return have_ended(kill_seconds)


def child_has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait up to so many seconds for the end of a child; whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    # The parent may have ended before the call.
    if os.getppid() != parent:
        os._exit(1)


def how_it_ended(code: int) -> str:
    """A process's end, as the second half of a sentence. code: as Popen gives it, a signal's negative."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (where no person did that, the machine ran out of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def open_descriptors(path: Path) -> Iterator[tuple[int, str]]:
    """Pid and number of each descriptor of this file; those of other users' processes are not seen."""
    try:
        file_stat = path.stat()
    except FileNotFoundError:
        return
    for pid, _ in _processes():
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        yield from ((pid, descriptor.name) for descriptor in descriptors if _is_file(descriptor, file_stat))


def _is_file(descriptor: Path, file_stat: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), file_stat)
    except OSError:
        return False  # closed since it was listed, or no file


def is_stopped(pid: int) -> bool:
    """Whether the system does not let a process run: it was stopped by a signal, or waits for a disk."""
    return _state(pid) in "TtD"


def is_halted(pid: int) -> bool:
    """Whether a signal, or a debugger, has stopped a process: it takes no other signal than SIGKILL."""
    return _state(pid) in "Tt"


def _state(pid: int) -> str:
    """The letter of a process's state; "X" (dead) where there is no such process."""
    try:
        return _stat(pid)[0]
    except (OSError, IndexError):
        return "X"


def processes_of_group(group: int) -> list[tuple[int, int]]:
    """Pid and session of each process of a group, zombies left out."""
    return [
        (pid, int(session))
        for pid, (state, _, its_group, session, *_) in _processes()
        if int(its_group) == group and state not in "ZX"
    ]


def children(parent: int | None = None) -> list[int]:
    """The pids of a process's children, zombies too. parent: its pid, this process's own unless given."""
    parent_pid = os.getpid() if parent is None else parent
    return [pid for pid, (_, its_parent, *_) in _processes() if int(its_parent) == parent_pid]


def _processes() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries: no Path is made of each
        if name.isdigit():
            # A process may end between the listing and the reading.
            with contextlib.suppress(OSError):
                yield int(name), _stat(int(name))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on. Raises OSError where there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # The name may hold blanks.


@contextlib.contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Let this process allocate ``more`` bytes beyond what it has: an excess fails here alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = [
        pages * mmap.PAGESIZE + more,
        *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY),
    ]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

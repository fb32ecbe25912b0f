"""Processes that never outlive the one that started them: one process group, ended as a whole.

All processes of a group are ended, grandchildren too: SIGTERM, a grace period, SIGKILL. A watchdog in the
group holds the reading end of a pipe. When the starter is gone, however it ended, the pipe closes and the
watchdog ends the group. Linux only (``/proc``, pidfd).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_durable.files.processes import child_has_ended, end_processes, how_it_ended, processes_of_group

_LOOK_SECONDS = 0.1
_LOG_LOOK_SECONDS = 60.0
_LAST_LINES = 15

LONGEST_LOG = 64 << 20
"""Bytes from which a log is rotated while its process runs; the one before is kept."""


_log = logging.getLogger(__name__)


class ProcessEndedError(RuntimeError):
    """A process of the group ended although it was needed; the message names it, its code and its log."""


@dataclass(frozen=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    log: Path


class ProcessGroup:
    """Named child processes in one process group (context manager; its end is theirs).

    grace_seconds: between SIGTERM and SIGKILL, so that a run commits what it has finished.
    keep_open: a file descriptor that the watchdog and each named process keep open: a lock on it lasts until
    the last of them is gone, even when this process and the watchdog are killed. longest_log: bytes.
    """

    def __init__(
        self, *, grace_seconds: float, keep_open: int | None = None, longest_log: int = LONGEST_LOG
    ) -> None:
        self._grace_seconds = grace_seconds
        self._longest_log = longest_log
        self._kept_open = () if keep_open is None else (keep_open,)
        self._children: list[_Child] = []

    def __enter__(self) -> ProcessGroup:
        # Where SIGINT is ignored (a background job of a script), children would inherit that, and Dagster
        # gives SIGTERM the same handling as SIGINT: they could not be ended.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._grace_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            pass_fds=self._kept_open,
        )
        assert self._watchdog.stdout is not None
        # It is deaf to SIGTERM from here on; a group whose watchdog died first could outlive us.
        self._watchdog.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def id(self) -> int:
        """The process group's id."""
        return self._watchdog.pid

    def pid_of(self, name: str) -> int:
        """The process that was started under this name."""
        return next(child.process.pid for child in self._children if child.name == name)

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a process of the group in ``directory``; its output goes to ``log``, after what is there.

        pass_fds: file descriptors that it inherits under the same numbers.
        """
        # Appending: whatever the children hold open, they write at the end of what is left of it.
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=directory,
                process_group=self.id,
                pass_fds=[*pass_fds, *self._kept_open],
            )
        self._children.append(_Child(name, process, os.pidfd_open(process.pid), log))

    def watch(self, seconds: float) -> None:
        """Let up to ``seconds`` pass. Raises ProcessEndedError as soon as a process of the group ends.

        Logs that grew too long are rotated meanwhile.
        """
        deadline = time.monotonic() + seconds
        while True:
            for child in self._children:
                rotate_log(child.log, self._longest_log)
            seconds_left = max(0.0, deadline - time.monotonic())
            pidfds = [child.pidfd for child in self._children]
            ended, _, _ = select.select(pidfds, [], [], min(seconds_left, _LOG_LOOK_SECONDS))
            for child in self._children:
                if child.pidfd in ended:
                    code = child.process.wait()
                    raise ProcessEndedError(
                        f"{child.name} {how_it_ended(code)}. Its last words:\n"
                        f"{last_lines(child.log)}\nAll of them: {child.log}"
                    )
            if seconds_left <= _LOG_LOOK_SECONDS:
                return

    def stop(self) -> None:
        """End every process of the group and wait until it is empty. A Ctrl-C meanwhile kills at once."""
        ended = False
        try:
            ended = _end_group(self.id, self._grace_seconds, self._reap)
        except KeyboardInterrupt:
            ended = _end_group(self.id, None, self._reap)
        finally:
            if not ended:
                _log.warning("Processes of group %d do not end, though they were killed.", self.id)
            for child in self._children:
                child_has_ended(child.process, _LOOK_SECONDS)
                os.close(child.pidfd)
            self._children.clear()
            for end in (self._watchdog.stdin, self._watchdog.stdout):
                if end is not None:
                    end.close()
            self._watchdog.wait()

    def _reap(self) -> None:
        for child in self._children:
            child.process.poll()


def rotate_log(log: Path, longest: int) -> None:
    """Keep a log that is longer than ``longest`` bytes as ``NAME.log.1``, and empty it.

    It is copied and truncated, because processes hold it open; what they write in the instant between the two
    is lost. Where the copy fails, the log stays as it is and the next call tries again.
    """
    older = log.with_suffix(".log.1")
    try:
        if log.stat().st_size > longest:
            shutil.copyfile(log, older)
            os.truncate(log, 0)
    except FileNotFoundError:
        return
    except OSError:
        # A full disk: half a copy would only fill it.
        with contextlib.suppress(OSError):
            older.unlink()


def last_lines(file: Path) -> str:
    """The last lines of a log, for an error's message."""
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(file.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    return "(no log)"


def _end_group(group: int, grace_seconds: float | None, reap: Callable[[], None] = lambda: None) -> bool:
    """End all processes of a group but its leader (the watchdog). False if they outlive SIGKILL."""

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)

    def have_ended(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(pid != group for pid, _ in processes_of_group(group)):
            if time.monotonic() >= deadline:
                return False
            reap()
            # They are not all our children, so there is no event of their end to wait for.
            time.sleep(_LOOK_SECONDS)
        return True

    return end_processes(send, have_ended, grace=grace_seconds)


def main(arguments: Sequence[str]) -> None:
    """The watchdog: wait until the starter's end of the pipe closes, then end this process's group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.write("watching\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    _end_group(os.getpgrp(), float(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal end this process as Ctrl-C does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Runs one command and leaves nothing of it behind: the program between a keeper and its server.

Usage: guard.py GRACE_SECONDS COMMAND..., with a pipe as standard input. It says on standard output, in lines
of JSON, ``pid`` and later ``exit``, or ``error``. When the pipe closes (its keeper ended, however) or the
command ends, so do all processes that the command has started, those too that left its process group: they
become this process's children when their parents go. Standard library only, without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.05
_REAPING_SECONDS = 30.0


def become_subreaper() -> None:
    """From now on orphans among this process's descendants become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill and reap every descendant of this process, which must be a subreaper."""
    while children := _children():
        for pid in children:
            # None is reaped but here, so no number has passed to another process.
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> dict[int, int]:
    """The children of this process, each with its process group."""
    found = {}
    own = str(os.getpid())
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes longer to import than the rest together
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:  # noqa: PTH123
                _, parent, group = stat.read().rpartition(")")[2].split()[:3]
                if parent == own:
                    found[int(name)] = int(group)
    return found


def _run(command: list[str], grace_seconds: float) -> None:
    # Handlers, not SIG_IGN: a command inherits what is ignored, and could then not be ended. The group's
    # SIGTERM is for the others.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    become_subreaper()
    libc, own = ctypes.CDLL(None), os.getpid()

    def die_with_the_guard() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)

    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=die_with_the_guard,  # safe: one thread
        )
    except OSError as error:
        _say({"error": f"{command[0]}: {error.strerror}"})
        return
    _say({"pid": server.pid})
    ended = os.pidfd_open(server.pid)
    while True:
        readable, _, _ = select.select([sys.stdin, ended], [], [], _REAPING_SECONDS)
        if ended in readable:
            code = server.wait()
            end_descendants()
            _say({"exit": code})
            return
        if readable:
            break
        _reap(besides=server.pid)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    # What has left the group was not asked to end, and is not waited for once the command itself has ended.
    while (server.poll() is None or own in _children().values()) and time.monotonic() < deadline:
        _reap(besides=server.pid)
        time.sleep(_LOOK_SECONDS)
    end_descendants()


def _reap(besides: int) -> None:
    """Collect the orphans that have ended."""
    for pid in _children():
        if pid != besides:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _say(what: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the keeper may be gone
        os.write(sys.stdout.fileno(), json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    _run(sys.argv[2:], float(sys.argv[1]))
    os._exit(0)  # nothing of Popen's is left to do, and it would warn of a process that was reaped here

"""Starting a life in a forked child, ending it, and hearing what it said before it ended.

The campaign's process has everything imported and forks it (some hundred lives a second where a fresh
interpreter takes a third of a second each). The product itself never forks.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from faults.file_operations import Before, FileOperations, Operation, die, strike_at
from faults.partition_life import Say, live

HANGS_AFTER_SECONDS = 60.0
_IN_THE_PIPE_SECONDS = 0.01
"""For reading what a child that stands still has said."""

# A child would otherwise spend a third of its life setting up a pool of its own.
pa.set_memory_pool(pa.system_memory_pool())


@dataclass
class Life:
    """What one life said, in its order, and how it ended."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    reported_at: list[int] = field(default_factory=list)
    """How many file operations had been done when each of these was said; of a recorded life."""
    done: list[Operation] = field(default_factory=list)
    """The file operations of a recorded life."""
    killed: bool = False
    error: str | None = None
    message: str = ""
    is_ours: bool = False
    """Whether the error is one of the product's own."""
    operations: int = 0
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it got to its end."""
        return any("finished" in report for report in self.reports)

    def cut_at(self, done: int) -> Life:
        """What was said by a recorded life that ended after so many file operations."""
        heard = [report for report, at in zip(self.reports, self.reported_at, strict=True) if at <= done]
        return Life(heard, done=self.done[:done], killed=True)


def live_until_operation(
    home: Path,
    at: int,
    strike: Callable[[], None] = die,
    *,
    torn: bool = False,
    recorded: bool = False,
    **more: Any,
) -> Life:
    """A life that is struck before its ``at``-th file operation (0: never). recorded: with its operations."""
    return _fork(home, _Orders(at, strike, torn, recorded, more), None, die)


def live_until_time(home: Path, seconds: float, strike: Callable[[], None] | None = None) -> Life:
    """A life that is killed from outside after so many seconds, or has ``strike`` done to it instead."""
    return _fork(home, _Orders(), seconds, strike)


def live_to_the_end(home: Path, **more: Any) -> Life:
    """A life that nothing happens to."""
    return live_until_operation(home, 0, **more)


def act_in_child(home: Path, act: Callable[[Say], None], before: Before | None = None) -> Life:
    """Have a child do ``act``, which is handed what it says things with. before: sees its file operations."""
    return _fork(home, _Orders(act=act, before=before), None, die)


def act_until_time(
    home: Path, act: Callable[[Say], None], seconds: float, strike: Callable[[], None] | None = None
) -> Life:
    """As ``act_in_child``, killed from outside after so many seconds, or with ``strike`` done instead."""
    return _fork(home, _Orders(act=act), seconds, strike)


class StoppedLife:
    """A child that is stopped (SIGSTOP) before its ``at``-th file operation, until it is woken.

    Without ``act`` it lives the life of the one partition. before: stops it instead. A context manager, which
    ends it for sure.
    """

    def __init__(
        self,
        home: Path,
        at: int,
        act: Callable[[Say], None] | None = None,
        *,
        before: Before | None = None,
    ) -> None:
        stop = _Orders(at, stop_here, act=act, before=before)
        self._child, self._reading = _begin(home, stop)
        self._status: int | None = None
        self._heard = bytearray()

    def __enter__(self) -> StoppedLife:
        # What it says before fits into the pipe.
        _, status = os.waitpid(self._child, os.WUNTRACED)
        self.is_stopped = os.WIFSTOPPED(status)
        if not self.is_stopped:
            self._status = status
        _ended(self._reading, _IN_THE_PIPE_SECONDS if self.is_stopped else HANGS_AFTER_SECONDS, self._heard)
        return self

    def wake(self) -> Life:
        """Let it go on; all that it said, before and after."""
        if self.is_stopped:
            os.kill(self._child, signal.SIGCONT)
        hangs = not _ended(self._reading, HANGS_AFTER_SECONDS, self._heard)
        self._end()
        assert self._status is not None
        life = _life_of(self._heard, self._status)
        if hangs:
            life.error = f"it hung for {HANGS_AFTER_SECONDS:.0f} s"
        return life

    def life_so_far(self) -> Life:
        """What it has said by now, as of a life that was killed."""
        return _life_of(self._heard, signal.SIGKILL)

    def _end(self) -> None:
        if self._status is None:
            if not _ended(self._reading, _IN_THE_PIPE_SECONDS, self._heard):
                os.kill(self._child, signal.SIGKILL)
            self._status = os.waitpid(self._child, 0)[1]

    def __exit__(self, *error: object) -> None:
        self._end()
        os.close(self._reading)


def stop_here() -> None:
    """Stop this process until it is woken."""
    os.kill(os.getpid(), signal.SIGSTOP)


def random_end(chance: random.Random, operations: int) -> dict[str, Any]:
    """Where a life ends: early ends, in recovery, are as likely as those in the work that follows."""
    return {"at": chance.randint(1, chance.choice((25, operations))), "torn": chance.random() < 0.3}


@dataclass(frozen=True)
class _Orders:
    """What is to happen to a life, and what it is called with."""

    at: int = 0
    strike: Callable[[], None] = die
    torn: bool = False
    recorded: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    act: Callable[[Say], None] | None = None
    """What is done instead of a life of the one partition."""
    before: Before | None = None
    """What is done instead of the strike."""


def _begin(home: Path, orders: _Orders) -> tuple[int, int]:
    """Fork a child that does as ordered; gives its number, and where it is heard."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _live_and_exit(home, writing, orders)
    os.close(writing)
    return child, reading


def _fork(home: Path, orders: _Orders, seconds: float | None, strike: Callable[[], None] | None) -> Life:
    started = time.monotonic()
    child, reading = _begin(home, orders)
    heard, hangs = bytearray(), False
    try:
        if seconds is not None and not _ended(reading, seconds, heard):
            if strike is None:
                os.kill(child, signal.SIGKILL)
            else:
                strike()
        if not _ended(reading, HANGS_AFTER_SECONDS, heard):
            os.kill(child, signal.SIGKILL)
            hangs = True
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    life = _life_of(heard, status)
    life.seconds = time.monotonic() - started
    if hangs:
        life.error = f"it hung for {HANGS_AFTER_SECONDS:.0f} s"
    return life


def _life_of(heard: bytearray, status: int) -> Life:
    """What a child said, and how it ended."""
    life = Life(killed=os.WIFSIGNALED(status))
    for line in heard.decode().splitlines():
        report = json.loads(line)
        if "did" in report:
            name, paths, inode, data = report["did"]
            life.done.append(Operation(name, tuple(paths), inode, bytes.fromhex(data)))
            continue
        life.operations = report.pop("operations", life.operations)
        life.error, life.message = report.pop("error", life.error), report.pop("message", life.message)
        life.is_ours = report.pop("is_ours", life.is_ours)
        if report:
            life.reports.append(report)
            life.reported_at.append(len(life.done))
    if not life.killed and life.error is None and os.WEXITSTATUS(status):
        life.error = f"it ended with {os.WEXITSTATUS(status)} and said nothing"
    return life


def _live_and_exit(home: Path, writing: int, orders: _Orders) -> None:
    """In the child: never returns."""
    write = os.write
    # It lives for a moment; a collection would look at all that the parent has, and copy each page of it.
    gc.disable()

    def say(**report: Any) -> None:
        write(writing, (json.dumps(report) + "\n").encode())

    def tell(done: Operation) -> None:
        say(did=[done.name, done.paths, done.inode, done.data.hex()])

    code = 1
    try:
        before = orders.before or strike_at(orders.at, orders.strike, torn=orders.torn)
        operations = FileOperations(home, before, tell if orders.recorded else None)
        operations.install()
        if orders.act is None:
            live(home, say, **orders.more)
        else:
            orders.act(say)
        say(operations=operations.count)
        code = 0
    except BaseException as error:  # whatever it is, the campaign judges it by its name
        ours = type(error).__module__.startswith("vlm_")
        say(error=type(error).__name__, message=str(error), errno=getattr(error, "errno", None), is_ours=ours)
    finally:
        os._exit(code)


def _ended(reading: int, seconds: float, heard: bytearray) -> bool:
    """Hear a child until it ends (True) or the time is up (False)."""
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        if select.select([reading], [], [], remaining)[0]:
            data = os.read(reading, 1 << 16)
            if not data:
                return True
            heard += data
    return False

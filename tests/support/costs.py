"""What the tests of each file cost in CPU seconds, which a busy machine hardly makes longer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SHOWN = 25
TICKS = os.sysconf("SC_CLK_TCK")


class Costs:
    """A plugin that names the files with the largest CPU time, of this process and those below it.

    What a server costs that several files share is told of each as it falls due. Left out is a process whose
    parent ended before it.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _cpu_seconds()
        answer = yield
        # Less than before: a process ended that something else has to wait for.
        self.seconds[item.nodeid.partition("::")[0]] += max(0.0, _cpu_seconds() - before)
        return answer

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds by file")
        for path, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} {path}")
        terminalreporter.write_line(f"{self.seconds.total():7.1f} all files")


def _cpu_seconds() -> float:
    """Of this process, of its children, and of all that have ended below them."""
    return sum(os.times()[:4]) + sum(map(_seconds_of, _children(os.getpid())))


def _seconds_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS + sum(map(_seconds_of, _children(pid)))
    except OSError:  # it has ended
        return 0.0


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for thread in Path(f"/proc/{pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except OSError:  # it has ended
        return []

"""What the tests of each file cost in CPU seconds, which a busy machine does not make longer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

SHOWN = 25


class Costs:
    """A plugin that names the files with the largest CPU time, of this process and its ended children."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _cpu_seconds()
        answer = yield
        self.seconds[item.nodeid.partition("::")[0]] += _cpu_seconds() - before
        return answer

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds by file")
        for path, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} {path}")
        terminalreporter.write_line(f"{_cpu_seconds():7.1f} this process and its ended children")


def _cpu_seconds() -> float:
    return sum(os.times()[:4])

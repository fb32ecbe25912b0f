"""What tests need from outside Python: there, or named at the end of the run, or in CI an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

_missing: set[str] = set()


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """Path of a program that ``make test-deps`` installs. Without it a test is left out, but not in CI."""

    def find(name: str) -> Path:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
        _missing.add(name)
        wanted = f"{name} is missing: `make test-deps` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(wanted)
        pytest.skip(wanted)

    return find


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was missing."""
    if _missing:
        terminalreporter.write_line(
            f"Not all tests ran: {', '.join(sorted(_missing))} missing. As root: `make test-deps`.",
            yellow=True,
        )

"""Ranks that do not end though they are killed: the training stops and names them, and waits no longer."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from vlm_training.rank_processes import RankProcesses, RanksDiedError


class Hung:
    """A process that hangs in the driver: it takes every signal, and lives on."""

    pid = 4711
    returncode = None

    def __init__(self) -> None:
        self.signals: list[str] = []

    def send_signal(self, number: Any) -> None:
        self.signals.append(number.name)

    def poll(self) -> None:
        """It lives."""

    def wait(self, seconds: float) -> None:
        raise subprocess.TimeoutExpired("rank", seconds)


def test_ranks_that_outlive_their_kill_are_named(tmp_path: Path) -> None:
    """Waited for, the run would hang too, and be ended as stuck without a word of why."""
    hung: Any = Hung()
    lock: Any = None
    ranks = RankProcesses(tmp_path, tmp_path, tmp_path, tmp_path, ["0"], lock, grace=0.0)
    ranks._running = [hung]
    with pytest.raises(RanksDiedError, match="4711"):
        ranks._codes()
    assert hung.signals == ["SIGKILL"]
    ranks._end()
    assert hung.signals == ["SIGKILL", "SIGTERM", "SIGKILL"]

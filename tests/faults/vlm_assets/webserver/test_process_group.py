"""No process of a group outlives its starter, however the starter ends."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes import has_ended
from tests.support.waiting import wait_until

STARTER = Path(__file__).with_name("group_starter.py")


def _start(kind: str, folder: Path, grace: float) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    command = [sys.executable, STARTER, kind, folder, str(grace)]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    said = json.loads(starter.stdout.readline())
    processes = [psutil.Process(pid) for pid in said["members"]]
    assert len(processes) == 3
    assert not any(map(has_ended, processes))
    return starter, processes


def _wait_for_ends(processes: list[psutil.Process]) -> None:
    wait_until(lambda: all(map(has_ended, processes)), "the end of every process", seconds=9.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_starter_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """A starter that is killed takes child, grandchild and watchdog with it."""
    starter, processes = _start("polite", tmp_path, 10.0)
    starter.send_signal(number)
    assert starter.wait(10) == -number
    _wait_for_ends(processes)


def test_deaf_process_is_killed_after_the_grace(tmp_path: Path) -> None:
    """A process that does not hear SIGTERM is killed once the grace is over, the starter being dead."""
    starter, processes = _start("deaf", tmp_path, 1.0)
    starter.kill()
    assert starter.wait(10) == -signal.SIGKILL
    _wait_for_ends(processes)


def test_interrupted_starter_ends_the_group_itself(tmp_path: Path) -> None:
    """After Ctrl-C the starter returns only when the whole group is gone."""
    starter, processes = _start("polite", tmp_path, 10.0)
    starter.send_signal(signal.SIGINT)
    assert starter.wait(15) != 0
    assert all(map(has_ended, processes))

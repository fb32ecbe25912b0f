"""The GPU resource inside real Dagster runs, each in a process of its own as the run launcher starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

Run = subprocess.Popen[str]
Start = Callable[[float], Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def start(wait_seconds: float) -> Run:
        script = Path(__file__).with_name("two_steps.py")
        command = [sys.executable, script, tmp_path / "leases", str(wait_seconds)]
        runs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        run.communicate()


def answer(stream: IO[str] | None) -> dict[str, Any]:
    assert stream is not None
    return dict(json.loads(stream.readline()))


def finish(run: Run) -> dict[str, Any]:
    """Let a run's first step go on, and what the run said at its end."""
    said, _ = run.communicate("go on\n")
    return dict(json.loads(said.splitlines()[-1]))


def test_two_runs_never_share_a_device(start: Start, tmp_path: Path) -> None:
    """While one run holds the only device another says whose it is, ends by name, and later gets it."""
    first = start(0)
    mine = answer(first.stdout)
    assert mine["device"] == "cpu-0"
    refused = finish(start(1.2))
    assert not refused["success"]
    (cause,) = refused["causes"]
    assert "NoDeviceFreeError" in cause
    assert f"(partition 000000000-000000999, described) of {tmp_path}, pid {first.pid} " in cause
    (notice,) = [message for message in refused["log"] if "No device is free" in message]
    assert f"pid {first.pid} " in notice

    done = finish(first)
    assert done["success"]
    assert finish(start(0))["success"]


def test_the_steps_of_a_run_share_one_pinned_device(start: Start) -> None:
    """The second step reuses the first one's device, pinned, with torch not imported before."""
    run = start(0)
    answer(run.stdout)
    steps = finish(run)["seen"]
    assert [(step["device"], step["visible"], step["torch_before"]) for step in steps] == [
        ("cpu-0", "", False),
        ("cpu-0", "", False),
    ]
    assert [len(step["holders"]) for step in steps] == [1, 1]
    assert ", described)" in steps[0]["holders"][0]
    assert ", embedded)" in steps[1]["holders"][0]

"""Runs that are forked from a process with torch in it are as separate, and end as told, as spawned ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# What Dagster's code server does with them, told line by line; what it is to do comes the same way.
STARTER = """
import json, os, signal, sys, threading
from sensors.dagster_internals.forked_runs import RunProcesses


def run(told, go_on):
    import resources.gpu.pinning
    from resources.gpu.devices import Device

    found = sorted({name.partition(".")[0] for name in sys.modules})
    was = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resources.gpu.pinning.pin(Device("cpu-0", "cpu", "slot", None, "", threads=1))
    torch = sys.modules.get("torch")
    told.put({
        "pid": os.getpid(), "server": os.getppid(), "modules": found, "sigterm as ever": was,
        "threads": torch and torch.get_num_threads(), "cuda": torch and torch.cuda.is_initialized(),
    })
    signal.signal(signal.SIGTERM, lambda *_: None)
    while not go_on.wait(0.1):
        pass
    sys.exit(7)


def start(runs):
    told, go_on = runs.Queue(), runs.Event()
    process = runs.Process(target=run, args=[told, go_on])
    process.start()
    print(json.dumps(told.get()), flush=True)
    return process, go_on


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)
    runs = RunProcesses()
    for line in sys.stdin:
        if line == "warm up\\n":
            runs.warm_up()
            print("{}", flush=True)
        elif line == "start\\n":
            process, go_on = start(runs)
        else:
            if line == "go on\\n":
                go_on.set()
            process.join()
            print(json.dumps(process.exitcode), flush=True)
"""

pytestmark = pytest.mark.timeout(300)


class Starter:
    """A process that starts runs; closed, it has ended."""

    def __init__(self, script: Path) -> None:
        script.write_text(STARTER)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
            env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        )

    def do(self, what: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    made = Starter(tmp_path / "starter.py")
    yield made
    made.close()


def test_a_forked_run_is_its_own_and_its_end_is_told(starter: Starter) -> None:
    """Libraries in it, nothing of ours, no CUDA; threads bounded; how a drain and a kill ended is told."""
    spawned = starter.do("start")
    assert spawned["server"] == starter.process.pid, "nothing was forked before it has shown that it works"
    assert "torch" not in spawned["modules"]
    assert starter.do("go on") == 7
    starter.do("warm up")

    run = starter.do("start")
    server = psutil.Process(run["server"])
    assert "forkserver" in " ".join(server.cmdline())
    assert {"torch", "transformers", "xgrammar", "pyarrow", "dagster"} <= set(run["modules"])
    assert "vlm_assets" not in run["modules"], "a run reads our modules as they are when it starts"
    assert run["threads"] == 1
    assert run["cuda"] is False
    assert run["sigterm as ever"]
    # As when the whole group is ended: the run drains, and nobody takes it for dead meanwhile.
    os.killpg(starter.process.pid, signal.SIGTERM)
    assert server.is_running()
    assert starter.do("go on") == 7

    run = starter.do("start")
    assert run["server"] == server.pid
    os.kill(run["pid"], signal.SIGKILL)
    assert starter.do("end") == -signal.SIGKILL

    server.kill()
    psutil.wait_procs([server], timeout=30)
    run = starter.do("start")
    assert run["server"] != server.pid, "started anew with the next run"
    assert "torch" in run["modules"]
    assert starter.do("go on") == 7
    server = psutil.Process(run["server"])
    starter.close()
    assert psutil.wait_procs([server], timeout=30)[1] == [], "it ends with whoever started it"

"""How far plan and rehearsal are off: real runs of the example in five sizes, through the product's commands.

``python -m benchmarks.plan_accuracy`` takes 15 minutes on two cores that nothing else uses. What the first
plan measures is used by the others, as in a home that grows. A run takes from the launch of its first
partition to its last publication; ``command`` is the whole of `vlm-assets run`, with the start of Dagster.

A shared machine can be a fifth slower from one minute to the next, which no plan knows. A run of a small
partition is mostly the start of its process, so every five seconds a small process is started and its seconds
of a core are noted: ``slower`` is what it took in the run against while the plan measured. The errors are
given as they are, and in brackets at the same pace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Self

PROGRAM = Path(sys.executable).with_name("vlm-assets")
SIZES = (60, 120, 240, 480, 800)
DAY = 86_400.0
TARGET = 0.05
LOOK_SECONDS = 5.0
PROBE = "import duckdb, pyarrow.parquet"


def main() -> None:
    """Print predicted, rehearsed and taken of each size; the exit code is 1 where one is off by more."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--range-size", type=int, default=20)
    arguments = parser.parse_args()
    print(
        "properties  partitions  planned s  rehearsed s  taken s  slower  plan/taken       rehearsal/taken"
        "  command s"
    )
    off = []
    with tempfile.TemporaryDirectory() as folder, Pace() as pace:
        measured: Path | None = None
        base = 0.0
        for size in arguments.sizes:
            home = Path(folder) / str(size)
            run(
                "demo", home, "--no-run", "--properties", str(size), "--range-size", str(arguments.range_size)
            )
            measured_folder = home / ".state" / "measured"
            if measured is not None:
                shutil.copytree(measured, measured_folder)
            began = time.monotonic()
            planned = run("plan", home, "--json")
            base = base or pace.since(began)
            measured, before = measured_folder, content(measured_folder)
            rehearsed = rehearse(home)["days_simulated"] * DAY
            began = time.monotonic()
            run("run", home)
            command, seen = time.monotonic() - began, pace.since(began)
            compared = run("plan", home, "--json")["compared"]
            predicted, taken = compared["predicted"], compared["actual"]
            slower = seen / base
            errors = [forecast / taken - 1.0 for forecast in (predicted, rehearsed)]
            paced = [forecast * slower / taken - 1.0 for forecast in (predicted, rehearsed)]
            off += paced
            print(
                f"{size:10,}  {planned['partitions']:10,}  {predicted:9.1f}  {rehearsed:11.1f}  {taken:7.1f}"
                f"  {slower:6.2f}  {errors[0]:+.1%} ({paced[0]:+.1%})  {errors[1]:+.1%} ({paced[1]:+.1%})"
                f"  {command:9.1f}",
                flush=True,
            )
            # The next plan stands on this run where it was long enough to be learned from.
            base = seen if content(measured_folder) != before else base
    sys.exit(any(abs(error) > TARGET for error in off))


class Pace:
    """Starts a small process again and again: the seconds of a core that it takes are the machine's pace."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def since(self, began: float) -> float:
        """The mean since then, by the monotonic clock."""
        return fmean(seconds for at, seconds in self._seen if at >= began)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            process = subprocess.Popen([sys.executable, "-c", PROBE])
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self._seen.append((time.monotonic(), usage.ru_utime + usage.ru_stime))


def content(folder: Path) -> list[bytes]:
    """What is measured in a home."""
    return [path.read_bytes() for path in sorted(folder.glob("*.json"))]


def run(command: str, home: Path, *options: str) -> Any:
    """Run a command of the product on a home; what it says as JSON, where it is asked for."""
    return start([str(PROGRAM), command], home, *options)


def rehearse(home: Path) -> Any:
    """What a rehearsal without faults says as JSON."""
    return start([sys.executable, "-m", "faults.rehearsal"], home, "--faults", "0", "--json")


def start(program: list[str], home: Path, *options: str) -> Any:
    """Run a program on a home; what it says as JSON, where it is asked for."""
    cores = len(os.sched_getaffinity(0))
    done = subprocess.run(
        [*program, *options, "--home", home],
        env={"VLM_ASSETS_DEVICES": f"cpu:{min(cores, 4)}", **os.environ},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout) if "--json" in options else None


if __name__ == "__main__":
    main()

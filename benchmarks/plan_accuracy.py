"""How far plan and rehearsal are off: real runs of the example in five sizes, through the product's commands.

``python -m benchmarks.plan_accuracy`` takes 15 minutes on two cores that nothing else uses. What the first
plan measures is used by the others, as in a home that grows. A run takes from the launch of its first
partition to its last publication; ``command`` is the whole of `vlm-assets run`, with the start of Dagster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("vlm-assets")
SIZES = (60, 120, 240, 480, 800)
DAY = 86_400.0
TARGET = 0.05


def main() -> None:
    """Print predicted, rehearsed and taken of each size; the exit code is 1 where one is off by more."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--range-size", type=int, default=20)
    arguments = parser.parse_args()
    print("properties  partitions  planned s  rehearsed s  taken s  plan/taken  rehearsal/taken  command s")
    off = []
    with tempfile.TemporaryDirectory() as folder:
        measured: Path | None = None
        for size in arguments.sizes:
            home = Path(folder) / str(size)
            run("example", home, "--properties", str(size), "--range-size", str(arguments.range_size))
            if measured is not None:
                shutil.copytree(measured, home / ".state" / "measured")
            planned = run("plan", home, "--json")
            measured = home / ".state" / "measured"
            rehearsed = run("rehearse", home, "--faults", "0", "--json")["days_simulated"] * DAY
            began = time.monotonic()
            run("run", home)
            command = time.monotonic() - began
            compared = run("plan", home, "--json")["compared"]
            predicted, taken = compared["predicted"], compared["actual"]
            off += [predicted / taken - 1.0, rehearsed / taken - 1.0]
            print(
                f"{size:10,}  {planned['partitions']:10,}  {predicted:9.1f}  {rehearsed:11.1f}  {taken:7.1f}"
                f"  {off[-2]:+10.1%}  {off[-1]:+15.1%}  {command:9.1f}",
                flush=True,
            )
    sys.exit(any(abs(one) > TARGET for one in off))


def run(command: str, home: Path, *options: str) -> Any:
    """Run a command of the product on a home; what it says as JSON, where it is asked for."""
    cores = len(os.sched_getaffinity(0))
    done = subprocess.run(
        [PROGRAM, command, *options, "--home", home],
        env={"VLM_ASSETS_DEVICES": f"cpu:{min(cores, 4)}", **os.environ},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout) if "--json" in options else None


if __name__ == "__main__":
    main()

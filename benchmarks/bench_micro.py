"""The micro-benchmarks and the growth, one after the other: ``make bench ARGS='--micro'``.

What lives here: which there are, with which sizes, and the table of what each says. What does not: any of the
measurements; each is a program of its own that can be run alone with other sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

CHECKOUT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = CHECKOUT / "benchmarks" / "results" / "micro.json"


@dataclass(frozen=True)
class Micro:
    """A program of ``benchmarks``. quick: its arguments where little time is given; None: left out then."""

    module: str
    arguments: str = ""
    quick: str | None = ""


MICROS: Final = (
    Micro("fixed_cost", quick="--repeat 2"),
    Micro("journal", quick="--commits 10 --segments 300 --repeat 3"),
    Micro("durability_cost", quick="--properties 48 --rounds 4"),
    Micro("definitions_import", "--partitions 100", quick=None),
    Micro("definitions_import", "--partitions 2000", quick="--partitions 2000 --repeat 3"),
    Micro("dataset_growth", quick="--sizes 100 1000"),
    *(
        Micro(module, f"--partitions {count}", quick=f"--partitions {count}" if count <= 1000 else None)
        for module in ("sensor_ticks", "health_ticks")
        for count in (100, 1000, 10_000)
    ),
    Micro("growth", "--sizes 50 500 5000 --images 1", quick="--sizes 20 200 --images 1"),
)


def run_micro(*, quick: bool) -> bool:
    """Run all, print what each said, and whether every one came to its end."""
    table = Table(title="micro-benchmarks", show_lines=True)
    for name in ("benchmark", "said", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    results = []
    for micro in MICROS:
        arguments = micro.quick if quick else micro.arguments
        if arguments is None:
            continue
        command = f"python -m benchmarks.{micro.module} {arguments}".strip()
        sys.stdout.write(f"{command} ...\n")
        sys.stdout.flush()
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{micro.module}", *arguments.split()],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        if done.returncode:
            lines.append(f"FAILED with {done.returncode}: {done.stderr.strip()[-300:]}")
        results.append(
            {"command": command, "said": lines, "seconds": seconds, "failed": done.returncode != 0}
        )
        table.add_row(command, escape("\n".join(lines)), f"{seconds:.0f}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }
    RESULTS.write_text(json.dumps({**facts, "benchmarks": results}, indent=2, ensure_ascii=False) + "\n")
    Console(width=max(Console().width, 150)).print(table)
    sys.stdout.write(f"{RESULTS}\n")
    return not any(result["failed"] for result in results)

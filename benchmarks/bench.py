"""This project against the best plain loop and against what people would use instead: ``make bench``.

What lives here: the rounds, the figures that are made of them, and the command. What does not: the work
(bench_task.py), one run (bench_runs.py), the table (bench_report.py), who contends (contenders/).

This project runs with its default settings. All others run at batch sizes 8, 16, 32 and 64 once, and in all
further rounds at the size at which they were fastest. Each round runs every contender once, in a fresh
process, on the same properties, model and threads, beginning with another one each time. A ratio compares
two runs of one round, so that whatever else the machine does meets both alike. The floor is the faster, by
its median, of a plain loop with and without guided decoding. Steady state: from the end of the first batch
until every row is durable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.bench_micro import run_micro
from benchmarks.bench_report import print_table, say
from benchmarks.bench_runs import (
    CHECKOUT,
    CONTENDERS,
    FLOOR,
    Contender,
    ContenderFailedError,
    Run,
    become_subreaper,
    run_contender,
    versions_in,
)
from benchmarks.bench_task import Workload

WORK: Final = CHECKOUT / "benchmarks" / ".work"
RESULTS: Final = CHECKOUT / "benchmarks" / "results" / "latest.json"
PACKAGES: Final = (
    "torch",
    "transformers",
    "xgrammar",
    "pyarrow",
    "pillow",
    "numpy",
    "dagster",
    "ray",
    "daft",
)

Rounds = list[dict[str, Run]]


def main() -> None:
    """Run the rounds, or the micro-benchmarks, and leave the figures."""
    arguments = _arguments()
    if arguments.micro:
        sys.exit(0 if run_micro(quick=arguments.quick) else 1)
    contenders = [contender for contender in CONTENDERS if contender.name in arguments.only]
    become_subreaper()
    WORK.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        say(f"{arguments.properties} properties a run, {arguments.rounds} rounds; preparing ...")
        workload = Workload.prepare(
            WORK,
            Path(folder),
            properties=arguments.properties,
            threads=arguments.threads,
            seed=arguments.seed,
        )
        bench = Bench(workload, Path(folder), arguments.limit_seconds)
        bench.try_batches(contenders, arguments.batches)
        rounds = [
            bench.round(_rotated(contenders, number), name=f"round {number + 1} of {arguments.rounds}")
            for number in range(arguments.rounds)
        ]
    results = {
        **_facts(arguments, load_before),
        **summary(contenders, rounds, bench),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    print_table(results)
    say(f"Figures of every round: {arguments.output}")
    sys.exit(1 if bench.errors else 0)


@dataclass
class Bench:
    """Runs contenders on one workload.

    rates: properties a second of each contender at each batch size, tried once. errors: why a contender
    failed, which is left out of what follows.
    """

    workload: Workload
    folder: Path
    limit_seconds: float
    rates: dict[str, dict[int, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def try_batches(self, contenders: Sequence[Contender], batches: Sequence[int]) -> None:
        """Run each contender at each size once; this also warms up the machine's file cache."""
        for size in batches:
            say(f"\nbatches of {size}; load {os.getloadavg()[0]:.1f}")
            for contender in contenders:
                if contender.batches and (run := self._run(contender, size)) is not None:
                    self.rates.setdefault(contender.name, {})[size] = run.rate

    def best_batch(self, contender: Contender) -> int:
        """The size at which it was fastest; 0 where it has a size of its own."""
        rates = self.rates.get(contender.name, {})
        return max(rates, key=rates.__getitem__, default=0)

    def round(self, order: Sequence[Contender], *, name: str) -> dict[str, Run]:
        """Each contender once, at its best batch size."""
        say(f"\n{name}; load {os.getloadavg()[0]:.1f}")
        runs = {contender.name: self._run(contender, self.best_batch(contender)) for contender in order}
        return {name: run for name, run in runs.items() if run is not None}

    def _run(self, contender: Contender, batch: int) -> Run | None:
        if contender.name in self.errors:
            return None
        place = self.folder / "run"
        place.mkdir()
        task, environment = self.workload.run(place, batch=batch, guided=contender.guided)
        with contextlib.ExitStack() as end:
            end.callback(shutil.rmtree, place)
            try:
                run = run_contender(contender, task, environment, place, seconds=self.limit_seconds)
            except ContenderFailedError as error:
                self.errors[contender.name] = str(error)
                say(f"  {contender.title}: FAILED: {error}")
                return None
        at = f", batch {batch}" if batch else ""
        ahead = "" if run.model_cpu is None else f" ({run.model_cpu:.1f} ms a property for the model)"
        say(
            f"  {contender.title}{at}: {run.rate:.2f} properties/s, start-up {run.startup:.1f} s,"
            f" after the last row {run.ending:.1f} s, {run.cpu:.1f} s of CPU{ahead}, {run.rss:.0f} MiB"
        )
        return run


def summary(chosen: Sequence[Contender], rounds: Rounds, bench: Bench) -> dict[str, Any]:
    """The figures of each contender, and which form of the loop was the floor."""
    floor = floor_of(rounds)
    contenders: dict[str, Any] = {}
    for contender in chosen:
        runs = {
            number: runs_of_round[contender.name]
            for number, runs_of_round in enumerate(rounds)
            if contender.name in runs_of_round
        }
        if contender.name in bench.errors or not runs:
            contenders[contender.name] = {
                "title": contender.title,
                "error": bench.errors.get(contender.name, "no round was run"),
            }
            continue
        contenders[contender.name] = {
            "title": contender.title,
            "batch": bench.best_batch(contender) or None,
            "properties_per_second_by_batch": {
                size: round(rate, 2) for size, rate in bench.rates.get(contender.name, {}).items()
            },
            **_figures(runs, rounds, floor),
        }
        if contender.environment:
            contenders[contender.name]["environment"] = f"benchmarks/environments/{contender.environment}.txt"
        contenders[contender.name]["versions"] = versions_in(contender, PACKAGES)
    return {"floor": floor, "contenders": contenders}


def floor_of(rounds: Rounds) -> str | None:
    """The form of the loop with the higher median rate; None where neither ran in every round."""
    medians = {
        name: statistics.median(runs_of_round[name].rate for runs_of_round in rounds)
        for name in FLOOR
        if rounds and all(name in runs_of_round for runs_of_round in rounds)
    }
    return max(medians, key=medians.__getitem__) if medians else None


def _figures(runs: Mapping[int, Run], rounds: Rounds, floor: str | None) -> dict[str, Any]:
    """Medians under the names of the project's issue, and the least and the most of each as its spread."""
    columns: dict[str, list[float]] = {
        "properties_per_second": [run.rate for run in runs.values()],
        "startup_seconds": [run.startup for run in runs.values()],
        "peak_rss_mb": [run.rss for run in runs.values()],
        "peak_pss_mb": [run.pss for run in runs.values()],
        "seconds_after_the_last_row": [run.ending for run in runs.values()],
        "whole_seconds": [run.whole for run in runs.values()],
        "cpu_seconds": [run.cpu for run in runs.values()],
        "model_process_cpu_ms_per_property": [
            run.model_cpu for run in runs.values() if run.model_cpu is not None
        ],
    }
    against = [
        rounds[number]["ours"].rate / run.rate for number, run in runs.items() if "ours" in rounds[number]
    ]
    if against:
        columns["ours_to_this"] = against
    same: float | None = None
    if floor is not None:
        columns["ratio_to_floor"] = [
            run.rate / rounds[number][floor].rate for number, run in runs.items() if floor in rounds[number]
        ]
        number, run = next(iter(runs.items()))
        yardstick = rounds[number][floor].answers
        if run.answers.keys() == yardstick.keys():
            same = sum(run.answers[property_id] == yardstick[property_id] for property_id in yardstick) / len(
                yardstick
            )
        else:
            same = 0.0
    return {
        **{name: round(statistics.median(values), 4) for name, values in columns.items() if values},
        "spread": {
            name: [round(min(values), 4), round(max(values), 4)] for name, values in columns.items() if values
        },
        "rounds": {name: [round(value, 4) for value in values] for name, values in columns.items()},
        "same_answers_as_floor": same,
    }


def _rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    start = number % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def _facts(arguments: argparse.Namespace, load_before: float) -> dict[str, Any]:
    model_names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    commit = subprocess.run(
        ["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"make bench ARGS='{' '.join(sys.argv[1:])}'" if sys.argv[1:] else "make bench",
        "commit": commit.stdout.strip() or None,
        "seed": arguments.seed,
        "properties": arguments.properties,
        "rounds": arguments.rounds,
        "batches_tried": arguments.batches,
        "threads": arguments.threads,
        "machine": {
            "processor": model_names[0] if model_names else platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.platform(),
            "python": platform.python_version(),
            "nice": os.nice(0),
            "load_before_and_after": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        },
    }


def _arguments() -> argparse.Namespace:
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.split("\n")[0])
    parser.add_argument("--properties", type=int, help="a run (default 480; multiples of the batch)")
    parser.add_argument("--rounds", type=int, help="(default 5)")
    parser.add_argument("--quick", action="store_true", help="160 properties, 2 rounds: about 8 minutes")
    parser.add_argument("--only", help=f"some of {','.join(names)}; the floor is loader and unguided")
    parser.add_argument("--micro", action="store_true", help="the micro-benchmarks and the growth instead")
    parser.add_argument(
        "--batches",
        default="8,16,32,64",
        help="sizes at which the others are tried; this project runs as by default",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) // 2),
        help="of torch (default: half of the cores, as a CPU slot of this project has)",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--limit-seconds", type=float, default=600.0, help="a run that takes longer failed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.properties = arguments.properties or (160 if arguments.quick else 480)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    chosen = arguments.only.split(",") if arguments.only else names
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no contender {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    arguments.batches = [int(size) for size in arguments.batches.split(",")]
    if arguments.properties < 2 * max(arguments.batches):
        parser.error("the steady state needs two batches of properties at least")
    arguments.only = chosen
    return arguments


if __name__ == "__main__":
    main()

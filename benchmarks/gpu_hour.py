"""What half an hour on a lent GPU can tell, the most worth first: ``make gpu-hour``.

A command there may end after ten minutes, or at any moment. So each step is a process with its own limit, its
result is written when it ends, and the next call goes on at the first step without a result. What lives here:
the steps, their order and their results. What a step measures is in gpu.py and gpu_partitions.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_facts import gpu_readings, versions

ROOT: Final = Path(__file__).resolve().parents[1]
TRIES: Final = 2
"""A step that took the whole machine down with it twice is not begun a third time."""
LEAST_SECONDS: Final = 60
"""A step is begun with less time than its limit, for its figures count as they come, but not with less."""
LIMIT: Final = "ended at its limit"
_LAST_WORDS: Final = 4000
_ENGINE_TESTS: Final = "tests/gpu/vlm_engine/test_engine_on_a_gpu.py"


@dataclass(frozen=True)
class Step:
    """One process. seconds: after which it is ended. measures: it takes ``--output FILE`` for its figures."""

    name: str
    command: tuple[str, ...]
    seconds: int
    measures: bool = True


def steps(*, device: str, tiny: bool) -> list[Step]:
    """All steps in the order of their worth. tiny: of models and images, to try the hour itself."""
    on_cpu = device == "cpu"
    tests = ("pytest", "-q", "-p", "no:cacheprovider")
    device_tests = "tests/unit/vlm_engine/devices" if on_cpu else "tests/gpu/vlm_engine/devices"
    # Beside the engine's tests are fixtures of tests that need all of our packages.
    alone = ("--confcutdir", "tests/unit/vlm_engine") if on_cpu else ()
    listed = [
        Step("device tests", (*tests, *alone, device_tests), 90, measures=False),
        Step(
            "engine tests",
            (*tests, *(("-m", "not needs_gpu") if on_cpu else ()), _ENGINE_TESTS),
            200,
            measures=False,
        ),
    ]
    options = ("--device", device, *(("--tiny",) if tiny else ()))
    case = (
        "benchmarks.gpu",
        *options,
        "--partitions",
        "0",
        *(("--seconds", "0.2", "--images", "2") if tiny else ("--seconds", "6")),
    )
    models = ("tiny-smolvlm2", "tiny-qwen2.5-vl") if tiny else ("smolvlm2-2.2b", "qwen2.5-vl-3b")
    small, large = ("1", "2") if tiny else ("6", "24")
    drafts = ("--alike", "50", "--drafts", "0", "5")
    partitions = ("benchmarks.gpu_partitions", *options, "--no-vllm", "--properties", "4" if tiny else "80")
    second = (
        *("benchmarks.prompt_memory", "--second-question", "--device", device),
        *("--rounds", "2", "--properties", "4", "--side", "112" if tiny else "1182"),
    )
    confidence = (
        *("benchmarks.confidence_cost", "--device", device, "--model", models[0]),
        *("--properties", "2" if tiny else "24", "--pairs", "2" if tiny else "6"),
    )
    drafts_and_partitions = [
        (
            Step(f"drafts {model}", (*case, "--model", model, "--batch", large, *drafts), 150),
            Step(f"partitions {model}", (*partitions, "--model", model), 240),
        )
        for model in models
    ]
    figures = [
        # First what no GPU has shown yet.
        Step("confidence", confidence, 170, measures=False),
        *drafts_and_partitions[0],
        *(
            Step(f"second question {model}", (*second, "--model", model), 100, measures=False)
            for model in models
        ),
        Step("canary", ("benchmarks.canary", "--rounds", "2"), 120, measures=False),
        *drafts_and_partitions[1],
        *(
            Step(f"plain {model}", (*case, "--model", model, "--batch", small, large, "--plain"), 180)
            for model in models
        ),
    ]
    # Measured twice, a figure shows its spread.
    again = [replace(step, name=f"{step.name}, again") for step in figures]
    return [*listed, *figures, *again]


def run_steps(
    listed: Sequence[Step], file: Path, *, seconds: float, environment: Mapping[str, str]
) -> list[str]:
    """Run what has no result yet, for so many seconds at most; returns the names of the steps that are left.

    file: the results of all calls, as JSON. It is replaced whole, before and after each step.
    """
    ends = time.monotonic() + seconds
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    remaining: list[str] = []
    out_of_time = False
    for step in listed:
        tries = results.get(step.name, {}).get("tries", 0)
        if "returned" in results.get(step.name, {}) or tries >= TRIES:
            continue
        has = ends - time.monotonic()
        out_of_time = out_of_time or has < min(step.seconds, LEAST_SECONDS)
        if out_of_time:
            remaining.append(step.name)
            continue
        print(f"== {step.name}: {' '.join(step.command)}", flush=True)
        result: dict[str, Any] = {"tries": tries + 1, "versions": versions(), "before": gpu_readings()}
        results[step.name] = result
        _replace(file, results)
        result |= _run(step, environment, min(has, step.seconds)) | {"after": gpu_readings()}
        if result["returned"] == LIMIT and has < step.seconds:
            del result["returned"]  # The call was over, not the step's own time.
            remaining.append(step.name)
        _replace(file, results)
        ended = result.get("returned", "cut")
        print(f"   {ended} after {result['seconds']:.0f} s\n{result['last_words'][-800:]}", flush=True)
    return remaining


def _run(step: Step, environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        figures, log = Path(name, "figures.json"), Path(name, "log")
        words = [sys.executable, "-m", *step.command, *(("--output", str(figures)) if step.measures else ())]
        began = time.monotonic()
        with log.open("wb") as written:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=dict(environment),
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                returned: int | str = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                returned = LIMIT
        return {
            "command": list(step.command),
            "returned": returned,
            "seconds": time.monotonic() - began,
            "last_words": log.read_text(errors="replace")[-_LAST_WORDS:],
            # What was measured before the limit stands all the same.
            "figures": json.loads(figures.read_text()) if figures.exists() else None,
        }


def _replace(file: Path, results: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    beside.replace(file)


def main() -> None:
    """Go on with the steps, and say what is left."""
    parser = argparse.ArgumentParser(prog="gpu-hour", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the hour on a CPU")
    parser.add_argument("--minutes", type=float, default=9.3, help="end the step under way after these")
    parser.add_argument("--results", type=Path, default=ROOT / ".gpu-hour" / "results.json")
    options = parser.parse_args()
    environment = {**os.environ, "GPU_TESTS_DEVICE": options.device, "PYTHONUNBUFFERED": "1"}
    listed = steps(device=options.device, tiny=options.tiny)
    remaining = run_steps(listed, options.results, seconds=60 * options.minutes, environment=environment)
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    print(f"results: {options.results}; left for the next call: {', '.join(remaining) or 'nothing'}")
    failed = [name for name, result in results.items() if result.get("returned") != 0]
    if failed:
        sys.exit(f"gpu-hour: failed, see the results: {', '.join(failed)}")


if __name__ == "__main__":
    main()

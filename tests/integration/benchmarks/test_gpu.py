"""The GPU benchmark with its tiny models on a CPU: it goes on working as the engine changes.

One case is always measured. All of them are marked long, a minute of two cores; `make test-bare` runs them.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_loops import Bench, render_jpegs
from benchmarks.gpu_meter import Ceilings
from benchmarks.gpu_models import SHAPES

ROOT = Path(__file__).parents[3]


def test_a_case_is_measured(tmp_path, request):
    """Guards: an engine that could not be closed left every case without a figure. All cases: below."""
    import torch

    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)
    deadline = time.monotonic() + 600
    ceilings = Ceilings(1e9, 1e9, 1e9, 1e9)
    bench = Bench("cpu", 1, 0.1, deadline, render_jpegs(tmp_path, 3, (160, 120), 1), ceilings)
    case = replace(gpu.TINY_CASES[3], output_tokens=8, batch=2)
    result = gpu.run_case(bench, case)
    assert not [name for name in result if "error" in name or "failed" in name]
    assert result["engine"]["images_per_second"] > 0 < result["plain"]["images_per_second"]


def test_each_option_makes_cases(monkeypatch):
    """The grids and what the options name are cases of models that there are."""
    options = ["--model", "tiny-qwen2.5-vl", "tiny-gemma3", "--side", "56", "--images", "1", "2"]
    options += [
        "--output-tokens",
        "8",
        "--alike",
        "0",
        "50",
        "--drafts",
        "0",
        "5",
        "--batch",
        "2",
        "--plain",
        "--profile",
    ]
    for given, count in (([], len(gpu.CASES)), (["--tiny"], len(gpu.TINY_CASES)), (["--tiny", *options], 16)):
        monkeypatch.setattr(sys, "argv", ["bench-gpu", *given])
        cases = gpu._cases(gpu._options())
        assert len({str(case) for case in cases}) == len(cases) == count
        assert {case.model for case in cases} <= SHAPES.keys()


def test_a_case_without_figures_fails_the_command(tmp_path, monkeypatch):
    """What measured nothing does not end as a success."""

    def run_case(bench, case):
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(gpu, "run_case", run_case)
    monkeypatch.setattr(gpu, "measure_ceilings", lambda device: Ceilings(1e9, 1e9, 1e9, 1e9))
    monkeypatch.setattr(gpu, "render_jpegs", lambda *_: [__file__])
    options = ["--device", "cpu", "--tiny", "--partitions", "0", "--output", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", ["bench-gpu", *options])
    with pytest.raises(SystemExit, match="5 of 5 cases failed"):
        gpu.main()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "gpu.json"
    options = ["--device", "cpu", "--tiny", "--seconds", "0.1", "--workers", "1", "--partitions", "0"]
    options += ["--output", str(output)]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # On a busy machine threads spin while they wait for the one whose core was taken.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(output.read_text())


@pytest.mark.long
def test_every_case_is_measured(results):
    """No family of models falls out of the benchmark unnoticed, and where a batch's time goes adds up."""
    assert len(results["cases"]) == 5
    for case in results["cases"]:
        assert not [name for name in case if "error" in name or "failed" in name]
        engine = case["engine"]
        assert engine["images_per_second"] > 0 and engine["decode_steps"] > 0 and engine["tiles"] >= 5
        assert sum(engine["stage_seconds"].values()) == pytest.approx(engine["batch_seconds"], rel=0.02)
        assert case["feeding"]["images_per_second_a_core"] > 0 < case["feeding"]["cores_to_feed_the_device"]
        assert all(spent > -0.01 for spent in engine["stage_seconds"].values())


@pytest.mark.long
def test_the_same_work_is_compared(results):
    """The engine and plain generation see the same tiles and write answers of the same lengths."""
    compared = [case for case in results["cases"] if "plain" in case and not case["case"]["alike"]]
    assert len(compared) == 4
    for case in compared:
        engine, plain = case["engine"], case["plain"]
        assert engine["prompts_padded_rows_steps"][0] == plain["prompts_padded_rows_steps"][0]
        assert engine["tiles"] == plain["tiles"]
        assert engine["generate_seconds_per_property"] > 0 < plain["generate_seconds_per_property"]


@pytest.mark.long
def test_guesses_are_compared_with_plain_generation(results):
    """Where answers are alike for the most part, the engine says them in fewer steps, and all steps count."""
    (case,) = (case for case in results["cases"] if case["case"]["alike"])
    engine, plain = case["engine"], case["plain"]
    assert engine["decode_steps"] < 0.75 * plain["decode_steps"]
    assert engine["tiles"] == plain["tiles"]
    # A step that looks at several guessed tokens is a step, and no prompt of its own.
    prompts = {tokens for tokens, _, _ in engine["prompts_padded_rows_steps"]}
    assert prompts == {tokens for tokens, _, _ in plain["prompts_padded_rows_steps"]}

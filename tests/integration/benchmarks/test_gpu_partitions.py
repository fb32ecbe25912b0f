"""Whole partitions of the GPU benchmark with its tiny models on a CPU."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_loops import render_jpegs
from benchmarks.gpu_partitions import prepare
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.settings import load_settings

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_whole_partitions_are_measured(tmp_path):
    """What a partition takes with start-up and embedder comes from the product's own runs, two of them."""
    output = tmp_path / "partitions.json"
    options = ["--device", "cpu", "--tiny", "--properties", "4", "--model", "tiny-smolvlm2"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_partitions", *options, "--no-vllm", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (found,) = json.loads(output.read_text())
    assert (found["failures"], len(found["outcomes"])) == ({}, 2)
    for one in found["outcomes"]:
        assert 0 < one["seconds"] < one["whole"]
        assert one["images"] == 4 * 3 - 2
    assert found["arithmetic_share"] > 0


@pytest.mark.long
def test_a_resident_vllm_is_not_refused(tmp_path):
    """The home that ours with vLLM describes names an embedder, without which a run of ours is refused."""
    options = argparse.Namespace(tiny=True, device="cpu", properties=2)
    bench = prepare(options, "tiny-smolvlm2", tmp_path, render_jpegs(tmp_path, 3, (64, 48), 1))
    require_models(load_settings(**{**bench.settings, "engine": "server"}))

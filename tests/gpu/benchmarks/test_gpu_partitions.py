"""Whole partitions on a real GPU. They need Dagster, which the engine's tests beside them do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def test_whole_partitions_are_made_on_it(tmp_path):
    """Lease, workers, model, embedder, checks and publishing work on a GPU as they do on a CPU."""
    output = tmp_path / "partitions.json"
    options = ["--device", DEVICE, "--tiny", "--no-vllm", "--properties", "16", "--output", str(output)]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_partitions", *options], cwd=ROOT, check=True)
    for model in json.loads(output.read_text()):
        assert (model["failures"], len(model["outcomes"])) == ({}, 2)

"""`make bench` on a few properties: the same harness, the guided loop and this project."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench import Bench, floor_of, summary
from benchmarks.bench_runs import CONTENDERS, Contender, Run
from benchmarks.contenders.task import Task

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "latest.json"
    options = ["--only", "loader,ours", "--properties", "40", "--batches", "8", "--rounds", "1"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench", *options, "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(output.read_text())


@pytest.mark.long
def test_every_figure_is_there(results):
    """Who reads latest.json finds each contender's figures with their spread, and on what they were taken."""
    assert {"date", "command", "commit", "seed", "machine", "floor", "contenders"} <= results.keys()
    assert results["contenders"].keys() == {"loader", "ours"}
    for found in results["contenders"].values():
        for name in ("properties_per_second", "ratio_to_floor", "startup_seconds", "peak_rss_mb"):
            low, high = found["spread"][name]
            assert 0 < low <= found[name] <= high
        assert found["versions"]["torch"]


@pytest.mark.long
def test_the_same_work_is_compared(results):
    """In float32 a materialization and the bare loop give the same descriptions of the same ids."""
    assert results["floor"] == "loader"
    assert results["contenders"]["ours"]["same_answers_as_floor"] == 1.0


class Unprepared:
    """A workload of which no contender gets far enough to read it."""

    def run(self, folder, *, batch, guided):
        """A task without files, and an empty environment."""
        return Task("", "", "", "", "", "", batch, guided, 1, 1, 1, 1, 1), {}


def test_a_contender_that_cannot_run_is_named(tmp_path):
    """A peer whose environment is missing stands in the figures with its error, and is not left out."""
    missing = Contender("missing", "Missing", "bare_loop", "never-installed")
    bench = Bench(Unprepared(), tmp_path, limit_seconds=1)
    found = summary([missing], [bench.round([missing], name="round 1")], bench)
    assert "not installed" in found["contenders"]["missing"]["error"]


def test_the_floor_is_the_faster_loop_over_all_rounds():
    """A floor that was lucky in one round does not decide what the others are measured against."""

    def run(rate):
        return Run(rate, 1.0, 1.0, 1.0, 1.0, None, 1.0, 1.0, {})

    rounds = [
        {"unguided": run(9.0), "loader": run(10.0)},
        {"unguided": run(20.0), "loader": run(10.0)},
        {"unguided": run(9.0), "loader": run(10.0)},
    ]
    assert floor_of(rounds) == "loader"


@pytest.mark.parametrize("name", sorted({one.environment for one in CONTENDERS if one.environment}))
def test_contenders_have_the_same_versions(name):
    """What all contenders use is the same in every environment: a ratio compares programs, not versions."""
    environment, project = (
        dict(line.split("==") for line in path.read_text().splitlines() if line and line[0] != "#")
        for path in (ROOT / "benchmarks" / "environments" / f"{name}.txt", ROOT / "constraints.txt")
    )
    for package in ("torch", "transformers", "tokenizers", "xgrammar", "pillow", "numpy", "pydantic"):
        assert environment[package] == project[package]

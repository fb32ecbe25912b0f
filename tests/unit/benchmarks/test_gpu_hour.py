"""The hour on a lent GPU: a cut at any moment costs one step at most, and the next call goes on behind it."""

import json
import os
import sys

import pytest

from benchmarks import gpu, gpu_hour
from benchmarks.gpu_hour import Step, run_steps, steps

STEP = """
import pathlib, sys
if "--output" in sys.argv:
    pathlib.Path(sys.argv[-1]).write_text('{"cases": 3}')
with open(f"{__file__}.runs", "a") as runs:
    runs.write(sys.argv[1] + "\\n")
"""


@pytest.fixture
def hour(tmp_path):
    """Runs steps as the hour does; returns what is left, the results, and the names of the steps that ran."""
    (tmp_path / "a_step.py").write_text(STEP)
    file, runs = tmp_path / "results.json", tmp_path / "a_step.py.runs"

    def run(*listed, seconds=1000.0):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        left = run_steps(listed, file, seconds=seconds, environment=environment)
        return left, json.loads(file.read_text()), runs.read_text().split() if runs.exists() else []

    run.file = file
    return run


def step(name, seconds=100, **more):
    return Step(name, ("a_step", name), seconds, **more)


def test_the_next_call_goes_on(hour):
    """Guards: what would not end in time is left, and a later call repeats nothing that has a result."""
    listed = step("first", 40), step("second", 2000)
    left, results, ran = hour(*listed, seconds=59.0)
    assert (left, ran, results["first"]["figures"]) == (["second"], ["first"], {"cases": 3})
    left, results, ran = hour(*listed, seconds=3000.0)
    assert (left, ran) == ([], ["first", "second"])
    assert [result["returned"] for result in results.values()] == [0, 0]
    assert results["second"]["versions"]["transformers"] and results["second"]["after"] == []


def test_a_step_has_a_limit_of_its_own(hour):
    """Guards: a step that hangs takes no time from those behind it, and is not begun again."""
    listed = step("hangs", 0), step("next")
    for _ in range(2):
        left, results, ran = hour(*listed)
        assert (left, ran[-1]) == ([], "next")
        assert results["hangs"]["returned"] == "ended at its limit"
    assert ran.count("next") == results["hangs"]["tries"] == 1


def test_a_step_that_the_call_ended_comes_again(hour, monkeypatch):
    """Guards: a step that had less than its own limit is no failure; the next call gives it its time."""
    monkeypatch.setattr(gpu_hour, "LEAST_SECONDS", 0)
    left, results, _ = hour(step("cut", 100), seconds=0.001)
    assert (left, "returned" in results["cut"]) == (["cut"], False)
    left, results, _ = hour(step("cut", 100))
    assert (left, results["cut"]["returned"], results["cut"]["tries"]) == ([], 0, 2)


@pytest.mark.parametrize(("tries", "ran"), [(1, ["cut"]), (2, [])])
def test_what_was_cut_off_is_tried_once_more(hour, tries, ran):
    """Guards: a call that is cut off repeats the step under way; a step cut off twice is left out."""
    hour.file.write_text(json.dumps({"cut": {"tries": tries}}))
    assert hour(step("cut"))[2] == ran


@pytest.mark.parametrize(("device", "tiny"), [("cuda", False), ("cpu", True)])
def test_each_step_can_be_asked_for(device, tiny, monkeypatch):
    """Guards: the hour finds no misspelt option, and each step fits into one call."""
    listed = steps(device=device, tiny=tiny)
    assert len({one.name for one in listed}) == len(listed)
    assert max(one.seconds for one in listed) < 9.3 * 60
    for one in listed:
        module, *options = one.command
        if module == "benchmarks.gpu":
            monkeypatch.setattr(sys, "argv", ["bench-gpu", *options])
            assert len(gpu._cases(gpu._options())) == 2
        else:
            paths = [word for word in options if word.startswith("tests/")]
            assert all((gpu_hour.ROOT / path).exists() for path in paths)
            assert bool(paths) == (module == "pytest")

"""``make mutations``: take out each safeguard and change each decision in turn; a test must fail each time.

The tests run on a copy of the tree; the quick ones first, the fault tests for what these let through.
Exit code 1 where a mutant survives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

# Imported once here, and not again in each of the forked children that run the tests.
import duckdb  # noqa: F401
import hypothesis.stateful  # noqa: F401
import pyarrow.dataset
import pyarrow.parquet  # noqa: F401
import pytest

from faults.mutations import (
    catalog_mutants,
    decision_mutants,
    journal_mutants,
    publication_mutants,
    store_mutants,
)
from faults.mutations.mutant import Mutant

CHECKOUT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "vlm_durable",
    "vlm_engine",
    "vlm_catalog",
    "resources",
    "sensors",
    "vlm_assets",
    "vlm_results",
    "vlm_training",
    "vlm_cluster",
)
_COPIED = (*_PACKAGES, "examples", "faults", "tests", "pyproject.toml")
_JOURNAL = "tests/unit/vlm_durable/journal"
_PUBLICATION = "tests/faults/vlm_durable/versions/test_published.py"
_POWER_CUTS = "tests/faults/test_power_cuts.py"
_QUICK = {
    # Most of what holds the protocol first.
    "journal": [
        *(
            f"tests/unit/vlm_durable/journal/test_{name}.py"
            for name in ("segments", "manifests", "recovery", "superseding")
        ),
        *(f"tests/unit/vlm_durable/files/test_{name}.py" for name in ("files", "sealed_json")),
        _JOURNAL,
    ],
    "publication": [
        "tests/unit/vlm_durable/versions/test_published.py",
        "tests/unit/vlm_durable/versions/test_put_back.py",
        "tests/unit/vlm_durable/versions/test_verification.py",
        f"{_PUBLICATION}::test_bytes_changed_before_the_read_back",
        "tests/unit/vlm_assets/services/test_status.py::test_finished_rows_that_no_check_refused_are_interrupted",
    ],
    **catalog_mutants.TESTS,
    **decision_mutants.TESTS,
    **store_mutants.TESTS,
}
_FAULTS = {
    "journal": [_POWER_CUTS, "tests/faults/vlm_durable/journal"],
    "publication": [_POWER_CUTS, _PUBLICATION, "tests/faults/vlm_durable/test_published_states.py"],
}
# What the publication shares with the journal: both groups' tests must be looked at.
_SHARED = ("files.py", "sealed_json.py", "segments.py")
_TIMEOUT_SECONDS = 400


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the test that failed, or None where it survived."""

    file: str
    promise: str
    killed_by: str | None
    seconds: float


def main(arguments: list[str]) -> int:
    """0: every mutant was killed."""
    parser = argparse.ArgumentParser(prog="make mutations", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose file or promise contains this")
    parser.add_argument("--json", type=Path, help="write the table as JSON too")
    options = parser.parse_args(arguments)
    groups = {"journal": journal_mutants.MUTANTS, "publication": publication_mutants.MUTANTS}
    for part in (catalog_mutants, decision_mutants, store_mutants):
        for file in part.TESTS:
            groups[file] = tuple(mutant for mutant in part.MUTANTS if mutant.file == file)
    outcomes = []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mutations-", dir=memory) as folder:
        copy = Path(folder)
        for name in _COPIED:
            source = CHECKOUT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "model"))
            else:
                shutil.copy(source, copy / name)
        # Settings that name the example model need its folder; no mutant is in it.
        (copy / "examples/model").symlink_to(CHECKOUT / "examples/model")
        _refuse_other_code(copy)
        for group, mutants in groups.items():
            chosen = [
                mutant for mutant in mutants if options.only in mutant.file or options.only in mutant.promise
            ]
            if chosen and (failing := _failing(copy, _QUICK[group])):
                print(f"Without any mutant {failing} fails: nothing to compare with.")
                return 2
            for mutant in chosen:
                outcomes.append(_judge(mutant, group, copy))
                print(_line(outcomes[-1]), flush=True)
    survived = [mutant for mutant in outcomes if mutant.killed_by is None]
    print(f"{len(outcomes) - len(survived)} of {len(outcomes)} mutants killed.")
    if options.json:
        options.json.write_text(json.dumps([asdict(mutant) for mutant in outcomes], indent=1))
    return 1 if survived else 0


def _judge(mutant: Mutant, group: str, copy: Path) -> Outcome:
    """Take the safeguard out, run the tests until one fails, put it back."""
    started, path = time.monotonic(), copy / mutant.file
    whole = path.read_text()
    path.write_text(mutant.applied(copy))
    try:
        tests = [_QUICK[group], *filter(None, [_FAULTS.get(group)])]
        if path.name in _SHARED:
            tests += [_QUICK["publication"], _FAULTS["publication"]]
        failing = next(filter(None, (_failing(copy, test_paths) for test_paths in tests)), None)
    finally:
        path.write_text(whole)
    return Outcome(mutant.file, mutant.promise, failing, time.monotonic() - started)


def _failing(copy: Path, tests: Iterable[str]) -> str | None:
    """The first test that fails, by file and name; None where all pass."""
    with tempfile.TemporaryFile("w+") as output_file:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            _run_tests(copy, tests, output_file.fileno())
        deadline, status = time.monotonic() + _TIMEOUT_SECONDS, 0
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "(no end: the tests hang)"
            time.sleep(0.02)
        status = os.waitstatus_to_exitcode(ended[1])
        output_file.seek(0)
        output = output_file.read()
    if status == 0:
        return None
    match = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py\S*)", output, re.MULTILINE)
    return match[1] if match else f"(pytest ended with {status})"


def _run_tests(copy: Path, tests: Iterable[str], output: int) -> NoReturn:
    """In a forked child, which has pytest and pyarrow imported and nothing of this project's product."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    os.environ.update(_environment(copy))
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    code = 1
    try:
        code = int(pytest.main(["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _refuse_other_code(copy: Path) -> None:
    """The tests must import the copy, not the checkout that is installed."""
    if any(name.partition(".")[0] in _PACKAGES for name in sys.modules):
        raise RuntimeError("the code under test was imported before it was mutated")
    ask = [sys.executable, "-c", "import vlm_durable; print(vlm_durable.__file__)"]
    answer = subprocess.run(ask, cwd=copy, env=_environment(copy), capture_output=True, text=True, check=True)
    if not Path(answer.stdout.strip()).is_relative_to(copy):
        raise RuntimeError(f"the tests would import {answer.stdout.strip()} and not the copy in {copy}")


def _environment(copy: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TESTS_SHARE": "all",
    }


def _line(outcome: Outcome) -> str:
    return f"{outcome.file:38} {outcome.promise:66} {outcome.killed_by or 'SURVIVED'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

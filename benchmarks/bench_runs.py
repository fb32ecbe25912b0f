"""One run of one contender of ``make bench``: a fresh process, timed by its marks, its memory watched.

What lives here: who contends, in which environment, what is measured of a run and how its processes are
ended. What does not: the task (bench_task.py), the rounds and the table (bench.py, bench_report.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.dataset as ds

from benchmarks.contenders.task import Task

CHECKOUT: Final = Path(__file__).resolve().parent.parent
ENVIRONMENTS: Final = CHECKOUT / "benchmarks" / ".environments"

_LOOK_SECONDS = 0.5
_LOOKS_A_SHARED_LOOK = 4
_PR_SET_CHILD_SUBREAPER = 36
_MIB = 1 << 20


@dataclass(frozen=True)
class Contender:
    """A program of ``benchmarks.contenders``.

    environment: a folder of ENVIRONMENTS; None: the project's own. batches: whether it runs in batches of any
    size, or as its settings say. guided: whether a grammar holds its answers.
    """

    name: str
    title: str
    module: str
    environment: str | None = None
    batches: bool = True
    guided: bool = True

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        if self.environment is None:
            return Path(sys.executable)
        return ENVIRONMENTS / self.environment / "bin" / "python"


CONTENDERS: Final = (
    Contender("loader", "floor: loop and one loader, guided", "loader_loop"),
    Contender("unguided", "floor: loop and one loader, unguided", "loader_loop", guided=False),
    Contender("ours", "this project", "ours", batches=False),
    Contender("ray", "Ray Data", "ray_data", "ray"),
    Contender("daft", "Daft", "daft_udf", "daft"),
    Contender("dagster", "plain Dagster asset", "dagster_loop"),
)
FLOOR: Final = ("loader", "unguided")


class ContenderFailedError(RuntimeError):
    """A contender could not run, or not to its end; the message ends with what it said last."""


@dataclass(frozen=True)
class Run:
    """What was measured of one run.

    rate: properties a second from the first batch's end until all rows are durable, the first batch's own
    left out. startup: seconds from the process's start until the first properties go to the model. ending:
    seconds from durable to the process's end. whole: from start to end. cpu: seconds of CPU of all its
    processes. model_cpu: milliseconds of CPU that the process with the model takes for a property in the
    steady part, all its threads together, which a busy machine changes little; None where the model's process
    is not the one that knows the end. rss: peak over time of the resident sets of all its processes, added
    up, in MiB; what processes share counts in each. pss: the same with what is shared counted once, looked at
    more rarely. answers: digest of each property's description by its id.
    """

    rate: float
    startup: float
    ending: float
    whole: float
    cpu: float
    model_cpu: float | None
    rss: float
    pss: float
    answers: Mapping[str, str]


def become_subreaper() -> None:
    """Have orphans of a contender become children of this process, so that none of them is left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_contender(
    contender: Contender, task: Task, environment: Mapping[str, str], folder: Path, *, seconds: float
) -> Run:
    """Run it to its end. Raises ContenderFailedError, also where it takes longer than ``seconds``."""
    if not contender.python.exists():
        raise ContenderFailedError("its environment is not installed: make bench-environments")
    path, log = folder / "task.json", folder / "log.txt"
    task.write(path)
    others = frozenset(_children(os.getpid()))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [contender.python, "-P", "-m", f"benchmarks.contenders.{contender.module}", str(path)],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
        )
    try:
        rss, pss = _watch(process, started + seconds, others)
    finally:
        ended = time.monotonic()
        _end_all(process, others)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode != 0:
        raise ContenderFailedError(f"ended with {process.returncode}: {_last_words(log)}")
    request, first_batch, durable = _moments(Path(task.marks), len(task.rows()), log)
    return Run(
        rate=(durable["rows"] - first_batch["rows"]) / (durable["at"] - first_batch["at"]),
        startup=request["at"] - started,
        ending=ended - durable["at"],
        whole=ended - started,
        cpu=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        model_cpu=_model_cpu(first_batch, durable),
        rss=rss,
        pss=pss,
        answers=_answers(Path(task.output)),
    )


def versions_in(contender: Contender, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of Python and of those of these packages that its environment has."""
    if not contender.python.exists():
        return {}
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({'python': platform.python_version(),"
        " **{p: found[p] for p in sys.argv[1:] if p in found}}))"
    )
    answer = subprocess.run(
        [contender.python, "-c", code, *packages], capture_output=True, text=True, check=True, timeout=60
    )
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def _watch(process: subprocess.Popen[bytes], deadline: float, others: frozenset[int]) -> tuple[float, float]:
    """Wait for its end; peaks of memory in MiB, added up over its processes at each look."""
    page = os.sysconf("SC_PAGE_SIZE")
    rss = pss = 0.0
    looks = 0
    while True:
        try:
            process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        else:
            return rss, pss
        if time.monotonic() > deadline:
            raise ContenderFailedError("took longer than it may (--limit-seconds)")
        pids = list(_descendants({process.pid, *_children(os.getpid())} - others))
        rss = max(rss, sum(_field(pid, "statm", 1) for pid in pids) * page / _MIB)
        if looks % _LOOKS_A_SHARED_LOOK == 0:
            pss = max(pss, sum(_shared_once(pid) for pid in pids) / 1024)
        looks += 1


def _descendants(roots: Collection[int]) -> Iterator[int]:
    """These processes and all that they started, and that these started."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            yield pid
            waiting += _children(pid)


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids += map(int, path.read_text().split())
        except OSError:
            continue  # It has ended since.
    return pids


def _field(pid: int, name: str, number: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/{name}").read_text().split()[number])
    except (OSError, IndexError):
        return 0


def _shared_once(pid: int) -> int:
    """Proportional set size in KiB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _end_all(process: subprocess.Popen[bytes], others: frozenset[int]) -> None:
    """End the run and whatever of it outlived it: its orphans are our children. Their CPU time counts too."""
    if process.poll() is None:
        process.kill()
        process.wait()
    while children := set(_children(os.getpid())) - others:
        for pid in list(_descendants(children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _moments(marks: Path, expected: int, log: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    lines = marks.read_text().splitlines() if marks.exists() else []
    moments: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, lines):
        if line["moment"] != "durable" or line["rows"] == expected:
            moments.setdefault(line["moment"], line)
    missing = [moment for moment in ("asked", "first_batch", "durable") if moment not in moments]
    if missing:
        raise ContenderFailedError(f"never said {', '.join(missing)}: {_last_words(log)}")
    if moments["first_batch"]["rows"] == expected:
        raise ContenderFailedError(
            "its first batch was all there is, so it has no steady state: more --properties"
        )
    return moments["asked"], moments["first_batch"], moments["durable"]


def _model_cpu(first_batch: Mapping[str, Any], durable: Mapping[str, Any]) -> float | None:
    if first_batch["pid"] != durable["pid"]:
        return None
    seconds: float = durable["cpu"] - first_batch["cpu"]
    rows: int = durable["rows"] - first_batch["rows"]
    return 1000.0 * seconds / rows


def _answers(output: Path) -> dict[str, str]:
    files = [str(path) for path in output.glob("*.parquet")]
    if not files:
        raise ContenderFailedError(f"left no parquet file in {output.name}")
    rows = ds.dataset(files).to_table(["property_id", "description"]).to_pylist()
    return {
        row["property_id"]: hashlib.sha256(
            json.dumps(row["description"], sort_keys=True, ensure_ascii=False).encode()
        ).hexdigest()
        for row in rows
    }


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or "(it said nothing)"

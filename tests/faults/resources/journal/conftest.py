"""The fork server of failing writers, and how long a campaign runs.

FAULTS_ROUNDS multiplies the random part (default 1); FAULTS_DIR puts the journals on
a storage of your choice; FAULTS_SEED replays a failure.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

WRITER = Path(__file__).with_name("writer_process.py")
TOTAL, BATCH = 9, 3


@dataclass
class Outcome:
    """What one writer process said before it ended."""

    killed: bool
    stopped: bool
    child: int
    restored: list[int] | None = None
    final: list[int] | None = None
    exact: bool = True
    promised: list[int] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)
    finished: bool = False
    operations: int = 0
    error: str | None = None
    message: str = ""


class Writers:
    """Starts writers, one at a time, and holds every journal to the promise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.homes = itertools.count()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def new_home(self) -> Path:
        """An empty home for one journal."""
        return self.root / f"home-{next(self.homes):05d}"

    def ask(self, **order) -> Outcome:
        """Send one order and gather the answer."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        outcome = Outcome(answer["killed"], answer["stopped"], answer["child"])
        for said in answer.get("said", []):
            for name, value in said.items():
                if name in ("promised", "submitted"):
                    getattr(outcome, name).extend(value)
                else:
                    setattr(outcome, name, value)
        return outcome

    def run(self, home: Path, mode: str = "none", at: int = 0, **more) -> Outcome:
        """Run one writer on a home; ``mode`` at its ``at``-th file operation."""
        return self.ask(**{"home": str(home), "total": TOTAL, "batch": BATCH, "mode": mode, "at": at, **more})

    def finish(self, home: Path, promised: set[int], total: int = TOTAL) -> Outcome:
        """Start again with nothing failing: what was promised is there, exact; the rest gets done, once."""
        resumed = self.run(home, total=total)
        assert resumed.error is None, resumed.message
        assert promised <= set(resumed.restored), f"lost {sorted(promised - set(resumed.restored))}"
        assert resumed.exact
        assert len(resumed.restored) == len(set(resumed.restored))
        assert resumed.final == list(range(total))
        return resumed

    def close(self) -> None:
        """End the server."""
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def writers():
    """Failing writers on the storage under test."""
    # A kill leaves the page cache alone, so memory shows the same states as a disk, without its waits.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    chosen = os.environ.get("FAULTS_DIR", memory)
    with tempfile.TemporaryDirectory(prefix="journal-faults-", dir=chosen) as root:
        started = Writers(Path(root))
        yield started
        started.close()


@pytest.fixture(scope="session")
def rounds() -> int:
    """How many times the random part of the campaign runs."""
    return int(os.environ.get("FAULTS_ROUNDS", "1"))


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of the random part; a failure prints it in its assertion."""
    return int(os.environ.get("FAULTS_SEED", "20240229"))


@pytest.fixture(scope="session")
def stride(rounds) -> int:
    """The costlier sweeps take every third operation in the short form, every one in a campaign."""
    return 3 if rounds == 1 else 1

"""The fork server of processes that post, deliver and are killed; how long the campaign runs.

FAULTS_ROUNDS multiplies the random part (40 rounds: 200 kills); FAULTS_SEED replays a failure; FAULTS_DIR
puts the outboxes on a storage of your choice.
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

PROCESS = Path(__file__).with_name("alert_process.py")


@dataclass
class Outcome:
    """What one process said before it ended. posted: ids that were promised. recovered: numbers."""

    killed: bool
    posted: list[str] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)
    finished: bool = False
    operations: int = 0
    open: list[str] = field(default_factory=list)
    error: str | None = None


class Posters:
    """Starts processes on outboxes, one at a time."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.homes = itertools.count()
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def new_home(self) -> Path:
        """An empty home for one outbox."""
        return self.root / f"home-{next(self.homes):05d}"

    def run(self, home: Path, **order) -> Outcome:
        """Run one process on a home; the order is alert_process.py's."""
        self.process.stdin.write(json.dumps({"home": str(home), "url": self.url, **order}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        outcome = Outcome(answer["killed"])
        for said in answer["said"]:
            for name, value in said.items():
                if name in ("posted", "recovered"):
                    getattr(outcome, name).append(value)
                else:
                    setattr(outcome, name, value)
        assert outcome.error is None, outcome.error
        return outcome

    def close(self) -> None:
        """End the server."""
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture
def posters(receiver):
    """Processes that are killed, and a real receiver that they deliver to."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    chosen = os.environ.get("FAULTS_DIR", memory)
    with tempfile.TemporaryDirectory(prefix="alert-faults-", dir=chosen) as root:
        started = Posters(Path(root), receiver.url())
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
    """The costlier sweeps take every fifth operation in the short form, every one in a campaign."""
    return 5 if rounds == 1 else 1

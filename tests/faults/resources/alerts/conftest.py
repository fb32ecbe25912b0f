"""Processes that post, deliver and are killed, and what each said."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Outcome:
    """What one process said before it ended. posted: ids that were promised. recovered: numbers.

    raised: the ids in the history."""

    killed: bool
    posted: list[str] = field(default_factory=list)
    recovered: list[int] = field(default_factory=list)
    finished: bool = False
    steps: int = 0
    open: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    error: str | None = None
    message: str = ""


class Posters:
    """Starts processes on outboxes, one at a time."""

    def __init__(self, server, url: str) -> None:
        self.server, self.url = server, url
        self.new_home = server.new_home
        self.started = 0

    def run(self, home: Path, **order) -> Outcome:
        """Run one process on a home, an hour after the last; the order is alert_process.py's."""
        self.started += 1
        answer = self.server.ask(home=str(home), url=self.url, ahead=3600.0 * self.started, **order)
        outcome = Outcome(answer["killed"])
        for said in answer["said"]:
            for name, value in said.items():
                if name in ("posted", "recovered"):
                    getattr(outcome, name).append(value)
                else:
                    setattr(outcome, name, value)
        assert outcome.error is None, f"{outcome.error}: {outcome.message}"
        return outcome


@pytest.fixture(scope="module")
def server(fork_server):
    """What forks the processes."""
    with fork_server(Path(__file__).with_name("alert_process.py")) as server:
        yield server


@pytest.fixture
def posters(server, receiver) -> Posters:
    """Processes that are killed, and a real receiver that they deliver to."""
    return Posters(server, receiver.url())

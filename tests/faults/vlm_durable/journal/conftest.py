"""Writers that fail on purpose, and what each said."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TOTAL, BATCH = 9, 3


@dataclass
class Outcome:
    """What one writer process said before it ended. again: of rows that it tried a second time."""

    killed: bool
    stopped: bool
    child: int
    restored: list[int] | None = None
    final: list[int] | None = None
    exact: bool = True
    restored_again: list[int] | None = None
    final_again: list[int] | None = None
    promised: list[int] = field(default_factory=list)
    promised_again: list[int] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)
    finished: bool = False
    operations: int = 0
    error: str | None = None
    message: str = ""


class Writers:
    """Starts writers, one at a time, and holds every journal to the promise."""

    def __init__(self, server) -> None:
        self.server = server
        self.new_home = server.new_home

    def ask(self, **order) -> Outcome:
        """Send one order and gather the answer."""
        answer = self.server.ask(**order)
        outcome = Outcome(answer["killed"], answer["stopped"], answer["child"])
        for said in answer["said"]:
            for name, value in said.items():
                if name in ("promised", "promised_again", "submitted"):
                    getattr(outcome, name).extend(value)
                else:
                    setattr(outcome, name, value)
        return outcome

    def run(self, home: Path, mode: str = "none", at: int = 0, **more) -> Outcome:
        """Run one writer on a home; ``mode`` at its ``at``-th file operation."""
        return self.ask(**{"home": str(home), "total": TOTAL, "batch": BATCH, "mode": mode, "at": at, **more})

    def finish(
        self, home: Path, promised: set[int], total: int = TOTAL, *, again: Collection[int] = ()
    ) -> Outcome:
        """Start again with nothing failing: what was promised is there, exact; the rest gets done, once.

        again: rows whose second try was promised, so that the first one must not come back.
        """
        resumed = self.run(home, total=total)
        assert resumed.error is None, resumed.message
        assert promised <= set(resumed.restored), f"lost {sorted(promised - set(resumed.restored))}"
        assert resumed.exact
        assert len(resumed.restored) == len(set(resumed.restored))
        assert set(again) <= set(resumed.restored_again), "a superseded row came back"
        assert resumed.final == list(range(total))
        assert resumed.final_again == list(range(1, total, 3)), "a failed row was not superseded"
        return resumed


@pytest.fixture(scope="session")
def writers(fork_server):
    """Failing writers on the storage under test."""
    with fork_server(Path(__file__).with_name("writer_process.py")) as server:
        yield Writers(server)

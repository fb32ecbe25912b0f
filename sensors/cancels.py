"""What a person cancelled: kept on disk until that partition is launched by hand again.

What lives here: the file ``.state/cancels/cancels.json``, and what Dagster's runs add to it and take from it.
What does not: which partitions would be tried again otherwise (``retry_decision.py``). A cancelled partition
is no failed one: who restarts it does what a person has just stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import dagster as dg

from resources.storage.files import set_aside
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed
from sensors.dagster_internals.runs import RunState, runs_created_since, runs_ended_since

_ABOUT = (
    "Truth about which partitions a person cancelled. Deleted, it is made anew from the runs that Dagster's"
    " database still has."
)
_OVERLAP_SECONDS = 120.0
_NOTE_SECONDS = 86_400.0


@dataclass(frozen=True)
class Cancel:
    """A run that a person ended, and when (unix seconds)."""

    run_id: str
    at: float


@dataclass(frozen=True)
class Cancelled:
    """Cancelled partitions by key. looked_until: runs that ended before it (unix seconds) are all known."""

    partitions: dict[str, Cancel] = field(default_factory=dict)
    looked_until: float = 0.0


def after(known: Cancelled, ended: Iterable[RunState], created: Iterable[RunState], now: float) -> Cancelled:
    """What stands cancelled, given runs that were cancelled and runs that were created meanwhile.

    Repeating it with runs that it knows changes nothing.
    """
    by_hand: dict[str, float] = {}
    for run in created:
        if run.partition is not None and run.is_by_hand:
            by_hand[run.partition] = max(run.created_at, by_hand.get(run.partition, 0.0))
    partitions = dict(known.partitions)
    for run in ended:
        if run.partition is not None and run.ended_at is not None and run.interrupted_by is None:
            standing = partitions.get(run.partition)
            if standing is None or standing.at < run.ended_at:
                partitions[run.partition] = Cancel(run.run_id, run.ended_at)
    # A run that was created after the cancel is a new wish; seconds are what the database keeps.
    left = {key: one for key, one in partitions.items() if by_hand.get(key, 0.0) <= one.at}
    return Cancelled(left, now)


class Cancels:
    """The cancels of one home, brought up to date from Dagster at each look."""

    def __init__(self, state_directory: Path) -> None:
        self.directory = state_directory / "cancels"
        self.path = self.directory / "cancels.json"
        self._looked_until = 0.0

    def look(self, instance: dg.DagsterInstance, now: float) -> tuple[dict[str, Cancel], str | None]:
        """What stands cancelled now, written down before it is used; and what was wrong with the file."""
        known, damage = self._read()
        # What this process has looked at since the file was last written is looked at only once.
        since = max(known.looked_until, self._looked_until) - _OVERLAP_SECONDS
        ended = runs_ended_since(instance, max(since, 0.0), [dg.DagsterRunStatus.CANCELED])
        oldest = min([since, *(run.ended_at or now for run in ended)])
        created = runs_created_since(instance, max(oldest, 0.0)) if known.partitions or ended else []
        found = after(known, ended, created, now)
        if found.partitions != known.partitions or now - known.looked_until > _NOTE_SECONDS or damage:
            self._write(found)
        self._looked_until = now
        return found.partitions, damage

    def read(self) -> dict[str, Cancel]:
        """What stands on disk. One that does not read is none here: ``look`` makes it anew."""
        try:
            return self._parsed().partitions
        except (BrokenSealError, KeyError, TypeError, ValueError):
            return {}

    def _read(self) -> tuple[Cancelled, str | None]:
        try:
            return self._parsed(), None
        except (BrokenSealError, KeyError, TypeError, ValueError) as error:
            aside = set_aside(self.path, self.directory / "set_aside")
            self._looked_until = 0.0
            return Cancelled(), (
                f"{self.path} does not read ({error}) and was moved to {aside}. It was made anew from the"
                " cancelled runs that Dagster's database has; a cancel that is older may be forgotten."
            )

    def _parsed(self) -> Cancelled:
        try:
            found = read_sealed(self.path)
        except FileNotFoundError:
            return Cancelled()
        partitions = {key: Cancel(**one) for key, one in found["partitions"].items()}
        return Cancelled(partitions, float(found["looked_until"]))

    def _write(self, cancelled: Cancelled) -> None:
        write_sealed(self.path, {"about": _ABOUT, **asdict(cancelled)})

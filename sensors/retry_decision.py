"""The decision about one partition that is not as it should be: a pure function of its facts and its entry.

Which system owns which failure, and what this one does about it:

========================================  ==========================================================
one property's answer                     the engine's retry ladder, inside the batch
a sick model server                       the engine: three restarts
a run that crashed (killed, no memory)    Dagster's run retries, twice; then this schedule, as an attempt
a run ended from outside (SIGTERM,        Dagster's run retries; then this schedule: resumed, no attempt
a reboot, a pause, a stuck worker)        counted; three in a row without a new row are told to a person
a run that never started (a busy machine) as the line above
no device came free; a server at an       this schedule: resumed, no attempt counted; told as the line
address, or the disk of images, is away   above
every device is left out                  a person, told at once; nothing is started and the queue waits
a materialization that failed             this schedule, backing off; five attempts without a new row, then
                                          given up: a person
a check that refused the rows             this schedule, where failed rows have a try left (three for kinds
                                          that may pass, counted in the rows); where none has, a person
a file that does not match its record     this schedule: the second copy, else as a materialization
answers of the model that are garbage     a person: its failed rows are new rows, and would go on for ever
settings or catalogue changed             a person, who is shown what it costs; a run of such a partition that
                                          was interrupted before its journal is told
cancelled by a person                     that person, by launching it
========================================  ==========================================================

Each asset of a run is judged by itself: what needs a person keeps no other from being tried again, except
those made from it. Attempts are counted by partition.

What lives here: that table as code. What does not: where the facts come from and what is launched
(``failed_partitions.py``), the ledger (``retry_ledger.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from sensors.dagster_internals.runs import RunState
from sensors.retry_ledger import Entry

INTERRUPTIONS_TOLD = 3
"""Interruptions in a row without a new row, from which a person is told."""

_LONGEST_DOUBLINGS = 6
_DAGSTER_SECONDS = 300.0
"""How long a run is left to Dagster if it says it retries it: it forgets runs of a backfill that ended."""


class Action(StrEnum):
    """The possible decisions about a partition at this tick."""

    LAUNCH = "launch"
    WAIT = "wait"
    DAGSTER = "left to Dagster's run retries"
    GIVE_UP = "give up"
    GIVEN_UP = "given up"
    PERSON = "left to a person"


ATTEMPTS = 5
"""A partition is given up after so many attempts in a row without a new row. With their back-offs these are
hours, which most outages do not outlast."""


@dataclass(frozen=True)
class Policy:
    """attempts: how many without a new row before giving up. backoff_seconds: the first delay; it doubles."""

    attempts: int
    backoff_seconds: float

    def delay(self, times: int) -> float:
        """Seconds to wait after the end of the ``times``-th run in a row without progress."""
        return float(self.backoff_seconds * 2 ** min(times, _LONGEST_DOUBLINGS))


@dataclass(frozen=True)
class Facts:
    """A partition that is not as it should be, and that no run works on now.

    why: for people. run: the latest finished run that should have put it right; None if Dagster knows none.
    rows: committed for it, ever. assets: those that the run should have put right; empty if they are not
    known. for_person: the run that another start of what is wrong would only repeat; None if there is more.
    """

    key: str
    why: str
    run: RunState | None
    rows: int
    assets: frozenset[str] = frozenset()
    for_person: RunState | None = None


@dataclass(frozen=True)
class Decision:
    """The action, the partition's new entry, and the reason for people."""

    action: Action
    entry: Entry
    why: str


def decide(entry: Entry, facts: Facts, policy: Policy, *, now: float, at_once: bool = False) -> Decision:
    """Decide what to do about one partition now. at_once: a person asks, so no back-off is waited for."""
    run = facts.run
    if run is not None and run.is_retried_by_dagster and abs(now - (run.ended_at or now)) < _DAGSTER_SECONDS:
        return Decision(Action.DAGSTER, entry, facts.why)
    entry = reckoned(entry, facts, policy)
    if at_once:
        entry = replace(entry, attempts=0, given_up=False, not_before=0.0)
    if facts.for_person is not None and not at_once:
        return Decision(Action.PERSON, replace(entry, requested=None), why_for_person(facts.for_person))
    if entry.given_up:
        return Decision(Action.GIVEN_UP, entry, facts.why)
    if entry.attempts >= policy.attempts:
        return Decision(Action.GIVE_UP, replace(entry, given_up=True), facts.why)
    # An end beyond the longest delay means: the clock was put back.
    if now < entry.not_before <= now + policy.delay(_LONGEST_DOUBLINGS):
        return Decision(Action.WAIT, entry, facts.why)
    return Decision(Action.LAUNCH, entry, facts.why)


def why_for_person(run: RunState) -> str:
    """Why what is wrong is left to a person, in words."""
    return f"another start would end as run {run.run_id[:8]} did: the error of that run says what to do"


def reckoned(entry: Entry, facts: Facts, policy: Policy) -> Entry:
    """The entry with the end of the latest run counted. Each run is counted once."""
    run = facts.run
    if run is None or run.run_id == entry.reckoned:
        return entry
    ended = run.ended_at or run.created_at
    interrupted = run.interruption_of(facts.assets) is not None
    entry = replace(entry, reckoned=run.run_id, requested=None)
    if run.is_by_hand:
        delay = 0.0 if interrupted else policy.delay(0)
        return Entry(
            entry.key,
            launches=entry.launches,
            interruptions=int(interrupted),
            rows=facts.rows,
            not_before=ended + delay,
            reckoned=run.run_id,
            alerted=entry.alerted,
            why=entry.why,
        )
    progress = facts.rows > entry.rows
    attempts = 0 if progress else entry.attempts + (not interrupted)
    interruptions = entry.interruptions + 1 if interrupted else 0
    if progress:
        interruptions = int(interrupted)
    times = max(interruptions - 1, 0) if interrupted else attempts
    delay = 0.0 if interrupted and interruptions <= 1 else policy.delay(times)
    return replace(
        entry,
        attempts=attempts,
        interruptions=interruptions,
        rows=facts.rows,
        not_before=ended + delay,
        given_up=entry.given_up and not progress,
    )

"""What happens next to a partition whose last run did not end well: it is tried again, or a person must act.

``retry_decision.py`` decides; here are the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from dagster import DagsterRunStatus

from resources.dagster_names import NEVER_STARTED
from sensors.dagster_internals.runs import InstanceRuns, RunState
from sensors.retry_decision import Action, Facts, Policy, decide
from sensors.retry_ledger import Entry
from vlm_durable.commands import command

_LONGEST = 600

_BY_PERSON = frozenset({Action.PERSON, Action.GIVE_UP, Action.GIVEN_UP})


@dataclass(frozen=True)
class Outlook:
    """What happens next to one partition.

    ending: how its last run ended. next_try: when it is tried again; None if a person must act.
    """

    key: str
    ending: str
    next_try: str | None
    why: str

    def sentence(self) -> str:
        """When it is tried again, or what a person must do, and why."""
        if self.next_try is None:
            return (
                f"partition {self.key} needs you: {self.why}. Put that right, then {command('run', self.key)}"
            )
        return f"partition {self.key} is tried again {self.next_try}, because {self.why}"


def outlooks(
    dagster: InstanceRuns,
    entries: Mapping[str, Entry],
    rows: Mapping[str, int],
    policy: Policy,
    *,
    every_minutes: int,
    now: float,
    most: int,
) -> tuple[Sequence[Outlook], int]:
    """What happens next to the partitions whose last run did not end well, those that need a person first.

    rows: committed rows, by key, of the partitions to consider. most: how many outlooks to return. Returns
    them, and how many more there are.
    """
    decided = []
    for key, run in dagster.latest_runs(rows).items():
        if run.status is DagsterRunStatus.FAILURE or run.interrupted_by is not None:
            for_person = run if run.needs_person_for(()) else None
            facts = Facts(key, "", run, rows[key], for_person=for_person)
            decided.append((decide(entries.get(key, Entry(key)), facts, policy, now=now), run))
    decided.sort(key=lambda pair: (pair[0].action not in _BY_PERSON, pair[0].entry.key))
    shown = []
    for decision, run in decided[:most]:
        entry, next_try = decision.entry, None
        if decision.action is Action.DAGSTER:
            next_try = "at once"
        elif decision.action not in _BY_PERSON:
            every = every_minutes * 60.0
            at = math.ceil(max(now, entry.not_before) / every) * every
            next_try = f"at {datetime.fromtimestamp(at).astimezone():%H:%M}"
        shown.append(Outlook(entry.key, _ending(run), next_try, why_ended(dagster, run)))
    return shown, len(decided) - len(shown)


def _ending(run: RunState) -> str:
    if run.interrupted_by == NEVER_STARTED:
        return "Not started"
    return "Failed" if run.interrupted_by is None else "Interrupted"


def why_ended(dagster: InstanceRuns, run: RunState) -> str:
    """Why a run did not end well, in one line that goes on with "because"."""
    if run.interrupted_by == NEVER_STARTED:
        return "the machine was too busy to start its run: no failure of the partition, and no attempt"
    error = dagster.error_of(run.run_id) or f"run {run.run_id[:8]} ended without a word"
    return _shortened(" ".join(error.split())).rstrip(".")


def _shortened(text: str) -> str:
    """The first sentences of a text, as many as fit. None of its commands is cut in two."""
    if len(text) <= _LONGEST:
        return text
    text = text[:_LONGEST]
    if text.count("`") % 2:
        text = text[: text.rindex("`")]
    return f"{text.rpartition('. ')[0] or text.rstrip()} …"

"""What happens next to a partition whose last run did not end well: it is tried again, or a person must act.

``retry_decision.py`` decides; here are the sentences.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from resources.alerts.alert import storable_text
from resources.dagster_names import NEVER_STARTED
from sensors.dagster_internals.runs import InstanceRuns, RunState
from sensors.retry_decision import ATTEMPTS
from vlm_durable.commands import command

_LONGEST = 600


@dataclass(frozen=True)
class Outlook:
    """What happens next to one partition. ending: how its last run ended."""

    key: str
    ending: str
    needs_person: bool
    why: str

    def sentence(self) -> str:
        """Whether it is tried again by itself, or what a person must do, and why."""
        if self.needs_person:
            return (
                f"partition {self.key} needs you: {self.why}. Put that right, then {command('run', self.key)}"
            )
        return (
            f"partition {self.key} is tried again by itself, {ATTEMPTS} times at most without a new row,"
            f" because {self.why}"
        )


def outlooks(
    dagster: InstanceRuns, keys: Collection[str], given_up: Collection[str], *, most: int
) -> tuple[Sequence[Outlook], int]:
    """What happens next to those of these partitions whose last run did not end well.

    given_up: those that are not tried again, unless a person has launched their last run. most: how many
    outlooks to return, those that need a person first. Returns them, and how many more there are.
    """
    ended = sorted(
        (not (run.needs_person_for(()) or (key in given_up and not run.is_by_hand)), key, run)
        for key, run in dagster.latest_runs(keys).items()
        if run.ended_badly
    )
    shown = [
        Outlook(key, _ending(run), not is_tried_again, why_ended(dagster, run))
        for is_tried_again, key, run in ended[:most]
    ]
    return shown, len(ended) - len(shown)


def _ending(run: RunState) -> str:
    if run.interrupted_by == NEVER_STARTED:
        return "Not started"
    return "Failed" if run.interrupted_by is None else "Interrupted"


def why_ended(dagster: InstanceRuns, run: RunState) -> str:
    """Why a run did not end well, in one line that goes on with "because"."""
    if run.interrupted_by == NEVER_STARTED:
        return "the machine was too busy to start its run: no failure of the partition, and no attempt"
    error = dagster.error_of(run.run_id) or f"run {run.run_id[:8]} ended without a word"
    # It may quote a file's name or a model server's answer, and the ledger keeps it.
    return storable_text(_shortened(" ".join(error.split())).rstrip("."))


def _shortened(text: str) -> str:
    """The first sentences of a text, as many as fit. None of its commands is cut in two."""
    if len(text) <= _LONGEST:
        return text
    text = text[:_LONGEST]
    if text.count("`") % 2:
        text = text[: text.rindex("`")]
    return f"{text.rpartition('. ')[0] or text.rstrip()} …"

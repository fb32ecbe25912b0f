"""Which check results a person is told of, and which say that something is right again.

What lives here: reading the new results, and what an alert of one says. What does not: the tick
(``alerts.py``), what was found wrong (the checks), what Dagster's tables look like (``dagster_internals``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from resources.alerts.alert import Alert
from sensors.dagster_facts import DagsterFacts
from sensors.dagster_internals.events import CheckEvaluation
from sensors.partition_history import PartitionHistory

FAILED, WARNED = "check_failed", "check_warning"

FOUND_AT = "found at"
"""Metadata of a result without a run: when it was found. It may be reported twice, with the same."""

_LOOK_BACK = 200
"""Events that are read again: on Postgres a lower id may become visible after a higher one."""

_AT_ONCE = 5000
_EXPECTED, _FOUND, _WHAT_TO_DO = "expected", "found", "what to do"


def new_evaluations(
    dagster: DagsterFacts, cursor: int | None, assets: Sequence[str]
) -> tuple[list[CheckEvaluation], int]:
    """The results since the last look, oldest first, some of them seen before, and where to go on.

    At the very first look (cursor None) of a long history: what stands failed now, not what once did. A
    history that was wiped or lost counts from 1 again: it is looked at as the first time.
    """
    newest = dagster.newest_evaluation()
    if cursor is None or newest < cursor:
        found, until = dagster.evaluations_since(0, limit=_AT_ONCE)
        if until >= newest:
            return found, until
        history = PartitionHistory(assets)
        history.look(dagster)
        return [one for asset in assets for of in history.failing(asset).values() for one in of], newest
    found, until = dagster.evaluations_since(cursor, look_back=_LOOK_BACK, limit=_AT_ONCE)
    before = cursor
    while until > before:
        # All of a storm in one tick, so that it is one message.
        before = until
        more, until = dagster.evaluations_since(before, limit=_AT_ONCE)
        found += more
    return found, until


def subject_of(one: CheckEvaluation) -> str:
    """What a result is about: the same check of the same partition, whatever run gave it."""
    return "/".join(part for part in (one.asset, one.partition, one.check) if part)


def alert_of(one: CheckEvaluation) -> Alert | None:
    """What a person is told of a result; nothing of one that passed."""
    if one.passed:
        return None
    of = f"{one.asset} {one.partition}" if one.partition else one.asset
    stops = one.severity == "ERROR"
    return Alert(
        kind=FAILED if stops else WARNED,
        subject=subject_of(one),
        # Not the row's number: a database begun anew counts from 1 again.
        occurrence=one.run_id or one.metadata.get(FOUND_AT) or f"{one.at:.3f}",
        severity="error" if stops else "warning",
        title=f"{one.check} {'failed' if stops else 'warns'}: {of}",
        partition=one.partition,
        expected=one.metadata.get(_EXPECTED),
        found=one.metadata.get(_FOUND) or one.description or None,
        next_step=one.metadata.get(_WHAT_TO_DO) or "Open the page below: the check says what it found.",
        page=f"runs/{one.run_id}"
        if one.run_id
        else f"assets/{one.asset}?view=checks&checkDetail={one.check}",
        at=one.at,
    )


def passed_again(evaluations: Iterable[CheckEvaluation]) -> dict[str, str]:
    """Sentences, by subject, of what passed at its latest result among these."""
    latest = {subject_of(one): one for one in sorted(evaluations, key=lambda one: one.storage_id)}
    return {
        subject: f"{one.check} passed. {one.description}".strip()
        for subject, one in latest.items()
        if one.passed
    }

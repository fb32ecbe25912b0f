"""Which failed runs a person is told of, and which of them are right again.

What lives here: leaving out what others look after, and what an alert of a run says. What does not: the
tick (``alerts.py``), starting anything again. Left out: runs that were interrupted (they are resumed), that
Dagster retries by itself, and that failed because of a check whose own alert says more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import dagster as dg

from resources.alerts.alert import Alert
from sensors.dagster_facts import DagsterFacts
from sensors.dagster_internals.runs import UNDER_WAY, RunState
from sensors.partition_history import PartitionHistory

FAILED, STANDS, STUCK = "run_failed", "queue_stands", "run_stuck"
QUEUE = "queue"
"""Subject of the queue that stands."""

STANDSTILL_SECONDS = 900.0
"""How long runs may wait with none under way: longer than any start or retry takes."""


_JOB = "job"
_SETTLED_SECONDS = 3.0
"""A run is failed a moment before it says whether Dagster retries it."""

_LOOK_BACK_SECONDS = 600.0
_FIRST_LOOK_SECONDS = 3600.0
_WORDED = 20
"""Runs of one look whose error is read from their log; a storm's others are told by their partition."""


def failed_runs(dagster: DagsterFacts, since: float | None, *, now: float) -> tuple[list[RunState], float]:
    """Runs that failed since the last look, some of them seen before, and from when to go on.

    since: unix seconds; None at the very first look, which goes back an hour.
    """
    # A clock that was put back hides nothing.
    start = now - _FIRST_LOOK_SECONDS if since is None else min(since, now) - _LOOK_BACK_SECONDS
    found = dagster.runs_ended_since(start, [dg.DagsterRunStatus.FAILURE])
    return [one for one in found if _concerns_a_person(one, now)], now


def _concerns_a_person(run: RunState, now: float) -> bool:
    settled = run.ended_at is None or run.ended_at <= now - _SETTLED_SECONDS
    return settled and run.interrupted_by is None and not run.is_retried_by_dagster


def alerts_of(
    dagster: DagsterFacts,
    failed: Sequence[RunState],
    history: PartitionHistory,
    *,
    by_hand: frozenset[str] = frozenset(),
) -> Iterator[Alert]:
    """What a person is told of these runs. history: how the partitions of their assets stand.

    by_hand: assets that nobody tries again but a person.
    """
    if failed:
        history.look(dagster)
    attempts = _assets_by_run(history)
    selections = dagster.selections([one.run_id for one in failed])
    for number, one in enumerate(failed):
        if one.run_id not in selections:
            continue  # Deleted meanwhile, by hand.
        job, selected = selections[one.run_id]
        # A run of a whole job has no selection; what it was to materialize and did not is known all the same.
        assets = selected or attempts.get(one.run_id, [])
        of = " and ".join(assets) or job
        error = dagster.error_of(one.run_id) if number < _WORDED else None
        yield Alert(
            kind=FAILED,
            subject=_subject(assets, job, one.partition),
            occurrence=one.run_id,
            severity="error",
            title=f"Run failed: {of} {one.partition}" if one.partition else f"Run failed: {of}",
            partition=one.partition,
            expected="a run that ends with its output published",
            found=error or "a failed run",
            next_step=(
                "The error on the run's page says what to do. The scheduled re-materialization tries the"
                " partition again by itself; when it gives up, another alert says so."
                if one.partition and by_hand.isdisjoint(assets)
                else "The error on the run's page says what to do; then launch it again."
            ),
            page=f"runs/{one.run_id}",
            at=one.ended_at or one.created_at,
        )


def queued_while_nothing_runs(dagster: DagsterFacts) -> int:
    """How many runs wait although none is under way; 0 where one is."""
    return 0 if dagster.runs_in(UNDER_WAY) else len(dagster.runs_in([dg.DagsterRunStatus.QUEUED]))


def queue_stands(queued: int, *, since: float, now: float) -> Iterator[Alert]:
    """An alert where runs have waited for long and none was under way. since: unix seconds."""
    if now - since <= STANDSTILL_SECONDS:
        return
    yield Alert(
        kind=STANDS,
        subject=QUEUE,
        occurrence=f"{since:.0f}",
        severity="error",
        title=f"{queued} runs are queued and none is started",
        expected="a run under way while others wait",
        found=f"none for {(now - since) / 60:.0f} minutes",
        next_step=(
            "`vlm-assets devices` says which devices are left out or held: take one back, or end what holds"
            " them. With free devices, look at the pool's limit under Deployment > Concurrency: at 0 none"
            " starts. Else look at the daemon's log and start Dagster again."
        ),
        page="runs?q%5B%5D=status%3AQUEUED",
        at=now,
    )


def silent_runs(
    dagster: DagsterFacts, working: Collection[str], before: Mapping[str, float], *, now: float
) -> list[tuple[RunState, float]]:
    """Runs of partitions that have begun and have no heartbeat, and since when (unix seconds of a look).

    working: ids of runs with a heartbeat. before: what the last look saw, by id.
    """
    begun = [one for one in dagster.runs_in(UNDER_WAY) if one.is_here or one.ray_job is not None]
    return [
        (run, before.get(run.run_id, now))
        for run in begun
        if run.status is dg.DagsterRunStatus.STARTED and run.partition and run.run_id not in working
    ]


def run_stuck(run: RunState, since: float, *, now: float) -> Alert:
    """An alert of a run whose process lives and that does not work: nobody could judge its worker."""
    return Alert(
        kind=STUCK,
        subject=f"runs/{run.run_id}",
        occurrence=run.run_id,
        severity="error",
        title=f"The run of partition {run.partition} does not begin to work",
        partition=run.partition,
        expected="a materialization under way",
        found=f"a run that was started, and no heartbeat for {(now - since) / 60:.0f} minutes",
        next_step=(
            "Open the run: its last event says what it waits for (a model hub, a network disk). Terminate it"
            " there; what is committed stays, and launched again by hand it goes on."
        ),
        page=f"runs/{run.run_id}",
        at=now,
    )


def going_on(open_alerts: Iterable[Alert], silent: Collection[str]) -> dict[str, str]:
    """Sentences, by subject, of stuck runs that are no longer silent."""
    return {
        alert.subject: "It works, or has ended."
        for alert in open_alerts
        if alert.kind == STUCK and alert.occurrence not in silent
    }


def right_again(
    dagster: DagsterFacts, open_alerts: Iterable[Alert], history: PartitionHistory
) -> dict[str, str]:
    """Sentences, by subject, of failed runs whose output was materialized since."""
    found = {}
    failed = [alert for alert in open_alerts if alert.kind == FAILED]
    if failed:
        history.look(dagster)
    for alert in failed:
        names = alert.subject.split("/")[0].split("+")
        if alert.partition is not None:
            if not set(names) <= set(history.assets):
                names = list(history.assets)  # of a run whose assets were not known: all of them
            if all(_stands(history, name, alert.partition) for name in names):
                found[alert.subject] = "The partition was materialized since."
        elif _succeeded_since(dagster, alert, names):
            found[alert.subject] = "It ran again and succeeded."
    return found


def _stands(history: PartitionHistory, asset: str, partition: str) -> bool:
    # An attempt after the materialization stands open until the next materialization.
    return partition in history.materialized[asset] and partition not in history.open_attempts[asset]


def _succeeded_since(dagster: DagsterFacts, alert: Alert, names: Collection[str]) -> bool:
    if names == [_JOB]:
        return (dagster.succeeded_at(alert.subject.split("/")[1]) or 0.0) > alert.at
    known = [dagster.latest_materialization(name) for name in names]
    return all(one is not None and one[0] > alert.at for one in known)


def _subject(assets: Sequence[str], job: str, partition: str | None) -> str:
    names = ["+".join(assets)] if assets else [_JOB, job]
    return "/".join([*names, *([partition] if partition else []), "run"])


def _assets_by_run(history: PartitionHistory) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for asset in sorted(history.assets):
        for attempt in history.open_attempts[asset].values():
            found.setdefault(attempt.run_id, []).append(asset)
    return found

"""Runs by the rows of Dagster's tables: in what state, of which partition, launched and ended by whom.

What lives here: reading many at once, without a run's body. What does not: what follows from it
(``retry_decision.py``, ``cancels.py``, ``run_alerts.py``). The public calls deserialize each run, which costs
seconds a tick where ten thousand have failed.

Checked with dagster 1.13.27. Not public: the tables of runs and of their tags, and the tags
``dagster/will_retry``, ``dagster/failure_reason``, ``dagster/retry_number``. If the tables change:
``get_run_records`` with a ``RunsFilter`` gives the same, slowly. If a tag goes: runs that Dagster retries
are seen by their children's ``dagster/parent_run_id``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dagster import DagsterInstance, DagsterRunStatus

from sensors.dagster_internals.tables import Row, naive, of_runs, run_table, tag_table, unix

LAUNCHED_BY = "vlm-assets/launched-by"
"""Run tag: who launched a run that no person did. The value RETRY marks those of the retry schedule."""
RETRY = "retry"
GOES_ON_WITH = "vlm-assets/goes-on-with"
"""Run tag: the parent that the retry schedule gave a run of its own; a re-execution has another."""

NO_ATTEMPT = "vlm-assets/no-attempt"
"""Run tag: the run's own id, where it ended for no fault of its partition though a step of it failed.

The id, because Dagster's run retries inherit tags.
"""
NEEDS_PERSON = "vlm-assets/needs-person"
"""Run tag: the run's own id, where it stopped for what another start would only repeat."""

_PARTITION = "dagster/partition"
_RUN_KEY = "dagster/run_key"
_FAILURE_REASON = "dagster/failure_reason"
_WILL_RETRY = "dagster/will_retry"
_RETRY_NUMBER = "dagster/retry_number"
_BACKFILL = "dagster/backfill"
_PARENT = "dagster/parent_run_id"
_TAGS = (_PARTITION, _RUN_KEY, _FAILURE_REASON, _WILL_RETRY, _RETRY_NUMBER, _BACKFILL, _PARENT)

FINISHED = frozenset({DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED})

_CHUNK = 500


@dataclass(frozen=True)
class RunState:
    """A run, without its body. Times in unix seconds; ``ended_at`` None while it is not finished."""

    run_id: str
    status: DagsterRunStatus
    created_at: float
    ended_at: float | None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in FINISHED

    @property
    def partition(self) -> str | None:
        """The key of its one partition."""
        return self.tags.get(_PARTITION)

    @property
    def run_key(self) -> str | None:
        """The key by which a tick that is repeated finds the run that it launched."""
        return self.tags.get(_RUN_KEY)

    @property
    def backfill(self) -> str | None:
        """The backfill that it is part of."""
        return self.tags.get(_BACKFILL)

    @property
    def interrupted_by(self) -> str | None:
        """What ended it, where that is no fault of its partition; ``UNEXPECTED_TERMINATION`` from outside.

        Nothing did where a person cancelled it, whatever was said of it just before: a stuck worker that is
        told to end ends its run as failed, and as cancelled only where somebody asked Dagster for that.
        """
        if self.status is DagsterRunStatus.CANCELED:
            return None
        reason = self.tags.get(_FAILURE_REASON)
        outside = reason if reason == "UNEXPECTED_TERMINATION" else None
        return "no attempt" if self.tags.get(NO_ATTEMPT) == self.run_id else outside

    @property
    def needs_person(self) -> bool:
        """Whether it stopped for what another start would only repeat."""
        return self.tags.get(NEEDS_PERSON) == self.run_id

    @property
    def is_retried_by_dagster(self) -> bool:
        """Whether Dagster's run retries have said that they start it again."""
        return self.status is DagsterRunStatus.FAILURE and self.tags.get(_WILL_RETRY) == "true"

    @property
    def retry_number(self) -> int:
        """How often Dagster's run retries had started it before, itself counted; 0 where they did not."""
        said = self.tags.get(_RETRY_NUMBER, "")
        return int(said) if said.isdecimal() else 0

    @property
    def is_by_hand(self) -> bool:
        """Whether a person asked for it: neither the retry schedule nor Dagster's run retries did.

        One that a person re-executes inherits the schedule's tags; it is told by its parent.
        """
        ours = self.tags.get(LAUNCHED_BY) == RETRY and self.tags.get(_PARENT) == self.tags.get(GOES_ON_WITH)
        return not ours and _RETRY_NUMBER not in self.tags


def run_states(instance: DagsterInstance, run_ids: Collection[str]) -> dict[str, RunState]:
    """Runs by id; one that was deleted is left out."""
    runs = run_table()
    wanted = sorted(set(run_ids))
    found: dict[str, RunState] = {}
    for start in range(0, len(wanted), _CHUNK):
        chunk = wanted[start : start + _CHUNK]
        found.update((one.run_id, one) for one in _runs_where(instance, runs.c.run_id.in_(chunk)))
    return found


def runs_with_key(instance: DagsterInstance, run_keys: Collection[str]) -> dict[str, RunState]:
    """Runs by run key; the newest of each. Run keys that no run has are left out."""
    import sqlalchemy as db

    tags = tag_table()
    wanted = sorted(set(run_keys))
    found: dict[str, RunState] = {}
    for start in range(0, len(wanted), _CHUNK):
        chunk = wanted[start : start + _CHUNK]
        runs = run_table()
        of_keys = db.select(tags.c.run_id).where(tags.c.key == _RUN_KEY, tags.c.value.in_(chunk))
        for one in _runs_where(instance, runs.c.run_id.in_(of_keys)):
            if one.run_key is not None:
                found[one.run_key] = one
    return found


def runs_ended_since(
    instance: DagsterInstance, since: float, statuses: Collection[DagsterRunStatus]
) -> list[RunState]:
    """Runs that are in one of these states and changed at or after ``since`` (unix seconds), oldest first."""
    runs = run_table()
    return _runs_where(
        instance,
        runs.c.status.in_([one.value for one in statuses]),
        runs.c.update_timestamp >= naive(since),
    )


def runs_created_since(instance: DagsterInstance, since: float) -> list[RunState]:
    """Runs that were created at or after ``since`` (unix seconds), oldest first."""
    return _runs_where(instance, run_table().c.create_timestamp >= naive(since))


def unfinished_partitions(instance: DagsterInstance) -> set[str]:
    """Partitions that have a run which is queued, starting, started or ending, or was just created."""
    import sqlalchemy as db

    runs, tags = run_table(), tag_table()
    query = (
        db.select(tags.c.value)
        .join(runs, runs.c.run_id == tags.c.run_id)
        .where(tags.c.key == _PARTITION, runs.c.status.not_in([one.value for one in FINISHED]))
    )
    with of_runs(instance) as connection:
        return set(connection.execute(query).scalars())


def _runs_where(instance: DagsterInstance, *conditions: Any) -> list[RunState]:
    """Runs by conditions on their table, oldest first."""
    import sqlalchemy as db

    runs, tags = run_table(), tag_table()
    times = (runs.c.create_timestamp, runs.c.update_timestamp, runs.c.end_time)
    query = db.select(runs.c.run_id, runs.c.status, *times).where(*conditions).order_by(runs.c.id)
    wanted = (*_TAGS, LAUNCHED_BY, GOES_ON_WITH, NO_ATTEMPT, NEEDS_PERSON)
    their_tags = db.select(tags.c.run_id, tags.c.key, tags.c.value).where(
        tags.c.key.in_(wanted), tags.c.run_id.in_(db.select(runs.c.run_id).where(*conditions))
    )
    with of_runs(instance) as connection:
        rows = connection.execute(query).mappings().all()
        tags_of: dict[str, dict[str, str]] = {}
        for run_id, key, value in connection.execute(their_tags).all() if rows else ():
            tags_of.setdefault(run_id, {})[key] = value
    return [_run_state(row, tags_of.get(row["run_id"], {})) for row in rows]


def _run_state(row: Row, tags: Mapping[str, str]) -> RunState:
    status = DagsterRunStatus(row["status"])
    ended = row["end_time"] or unix(row["update_timestamp"]) if status in FINISHED else None
    return RunState(row["run_id"], status, unix(row["create_timestamp"]), ended, tags)

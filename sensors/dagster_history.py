"""What Dagster's database says of partitions, runs and checks: the one module that uses its private tables.

What lives here: reading, a row at a time and only what is new. What does not: what follows from it
(``retry_decision.py``, ``check_alerts.py``). The public calls deserialize a run or an event for each of ten
thousand partitions, which costs seconds a tick; two of the tables behind them answer in milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from dagster import AssetCheckEvaluation, AssetKey, DagsterInstance, DagsterRunStatus
from dagster import DagsterEventType as EventType

LAUNCHED_BY = "vlm-assets/launched-by"
"""Run tag: who launched a run that no person did. The value RETRY marks those of the retry schedule."""
RETRY = "retry"

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
_TAGS = (_PARTITION, _RUN_KEY, _FAILURE_REASON, _WILL_RETRY, _RETRY_NUMBER, _BACKFILL)

FINISHED = frozenset({DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED})

_CHUNK = 500
_LOOK_BACK = 200
"""Events read again at each look: on Postgres a lower id may become visible after a higher one."""
_EVALUATIONS_A_LOOK = 5000

Severity = Literal["WARN", "ERROR"]


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
    def is_by_hand(self) -> bool:
        """Whether a person asked for it: neither the retry schedule nor Dagster's run retries did."""
        return self.tags.get(LAUNCHED_BY) != RETRY and _RETRY_NUMBER not in self.tags


@dataclass(frozen=True)
class Evaluation:
    """One result of a check. metadata: as text. storage_id: grows with every event of the database."""

    asset: str
    check: str
    partition: str | None
    passed: bool
    severity: Severity
    description: str
    metadata: Mapping[str, str]
    run_id: str
    at: float
    storage_id: int

    @property
    def stops(self) -> bool:
        """Whether it is a failed check that kept, or must keep, the partition from being used."""
        return not self.passed and self.severity == "ERROR"


@dataclass(frozen=True)
class OpenAttempt:
    """The latest time that a partition was to be materialized, where it was not (yet)."""

    run_id: str
    storage_id: int


class PartitionHistory:
    """How the partitions of some assets stand, kept between looks so that a look reads only what is new.

    open_attempts, materialized (storage id of the latest materialization), failing (standing evaluations
    with severity ERROR, by check): each by asset and then by partition. A failing evaluation stands until
    the check is evaluated again, or the partition is materialized again.
    """

    def __init__(self, assets: Sequence[str]) -> None:
        self.assets = tuple(assets)
        self._forget()

    def _forget(self) -> None:
        self.open_attempts: dict[str, dict[str, OpenAttempt]] = {asset: {} for asset in self.assets}
        self.materialized: dict[str, dict[str, int]] = {asset: {} for asset in self.assets}
        self._latest: dict[str, dict[tuple[str, str], Evaluation]] = {asset: {} for asset in self.assets}
        self._events_until = 0
        self._checks_until = 0

    def look(self, instance: DagsterInstance) -> None:
        """Read what is new. A database that is younger than the last look is read from its start."""
        newest = _newest_event(instance)
        if newest < self._events_until:
            self._forget()
        if self._events_until == newest == self._checks_until:
            return
        for asset in self.assets:
            self._look_at_attempts(instance, asset)
        if not self._events_until:
            for one in _latest_failures(instance, self.assets):
                self._take(one)
            self._checks_until = newest
        else:
            found, until = evaluations_since(
                instance, self._checks_until, look_back=_LOOK_BACK, limit=_EVALUATIONS_A_LOOK
            )
            for one in found:
                self._take(one)
            # A look that was cut short goes on from there at the next one.
            self._checks_until = until if len(found) >= _EVALUATIONS_A_LOOK else newest
        self._events_until = newest

    def failing(self, asset: str) -> dict[str, list[Evaluation]]:
        """Standing evaluations that stop a partition, by partition."""
        standing: dict[str, list[Evaluation]] = {}
        materialized = self.materialized[asset]
        for (partition, _), one in self._latest[asset].items():
            if one.stops and one.storage_id > materialized.get(partition, 0):
                standing.setdefault(partition, []).append(one)
        return standing

    def _take(self, one: Evaluation) -> None:
        if one.asset not in self._latest or one.partition is None:
            return
        latest = self._latest[one.asset]
        at = (one.partition, one.check)
        known = latest.get(at)
        if known is not None and known.storage_id > one.storage_id:
            return
        # What does not stop anything is remembered by its absence.
        if one.stops:
            latest[at] = one
        else:
            latest.pop(at, None)

    def _look_at_attempts(self, instance: DagsterInstance, asset: str) -> None:
        attempts, materialized = self.open_attempts[asset], self.materialized[asset]
        for row in _materialization_events(instance, asset, self._events_until - _LOOK_BACK):
            partition: str | None = row["partition"]
            if partition is None:
                continue
            if row["dagster_event_type"] == EventType.ASSET_MATERIALIZATION.value:
                materialized[partition] = row["id"]
                attempts.pop(partition, None)
            else:
                attempts[partition] = OpenAttempt(row["run_id"], row["id"])


def evaluations_since(
    instance: DagsterInstance, cursor: int, *, look_back: int = 0, limit: int = 1000
) -> tuple[list[Evaluation], int]:
    """Check results written after ``cursor`` (0: from the start), oldest first, and where to go on.

    A result has its id from when it came, not from when its check was planned. ``look_back`` reads that many
    ids before the cursor again: on Postgres they may have become visible since; keep what was seen.
    """
    rows = _rows_of_evaluations(instance, cursor - look_back, limit)
    found = [one for row in rows if (one := _evaluation(row)) is not None]
    return found, max([cursor, *(row["id"] for row in rows)])


def newest_evaluation(instance: DagsterInstance) -> int:
    """A cursor after all results that are there now."""
    import sqlalchemy as db

    events = _event_table()
    query = db.select(db.func.max(events.c.id)).where(
        events.c.dagster_event_type == EventType.ASSET_CHECK_EVALUATION.value
    )
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        return int(connection.execute(query).scalar() or 0)


def run_states(instance: DagsterInstance, run_ids: Collection[str]) -> dict[str, RunState]:
    """Runs by id; one that was deleted is left out."""
    runs = _run_table()
    wanted = sorted(set(run_ids))
    found: dict[str, RunState] = {}
    for start in range(0, len(wanted), _CHUNK):
        chunk = wanted[start : start + _CHUNK]
        found.update((one.run_id, one) for one in _runs_where(instance, runs.c.run_id.in_(chunk)))
    return found


def runs_with_key(instance: DagsterInstance, run_keys: Collection[str]) -> dict[str, RunState]:
    """Runs by run key; the newest of each. Run keys that no run has are left out."""
    import sqlalchemy as db

    tags = _tag_table()
    wanted = sorted(set(run_keys))
    found: dict[str, RunState] = {}
    for start in range(0, len(wanted), _CHUNK):
        chunk = wanted[start : start + _CHUNK]
        runs = _run_table()
        of_keys = db.select(tags.c.run_id).where(tags.c.key == _RUN_KEY, tags.c.value.in_(chunk))
        for one in _runs_where(instance, runs.c.run_id.in_(of_keys)):
            if one.run_key is not None:
                found[one.run_key] = one
    return found


def runs_ended_since(
    instance: DagsterInstance, since: float, statuses: Collection[DagsterRunStatus]
) -> list[RunState]:
    """Runs that are in one of these states and changed at or after ``since`` (unix seconds), oldest first."""
    runs = _run_table()
    return _runs_where(
        instance,
        runs.c.status.in_([one.value for one in statuses]),
        runs.c.update_timestamp >= _naive(since),
    )


def runs_created_since(instance: DagsterInstance, since: float) -> list[RunState]:
    """Runs that were created at or after ``since`` (unix seconds), oldest first."""
    return _runs_where(instance, _run_table().c.create_timestamp >= _naive(since))


def unfinished_partitions(instance: DagsterInstance) -> set[str]:
    """Partitions that have a run which is queued, starting, started or ending, or was just created."""
    import sqlalchemy as db

    runs, tags = _run_table(), _tag_table()
    query = (
        db.select(tags.c.value)
        .join(runs, runs.c.run_id == tags.c.run_id)
        .where(tags.c.key == _PARTITION, runs.c.status.not_in([one.value for one in FINISHED]))
    )
    with instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
        return set(connection.execute(query).scalars())


def unfinished_runs(instance: DagsterInstance) -> list[RunState]:
    """Every run that is queued, starting, started or ending, oldest first."""
    return _runs_where(instance, _run_table().c.status.not_in([one.value for one in FINISHED]))


def report_evaluation(instance: DagsterInstance, found: AssetCheckEvaluation) -> None:
    """Tell Dagster the result of a check that no run made, for one partition; replaces the one told before.

    Dagster keeps one such result a check and partition, and refuses the next: a unique index over asset,
    check, partition and run, and the run is the same empty name for all. The earlier event stays in its log.
    """
    import sqlalchemy as db
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable as Executions

    told_before = (
        Executions.c.asset_key == found.asset_key.to_string(),
        Executions.c.check_name == found.check_name,
        Executions.c.partition == found.partition,
        Executions.c.run_id == "",
    )
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        connection.execute(db.delete(Executions).where(*told_before))
    # Killed here, nothing is told, and whoever tells it has not noted that it did.
    instance.report_runless_asset_event(found)


def _runs_where(instance: DagsterInstance, *conditions: Any) -> list[RunState]:
    """Runs by conditions on their table, oldest first."""
    import sqlalchemy as db

    runs, tags = _run_table(), _tag_table()
    times = (runs.c.create_timestamp, runs.c.update_timestamp, runs.c.end_time)
    query = db.select(runs.c.run_id, runs.c.status, *times).where(*conditions).order_by(runs.c.id)
    wanted = (*_TAGS, LAUNCHED_BY, NO_ATTEMPT, NEEDS_PERSON)
    of_runs = db.select(tags.c.run_id, tags.c.key, tags.c.value).where(
        tags.c.key.in_(wanted), tags.c.run_id.in_(db.select(runs.c.run_id).where(*conditions))
    )
    with instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
        rows = connection.execute(query).mappings().all()
        tags_of: dict[str, dict[str, str]] = {}
        for run_id, key, value in connection.execute(of_runs).all() if rows else ():
            tags_of.setdefault(run_id, {})[key] = value
    return [_run_state(row, tags_of.get(row["run_id"], {})) for row in rows]


def _run_state(row: Mapping[str, Any], tags: Mapping[str, str]) -> RunState:
    status = DagsterRunStatus(row["status"])
    ended = row["end_time"] or _unix(row["update_timestamp"]) if status in FINISHED else None
    return RunState(row["run_id"], status, _unix(row["create_timestamp"]), ended, tags)


def _materialization_events(instance: DagsterInstance, asset: str, after: int) -> Sequence[Mapping[str, Any]]:
    import sqlalchemy as db

    events = _event_table()
    kinds = (EventType.ASSET_MATERIALIZATION, EventType.ASSET_MATERIALIZATION_PLANNED)
    query = (
        db.select(events.c.id, events.c.dagster_event_type, events.c.partition, events.c.run_id)
        .where(
            events.c.asset_key == AssetKey(asset).to_string(),
            events.c.dagster_event_type.in_([kind.value for kind in kinds]),
            events.c.id > after,
        )
        .order_by(events.c.id)
    )
    return _mappings(instance, query)


def _rows_of_evaluations(instance: DagsterInstance, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
    import sqlalchemy as db

    events = _event_table()
    query = (
        db.select(events.c.id, events.c.event)
        .where(
            events.c.dagster_event_type == EventType.ASSET_CHECK_EVALUATION.value,
            events.c.id > after,
        )
        .order_by(events.c.id)
        .limit(limit)
    )
    return _mappings(instance, query)


def _latest_failures(instance: DagsterInstance, assets: Sequence[str]) -> Iterator[Evaluation]:
    """The latest result of every check and partition where it failed: only these texts are read."""
    import sqlalchemy as db
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable as Executions

    newest = (
        db.select(db.func.max(Executions.c.id))
        .where(
            Executions.c.asset_key.in_([AssetKey(asset).to_string() for asset in assets]),
            # A run that ended before its checks leaves them planned for ever; the result before it stands.
            Executions.c.execution_status != "PLANNED",
        )
        .group_by(Executions.c.asset_key, Executions.c.check_name, Executions.c.partition)
    )
    query = db.select(
        Executions.c.evaluation_event_storage_id.label("id"), Executions.c.evaluation_event.label("event")
    ).where(Executions.c.id.in_(newest), Executions.c.execution_status == "FAILED")
    for row in _mappings(instance, query):
        if row["id"] is not None and (one := _evaluation(row)) is not None:
            yield one


def _evaluation(row: Mapping[str, Any]) -> Evaluation | None:
    from dagster import EventLogEntry
    from dagster._serdes import deserialize_value

    entry: EventLogEntry = deserialize_value(row["event"], EventLogEntry)
    found = entry.dagster_event.event_specific_data if entry.dagster_event else None
    if not isinstance(found, AssetCheckEvaluation):
        return None
    return Evaluation(
        asset=found.asset_key.to_user_string(),
        check=found.check_name,
        partition=found.partition,
        passed=found.passed,
        severity=found.severity.value,
        description=found.description or "",
        metadata={name: str(value.value) for name, value in found.metadata.items()},
        run_id=entry.run_id,
        at=entry.timestamp,
        storage_id=row["id"],
    )


def _newest_event(instance: DagsterInstance) -> int:
    import sqlalchemy as db

    query = db.select(db.func.max(_event_table().c.id))
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        return int(connection.execute(query).scalar() or 0)


def _mappings(instance: DagsterInstance, query: Any) -> Sequence[Mapping[str, Any]]:
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        rows: Sequence[Mapping[str, Any]] = connection.execute(query).mappings().all()
    return rows


def _event_table() -> Any:
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable

    return SqlEventLogStorageTable


def _run_table() -> Any:
    from dagster._core.storage.runs.schema import RunsTable

    return RunsTable


def _tag_table() -> Any:
    from dagster._core.storage.runs.schema import RunTagsTable

    return RunTagsTable


def _unix(stamp: datetime) -> float:
    """Seconds of a time that the database keeps in UTC without saying so."""
    return stamp.replace(tzinfo=UTC).timestamp()


def _naive(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None, microsecond=0)

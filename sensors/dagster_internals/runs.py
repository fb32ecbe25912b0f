"""Runs from the rows of Dagster's tables: their states, processes and places in pools, and ending a run.

What lives here: reading many runs at once, without their bodies, and reporting the end of a run. What does
not: the decisions (``failed_partitions.py``, ``cancels.py``, ``reconciliation.py``, ``alerts.py``). The
public calls deserialize each run, which costs seconds a tick after ten thousand have failed.

Checked with dagster 1.13.27. Not public: the tables of runs and of their tags; the tags
``dagster/will_retry``, ``dagster/failure_reason``, ``dagster/retry_number`` and ``.dagster/grpc_info``;
``get_backfills``, ``get_backfill`` and the fields of ``asset_backfill_data``; ``all_logs``,
``event_log_storage`` (pools), ``report_run_failed`` and ``report_run_canceled``. If the tables change:
``get_run_records`` with a ``RunsFilter`` gives the same, slowly. If a tag goes: runs that Dagster retries are
seen by their children's ``dagster/parent_run_id``, and runs that were ended from outside count as failed
attempts. If backfills change: GraphQL's ``partitionBackfillsOrError``; with an empty set, a partition that a
backfill will launch may be launched by the retry schedule too, and its second run waits for the first one's
lock. If ending or pools change: GraphQL has ``terminateRuns`` (MARK_AS_CANCELED_IMMEDIATELY) and
``setConcurrencyLimit``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import sqlalchemy as db
from dagster import DagsterInstance, DagsterRunStatus
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.runs.schema import RunsTable, RunTagsTable

from resources.dagster_names import (
    FAILURE_REASON,
    NEEDS_PERSON,
    NEVER_STARTED,
    NO_ATTEMPT,
    UNPREFIXED,
    DagsterNames,
    is_tagged,
)

LAUNCHED_BY = "vlm-assets/launched-by"
"""Run tag: what launched a run, if no person did. The value RETRY marks runs of the retry schedule."""
RETRY = "retry"
GOES_ON_WITH = "vlm-assets/goes-on-with"
"""Run tag: the parent that the retry schedule gave its run. A person's re-execution has another parent."""

LAUNCHER_JOB = "vlm-assets/job"
"""Run tag: the job as which an extension's launcher submitted the run."""

_PARTITION = "dagster/partition"
_RUN_KEY = "dagster/run_key"
_WILL_RETRY = "dagster/will_retry"
_RETRY_NUMBER = "dagster/retry_number"
_BACKFILL = "dagster/backfill"
_PARENT = "dagster/parent_run_id"
_SERVER = ".dagster/grpc_info"
_TAGS = (_SERVER, _PARTITION, _RUN_KEY, FAILURE_REASON, _WILL_RETRY, _RETRY_NUMBER, _BACKFILL, _PARENT)

FINISHED = frozenset({DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED})
UNFINISHED = frozenset(DagsterRunStatus) - FINISHED
_AT_WORK = frozenset({DagsterRunStatus.STARTING, DagsterRunStatus.STARTED})
UNDER_WAY = _AT_WORK | {DagsterRunStatus.CANCELING}
"""A run in one of these states may have a process."""

_BACKFILL_LAUNCHES = "REQUESTED"
_BACKFILL_GOES_ON = (_BACKFILL_LAUNCHES, "CANCELING", "FAILING")

_CHUNK = 500

_NO_FAULT = frozenset({"UNEXPECTED_TERMINATION", NEVER_STARTED})

_INTERRUPTED = {FAILURE_REASON: "UNEXPECTED_TERMINATION"}
"""The tag that Dagster gives a run that was ended from outside. Its retries do not inherit this tag."""

_HERE = {None, "", "localhost", "127.0.0.1", "::1"}


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
        """The key by which a repeated tick finds the run that it launched."""
        return self.tags.get(_RUN_KEY)

    @property
    def launched_by(self) -> str | None:
        """What launched it; None if a person did."""
        return self.tags.get(LAUNCHED_BY)

    @property
    def is_here(self) -> bool:
        """Whether this machine's code server started it: other launchers watch their own runs."""
        server_tag = self.tags.get(_SERVER)
        server = json.loads(server_tag) if server_tag is not None else {"host": "unknown"}
        return bool(server.get("socket")) or server.get("host") in _HERE

    @property
    def launcher_job(self) -> str | None:
        """The launcher's job as which it was submitted; None if it was not."""
        return tagged_launcher_job(self.run_id, self.tags)

    @property
    def backfill(self) -> str | None:
        """The backfill that it is part of."""
        return self.tags.get(_BACKFILL)

    @property
    def interrupted_by(self) -> str | None:
        """What ended it without a fault of its partition; None if nothing did.

        ``UNEXPECTED_TERMINATION``: it was ended from outside. ``START_TIMEOUT``: it never started. None for a
        run that a person cancelled, whatever its tags say. A stuck worker that is told to end ends its run as
        failed, and as cancelled only if a person asked Dagster for that.
        """
        return self.interruption_of(())

    @property
    def ended_badly(self) -> bool:
        """Whether it failed or was interrupted. A run that a person cancelled was not."""
        return self.finished and (self.status is DagsterRunStatus.FAILURE or self.interrupted_by is not None)

    def interruption_of(self, assets: Collection[str]) -> str | None:
        """What ended it without a fault of the partition of any of these assets. See ``interrupted_by``."""
        if self.status is DagsterRunStatus.CANCELED:
            return None
        if is_tagged(self.tags.get(NO_ATTEMPT), self.run_id, assets):
            return "no attempt"
        reason = self.tags.get(FAILURE_REASON)
        return reason if reason in _NO_FAULT else None

    def needs_person_for(self, assets: Collection[str]) -> bool:
        """Whether another start of each of these assets would only end the same way; of any, without one."""
        return is_tagged(self.tags.get(NEEDS_PERSON), self.run_id, assets)

    @property
    def is_retried_by_dagster(self) -> bool:
        """Whether Dagster has noted that its run retries start it again."""
        return self.status is DagsterRunStatus.FAILURE and self.tags.get(_WILL_RETRY) == "true"

    @property
    def retry_number(self) -> int:
        """Which retry of Dagster's run retries it is, from 1; 0 if it is none."""
        number = self.tags.get(_RETRY_NUMBER, "")
        return int(number) if number.isdecimal() else 0

    @property
    def is_by_hand(self) -> bool:
        """Whether a person asked for it, and neither the retry schedule nor Dagster's run retries.

        A run that a person re-executes inherits the schedule's tags, but it has another parent.
        """
        is_ours = self.launched_by == RETRY and self.tags.get(_PARENT) == self.tags.get(GOES_ON_WITH)
        return not is_ours and _RETRY_NUMBER not in self.tags


@dataclass(frozen=True)
class LaunchedBackfill:
    """A backfill. unfinished: Dagster goes on with it.

    keys: the partitions that it was launched for, by asset. awaited: those of them for which it will launch a
    run. error: the first line of why Dagster gave it up, whatever its runs did; None where it did not.
    """

    id: str
    unfinished: bool
    keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    awaited: frozenset[str] = frozenset()
    tags: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


def first_launcher_job(run_id: str) -> str:
    """The name of a run's first job. Later jobs of the run add a number to it."""
    return f"dagster-run-{run_id}"


def tagged_launcher_job(run_id: str, tags: Mapping[str, str]) -> str | None:
    """The job that the tag names; None if it is no job of this run.

    Dagster's run retries inherit the tag of their parent, and anyone who submits a run chooses its tags.
    """
    job = tags.get(LAUNCHER_JOB, "")
    return job if job.startswith(first_launcher_job(run_id)) else None


class InstanceRuns:
    """The part of ``DagsterFacts`` about runs. All times are in unix seconds.

    Assets go by their own names. With a prefix in ``names``, only runs of this home's assets are found; a run
    whose id is given is read whatever it materializes.
    """

    def __init__(self, instance: DagsterInstance, names: DagsterNames = UNPREFIXED) -> None:
        self.instance = instance
        self.names = names

    def run_states(self, run_ids: Collection[str]) -> dict[str, RunState]:
        """Runs by id; one that was deleted is left out."""
        ids = sorted(set(run_ids))
        states: dict[str, RunState] = {}
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            states.update((run.run_id, run) for run in self._runs_where(RunsTable.c.run_id.in_(chunk)))
        return states

    def runs_with_key(self, run_keys: Collection[str]) -> dict[str, RunState]:
        """Runs by run key; the newest of each. Run keys that no run has are left out."""
        return self._newest_by_tag(_RUN_KEY, run_keys)

    def latest_runs(self, partitions: Collection[str]) -> dict[str, RunState]:
        """The newest run of each of these partitions; those without a run are left out."""
        return self._newest_by_tag(_PARTITION, partitions)

    def _newest_by_tag(self, tag: str, values: Collection[str]) -> dict[str, RunState]:
        """The newest run with each of these values of a tag."""
        tags, listed = RunTagsTable, sorted(set(values))
        states: dict[str, RunState] = {}
        for start in range(0, len(listed), _CHUNK):
            chunk = listed[start : start + _CHUNK]
            tagged = db.select(tags.c.run_id).where(tags.c.key == tag, tags.c.value.in_(chunk))
            runs = self._own(self._runs_where(RunsTable.c.run_id.in_(tagged)))
            states |= {run.tags[tag]: run for run in runs}
        return states

    def runs_ended_since(self, since: float, statuses: Collection[DagsterRunStatus]) -> list[RunState]:
        """Runs in one of these states that changed at or after ``since`` (unix seconds), oldest first."""
        is_in_state = RunsTable.c.status.in_([status.value for status in statuses])
        return self._own(self._runs_where(is_in_state, RunsTable.c.update_timestamp >= _naive(since)))

    def runs_created_since(self, since: float) -> list[RunState]:
        """Runs that were created at or after ``since`` (unix seconds), oldest first."""
        return self._own(self._runs_where(RunsTable.c.create_timestamp >= _naive(since)))

    def runs_in(self, statuses: Collection[DagsterRunStatus]) -> list[RunState]:
        """Runs that are in one of these states now, oldest first."""
        return self._own(self._runs_where(RunsTable.c.status.in_([status.value for status in statuses])))

    def awaited_partitions(self, assets: Sequence[str]) -> set[str]:
        """Partitions of these assets for which an unfinished backfill will launch a run."""
        return {key for backfill in self.unfinished_backfills(assets) for key in backfill.awaited}

    def unfinished_backfills(self, assets: Sequence[str]) -> list[LaunchedBackfill]:
        """The backfills of these assets that Dagster goes on with, oldest first, whoever launched them."""
        from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus

        statuses = [BulkActionStatus(status) for status in _BACKFILL_GOES_ON]
        rows = self.instance.get_backfills(filters=BulkActionsFilter(statuses=statuses))
        backfills = [self._launched(row, assets) for row in reversed(rows)]
        return [backfill for backfill in backfills if backfill.keys]

    def backfill(self, backfill_id: str) -> LaunchedBackfill | None:
        """A backfill without its partitions; None if it was deleted."""
        row = self.instance.get_backfill(backfill_id)
        return None if row is None else self._launched(row, ())

    def _launched(self, row: Any, assets: Sequence[str]) -> LaunchedBackfill:
        keys: dict[str, frozenset[str]] = {}
        awaited: set[str] = set()
        data = row.asset_backfill_data
        for asset in assets if data is not None else ():
            key = self.names.key(asset)
            if targeted := _partitions_of(data.target_subset, key):
                keys[asset] = targeted
                launched = _partitions_of(data.requested_subset, key)
                awaited |= targeted - launched - _partitions_of(data.failed_and_downstream_subset, key)
        status, error = row.status.value, row.error.message.strip() if row.error else None
        return LaunchedBackfill(
            row.backfill_id,
            unfinished=status in _BACKFILL_GOES_ON,
            keys=keys,
            awaited=frozenset(awaited if status == _BACKFILL_LAUNCHES else ()),
            tags=dict(row.tags),
            error=error.splitlines()[0] if error else None,
        )

    def run_config(self, run_id: str) -> tuple[Mapping[str, Any], str] | None:
        """The run config of a run, and the id of its root run: its own id if it retries no other run."""
        run = self.instance.get_run_by_id(run_id)
        return None if run is None else (run.run_config, run.get_root_run_id() or run_id)

    def selections(self, run_ids: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
        """The job and the selected assets of runs, by id; one that was deleted is left out."""
        selections: dict[str, tuple[str, list[str]]] = {}
        for start in range(0, len(run_ids), _CHUNK):
            chunk = list(run_ids[start : start + _CHUNK])
            for run in self.instance.get_runs(dg.RunsFilter(run_ids=chunk)):
                assets = (self.names.asset(key) for key in run.asset_selection or ())
                selected = sorted(asset for asset in assets if asset is not None)
                selections[run.run_id] = (run.job_name, selected)
        return selections

    def error_of(self, run_id: str) -> str | None:
        """The error in a run's log: the asset's own sentence, else the message of the error's root cause."""
        types = {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE}
        message = None
        for entry in self.instance.all_logs(run_id, of_type=types):
            event = entry.dagster_event
            if event is None:
                continue
            if event.is_step_failure:
                data = event.step_failure_data
                if data.user_failure_data is not None and data.user_failure_data.description:
                    return data.user_failure_data.description
                error = data.error
                while error is not None and error.cause is not None:
                    error = error.cause
                return error.message.strip() if error is not None else event.message
            message = message or event.message
        return message

    def cancel_requested_at(self, run_id: str) -> float | None:
        """When a person asked to end a run (unix seconds); None if its log does not say."""
        entries = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_CANCELING)
        return entries[0].timestamp if entries else None

    def succeeded_at(self, job: str) -> float | None:
        """When the newest run of a job that succeeded has ended, in unix seconds."""
        succeeded = dg.RunsFilter(job_name=job, statuses=[DagsterRunStatus.SUCCESS])
        runs = self.instance.get_runs(succeeded, limit=1)
        return self.instance.get_run_stats(runs[0].run_id).end_time if runs else None

    def delete_run(self, run_id: str) -> None:
        """Forget a run that has done nothing."""
        self.instance.delete_run(run_id)

    def process_of(self, run_id: str) -> tuple[int, float] | None:
        """The pid that a run's process gave when it began, and when (unix seconds); None before that."""
        for entry in self.instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
            event = entry.get_dagster_event()
            pid = event.engine_event_data.metadata.get("pid")
            if pid is not None and event.step_key is None:
                return int(str(pid.value)), entry.timestamp
        return None

    def report_end(self, run_id: str, why: str) -> bool:
        """End a run as failed; or as cancelled, if it is being cancelled. False if it has ended meanwhile."""
        run = self.instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        if not self.end_cancelled(run_id, why):
            self.instance.report_run_failed(run, why)
        return True

    def end_cancelled(self, run_id: str, why: str) -> bool:
        """End a run that a person is cancelling, as cancelled. False if nobody is cancelling it."""
        run = self.instance.get_run_by_id(run_id)
        if run is None or run.status is not DagsterRunStatus.CANCELING:
            return False
        self.instance.report_run_canceled(run, why)
        return True

    def mark_interrupted(self, run_id: str) -> None:
        """Tag a run, before it is ended from outside, so that its end counts as no failure of its partition.

        A run that a person is cancelling is not tagged: it would be retried. Nor is one that Dagster forgot.
        """
        run = self.instance.get_run_by_id(run_id)
        if run is not None and run.status in _AT_WORK:
            with contextlib.suppress(dg.DagsterRunNotFoundError):  # deleted since it was looked at
                self.instance.add_run_tags(run_id, _INTERRUPTED)

    def free_slots(self, run_id: str) -> None:
        """Free the places of a run in pools."""
        self.instance.event_log_storage.free_concurrency_slots_for_run(run_id)

    def free_slots_of_ended(self) -> list[str]:
        """Free the places that ended or forgotten runs still hold in pools. Returns the ids of these runs."""
        storage = self.instance.event_log_storage
        if not storage.supports_global_concurrency_limits:
            return []
        freed = []
        for run_id in sorted(storage.get_concurrency_run_ids()):
            run = self.instance.get_run_by_id(run_id)
            if run is None or run.is_finished:
                storage.free_concurrency_slots_for_run(run_id)
                freed.append(run_id)
        return freed

    def fit_pool(self, pool: str, *, previous: int, slots: int) -> None:
        """Set a pool's limit to the devices in use; a lower limit that a person set is kept.

        previous: the devices at the last call: a limit of that many is no person's. With 0 slots no run
        leaves the queue, and none is lost.
        """
        limits = {info.name: info.limit for info in self.instance.event_log_storage.get_pool_limits()}
        limit = limits.get(pool)
        if limit is not None and limit != slots and (limit > slots or limit in (previous, 0)):
            set_pool(self.instance, pool, slots)

    def _own(self, runs: list[RunState]) -> list[RunState]:
        """Those of the runs that were launched for an asset of this home: all, where no prefix is set.

        Dagster notes at the creation of a run which assets it is to materialize.
        """
        if not self.names.prefix:
            return runs
        events, own = SqlEventLogStorageTable, set[str]()
        beginning = self.names.key("").to_string().removesuffix('""]')
        storage = self.instance.event_log_storage
        with storage.index_connection() as connection:  # type: ignore[attr-defined]
            for start in range(0, len(runs), _CHUNK):
                run_ids = [run.run_id for run in runs[start : start + _CHUNK]]
                query = db.select(events.c.run_id).where(
                    events.c.run_id.in_(run_ids),
                    events.c.dagster_event_type == dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
                    events.c.asset_key.startswith(beginning, autoescape=True),
                )
                own.update(connection.execute(query.distinct()).scalars())
        return [run for run in runs if run.run_id in own]

    def _runs_where(self, *conditions: Any) -> list[RunState]:
        """Runs by conditions on their table, oldest first."""
        runs, tags = RunsTable, RunTagsTable
        times = (runs.c.create_timestamp, runs.c.update_timestamp, runs.c.end_time)
        query = db.select(runs.c.run_id, runs.c.status, *times).where(*conditions).order_by(runs.c.id)
        tag_names = (*_TAGS, LAUNCHED_BY, GOES_ON_WITH, NO_ATTEMPT, NEEDS_PERSON, LAUNCHER_JOB)
        tag_query = db.select(tags.c.run_id, tags.c.key, tags.c.value).where(
            tags.c.key.in_(tag_names), tags.c.run_id.in_(db.select(runs.c.run_id).where(*conditions))
        )
        with self.instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
            rows = connection.execute(query).mappings().all()
            tags_of: dict[str, dict[str, str]] = {}
            for run_id, key, value in connection.execute(tag_query).all() if rows else ():
                tags_of.setdefault(run_id, {})[key] = value
        return [_run_state(row, tags_of.get(row["run_id"], {})) for row in rows]


def _partitions_of(subset: Any, asset: dg.AssetKey) -> frozenset[str]:
    """The partitions of one asset in a graph subset of a backfill."""
    partitions = subset.partitions_subsets_by_asset_key.get(asset)
    return frozenset(partitions.get_partition_keys()) if partitions else frozenset()


def set_pool(instance: DagsterInstance, pool: str, slots: int) -> None:
    """Set a pool's limit."""
    instance.event_log_storage.set_concurrency_slots(pool, slots)


def _run_state(row: Mapping[str, Any], tags: Mapping[str, str]) -> RunState:
    status = DagsterRunStatus(row["status"])
    ended = row["end_time"] or unix(row["update_timestamp"]) if status in FINISHED else None
    return RunState(row["run_id"], status, unix(row["create_timestamp"]), ended, tags)


def unix(stamp: datetime) -> float:
    """The unix seconds of a time from the database, which is in UTC and has no time zone."""
    return stamp.replace(tzinfo=UTC).timestamp()


def _naive(seconds: float) -> datetime:
    """A time as the database keeps it, in whole seconds."""
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None, microsecond=0)

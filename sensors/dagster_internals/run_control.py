"""Runs under way: which are here, their processes, how one is ended from outside, and the pool's limit.

What does not live here: which runs are ended and why (``reconciliation.py``, ``worker_health.py``).

Checked with dagster 1.13.27. Not public: ``event_log_storage`` (pools), ``report_run_failed``,
``report_run_canceled``, ``all_logs``, ``get_materialized_partitions``, and the tags ``.dagster/grpc_info``
and ``dagster/failure_reason``. If one goes: GraphQL has ``terminateRuns`` (policy
MARK_AS_CANCELED_IMMEDIATELY) and ``setConcurrencyLimit``; without the tags, runs that were ended from
outside count as failed attempts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

import dagster as dg

_SERVER_TAG = ".dagster/grpc_info"
_INTERRUPTED = {"dagster/failure_reason": "UNEXPECTED_TERMINATION"}
"""What Dagster says of a run that was ended from outside. Its retries do not inherit this tag."""

_AT_WORK = (dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED)
_IN_PROGRESS = (*_AT_WORK, dg.DagsterRunStatus.CANCELING)
_HERE = {None, "", "localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class RunUnderWay:
    """A run that Dagster believes in progress. here: its process was started on this machine."""

    run: dg.DagsterRun
    here: bool


def runs_under_way(instance: dg.DagsterInstance) -> list[RunUnderWay]:
    """Every run that is starting, started or being cancelled."""
    runs = instance.get_runs(dg.RunsFilter(statuses=list(_IN_PROGRESS)))
    return [RunUnderWay(run, _is_here(run)) for run in runs]


def _is_here(run: dg.DagsterRun) -> bool:
    """Whether the code server of this machine started it: any other launcher looks after its own runs."""
    said = run.tags.get(_SERVER_TAG)
    if said is None:
        return False
    server = json.loads(said)
    return bool(server.get("socket")) or server.get("host") in _HERE


def process_of(instance: dg.DagsterInstance, run_id: str) -> tuple[int, float] | None:
    """The pid that a run's process gave when it began, and when (unix seconds); None before that."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.get_dagster_event()
        pid = event.engine_event_data.metadata.get("pid")
        if pid is not None and event.step_key is None:
            return int(str(pid.value)), entry.timestamp
    return None


class RunOfProcess(StrEnum):
    """How the run stands that a process says it works for, as the second half of a sentence."""

    UNDER_WAY = "under way"
    FINISHED = "finished"
    ELSEWHERE = "finished, and was not started by this machine's code server"
    UNKNOWN = "not known to Dagster"


def run_of_process(instance: dg.DagsterInstance, run_id: str, pid: int) -> RunOfProcess:
    """How a run stands. FINISHED: and this pid is the one that its process gave when it began here."""
    run = instance.get_run_by_id(run_id)
    if run is None:
        return RunOfProcess.UNKNOWN
    if not run.is_finished:
        return RunOfProcess.UNDER_WAY
    said = process_of(instance, run_id)
    ours = _is_here(run) and said is not None and said[0] == pid
    return RunOfProcess.FINISHED if ours else RunOfProcess.ELSEWHERE


def end_interrupted(instance: dg.DagsterInstance, run_id: str, why: str) -> bool:
    """End a run whose process is gone, as one that was interrupted; one being cancelled, as cancelled.

    Its places in pools are freed. False where it has ended meanwhile.
    """
    run = instance.get_run_by_id(run_id)
    if run is None or run.is_finished:
        return False
    if not end_cancelled(instance, run_id, why):
        mark_interrupted(instance, run_id)
        instance.report_run_failed(run, why)
    instance.event_log_storage.free_concurrency_slots_for_run(run_id)
    return True


def end_cancelled(instance: dg.DagsterInstance, run_id: str, why: str) -> bool:
    """End a run that a person is cancelling as cancelled; False where nobody is.

    Before its process is killed: the code server calls a killed one failed, whatever was asked for, and
    Dagster would start again what a person has just stopped.
    """
    run = instance.get_run_by_id(run_id)
    if run is None or run.status is not dg.DagsterRunStatus.CANCELING:
        return False
    instance.report_run_canceled(run, why)
    return True


def mark_interrupted(instance: dg.DagsterInstance, run_id: str) -> None:
    """Say on a run, before it is ended from outside, that this is no failure of its partition.

    Not on one that a person cancels: it would be retried. One that Dagster has forgotten has nothing to say.
    """
    run = instance.get_run_by_id(run_id)
    if run is not None and run.status in _AT_WORK:
        with contextlib.suppress(dg.DagsterRunNotFoundError):  # deleted since it was looked at
            instance.add_run_tags(run_id, _INTERRUPTED)


def free_slots_of_ended(instance: dg.DagsterInstance) -> list[str]:
    """Free what ended or forgotten runs still hold in pools. Returns their ids."""
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return []
    freed = []
    for run_id in sorted(storage.get_concurrency_run_ids()):
        run = instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            storage.free_concurrency_slots_for_run(run_id)
            freed.append(run_id)
    return freed


def unknown_to_dagster(instance: dg.DagsterInstance, asset: str, keys: Collection[str]) -> Iterator[str]:
    """Which of these partitions Dagster does not know as materialized, in their order."""
    known = instance.get_materialized_partitions(dg.AssetKey(asset))
    return (key for key in keys if key not in known)


def fit_pool(instance: dg.DagsterInstance, pool: str, *, before: int, now: int) -> None:
    """Let a pool's limit follow the number of devices in use; a lower one that a person set is kept.

    With 0 nothing is taken from the queue, and nothing in it is lost.
    """
    limits = {one.name: one.limit for one in instance.event_log_storage.get_pool_limits()}
    limit = limits.get(pool)
    if limit is not None and limit != now and (limit > now or limit in (before, 0)):
        set_pool(instance, pool, now)


def set_pool(instance: dg.DagsterInstance, pool: str, slots: int) -> None:
    """Set a pool's limit."""
    instance.event_log_storage.set_concurrency_slots(pool, slots)

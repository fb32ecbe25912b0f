"""Brings Dagster's database in line with the living processes and with the disk, after anything has died.

It starts nothing again: Dagster's run retries and the scheduled re-materialization do that.
``worker_health.py`` judges living workers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import dagster as dg

from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import UNDER_WAY
from sensors.run_end import end_gone_run
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.processes import ProcessIdentity
from vlm_durable.state.workers import Workers
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_durable.wording import counted

NAME = "reconciliation"
INTERVAL_SECONDS = 30
_CANCELLED_SECONDS = 24 * 3600.0
"""How far back each process reads cancelled runs, once."""

_REPORT_SECONDS = 20.0
"""How long a tick reports partitions that the database does not know: the rest follows at the next ticks."""

_GONE = (
    "The process of this run is gone without a word: it was killed, or its machine went down. What it had"
    " committed is on disk; the next start of the partition goes on from there."
)


TagsOf = Callable[[str, PublishedRecord, int], Mapping[str, str]]
"""The tags of a partition that is found on disk: of its asset, its record, and Dagster's latest event."""

Processes = dict[str, ProcessIdentity]
"""The processes of runs under way, by run id. A process that was seen once is recognized without a clock."""


def end_dead_runs(
    dagster: DagsterFacts, workers: Workers, seen: Mapping[str, ProcessIdentity]
) -> tuple[list[str], Processes]:
    """End every run under way whose process is certainly gone; a living worker is never ended.

    A process is certainly gone if the lock of its heartbeat is free, or if there is no heartbeat and no such
    process on the machine that started it. Returns the runs ended, and the processes of the others.
    """
    living = {worker.run_id for worker in workers.living()}
    dead = {worker.run_id for worker in workers.dead()}
    ended: list[str] = []
    alive: Processes = {}
    for run in dagster.runs_in(UNDER_WAY):
        run_id = run.run_id
        if run_id in living:
            continue
        if run_id not in dead:
            if not run.is_here:
                continue
            process = seen.get(run_id)
            if process is None:
                pid_and_start = dagster.process_of(run_id)
                if pid_and_start is None:
                    continue  # Not begun: Dagster's monitoring ends it, or the sensor of a cluster.
                process = ProcessIdentity.started_before(*pid_and_start)
            if process is not None and process.lives():
                alive[run_id] = process
                continue
        if end_gone_run(dagster, run_id, _GONE):
            ended.append(run_id)
    # Only workers that were dead before the runs were read: they have no run under way any more.
    for worker in workers.dead():
        if worker.run_id in dead:
            workers.forget(worker)
    return ended, alive


def report_published(
    dagster: DagsterFacts,
    assets: Sequence[AssetFolders],
    keys: Sequence[str],
    workers: Workers,
    *,
    tags_of: TagsOf,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[str, str]]:
    """Report to Dagster the partitions on disk that it does not know as materialized: its database was lost.

    A partition that a worker works on is left out. Stops after 20 seconds; the next call goes on.
    """
    deadline = clock() + _REPORT_SECONDS
    reported: list[tuple[str, str]] = []
    worked_on = {(worker.asset, worker.partition) for worker in workers.living()}
    for asset in assets:
        published, on_disk = PublishedPartitions(asset), frozenset(asset.published_keys())
        known_keys = dagster.materialized_partitions(asset.name)
        for key in keys:
            if key in known_keys or key not in on_disk:
                continue
            if clock() > deadline:
                return reported
            if (asset.name, key) in worked_on:
                continue
            try:
                record = published.record(key)
            except RecordDamagedError:
                continue  # The drift sensor and the audit name it.
            if record is not None:
                tags = tags_of(asset.name, record, dagster.newest_event())
                dagster.report_materialization(_from_disk(asset.name, record, tags))
                reported.append((asset.name, key))
    return reported


def restore_results_of_cancelled(
    dagster: DagsterFacts, handled: set[str], *, now: float
) -> list[tuple[str, str, str]]:
    """Restore the check results that a cancelled run hides: it did not change the published file.

    handled: runs of the last day that earlier calls handled; this call adds to it.
    """
    cancelled = dagster.runs_ended_since(now - _CANCELLED_SECONDS, [dg.DagsterRunStatus.CANCELED])
    new = {run.run_id for run in cancelled} - handled
    restored = dagster.restore_results(new)
    handled.intersection_update({run.run_id for run in cancelled})
    handled.update(new)
    return restored


def _from_disk(asset: str, record: PublishedRecord, tags: Mapping[str, str]) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        asset_key=asset,
        partition=record.key,
        description=(
            "Found on disk: published earlier, and not known to this database. It was lost or begun anew, or"
            " a run was deleted or materializations were wiped in it, which touches no file. To compute it"
            " anew: `recompute: true`."
        ),
        metadata={
            "dagster/partition_row_count": dg.MetadataValue.int(record.rows),
            "sha256": dg.MetadataValue.text(record.sha256),
            "fingerprint": dg.MetadataValue.text(record.fingerprint),
            "published at": dg.MetadataValue.text(record.published_at),
            "found on disk": dg.MetadataValue.bool(True),
        },
        tags=tags,
    )


def build_reconciliation_sensor(
    assets: Sequence[AssetFolders], keys: Sequence[str], *, workers: Workers, ticks: Ticks, tags_of: TagsOf
) -> dg.SensorDefinition:
    """The sensor. assets, keys: published as files, upstream first. ticks: where it notes that it ticked.

    tags_of: the tags by which Dagster compares versions.
    """
    handled: set[str] = set()

    def decide(situation: Situation) -> Decided:
        ended, alive = end_dead_runs(situation.dagster, workers, _processes(situation.cursor))
        freed = situation.dagster.free_slots_of_ended()
        reported = report_published(situation.dagster, assets, keys, workers, tags_of=tags_of)
        restored = restore_results_of_cancelled(situation.dagster, handled, now=situation.now)
        sentences = []
        if ended:
            runs = counted(len(ended), "runs")
            sentences.append(f"{runs} ended whose process was gone: {', '.join(ended)}.")
        if freed:
            sentences.append(f"Places in pools were freed of {', '.join(freed)}.")
        if reported:
            first = ", ".join(f"{asset} {key}" for asset, key in reported[:3])
            sentences.append(
                f"{counted(len(reported), 'published partitions')} not known here before: {first} ..."
            )
        if restored:
            sentences.append(
                f"{counted(len(restored), 'results')} of checks, hidden by cancelled runs before, can"
                f" be seen again."
            )
        all_well = "Every run that is under way has its process; every published partition is known."
        cursor = json.dumps({run_id: asdict(process) for run_id, process in alive.items()})
        return Decided(" ".join(sentences) or all_well, cursor)

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Ends runs whose process is gone, frees what they held, and tells this database of published"
            " partitions that it does not know. It starts nothing."
        ),
        ticks=ticks,
    )


def _processes(cursor: str | None) -> Processes:
    try:
        return {run_id: ProcessIdentity(**fields) for run_id, fields in json.loads(cursor or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}  # Another version wrote it: the processes are looked up again.

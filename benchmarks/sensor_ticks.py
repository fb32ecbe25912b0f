"""CPU seconds of a tick over ten thousand partitions, on a real Dagster instance made for it (SQLite).

``python -m benchmarks.sensor_ticks [--partitions 10000]``. The history is written to Dagster's tables as its
own runs would write it: all materialized with every check passed, or all failed. Each line: the first tick
after a start of the code server, and one with nothing new.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable, SqlEventLogStorageTable
from dagster._core.storage.runs.schema import RunsTable, RunTagsTable
from dagster._serdes import serialize_value

from sensors.dagster_internals.events import DagsterFacts
from sensors.failed_partitions import FailedPartitions

ASSETS = ("property_descriptions", "property_embeddings")
CHECKS = ("ids_conserved", "row_count", "unique_ids", "row_schema", "failed_share")


def keys(count: int) -> list[str]:
    """Partition keys as the catalogue names them."""
    return [f"{number * 1000:09d}-{number * 1000 + 999:09d}" for number in range(count)]


def write_history(instance: dg.DagsterInstance, partitions: list[str], *, failed: bool) -> None:
    """One finished run a partition, an hour ago."""
    at = datetime.datetime.fromtimestamp(time.time() - 3600, datetime.UTC).replace(tzinfo=None)
    ended = time.time() - 3600
    runs, tags, events, checks = [], [], [], []
    status = "FAILURE" if failed else "SUCCESS"
    body = serialize_value(
        dg.DagsterRun(job_name="__ASSET_JOB", run_id=str(uuid.uuid4()), status=dg.DagsterRunStatus(status))
    )
    evaluation = "x" * 1500
    for key in partitions:
        run_id = str(uuid.uuid4())
        runs.append(
            {"run_id": run_id, "pipeline_name": "__ASSET_JOB", "status": status, "run_body": body,
             "create_timestamp": at, "update_timestamp": at, "start_time": ended, "end_time": ended}
        )  # fmt: skip
        run_tags = {"dagster/partition": key, "dagster/backfill": "b"}
        if failed:
            run_tags |= {"dagster/failure_reason": "STEP_FAILURE", "dagster/will_retry": "false"}
        tags += [{"run_id": run_id, "key": name, "value": value} for name, value in run_tags.items()]
        for asset in ASSETS:
            kinds = ["ASSET_MATERIALIZATION_PLANNED", *([] if failed else ["ASSET_MATERIALIZATION"])]
            events += [
                {"run_id": run_id, "event": "x" * 800, "dagster_event_type": kind, "timestamp": at,
                 "asset_key": dg.AssetKey(asset).to_string(), "partition": key}
                for kind in kinds
            ]  # fmt: skip
            checks += [
                {"asset_key": dg.AssetKey(asset).to_string(), "check_name": check, "partition": key,
                 "run_id": run_id, "execution_status": "PLANNED" if failed else "SUCCEEDED",
                 "evaluation_event": evaluation, "evaluation_event_timestamp": at,
                 "evaluation_event_storage_id": 1}
                for check in CHECKS
            ]  # fmt: skip
    runs_storage: Any = instance.run_storage  # SQLite's, whose tables are written to directly
    with runs_storage.connect() as connection:
        connection.execute(RunsTable.insert(), runs)
        connection.execute(RunTagsTable.insert(), tags)
    event_storage: Any = instance.event_log_storage
    with event_storage.index_connection() as connection:
        connection.execute(SqlEventLogStorageTable.insert(), events)
        connection.execute(AssetCheckExecutionsTable.insert(), checks)


def write_runs_under_way(instance: dg.DagsterInstance, runs: Mapping[str, Mapping[str, str]]) -> None:
    """Runs that were started a minute ago: the tags of each by its id."""
    began = time.time() - 60
    at = datetime.datetime.fromtimestamp(began, datetime.UTC).replace(tzinfo=None)
    rows = [
        {"run_id": run_id, "pipeline_name": "__ASSET_JOB", "status": "STARTED",
         "run_body": serialize_value(
             dg.DagsterRun(
                 job_name="__ASSET_JOB", run_id=run_id, status=dg.DagsterRunStatus.STARTED, tags=dict(tags)
             )
         ),
         "create_timestamp": at, "update_timestamp": at, "start_time": began, "end_time": None}
        for run_id, tags in runs.items()
    ]  # fmt: skip
    named = [
        {"run_id": run_id, "key": name, "value": value}
        for run_id, tags in runs.items()
        for name, value in tags.items()
    ]
    storage: Any = instance.run_storage
    with storage.connect() as connection:
        connection.execute(RunsTable.insert(), rows)
        connection.execute(RunTagsTable.insert(), named)


def retries(home: Path, partitions: list[str]) -> FailedPartitions:
    """The re-materialization over a home without files, so that every file is asked about."""
    from vlm_assets.automation.retries import build_failed_partitions
    from vlm_assets.config.settings import load_settings

    return build_failed_partitions(load_settings(home=home), partitions)


def measure_retries(count: int, *, failed: bool) -> str:
    """The scheduled re-materialization."""
    partitions = keys(count)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        (Path(folder) / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        for asset in ASSETS:
            (home / asset).mkdir(parents=True)
            if not failed:
                for key in partitions:
                    (home / asset / f"{key}.parquet").touch()
        with dg.DagsterInstance.from_config(folder) as instance:
            write_history(instance, partitions, failed=failed)
        ticking = retries(home, partitions)
        seconds, launched = [], []
        for number in range(4):
            # Each tick gets an instance of its own, as the code server makes one.
            with dg.DagsterInstance.from_config(folder) as instance:
                before = time.process_time()
                launched.append(ticking.tick(DagsterFacts(instance), tick=f"tick {number}", now=time.time()))
                seconds.append(time.process_time() - before)
        outcome = "all failed" if failed else "all complete"
        return (
            f"failed partitions, {count} partitions, {outcome}: first tick {seconds[0]:.2f} s,"
            f" nothing new {min(seconds[1:]):.2f} to {max(seconds[1:]):.2f} s of CPU;"
            f" launched {[len(tick.launches) for tick in launched]} ({launched[-1].sentence})"
        )


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=10_000)
    chosen = parser.parse_args()
    print(measure_retries(chosen.partitions, failed=False), flush=True)
    print(measure_retries(chosen.partitions, failed=True), flush=True)


if __name__ == "__main__":
    main()

"""Runs whose process is gone are ended, living ones never; what is on disk is told to a lost database."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time

import dagster as dg
import pyarrow as pa
import pytest
from dagster import DagsterRunStatus
from dagster._core.events import EngineEventData

from sensors.dagster_internals.events import DagsterFacts
from sensors.reconciliation import end_dead_runs, report_published
from vlm_durable.files.layout import Home
from vlm_durable.files.processes import ProcessIdentity
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers
from vlm_durable.versions.published import PublishedPartitions

HERE = {".dagster/grpc_info": json.dumps({"host": "localhost", "socket": "/somewhere"})}
GONE = 2**22 + 1
"""A pid that no process has."""
HOLDER = """
import sys
from pathlib import Path
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers
with Workers(open_state(Path(sys.argv[1]))).begin(run_id=sys.argv[2], asset="a", partition="k", expected=9):
    print("held", flush=True)
    sys.stdin.read()
"""


@dg.job
def nothing():
    """A job whose runs are only ever pretended to be under way."""


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def workers(tmp_path):
    return Workers(open_state(tmp_path))


@pytest.fixture
def processes():
    """Processes to be ended with the test."""
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def started_run(instance, pid=None, tags=HERE, status=DagsterRunStatus.STARTED):
    """A run as Dagster keeps it once its process has said its pid."""
    run = instance.create_run_for_job(nothing, tags=tags, status=status)
    if pid is not None:
        instance.report_engine_event("Started process for run.", run, EngineEventData.in_process(pid))
    return run.run_id


def holder(workers, run_id, processes):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, workers.directory.parent, run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    processes.append(process)
    assert process.stdout.readline() == b"held\n"
    return process


def sleeper(processes):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    processes.append(process)
    return process


def end_dead(instance, workers, seen=()):
    """The runs that were ended, and the processes of the others."""
    return end_dead_runs(DagsterFacts(instance), workers, dict(seen))


def kill(process):
    process.kill()
    process.wait()


def test_a_killed_materialization_is_ended_as_interrupted_and_a_living_one_never(
    instance, workers, processes
):
    """Whatever pid its run has told, the heartbeat's lock decides; its record goes with it, once."""
    run_id = started_run(instance, pid=GONE)
    process = holder(workers, run_id, processes)
    assert end_dead(instance, workers) == ([], {})
    kill(process)
    assert end_dead(instance, workers) == ([run_id], {})
    run = instance.get_run_by_id(run_id)
    assert run.status is DagsterRunStatus.FAILURE
    assert run.tags["dagster/failure_reason"] == "UNEXPECTED_TERMINATION"
    assert not workers.dead()
    assert end_dead(instance, workers) == ([], {})


def test_a_process_without_a_heartbeat_is_known_by_its_start_and_boot(
    instance, workers, processes, monkeypatch
):
    """Fault 16: before its heartbeat the process decides; no clock that jumps, no pid that comes twice."""
    process = sleeper(processes)
    starting = started_run(instance, pid=process.pid)
    ended, seen = end_dead(instance, workers)
    identity = ProcessIdentity.from_pid(process.pid)
    assert (ended, seen) == ([], {starting: identity})
    told_at = time.time()
    for clock in (time.time, lambda: told_at - 3600):
        assert ProcessIdentity.started_before(process.pid, told_at, clock=clock) == identity
    inherited = ProcessIdentity.started_before(process.pid, told_at - 3600)
    assert inherited is None, "a process that began an hour after the word has inherited the pid"
    monkeypatch.setattr(DagsterFacts, "process_of", lambda *_: (process.pid, told_at - 3600))
    assert end_dead(instance, workers, seen) == ([], seen), "who was seen once needs no clock"
    for other in ({"start": identity.start - 1}, {"boot_id": "x"}):
        assert not dataclasses.replace(identity, **other).send(signal.SIGKILL)
    assert process.poll() is None
    assert identity.send(signal.SIGKILL)
    process.wait()
    assert not identity.lives()
    assert end_dead(instance, workers, seen) == ([starting], {})


def test_a_run_being_cancelled_ends_as_cancelled(instance, workers):
    """What a person cancelled stays cancelled, though its process died before it could say so."""
    run_id = started_run(instance, pid=GONE)
    instance.report_run_canceling(instance.get_run_by_id(run_id))
    assert end_dead(instance, workers)[0] == [run_id]
    assert instance.get_run_by_id(run_id).status is DagsterRunStatus.CANCELED


def test_runs_of_other_machines_are_left_to_their_launcher(instance, workers):
    """Ray or Kubernetes look after their own: no pid of theirs means anything here, nor does a step's."""
    remote = {".dagster/grpc_info": json.dumps({"host": "code.example", "port": 4000})}
    started_run(instance, GONE, {})
    started_run(instance, GONE, remote)
    run_id = started_run(instance)
    run = instance.get_run_by_id(run_id)
    instance.report_engine_event("A step's", run, EngineEventData.in_process(GONE), step_key="step")
    assert end_dead(instance, workers)[0] == []
    instance.report_engine_event("Started process for run.", run, EngineEventData.in_process(77))
    assert DagsterFacts(instance).process_of(run_id)[0] == 77


def test_pool_slots_of_ended_runs_are_freed(new_instance):
    """Fault 21: no slot stays held by a run that is over or that the database does not know."""
    # The instance in memory keeps no pools.
    with new_instance("dagster") as instance:
        storage = instance.event_log_storage
        storage.set_concurrency_slots("gpu", 2)
        living, over = started_run(instance), started_run(instance)
        for run_id in (living, over, "unknown"):
            storage.claim_concurrency_slot("gpu", run_id, "step")
        instance.report_run_failed(instance.get_run_by_id(over))
        assert DagsterFacts(instance).free_slots_of_ended() == sorted([over, "unknown"])
        assert storage.get_concurrency_run_ids() == {living}
        assert DagsterFacts(instance).free_slots_of_ended() == []


def published(asset, key):
    ids = [f"{key}-{n}" for n in range(3)]
    table = pa.table({"property_id": ids, "ordinal": range(3)})
    partitions = PublishedPartitions(asset)
    staged = partitions.stage(
        key, table.to_batches(), table.schema, expected_ids=ids, fingerprint="f", metadata={}
    )
    partitions.publish(staged)


def report(instance, folders, keys, workers, **more):
    def tags_of(asset, record, newest_event):
        return {"dagster/data_version": record.fingerprint, "newest": str(newest_event)}

    return report_published(DagsterFacts(instance), [folders], keys, workers, tags_of=tags_of, **more)


def test_a_lost_database_is_told_what_is_on_disk(instance, workers, tmp_path, processes):
    """Fault 20: published partitions are reported once, with their rows; one that is worked on is not."""
    folders = Home(tmp_path).asset("a")
    for key in ("k0", "k1", "k"):
        published(folders, key)
    holder(workers, "r", processes)
    keys = ("k0", "k1", "k", "k9")
    assert report(instance, folders, keys, workers) == [("a", "k0"), ("a", "k1")]
    assert instance.get_materialized_partitions(dg.AssetKey("a")) == {"k0", "k1"}
    (record, *_) = instance.fetch_materializations(dg.AssetKey("a"), limit=1).records
    metadata = record.asset_materialization.metadata
    assert metadata["dagster/partition_row_count"].value == 3
    assert record.asset_materialization.tags["dagster/data_version"] == "f"
    assert int(record.asset_materialization.tags["newest"]) < record.storage_id
    said = record.asset_materialization.description
    assert "wiped" in said, "who has just wiped it is told why it is back"
    assert "recompute" in said
    assert report(instance, folders, keys, workers) == []


def test_ten_thousand_lost_partitions_are_told_in_several_ticks(instance, workers, tmp_path):
    """A tick ends after a minute, and the next tick tells the rest. A home without output has no news."""
    folders, keys = Home(tmp_path).asset("a"), tuple(f"k{n}" for n in range(4))
    assert report(instance, folders, keys, workers) == []
    for key in keys:
        published(folders, key)
    times = iter([0.0, 1.0, 2.0, 30.0])
    assert len(report(instance, folders, keys, workers, clock=lambda: next(times))) == 2
    assert len(report(instance, folders, keys, workers)) == 2

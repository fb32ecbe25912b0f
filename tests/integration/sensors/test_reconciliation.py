"""Killed with its code server, stopped, truncated, forgotten: each is found and put right by itself."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import dagster as dg
import psutil
import pyarrow.parquet as pq
import pytest

from examples.rendered_properties import write_example
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.partition_history import PartitionHistory
from tests.support.dagster_pages import partition_keys
from tests.support.listings import share_images
from tests.support.processes import command_line, kill
from tests.support.waiting import wait_until
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import dagster_server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers
from vlm_engine.devices.left_out import LeftOutDevices

DESCRIPTIONS = "property_descriptions"
PROPERTIES = 64
STEPS = {
    "VLM_ASSETS_BATCH_SIZE": "1",
    "VLM_ASSETS_COMMIT_SECONDS": "0.5",
    # Longer than a batch takes beside other work: a worker that moves is never to be called stuck here.
    "VLM_ASSETS_STUCK_SECONDS": "30",
    "VLM_ASSETS_GRACE_SECONDS": "5",
    "OMP_NUM_THREADS": "1",
}

pytestmark = pytest.mark.serves


def make_home(home: Path, *, properties: int, range_size: int) -> Path:
    """Ranges of properties that share two images, so that each takes a while and rendering does not."""
    rendered = write_example(home, properties=2, seed=7)
    listing = share_images(rendered, "many.jsonl", (f"p{n}" for n in range(properties)), 2)
    ingest(listing, home, range_size=range_size)
    return home


def serve(home: Path, *, slots: int = 2, devices: str = "cpu:2"):
    catalog = Catalog.open(home)
    prepare_dagster_home(home / "dagster", catalog_id=catalog.catalog_id, slots=slots)
    environment = {**STEPS, "VLM_ASSETS_DEVICES": devices}
    return dagster_server(home, home / "dagster", port=3500, grace_seconds=5.0, environment=environment)


def wait_for(server, reached, what, seconds=240.0):
    return wait_until(reached, what, seconds=seconds, every=0.3, pause=server.group.watch)


def materialized(instance, key):
    return key in instance.get_materialized_partitions(dg.AssetKey(DESCRIPTIONS))


def at_work(workers, *, other_than=""):
    """The one worker that has committed three rows in its own run."""
    found = [
        one for one in workers.living() if one.run_id != other_than and one.committed >= one.restored + 3
    ]
    return found[0] if found else None


def kill_code_server_and_worker(worker):
    """The code server first, so that nobody is left who would notice the worker's end."""
    parents = [process for process in psutil.Process(worker.pid).parents() if process.pid != os.getpid()]
    servers = [process for process in parents if {"code-server", "grpc"} & set(command_line(process))]
    assert servers
    kill([*servers, psutil.Process(worker.pid)])


def assert_interrupted(instance, run_id):
    run = instance.get_run_by_id(run_id)
    assert run.status is dg.DagsterRunStatus.FAILURE
    assert run.tags["dagster/failure_reason"] == "UNEXPECTED_TERMINATION"


def failing(instance, key):
    history = PartitionHistory([DESCRIPTIONS])
    history.update(DagsterFacts(instance))
    return [one.check for one in history.failing(DESCRIPTIONS).get(key, [])]


@pytest.mark.long
def test_what_dies_is_ended_and_done_elsewhere_and_what_is_lost_is_told_again(tmp_path):
    """One partition through all of it: killed with its code server, stopped, truncated, its database gone."""
    home = make_home(tmp_path, properties=PROPERTIES, range_size=PROPERTIES)
    (key,) = [one.key for one in Catalog.open(home).ranges]
    workers = Workers(open_state(home / ".state"))
    with pytest.raises(Exception, match="code-server"), serve(home) as server:
        server.start_pages()
        server.api.launch_backfill([DESCRIPTIONS], [key], title="t", tags={})
        server.start_daemon()
        killed = wait_for(server, lambda: at_work(workers), "three rows committed")
        kill_code_server_and_worker(killed)
        wait_for(server, lambda: False, "the end of the code server")

    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance, serve(home) as server:
        assert instance.get_run_by_id(killed.run_id).status is dg.DagsterRunStatus.STARTED, "nobody noticed"
        server.start_pages()
        began = time.monotonic()
        server.start_daemon()
        wait_for(server, lambda: instance.get_run_by_id(killed.run_id).is_finished, "run ended", 90)
        print(f"killed run ended {time.monotonic() - began:.1f} s after the daemon's start")
        assert_interrupted(instance, killed.run_id)

        stopped = wait_for(server, lambda: at_work(workers, other_than=killed.run_id), "the retry at work")
        assert stopped.restored >= killed.committed, "it went on from there"
        os.kill(stopped.pid, signal.SIGSTOP)
        began = time.monotonic()
        wait_for(server, lambda: instance.get_run_by_id(stopped.run_id).is_finished, "stuck run ended", 150)
        print(
            f"stuck run ended after {time.monotonic() - began:.1f} s;"
            f" learned time {stopped.batch_seconds:.1f} s, stuck after {STEPS['VLM_ASSETS_STUCK_SECONDS']} s"
        )
        assert_interrupted(instance, stopped.run_id)
        wait_for(server, lambda: materialized(instance, key), "the next retry's end")
        (record,) = instance.fetch_materializations(dg.AssetKey(DESCRIPTIONS), limit=1).records
        assert not record.asset_materialization.metadata["device"].value.startswith(stopped.device)

        file = home / DESCRIPTIONS / f"{key}.parquet"
        assert pq.read_metadata(file).num_rows == PROPERTIES
        assert len(set(pq.read_table(file)["property_id"].to_pylist())) == PROPERTIES
        file.write_bytes(file.read_bytes()[:-100])
        began = time.monotonic()
        wait_for(server, lambda: "published_file" in failing(instance, key), "the failing check", 150)
        print(f"truncated file told after {time.monotonic() - began:.1f} s")
        server.api.launch_backfill([DESCRIPTIONS], [key], title="restore", tags={})
        wait_for(server, lambda: not failing(instance, key), "the check passing again")
    assert pq.read_metadata(file).num_rows == PROPERTIES

    for name in ("history", "storage", "schedules"):
        shutil.rmtree(home / "dagster" / name)
    with serve(home) as server, dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        assert not materialized(instance, key)
        server.start_pages()
        server.start_daemon()
        wait_for(server, lambda: materialized(instance, key), "the partition told again", 90)
        # Ending Dagster may have killed a run that only verified: nothing of it stays.
        wait_for(server, lambda: not workers.dead(), "what dead workers left cleared away", 90)
        (record,) = instance.fetch_materializations(dg.AssetKey(DESCRIPTIONS), limit=1).records
        metadata = record.asset_materialization.metadata
        assert metadata["dagster/partition_row_count"].value == PROPERTIES
        assert metadata["found on disk"].value is True


@pytest.mark.long
def test_a_device_that_hangs_twice_is_left_out_and_the_others_finish_everything(tmp_path):
    """One of three devices stops two partitions' workers: it is left out, nothing is lost nor doubled."""
    make_home(tmp_path, properties=8 * 16, range_size=16)
    keys = [one.key for one in Catalog.open(tmp_path).ranges]
    workers = Workers(open_state(tmp_path / ".state"))
    left_out = LeftOutDevices(open_state(tmp_path / ".state"))
    device = "cpu-0"
    stopped: list[str] = []

    def hang() -> None:
        """The device at work: it stops who has committed on it, a partition once, until it is left out."""
        for one in workers.living():
            at_work = one.device == device and one.committed > one.restored
            if at_work and one.partition not in stopped and not left_out.left_out():
                os.kill(one.pid, signal.SIGSTOP)
                stopped.append(one.partition)

    def blamed() -> bool:
        hang()
        return device in left_out.records()

    def is_left_out() -> bool:
        hang()
        return device in left_out.left_out()

    with serve(tmp_path, slots=3, devices="cpu:3") as server:
        server.start_pages()
        server.api.launch_backfill([DESCRIPTIONS], keys[:3], title="one a device", tags={})
        server.start_daemon()
        began = time.monotonic()
        wait_for(server, blamed, "the device blamed once", 300)
        # Only now, so that there is work left for it however long it took to be blamed.
        server.api.launch_backfill([DESCRIPTIONS], keys[3:], title="the rest", tags={})
        wait_for(server, is_left_out, "the device left out", 300)
        assert list(left_out.left_out()) == [device]
        assert len(stopped) == 2
        wait_for(
            server,
            lambda: partition_keys(server.api, DESCRIPTIONS).materialized == set(keys),
            "all done",
            300,
        )
        print(
            f"{len(keys)} partitions done {time.monotonic() - began:.0f} s after the start, {device} left out"
        )
    rows = [
        one
        for key in keys
        for one in pq.read_table(tmp_path / DESCRIPTIONS / f"{key}.parquet")["property_id"].to_pylist()
    ]
    assert sorted(rows) == sorted(f"p{n}" for n in range(8 * 16))
    alerts = Outbox(open_state(tmp_path / ".state")).open_subjects()
    assert alerts[f"devices/{device}/left out"].severity == "error"

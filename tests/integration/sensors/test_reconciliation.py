"""Everything killed at once, then the database lost: a new start puts both right by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import dagster as dg
import psutil
import pyarrow.parquet as pq
import pytest

from resources.workers import Workers
from vlm_assets.catalog import Catalog
from vlm_assets.dagster_home import prepare_dagster_home
from vlm_assets.dagster_server import dagster_server, free_port
from vlm_assets.demo.example import write_example
from vlm_assets.ingest import ingest

DESCRIPTIONS = "property_descriptions"
PROPERTIES = 48
STEPS = {
    "VLM_ASSETS_DEVICES": "cpu:2",
    "VLM_ASSETS_BATCH_SIZE": "1",
    "VLM_ASSETS_COMMIT_SECONDS": "0.5",
    "OMP_NUM_THREADS": "1",
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """One range, long enough to be killed in its middle."""
    home = tmp_path_factory.mktemp("home")
    listing = write_example(home, properties=2, seed=7)
    images = json.loads(listing.read_text().splitlines()[0])["images"][:2]
    listing.write_text(
        "".join(json.dumps({"property_id": f"p{n}", "images": images}) + "\n" for n in range(PROPERTIES))
    )
    ingest(listing, home, range_size=PROPERTIES)
    return home


def serve(home: Path):
    catalog = Catalog.open(home)
    prepare_dagster_home(home / "dagster", catalog_id=catalog.catalog_id, slots=2)
    return dagster_server(home, home / "dagster", port=free_port(3500), grace_seconds=5.0, environment=STEPS)


def wait_until(server, reached, what, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        server.group.watch(0.3)
    return found


def test_what_died_is_ended_and_what_was_lost_is_told_again(home):
    """Code server and run worker killed together: the run is ended, its lease free, and it is retried.

    Then the database is deleted: the partition is on disk, and a new start says so.
    """
    (key,) = [one.key for one in Catalog.open(home).ranges]
    workers = Workers(home / ".state" / "workers")
    with pytest.raises(Exception, match="code-server"), serve(home) as server:
        server.start_pages()
        server.api.launch_backfill([DESCRIPTIONS], [key], title="t", tags={})
        server.start_daemon()
        wait_until(
            server, lambda: any(one.committed >= 3 for one in workers.living()), "three rows committed"
        )
        (worker,) = workers.living()
        # The code server first, so that nobody is left who would notice the worker's end.
        parents = [one for one in psutil.Process(worker.pid).parents() if one.pid != os.getpid()]
        servers = [one for one in parents if "code-server" in one.cmdline() or "grpc" in one.cmdline()]
        assert servers
        for process in [*servers, psutil.Process(worker.pid)]:
            process.send_signal(signal.SIGKILL)
        wait_until(server, lambda: False, "the end of the code server")

    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        run = instance.get_run_by_id(worker.run_id)
        assert run.status is dg.DagsterRunStatus.STARTED, "Dagster alone never notices"
        with serve(home) as server:
            server.start_pages()
            began = time.monotonic()
            server.start_daemon()
            wait_until(server, lambda: instance.get_run_by_id(worker.run_id).is_finished, "run ended", 90)
            print(f"ended {time.monotonic() - began:.1f} s after the daemon's start")
            run = instance.get_run_by_id(worker.run_id)
            assert run.status is dg.DagsterRunStatus.FAILURE
            assert run.tags["dagster/failure_reason"] == "UNEXPECTED_TERMINATION"
            wait_until(
                server,
                lambda: key in instance.get_materialized_partitions(dg.AssetKey(DESCRIPTIONS)),
                "the retry's end",
            )
    assert pq.read_metadata(home / DESCRIPTIONS / f"{key}.parquet").num_rows == PROPERTIES
    assert not workers.dead()

    for name in ("history", "storage", "schedules"):
        shutil.rmtree(home / "dagster" / name)
    with serve(home) as server, dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        assert not instance.get_materialized_partitions(dg.AssetKey(DESCRIPTIONS))
        server.start_pages()
        server.start_daemon()
        wait_until(
            server,
            lambda: key in instance.get_materialized_partitions(dg.AssetKey(DESCRIPTIONS)),
            "the partition told again",
            90,
        )
        (record,) = instance.fetch_materializations(dg.AssetKey(DESCRIPTIONS), limit=5).records
        metadata = record.asset_materialization.metadata
        assert metadata["dagster/partition_row_count"].value == PROPERTIES
        assert metadata["found on disk"].value is True

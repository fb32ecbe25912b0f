"""A run's process hit by SIGTERM, as by a preempted machine, drains: nothing that is finished is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import psutil
import pyarrow.parquet as pq
import pytest

from tests.support.dagster_pages import partition_keys
from tests.support.listings import share_images
from tests.support.processes import has_ended
from tests.support.waiting import wait_until
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.config.resource_settings import build_gpu
from vlm_assets.config.settings import load_settings
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import DagsterServer, dagster_server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers

DESCRIPTIONS = "property_descriptions"
PROPERTIES = 500
KEY = f"{0:09d}-{PROPERTIES - 1:09d}"
# No commit falls due by itself: every committed row is one that was drained.
SETTINGS = {
    "VLM_ASSETS_BATCH_SIZE": "2",
    "VLM_ASSETS_COMMIT_SECONDS": "3600",
    "VLM_ASSETS_DEVICES": "cpu:1",
}

pytestmark = [pytest.mark.serves, pytest.mark.long, pytest.mark.timeout(1200)]


def wait_for(server: DagsterServer, reached: Callable[[], bool], what: str) -> None:
    """Wait for what is to be seen from outside; a server that ends meanwhile is an error at once."""
    wait_until(reached, what, seconds=480.0, pause=server.group.watch)


def test_sigterm_commits_what_is_finished_and_the_next_start_goes_on(listing: Path, tmp_path: Path) -> None:
    """Every finished row committed, the device free, nothing published; the next start does the rest."""
    many = share_images(listing, "sigterm.jsonl", (f"p{n}" for n in range(PROPERTIES)), 2)
    home, dagster_home = tmp_path / "home", tmp_path / "home" / "dagster"
    ingest(many, home, range_size=PROPERTIES)
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=1)
    file = home / DESCRIPTIONS / f"{KEY}.parquet"
    workers = Workers(open_state(home / ".state"))
    settings = load_settings(home=home, devices="cpu:1")
    leases = build_gpu(settings).leases

    def committed() -> int:
        return committed_rows(settings.descriptions, KEY)

    def holds(pid: int) -> bool:
        return any(held.record is not None and held.record.pid == pid for held in leases().holders())

    with dagster_server(home, dagster_home, port=3750, grace_seconds=10.0, environment=SETTINGS) as server:
        server.start_pages()
        server.api.launch_backfill([DESCRIPTIONS], [KEY], title="first", tags={})
        server.start_daemon()
        wait_for(server, lambda: any(one.computed for one in workers.living()), "first rows")
        (worker,) = workers.living()
        process = psutil.Process(worker.pid)
        assert committed() == 0
        assert holds(worker.pid)
        os.kill(worker.pid, signal.SIGTERM)
        wait_for(server, lambda: has_ended(process), "end of the run")
        drained = committed()
        assert worker.computed <= drained < PROPERTIES
        # The last of its threads frees the lock, a moment after the first has ended. Somebody else, such as
        # Dagster's own retry of the run, may have the device by then.
        wait_for(server, lambda: not holds(worker.pid), "device free")
        assert not file.exists()
        assert KEY not in partition_keys(server.api, DESCRIPTIONS).materialized

        # Dagster's retry of crashed runs is the next start.
        wait_for(server, lambda: KEY in partition_keys(server.api, DESCRIPTIONS).materialized, "materialized")
    assert pq.read_table(file)["property_id"].to_pylist() == [f"p{n}" for n in range(PROPERTIES)]
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        wanted = dg.AssetRecordsFilter(asset_key=dg.AssetKey(DESCRIPTIONS), asset_partitions=[KEY])
        said = [
            record.asset_observation.metadata["restored rows"].value
            for record in instance.fetch_observations(wanted, limit=1000, ascending=True).records
            if "restored rows" in record.asset_observation.metadata
        ]
    assert said == [0, drained], "the next start found all that was finished"

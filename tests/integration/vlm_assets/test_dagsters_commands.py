"""Dagster's own commands in a checkout: `dg` and `dagster dev`, with one home for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from tests.support.dagster_pages import started
from tests.support.shares import share_of
from vlm_assets.config.settings import CHECKOUT
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import CODE_LOCATION
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest

KEY = "000000000-000000003"
SENSOR = "worker_health"

DG, DAGSTER = (Path(sys.executable).with_name(name) for name in ("dg", "dagster"))

pytestmark = pytest.mark.serves


@dataclass(frozen=True)
class Newcomer:
    """A person in a checkout with a home of a few properties, who types Dagster's commands."""

    home: Path
    environment: dict[str, str]

    def call(self, *words: str | Path) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(words, env=self.environment, cwd=CHECKOUT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(
    listing: Path, tmp_path_factory: pytest.TempPathFactory, scripted_runs: dict[str, str]
) -> Newcomer:
    """The home of all tests of this file: four ranges of four, and what Dagster keeps of it."""
    home = tmp_path_factory.mktemp("newcomer") / "home"
    dagster_home = home / "dagster"
    ingest(listing, home, range_size=4)
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=1)
    environment = {
        **os.environ,
        **scripted_runs,
        "DAGSTER_HOME": str(dagster_home),
        "VLM_ASSETS_HOME": str(home),
        "VLM_ASSETS_ENV_FILE": "/dev/null",
        "VLM_ASSETS_DEVICES": "cpu:1",
        "VLM_ASSETS_DECODE_WORKERS": "1",
    }
    return Newcomer(home, environment)


def test_dg_checks_and_lists_the_definitions(newcomer: Newcomer) -> None:
    """`dg` finds the project by pyproject.toml alone."""
    assert "All definitions loaded successfully" in newcomer.call(DG, "check", "defs")
    listed = json.loads(newcomer.call(DG, "list", "defs", "--json"))
    assets = {asset["asset_key"] for asset in listed["assets"]}
    assert {"property_catalog", "property_descriptions", "property_embeddings"} <= assets
    assert SENSOR in {sensor["name"] for sensor in listed["sensors"]}


def test_dg_launch_describes_a_partition(newcomer: Newcomer) -> None:
    """A partition that `dg` launches is published as every other is, and Dagster keeps the run."""
    newcomer.call(DG, "launch", "--assets", "property_descriptions", "--partition", KEY)
    assert (newcomer.home / "property_descriptions" / f"{KEY}.parquet").is_file()
    with dg.DagsterInstance.from_config(str(newcomer.home / "dagster")) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("property_descriptions")) == {KEY}


def test_a_sensor_that_was_stopped_stays_stopped_however_dagster_is_started(newcomer: Newcomer) -> None:
    """State of sensors and schedules is kept under the code location's name, which is the same everywhere."""
    others = ([DAGSTER, "dev"], [DAGSTER, "dev", "-w", "workspace.yaml"])
    starts = ([DG, "dev"], *share_of(others, len(others)))
    statuses = []
    for words in starts:
        log = newcomer.home / "dagster.log"
        with started(*words, environment=newcomer.environment, folder=CHECKOUT, log=log) as pages:
            assert [location["name"] for location in pages.locations()] == [CODE_LOCATION], words
            sensor = pages.sensor(SENSOR)
            statuses.append(sensor["sensorState"]["status"])
            pages.ask(f'mutation{{stopSensor(id: "{sensor["id"]}"){{__typename}}}}')
    assert statuses == ["RUNNING", *["STOPPED"] * (len(starts) - 1)]

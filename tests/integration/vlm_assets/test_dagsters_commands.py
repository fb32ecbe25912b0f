"""Dagster's own commands in a checkout: `dg` and `dagster dev`, with one home for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from faults.s3_server import free_ports
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.config.settings import CHECKOUT
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import CODE_LOCATION

KEY = "000000000-000000003"
SENSOR = "worker_health"
START_SECONDS = 180.0

DG, DAGSTER = (Path(sys.executable).with_name(name) for name in ("dg", "dagster"))
WORKSPACE = (
    "workspaceOrError{...on Workspace{locationEntries{name loadStatus locationOrLoadError{__typename}}}}"
)
SENSORS = "repositoriesOrError{...on RepositoryConnection{nodes{sensors{id name sensorState{status}}}}}"

pytestmark = [pytest.mark.serves, pytest.mark.timeout(600)]


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

    @contextlib.contextmanager
    def dagster(self, *words: str | Path) -> Iterator[Pages]:
        """A Dagster that is started with these words, once its definitions are loaded; killed in the end."""
        (port,) = free_ports(1)
        log = self.home / "dagster.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*words, "--host", "127.0.0.1", "--port", str(port)],
                env=self.environment,
                cwd=CHECKOUT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            pages = Pages(f"http://127.0.0.1:{port}/graphql")
            deadline = time.monotonic() + START_SECONDS
            while not pages.are_loaded():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield pages
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Pages:
    """The GraphQL that Dagster's pages use."""

    url: str

    def ask(self, query: str) -> dict[str, Any]:
        body = json.dumps({"query": query}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["data"]

    def locations(self) -> list[dict[str, Any]]:
        return self.ask(f"{{{WORKSPACE}}}")["workspaceOrError"]["locationEntries"]

    def are_loaded(self) -> bool:
        try:
            locations = self.locations()
        except OSError:
            return False
        assert "PythonError" not in str(locations)
        return bool(locations) and all(location["loadStatus"] == "LOADED" for location in locations)

    def sensor(self, name: str) -> dict[str, Any]:
        [repository] = self.ask(f"{{{SENSORS}}}")["repositoriesOrError"]["nodes"]
        return next(sensor for sensor in repository["sensors"] if sensor["name"] == name)


@pytest.fixture(scope="module")
def newcomer(listing: Path, tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    """The home of all tests of this file: four ranges of four, and what Dagster keeps of it."""
    home = tmp_path_factory.mktemp("newcomer") / "home"
    dagster_home = home / "dagster"
    ingest(listing, home, range_size=4)
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=1)
    environment = {
        **os.environ,
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
    starts = ([DG, "dev"], [DAGSTER, "dev"], [DAGSTER, "dev", "-w", "workspace.yaml"])
    statuses = []
    for words in starts:
        with newcomer.dagster(*words) as pages:
            assert [location["name"] for location in pages.locations()] == [CODE_LOCATION], words
            sensor = pages.sensor(SENSOR)
            statuses.append(sensor["sensorState"]["status"])
            pages.ask(f'mutation{{stopSensor(id: "{sensor["id"]}"){{__typename}}}}')
    assert statuses == ["RUNNING", "STOPPED", "STOPPED"]

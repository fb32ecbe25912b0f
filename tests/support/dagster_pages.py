"""A Dagster that a person starts with its own commands, and the GraphQL that its pages use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.s3_server import free_ports
from tests.support.waiting import wait_until
from vlm_assets.webserver.api import DagsterApi

_WORKSPACE = (
    "workspaceOrError{...on Workspace{locationEntries{name loadStatus locationOrLoadError{__typename}}}}"
)
_SENSORS = "repositoriesOrError{...on RepositoryConnection{nodes{sensors{id name sensorState{status}}}}}"
_PARTITIONS = (
    "query($a: AssetKeyInput!){assetNodeOrError(assetKey: $a){...on AssetNode{assetPartitionStatuses{"
    "...on DefaultPartitionStatuses{materializedPartitions failedPartitions materializingPartitions"
    " unmaterializedPartitions}}}}}"
)
_LAUNCH = (
    "mutation($e: ExecutionParams!){launchRun(executionParams: $e){__typename"
    " ...on LaunchRunSuccess{run{runId}} ...on PythonError{message}}}"
)
_RELOAD = "mutation($n: String!){reloadRepositoryLocation(repositoryLocationName: $n){__typename}}"


@dataclass(frozen=True)
class PartitionKeys:
    """Keys of an asset's partitions by what the pages show of them; ``rest`` are missing there."""

    materialized: frozenset[str]
    failed: frozenset[str]
    running: frozenset[str]
    rest: frozenset[str]


def partition_keys(api: DagsterApi, asset: str) -> PartitionKeys:
    """The partitions of an asset as the pages show them."""
    statuses = api.ask(_PARTITIONS, a={"path": [asset]})["assetNodeOrError"]["assetPartitionStatuses"]
    names = ("materialized", "failed", "materializing", "unmaterialized")
    return PartitionKeys(*(frozenset(statuses[f"{name}Partitions"]) for name in names))


@dataclass(frozen=True)
class Pages:
    """The GraphQL that Dagster's pages use."""

    url: str

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["data"]

    def locations(self) -> list[dict[str, Any]]:
        return self.ask(f"{{{_WORKSPACE}}}")["workspaceOrError"]["locationEntries"]

    def are_loaded(self) -> bool:
        try:
            locations = self.locations()
        except OSError:
            return False
        assert "PythonError" not in str(locations)
        return bool(locations) and all(location["loadStatus"] == "LOADED" for location in locations)

    def sensor(self, name: str) -> dict[str, Any]:
        [repository] = self.ask(f"{{{_SENSORS}}}")["repositoriesOrError"]["nodes"]
        return next(sensor for sensor in repository["sensors"] if sensor["name"] == name)

    def launch(self, *path: str, partition: str | None = None) -> str:
        """Materialize an asset, as the button of its page does; gives the run's id."""
        [location] = self.locations()
        selector = {
            "repositoryLocationName": location["name"],
            "repositoryName": "__repository__",
            "pipelineName": "__ASSET_JOB",
            "assetSelection": [{"path": list(path)}],
        }
        tags = [] if partition is None else [{"key": "dagster/partition", "value": partition}]
        launch = {"selector": selector, "mode": "default", "executionMetadata": {"tags": tags}}
        launched = self.ask(_LAUNCH, e=launch)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return launched["run"]["runId"]

    def status(self, run_id: str) -> str:
        return self.ask("query($r: ID!){runOrError(runId: $r){...on Run{status}}}", r=run_id)["runOrError"][
            "status"
        ]

    def reload(self) -> None:
        """Deployment > Reload."""
        [location] = self.locations()
        self.ask(_RELOAD, n=location["name"])


@contextlib.contextmanager
def started(*words: str | Path, environment: Mapping[str, str], folder: Path, log: Path) -> Iterator[Pages]:
    """A Dagster that is started with these words, once its definitions are loaded; killed in the end."""
    (port,) = free_ports(1)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        pages = Pages(f"http://127.0.0.1:{port}/graphql")
        wait_until(lambda: process.poll() is not None or pages.are_loaded(), f"Dagster ({log})", every=0.2)
        assert process.poll() is None, log.read_text()
        yield pages
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

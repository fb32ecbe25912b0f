"""Requests to a running Dagster, through the GraphQL that its pages use.

``server.py`` starts Dagster. Code that needs no running webserver asks the Dagster instance itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resources.dagster_names import FAILURE_REASON, NEVER_STARTED
from vlm_assets.webserver.home import HOME_HEADER, home_id, running_address
from vlm_durable.commands import command
from vlm_durable.markdown_text import plain

if TYPE_CHECKING:
    import httpx2

LAUNCHED_BY = "vlm-assets/launched-by"
"""Tag of a backfill: which command launched it."""

STALE = "vlm-assets/stale"
"""Tag of a backfill: what its runs do with stale partitions."""

_SECONDS = 60.0

_FAILED_RUNS_READ = 100
"""Of the runs that failed, so many are asked why, at each look."""


class DagsterApiError(RuntimeError):
    """Dagster answered with an error; the message is Dagster's own."""


class DagsterUnreachableError(DagsterApiError):
    """No webserver answers at the address, or it could not answer this time: asking again is safe.

    It starts, it is slow, it loads its definitions again, or Dagster's database is away.
    """


class OtherHomeError(DagsterApiError):
    """What answers at the address is not the Dagster of this home; nothing was asked of it."""


class CodeLocationError(DagsterApiError):
    """The definitions did not load; the message says why."""


@dataclass(frozen=True)
class PartitionKeys:
    """Keys of one asset's partitions by their status in Dagster; ``rest`` were never materialized."""

    materialized: frozenset[str]
    failed: frozenset[str]
    running: frozenset[str]
    rest: frozenset[str]


@dataclass(frozen=True)
class LaunchedBackfill:
    """A backfill: ``keys`` are the partitions of the asset that it was looked up for.

    unfinished: Dagster goes on with it. stale: what its runs do with stale
    partitions, as it was launched; None where that was not said. error: why Dagster gave it up, whatever its
    runs did; None where it did not.
    """

    id: str
    unfinished: bool
    keys: frozenset[str] = frozenset()
    stale: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class FailingCheck:
    """The latest result of a check for one partition, where it did not pass.

    severity: WARN or ERROR. description: plain text; None if the run ended before the check had a result.
    """

    asset: str
    name: str
    partition: str
    severity: str
    description: str | None


@dataclass(frozen=True)
class Queue:
    """How many runs wait and work, how many a pool lets work, and which daemons are down, and why."""

    queued: int
    started: int
    slots: int
    failing_daemons: Mapping[str, str]


class DagsterApi:
    """The Dagster of a ``dagster_home``, whose pages are at ``url`` (http://127.0.0.1:3000)."""

    def __init__(self, url: str, dagster_home: Path) -> None:
        self.url = url
        self.dagster_home = dagster_home

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """The data of a GraphQL query. Raises DagsterUnreachableError, OtherHomeError, DagsterApiError.

        The server says first whose pages these are: the Dagster of another home is asked nothing.
        """
        import httpx2

        body = {"query": query, "variables": variables}
        try:
            mark = {HOME_HEADER: home_id(self.dagster_home)}
            # Loopback: a proxy from the environment would only be in the way.
            with httpx2.Client(base_url=self.url, headers=mark, timeout=_SECONDS, trust_env=False) as client:
                self._refuse_other_home(client.get("/server_info"), mark)
                response = client.post("/graphql", json=body)
        except (httpx2.HTTPError, OSError) as error:
            raise DagsterUnreachableError(f"Dagster does not answer at {self.url}: {error}") from error
        self._refuse_other_home(response, mark)
        if response.is_client_error:
            raise DagsterApiError(f"Dagster at {self.url} refused a request: {_first_line(response.text)}")
        log = f"its log is {self.dagster_home / 'process_logs' / 'webserver.log'}"
        try:
            answer = response.json() if response.is_success else {}
            errors, data = answer.get("errors"), answer.get("data")
        except (ValueError, AttributeError):
            errors, data = None, None
        if errors:
            messages = "; ".join(dict.fromkeys(_first_line(str(error["message"])) for error in errors))
            raise DagsterUnreachableError(f"Dagster at {self.url} could not answer ({messages}); {log}")
        if not isinstance(data, dict):
            status = f"status {response.status_code}"
            raise DagsterUnreachableError(f"Dagster at {self.url} gave no answer ({status}); {log}")
        return data

    def _refuse_other_home(self, response: httpx2.Response, mark: Mapping[str, str]) -> None:
        if response.headers.get(HOME_HEADER) != mark[HOME_HEADER]:
            raise OtherHomeError(
                f"At {self.url} the Dagster of another home answers, or another program, not the one of"
                f" {self.dagster_home}. Nothing was asked of it and nothing was changed. Start this home's"
                f" Dagster on another port: {command('serve', '--port', 'PORT')}."
            )

    def definitions_loaded(self) -> bool:
        """Whether the definitions are there. Raises CodeLocationError where they failed to load."""
        workspace = self.ask(
            "{workspaceOrError{__typename ...on Workspace{locationEntries{loadStatus locationOrLoadError{"
            "__typename ...on PythonError{message}}}}}}"
        )["workspaceOrError"]
        entries = workspace.get("locationEntries", [])
        _refuse_unloaded(entries)
        return bool(entries) and all(entry["loadStatus"] == "LOADED" for entry in entries)

    def reload_definitions(self) -> None:
        """Reload the definitions, so that new ranges show. Raises CodeLocationError."""
        result = self.ask(
            "mutation{reloadWorkspace{__typename ...on Workspace{locationEntries{locationOrLoadError{"
            "__typename ...on PythonError{message}}}} ...on PythonError{message}}}"
        )["reloadWorkspace"]
        _refuse_error(result)
        _refuse_unloaded(result["locationEntries"])

    def runs_in(self, status: str) -> int:
        """How many runs are in a status: QUEUED ones wait for their turn, STARTED ones work."""
        runs = self.ask(
            "query($s: RunStatus!){runsOrError(filter: {statuses: [$s]}){...on Runs{count}}}", s=status
        )["runsOrError"]
        return int(runs["count"])

    def never_started(self) -> frozenset[str]:
        """Partitions whose latest failed run never started, among the runs that failed last."""
        runs = self.ask(
            "query($n: Int!){runsOrError(filter: {statuses: [FAILURE]}, limit: $n){__typename"
            " ...on Runs{results{tags{key value}}} ...on Error{message}}}",
            n=_FAILED_RUNS_READ,
        )["runsOrError"]
        _refuse_error(runs)
        reasons: dict[str, str | None] = {}
        for run in runs["results"]:  # the newest first
            tags = {tag["key"]: tag["value"] for tag in run["tags"]}
            reasons.setdefault(tags.get("dagster/partition", ""), tags.get(FAILURE_REASON))
        return frozenset(key for key, reason in reasons.items() if reason == NEVER_STARTED)

    def queue(self, pool: str) -> Queue:
        """How the queue, a pool and the daemons stand. Raises DagsterApiError."""
        answer = self.ask(
            "{instance{concurrencyLimits{concurrencyKey slotCount} daemonHealth{allDaemonStatuses{daemonType"
            " required healthy lastHeartbeatErrors{message}}}}}"
        )
        instance = answer["instance"]
        limits = {limit["concurrencyKey"]: limit["slotCount"] for limit in instance["concurrencyLimits"]}
        failing_daemons = {
            daemon["daemonType"]: " ".join(
                error["message"].strip()
                for error in daemon["lastHeartbeatErrors"] or [{"message": "no heartbeat"}]
            )
            for daemon in instance["daemonHealth"]["allDaemonStatuses"]
            if daemon["required"] and not daemon["healthy"]
        }
        return Queue(
            self.runs_in("QUEUED"), self.runs_in("STARTED"), int(limits.get(pool, 0)), failing_daemons
        )

    def partition_keys(self, asset: str) -> PartitionKeys:
        """Which partitions of an asset are done, failed, running or not there. Raises DagsterApiError."""
        node = self._node(
            asset,
            "assetPartitionStatuses{...on DefaultPartitionStatuses{materializedPartitions failedPartitions"
            " materializingPartitions unmaterializedPartitions}}",
        )
        statuses = node["assetPartitionStatuses"]
        return PartitionKeys(
            materialized=frozenset(statuses["materializedPartitions"]),
            failed=frozenset(statuses["failedPartitions"]),
            running=frozenset(statuses["materializingPartitions"]),
            rest=frozenset(statuses["unmaterializedPartitions"]),
        )

    def launch_backfill(
        self,
        assets: Sequence[str],
        keys: Sequence[str],
        *,
        title: str,
        tags: Mapping[str, str],
        run_config: Mapping[str, object] | None = None,
    ) -> str:
        """Launch one backfill of these partitions of all the assets together; gives its id.

        run_config: of each of its runs.
        """
        result = self.ask(
            "mutation($p: LaunchBackfillParams!){launchPartitionBackfill(backfillParams: $p){__typename"
            " ...on LaunchBackfillSuccess{backfillId} ...on Error{message}}}",
            p={
                "assetSelection": [{"path": [asset]} for asset in assets],
                "partitionNames": list(keys),
                "title": title,
                "tags": [{"key": key, "value": value} for key, value in tags.items()],
                "runConfigData": dict(run_config or {}),
            },
        )["launchPartitionBackfill"]
        _refuse_error(result)
        return str(result["backfillId"])

    def unfinished_backfills(self, asset: str) -> list[LaunchedBackfill]:
        """Backfills of an asset that Dagster goes on with, oldest first, whoever launched them."""
        result = self.ask(
            "query{partitionBackfillsOrError(filters: {statuses: ["
            + " ".join(_UNFINISHED)
            + "]}){__typename ...on PartitionBackfills{results{"
            + _BACKFILL
            + " assetSelection{path}}}"
            " ...on PythonError{message}}}",
        )["partitionBackfillsOrError"]
        _refuse_error(result)
        # Asked for the partitions of an asset that a backfill does not have, Dagster fails.
        of_asset = [row for row in result["results"] if {"path": [asset]} in (row["assetSelection"] or ())]
        backfills = [replace(_backfill(row), keys=self._keys_of(row["id"], asset)) for row in of_asset]
        return [backfill for backfill in reversed(backfills) if backfill.keys]

    def _keys_of(self, backfill_id: str, asset: str) -> frozenset[str]:
        """The partitions of one of its assets that a backfill was launched for."""
        targeted = self._backfill(
            backfill_id, "partitionsTargetedForAssetKey(assetKey: $a){partitionKeys}", asset
        )["partitionsTargetedForAssetKey"]
        return frozenset((targeted or {}).get("partitionKeys") or ())

    def backfill(self, backfill_id: str) -> LaunchedBackfill:
        """One backfill, without its partitions. Raises DagsterApiError."""
        return _backfill(self._backfill(backfill_id, _BACKFILL))

    def _backfill(self, backfill_id: str, fields: str, asset: str | None = None) -> Mapping[str, Any]:
        given, values = "$i: String!", {}
        if asset is not None:
            given, values = f"{given}, $a: AssetKeyInput!", {"a": {"path": [asset]}}
        result: Mapping[str, Any] = self.ask(
            f"query({given}){{partitionBackfillOrError(backfillId: $i){{__typename"
            " ...on PartitionBackfill{" + fields + "} ...on Error{message}}}",
            i=backfill_id,
            **values,
        )["partitionBackfillOrError"]
        _refuse_error(result)
        return result

    def failing_checks(self, asset: str) -> list[FailingCheck]:
        """The checks of an asset whose latest result for a partition is not passed."""
        node = self._node(
            asset,
            "assetChecksOrError{...on AssetChecks{checks{name partitionStatuses{__typename"
            " ...on AssetCheckDefaultPartitionStatuses{" + " ".join(_NOT_PASSED) + "}}}}}",
        )
        failing = []
        for check in node["assetChecksOrError"].get("checks", []):
            statuses = check["partitionStatuses"] or {}
            for key in sorted(key for name in _NOT_PASSED for key in statuses.get(name, ())):
                failing.append(self._latest_result(asset, check["name"], key))
        return failing

    def _latest_result(self, asset: str, name: str, key: str) -> FailingCheck:
        executions = self.ask(
            "query($a: AssetKeyInput!, $n: String!, $p: String){assetCheckExecutions(assetKey: $a,"
            " checkName: $n, partition: $p, limit: 1){status evaluation{severity description}}}",
            a={"path": [asset]},
            n=name,
            p=key,
        )["assetCheckExecutions"]
        evaluation: Mapping[str, Any] = (executions[0]["evaluation"] if executions else None) or {}
        return FailingCheck(
            asset=asset,
            name=name,
            partition=key,
            severity=evaluation.get("severity", "ERROR"),
            description=plain(evaluation["description"] or "") if evaluation else None,
        )

    def _node(self, asset: str, fields: str) -> dict[str, Any]:
        node: dict[str, Any] = self.ask(
            "query($a: AssetKeyInput!){assetNodeOrError(assetKey: $a){__typename ...on AssetNode{"
            + fields
            + "} ...on AssetNotFoundError{message}}}",
            a={"path": [asset]},
        )["assetNodeOrError"]
        if node["__typename"] != "AssetNode":
            # While definitions are loaded again, Dagster knows no asset.
            raise DagsterUnreachableError(f"Dagster does not know the asset {asset}: {node.get('message')}")
        return node


_UNFINISHED = ("REQUESTED", "CANCELING", "FAILING")

_NOT_PASSED = ("failedPartitions", "executionFailedPartitions")

_BACKFILL = "id status tags{key value} error{message}"


def _backfill(row: Mapping[str, Any]) -> LaunchedBackfill:
    tags = {tag["key"]: tag["value"] for tag in row["tags"]}
    return LaunchedBackfill(
        row["id"],
        row["status"] in _UNFINISHED,
        stale=tags.get(STALE),
        error=_first_line(row["error"]["message"]) if row["error"] else None,
    )


def _refuse_unloaded(entries: Sequence[Mapping[str, Any]]) -> None:
    for entry in entries:
        location = entry["locationOrLoadError"]
        if location and location["__typename"] == "PythonError":
            raise CodeLocationError(f"The definitions do not load: {location['message'].strip()}")


def _refuse_error(result: Mapping[str, Any]) -> None:
    if result.get("__typename") == "PythonError":
        raise DagsterUnreachableError(f"Dagster could not answer: {_first_line(result['message'])}")
    if "message" in result:
        raise DagsterApiError(f"{result['__typename']}: {result['message']}")


def _first_line(text: str) -> str:
    """The first line of a message: below it, a database's error has its query and a traceback."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "nothing was said")


BY_HAND = "A Dagster that was started by hand sees new ranges after Deployment > Reload."


def reload_running(dagster_home: Path) -> str:
    """Reload the definitions of the Dagster that runs on this state, if one does; a sentence about it."""
    address = running_address(dagster_home)
    if address is None:
        return BY_HAND
    try:
        DagsterApi(address, dagster_home).reload_definitions()
    except DagsterApiError as error:
        why = str(error).rstrip(".")
        return f"Dagster at {address} did not take the new ranges: {why}. Try Deployment > Reload there."
    return f"Dagster at {address} has read its definitions anew: the new ranges are partitions there now."

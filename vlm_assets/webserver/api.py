"""What only a running Dagster can do or say, through the GraphQL that its pages use.

``server.py`` starts Dagster. How runs and partitions stand is read from its database
(``sensors/dagster_internals``), by ``run`` as by the sensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_assets.webserver.home import HOME_HEADER, home_id, running_address
from vlm_durable.commands import command

if TYPE_CHECKING:
    import httpx2

LAUNCHED_BY = "vlm-assets/launched-by"
"""Tag of a backfill: which command launched it."""

STALE = "vlm-assets/stale"
"""Tag of a backfill: what its runs do with stale partitions."""

_SECONDS = 60.0


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

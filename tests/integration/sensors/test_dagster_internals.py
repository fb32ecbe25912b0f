"""sensors/dagster_internals on both databases that Dagster can keep its state in: SQLite and Postgres."""

import time
import warnings
from pathlib import Path

import dagster as dg
import pytest
from starlette.testclient import TestClient

from faults.postgres_server import PostgresServer
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.pages import GRAPHQL, pages
from sensors.partition_history import PartitionHistory
from tests.support.waiting import wait_until

RANGES = dg.StaticPartitionsDefinition(["a", "b", "c"])


@pytest.fixture(params=["sqlite", "postgres"])
def instance(request: pytest.FixtureRequest, tmp_path: Path):
    """An instance of Dagster on a real database."""
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        (tmp_path / "dagster.yaml").write_text(f"storage:\n  postgres:\n    postgres_url: {url}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as opened:
        yield opened


def _materialize(instance: dg.DagsterInstance, key: str, *, passed: bool = True, raises: bool = False) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        spec = dg.AssetCheckSpec("rows", asset="described", partitions_def=RANGES)

    @dg.asset(partitions_def=RANGES, check_specs=[spec])
    def described():
        if raises:
            raise dg.Failure("no device came free")
        yield dg.Output(None)
        yield dg.AssetCheckResult(passed=passed, check_name="rows", metadata={"expected": "3 rows"})

    ran = dg.materialize([described], instance=instance, partition_key=key, raise_on_error=False)
    return str(ran.run_id)


def test_partitions_runs_and_results_read_alike_on_both_databases(instance):
    """What failed, what a check found and what was put right are seen, whichever database tells of it."""
    dagster = DagsterFacts(instance)
    history = PartitionHistory(["described"])
    history.update(dagster)
    assert history.failing("described") == {}

    sound = _materialize(instance, "a")
    refused = _materialize(instance, "b", passed=False)
    broken = _materialize(instance, "c", raises=True)
    history.update(dagster)
    assert set(history.materialized["described"]) == {"a", "b"}
    assert history.open_attempts["described"]["c"].run_id == broken
    (failing,) = history.failing("described")["b"]
    assert (failing.check, failing.run_id, failing.metadata["expected"]) == ("rows", refused, "3 rows")

    states = dagster.run_states([sound, refused, broken])
    assert {one.partition for one in states.values()} == {"a", "b", "c"}
    ended = dagster.runs_ended_since(0.0, [dg.DagsterRunStatus.FAILURE])
    assert [one.run_id for one in ended] == [broken]

    results, until = dagster.evaluations_since(0)
    assert {(one.partition, one.passed) for one in results} == {("a", True), ("b", False)}
    assert dagster.evaluations_since(until) == ([], until)
    latest = {one.partition: one for one in dagster.latest_results(passed=True)}
    assert {key: one.passed for key, one in latest.items()} == {"a": True, "b": False}
    (passed,) = (one for one in results if one.passed)
    assert abs(latest["a"].at - passed.at) < 1e-3
    assert [one.partition for one in dagster.latest_results()] == ["b"]

    _materialize(instance, "b")
    _materialize(instance, "c")
    history.update(dagster)
    assert history.failing("described") == {}
    assert history.open_attempts["described"] == {}


def test_pages_answer_the_first_request_after_a_restart_of_postgres(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that the restart has cut is not used: nobody has to press a button twice."""
    (tmp_path / "dagster.yaml").write_text(f"storage:\n  postgres:\n    postgres_url: {postgres_url}\n")
    workspace = tmp_path / "workspace.yaml"
    workspace.write_text("load_from: []\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    # Runs, events and schedules have a pool of connections each.
    query = "{runsOrError(limit: 1) {__typename} assetsOrError {__typename} autoMaterializeTicks {id}}"
    with pages(workspace) as application:
        client = TestClient(application)
        answers = [client.post(GRAPHQL, json={"query": query})]
        asked_at = time.monotonic()
        postgres_server.stop()
        postgres_server.start()
        wait_until(lambda: time.monotonic() > asked_at + 1.5, "a connection that is too old to be used")
        answers.append(client.post(GRAPHQL, json={"query": query}))
    first, after = ((answer.status_code, answer.json()) for answer in answers)
    assert first[0] == 200 and "errors" not in first[1], first
    assert after == first

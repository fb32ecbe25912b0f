"""What a run of a cluster writes on one machine is shown on another one, from the bucket alone."""

import sys
import tempfile
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster_graphql.schema import create_schema

from vlm_assets.webserver.home import seed_settings
from vlm_cluster.cluster_launcher import filled_in

SHOWN = """
query($key: [String!]!) {
  capturedLogs(logKey: $key) { stdout stderr }
  capturedLogsMetadata(logKey: $key) { stdoutLocation }
}
"""
"""What the page of a run asks for."""


@dg.asset
def talking():
    print("said on stdout")
    print("said on stderr", file=sys.stderr)


@pytest.fixture
def machine(tmp_path, bucket, postgres_url, monkeypatch):
    """Opens the Dagster of a machine as a cluster's settings have it, with a local folder of its own."""
    monkeypatch.setenv("VLM_ASSETS_STATE_URL", postgres_url)
    monkeypatch.setenv("VLM_ASSETS_RAY_ADDRESS", "http://10.0.0.1:8265")

    def open_as(name):
        local = tmp_path / name / "local"
        local.mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(local))
        seed_settings(tmp_path / name / "dagster", filled_in(bucket, devices_of_a_run=1))
        return dg.DagsterInstance.from_config(str(tmp_path / name / "dagster"))

    return open_as


def test_the_output_of_a_run_is_read_on_a_machine_that_did_not_run_it(machine, bucket, tmp_path):
    """Stdout and stderr as the page of the run shows them; they lie where the lifecycle rule expires them."""
    with machine("one") as ran:
        run = dg.materialize([talking], instance=ran).run_id
    with machine("two") as shows:
        assert not list((tmp_path / "two" / "local").rglob("*.out")), "nothing of it is here"
        events = [one.dagster_event for one in shows.all_logs(run) if one.is_dagster_event]
        (captured,) = [one.logs_captured_data for one in events if one.event_type_value == "LOGS_CAPTURED"]
        key = shows.compute_log_manager.build_log_key_for_run(run, captured.file_key)
        answer = create_schema().execute(
            SHOWN, variables={"key": key}, context_value=SimpleNamespace(instance=shows)
        )
    assert answer.errors is None
    logs = answer.data["capturedLogs"]
    assert "said on stdout" in logs["stdout"]
    assert "said on stderr" in logs["stderr"]
    assert answer.data["capturedLogsMetadata"]["stdoutLocation"].startswith(
        bucket.address("dagster-logs/storage/")
    )

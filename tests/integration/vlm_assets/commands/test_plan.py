"""``vlm-assets plan`` with the example model: measured for real, kept, and compared with real runs."""

import json
import re

import dagster as dg
import pytest
from typer.testing import CliRunner

from faults.rehearsal.rehearse import program
from vlm_assets.automation.dataset_plan import build_dataset_plan
from vlm_assets.commands.main import app
from vlm_assets.services import small_runs
from vlm_assets.services.forecast import compare_with_run

pytestmark = [pytest.mark.serves, pytest.mark.long]


def test_a_plan_is_measured_once_kept_and_compared_with_its_run(desk, monkeypatch, receiver):
    """It measures by real runs under a Dagster of their own, tells nobody, and is held against the run."""
    monkeypatch.setattr(small_runs, "STEADY_RUNS", 1)
    # What leads out of the home is left out of the runs that are measured: nothing answers at this store.
    monkeypatch.setenv("VLM_ASSETS_STORE", "s3://nothing-is-there/x")
    monkeypatch.setenv("VLM_ASSETS_ALERT_TARGETS", f"json://127.0.0.1:{receiver.port}/hook")
    for name, value in {
        "DEVICES": "cpu:1",
        "DECODE_WORKERS": "1",
        "MAX_IMAGES": "2",
        "BATCH_SIZE": "4",
    }.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    desk = desk.changed(max_images=2)

    told: list[str] = []

    def plan(*options):
        done = CliRunner().invoke(app, ["plan", "--home", str(desk.settings.home), *options])
        assert done.exit_code == 0, done.output
        told.append(done.stderr)
        return done.stdout

    before = set(desk.settings.home.rglob("*.parquet"))
    said = json.loads(plan("--json"))
    assert said["measured"]["run"]["properties"] == 8
    assert said["measured"]["batches"][0][0] == 4
    assert said["days_band"][0] < said["days"] < said["days_band"][1]
    assert {"failures_expected", "range_size", "commit_seconds_best"} <= set(said)
    run = said["measured"]["run"]
    assert 0 < run["alone_seconds"] <= run["seconds"]
    assert receiver.messages == []
    rehearsed = CliRunner().invoke(program, ["--home", str(desk.settings.home), "--faults", "0", "--json"])
    shown = json.loads(rehearsed.stdout)
    assert shown["days_planned"] == pytest.approx(said["days"], rel=1e-3)
    assert shown["days_simulated"] == pytest.approx(said["days"], rel=0.04)
    assert set(desk.settings.home.rglob("*.parquet")) == before
    again = plan("--devices", "2", "--price-per-hour", "1.5")
    assert ["Not all is measured" in text for text in told] == [False, False], (
        "--json, then nothing to measure"
    )
    assert re.search(r"Cost: 0\.\d\d to 0\.\d\d\.", again)
    page = dg.materialize([build_dataset_plan(desk.settings)])
    (shown,) = page.asset_materializations_for_node("dataset_plan")
    what_if = shown.metadata["what if"].value
    # A small job is told in minutes, or in seconds.
    assert all(re.search(rf"(seconds|minutes) on {count}\b", what_if) for count in (1, 2, 4, 8, 16))
    assert compare_with_run(desk.settings) is None
    for key in ("000000000-000000007", "000000008-000000015"):
        assert desk.materialize("property_descriptions", "property_embeddings", key=key).success
    found = compare_with_run(desk.settings)
    assert found is not None
    assert found.sentence() in plan()

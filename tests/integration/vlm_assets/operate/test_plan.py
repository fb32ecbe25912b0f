"""``vlm-assets plan`` with the example model: measured for real, kept, and compared with real runs."""

import json
import re

import dagster as dg
from typer.testing import CliRunner

from vlm_assets.automation.dataset_plan import build_dataset_plan
from vlm_assets.cli.main import app
from vlm_assets.operate.plan import compare_with_run


def test_a_plan_is_measured_once_kept_and_compared_with_its_run(desk, monkeypatch):
    """It measures by a real run outside of the home's files, repeats nothing, and is held against the run."""
    for name, value in {
        "DEVICES": "cpu:1",
        "DECODE_WORKERS": "1",
        "MAX_IMAGES": "2",
        "BATCH_SIZE": "4",
    }.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    desk = desk.changed(max_images=2)

    def plan(*options):
        done = CliRunner().invoke(app, ["plan", "--home", str(desk.settings.home), *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    before = set(desk.settings.home.rglob("*.parquet"))
    said = json.loads(plan("--json"))
    assert said["measured"]["run"]["properties"] == 8
    assert said["measured"]["batches"][0][0] == 4
    assert said["days_band"][0] < said["days"] < said["days_band"][1]
    assert {"failures_expected", "range_size", "commit_seconds_best"} <= set(said)
    assert set(desk.settings.home.rglob("*.parquet")) == before
    again = plan("--devices", "2", "--price-per-hour", "1.5")
    assert "Nothing is measured" not in again
    assert re.search(r"Cost: 0\.\d\d to 0\.\d\d\.", again)
    page = dg.materialize([build_dataset_plan(desk.settings)])
    (shown,) = page.asset_materializations_for_node("dataset_plan")
    assert "| days on devices | 1 | 2 | 4 | 8 | 16 |" in shown.metadata["what if"].value
    assert compare_with_run(desk.settings) is None
    for key in ("000000000-000000007", "000000008-000000015"):
        assert desk.materialize("property_descriptions", "property_embeddings", key=key).success
    found = compare_with_run(desk.settings)
    assert found is not None
    assert found.sentence() in plan()

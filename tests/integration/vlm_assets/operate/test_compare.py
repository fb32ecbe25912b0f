"""``vlm-assets compare`` with the example model, as it is and with images too bright."""

import json

from typer.testing import CliRunner

from vlm_assets.cli.main import app


def test_two_variants_are_held_against_the_truth_and_each_other(desk, listing, tmp_path, monkeypatch):
    """One sees images too bright: numbers and intervals for both, and the page shows where they differ."""
    for name, value in {"DEVICES": "cpu:1", "DECODE_WORKERS": "1", "MAX_IMAGES": "3"}.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    truth, page = listing.parent / "truth.parquet", tmp_path / "page.html"
    before = {path: path.stat().st_mtime_ns for path in desk.settings.home.rglob("*.parquet")}
    options = [
        "--truth",
        str(truth),
        "--limit",
        "6",
        "--html",
        str(page),
        "--json",
        "--processor-options",
        '{"do_normalize": false}',
    ]
    done = CliRunner().invoke(app, ["compare", "--home", str(desk.settings.home), *options])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    ours, other = said["results"]
    assert (ours["name"], other["name"]) == ("as set", 'processor_options {"do_normalize": false}')
    assert ours["overall"]["of"] == 6
    assert 0 <= ours["overall"]["low"] <= ours["overall"]["share"] <= ours["overall"]["high"] <= 1
    assert {"facade_material", "floors"} <= set(ours["fields"])
    assert "hard" not in ours["fields"]
    assert ours["days"] > 0
    (pair,) = said["pairs"]
    low, high = pair["better_by"][1:]
    assert low <= ours["overall"]["share"] - other["overall"]["share"] <= high
    written = page.read_text()
    assert said["disagreements"]
    assert all(one in written for one in said["disagreements"])
    assert "data:image/jpeg;base64," in written
    assert {path: path.stat().st_mtime_ns for path in desk.settings.home.rglob("*.parquet")} == before

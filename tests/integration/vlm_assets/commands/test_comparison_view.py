"""``vlm-assets compare`` of one: what a few properties tell before weeks of work, by the engine of a run."""

import json
import re

import pytest
from typer.testing import CliRunner

from vlm_assets.commands.main import app
from vlm_assets.services.doctor import examination
from vlm_catalog.ingest import ingest

pytestmark = pytest.mark.usefixtures("scripted_engine")


@pytest.fixture
def trial(desk, monkeypatch):
    """Runs the command on the desk's home: sixteen properties, an image or two shown of each."""
    home = desk.settings.home
    for name, value in {"DEVICES": "cpu:1", "DECODE_WORKERS": "1", "MAX_IMAGES": "2"}.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    return lambda *options: CliRunner().invoke(app, ["compare", "--home", str(home), *options])


def test_a_few_properties_tell_answers_rate_and_what_all_would_take(trial, desk):
    """The answers are shown, all of it is reckoned up, and no row is written for it."""
    before = {path for path in desk.settings.home.rglob("*") if path.suffix == ".parquet"}
    said = trial("--limit", "3").stdout
    assert len(re.findall(r"^  facade_material", said, re.MULTILINE)) == 3
    assert re.search(r"^  described from 2 of \d+ images; VLM_ASSETS_MAX_IMAGES is 2", said, re.MULTILINE)
    told = " ".join(said.split())
    assert re.search(
        r"3 properties with \d images in [\d.]+ s on .*: [\d.]+ properties/s, [\d.]+ images/s", told
    )
    assert re.search(r"In partitions of 8: [\d.]+ properties/s, [\d.]+ images/s\. Each begins with", told)
    assert re.search(
        r"images and prompt are [\d,]+ tokens here, [\d,]+ at most\. As set, at most: 4 tokens", told
    )
    assert re.search(r"(\d+) of \1 images fit", told)
    assert re.search(r"All 16 would take [\d.]+ (seconds|minutes) on 1 device like it, and [\d.]+ MB", said)
    assert {path for path in desk.settings.home.rglob("*") if path.suffix == ".parquet"} == before


def test_properties_that_fill_no_partition_yet_can_be_tried(trial, listing, tmp_path, monkeypatch):
    """The first look of most people: fewer properties than a partition has, so there is only a tail."""
    home = tmp_path / "small"
    ingest(listing, home, range_size=1000)
    chosen = [check for check in examination.checks() if check.name in ("catalogue", "model")]
    monkeypatch.setattr(examination, "checks", lambda: chosen)
    tried = trial("--limit", "2", "--home", str(home)).stdout
    assert "All 16 would take" in tried
    done = CliRunner().invoke(app, ["doctor", "--home", str(home), "--json"])
    assert [one["level"] for one in json.loads(done.stdout)] == ["ok", "warning", "ok", "ok"], done.stdout

"""``vlm-assets try``: what a few properties tell before weeks of spending, by the engine of a real run."""

import json
import re

import pytest
from typer.testing import CliRunner

from resources.engine.transformers.transformers_engine import TransformersEngine
from vlm_assets.catalog.ingest import ingest
from vlm_assets.operate import doctor
from vlm_assets.operate.doctor import CHECKS
from vlm_assets.operate.main import app
from vlm_assets.operate.terminal import CommandError


@pytest.fixture
def trial(desk, monkeypatch):
    """Runs the command on the desk's home: sixteen properties, an image or two shown of each."""
    home = desk.settings.home
    for name, value in {"DEVICES": "cpu:1", "DECODE_WORKERS": "1", "MAX_IMAGES": "2"}.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    return lambda *options: CliRunner().invoke(app, ["try", "--home", str(home), *options])


def test_a_few_properties_tell_answers_rate_and_what_all_would_take(trial, desk):
    """The answers are shown, all of it is reckoned up, and no row is written for it."""
    before = {path for path in desk.settings.home.rglob("*") if path.suffix == ".parquet"}
    said = trial("--limit", "3").stdout
    assert len(re.findall(r"^  facade_material", said, re.MULTILINE)) == 3
    assert re.search(r"3 properties in [\d.]+ s on .*: [\d.]+ properties/s, [\d.]+ images/s", said)
    told = " ".join(said.split())
    assert re.search(
        r"images and prompt are [\d,]+ tokens here, [\d,]+ at most\. As set, at most: 4 tokens", told
    )
    assert re.search(r"(\d+) of \1 images fit", told)
    assert re.search(r"All 16 would take [\d.]+ (seconds|minutes) on 1 device like it, and [\d.]+ MB", said)
    assert {path for path in desk.settings.home.rglob("*") if path.suffix == ".parquet"} == before


def test_the_batch_that_pays_is_named_by_its_settings(trial):
    """Each size is described and its rate said, and what to set can be copied from the screen."""
    said = trial("--batch-images", "8", "--batch-images", "4").stdout
    assert re.findall(r"(\d+) images a batch: [\d.]+ properties/s", said) == ["4", "8"]
    assert re.search(r"What pays: VLM_ASSETS_BATCH_IMAGES=([48]) VLM_ASSETS_BATCH_SIZE=\1\.", said)


def test_sizes_that_do_not_fit_are_said_and_not_chosen(trial, monkeypatch):
    """Where the device's memory ends, larger sizes are left out, and a smaller one is named."""
    import torch

    generate = TransformersEngine._generate

    def run_out(engine, inputs, *rest):
        if len(inputs.prompt_tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate(engine, inputs, *rest)

    monkeypatch.setattr(TransformersEngine, "_generate", run_out)
    said = trial(*(f"--batch-images={size}" for size in (2, 8, 12))).stdout
    assert "too large for the device: it went on with 2 properties" in said
    assert "12 images a batch" not in said
    assert "VLM_ASSETS_BATCH_IMAGES=2 VLM_ASSETS_BATCH_SIZE=2" in said


def test_a_rate_is_not_made_of_one_batch(trial):
    """A catalogue that is too small for a size says so, and nothing is chosen by what warmed up."""
    done = trial("--batch-images", "64")
    assert isinstance(done.exception, CommandError)
    assert "16 properties are one batch of 64 images" in str(done.exception)


def test_properties_that_fill_no_partition_yet_can_be_tried(trial, listing, tmp_path, monkeypatch):
    """The first look of most people: fewer properties than a partition has, so there is only a tail."""
    home = tmp_path / "small"
    ingest(listing, home, range_size=1000)
    monkeypatch.setattr(doctor, "CHECKS", [one for one in CHECKS if one.name in ("catalogue", "model")])
    tried = trial("--limit", "2", "--home", str(home)).stdout
    assert "All 16 would take" in tried
    done = CliRunner().invoke(app, ["doctor", "--home", str(home), "--json"])
    assert [one["level"] for one in json.loads(done.stdout)] == ["ok", "warning", "ok", "ok"], done.stdout

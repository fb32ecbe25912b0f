"""``vlm-assets compare`` with the example model, as it is and with images too bright."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from vlm_assets.commands.main import app
from vlm_assets.config.settings import EXAMPLE_MODEL

TWO_FIELDS = """
from pydantic import BaseModel

class Two(BaseModel):
    floors: int
    has_pool: bool
"""


@pytest.fixture
def compared(desk, monkeypatch):
    """What a comparison of a few properties says as JSON."""
    for name, value in {"DEVICES": "cpu:1", "DECODE_WORKERS": "1", "MAX_IMAGES": "3"}.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)

    def run(*options):
        done = CliRunner().invoke(app, ["compare", "--home", str(desk.settings.home), "--json", *options])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return run


@pytest.mark.usefixtures("scripted_engine")
def test_a_model_that_is_named_twice_is_compared_with_itself(compared):
    """Two results and one pair, not one that was merged by name: it says the same both times."""
    said = compared("--model", "example", "--model", "example", "--limit", "3")
    assert [one["name"] for one in said["results"]] == ["example", "example (2)"]
    (pair,) = said["pairs"]
    assert (pair["agreement"]["share"], pair["agreement"]["total"]) == (1.0, 3)
    assert said["disagreements"] == []


def test_prompts_and_schemas_reach_the_model_and_are_compared_by_what_both_ask(
    compared, tmp_path, monkeypatch
):
    """Another prompt costs other tokens; a schema of two fields is not wrong in those that it lacks."""
    # The example model is shown no text: a copy of it is.
    model = shutil.copytree(EXAMPLE_MODEL, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<image>", "<image>{%- else -%}{{ part['text'] }}"))
    monkeypatch.setenv("VLM_ASSETS_MODEL", str(model))
    monkeypatch.setenv("VLM_ASSETS_PROMPT", "House.")
    (tmp_path / "two_fields.py").write_text(TWO_FIELDS)
    monkeypatch.syspath_prepend(tmp_path)
    said = compared("--prompt", "Describe the house.", "--schema", "two_fields:Two", "--limit", "2")
    ours, prompted, short = said["results"]
    assert (prompted["name"], short["name"]) == ("prompt Describe the house.", "schema two_fields:Two")
    assert prompted["prompt_tokens"] > ours["prompt_tokens"]
    assert short["prompt_tokens"] == ours["prompt_tokens"]
    (pair,) = (one for one in said["pairs"] if (one["first"], one["second"]) == ("as set", short["name"]))
    assert set(pair["fields"]) == {"floors", "has_pool"}


def test_two_contenders_are_held_against_the_truth_and_each_other(desk, compared, listing, tmp_path):
    """One sees images too bright: numbers and intervals for both, and the page shows where they differ."""
    truth, page = listing.parent / "truth.parquet", tmp_path / "page.html"
    before = {path: path.stat().st_mtime_ns for path in desk.settings.home.rglob("*.parquet")}
    options = [
        "--truth",
        str(truth),
        "--limit",
        "6",
        "--html",
        str(page),
        "--processor-options",
        '{"do_normalize": false}',
    ]
    said = compared(*options)
    ours, other = said["results"]
    assert (ours["name"], other["name"]) == ("as set", 'processor_options {"do_normalize": false}')
    assert ours["overall"]["total"] == 6
    assert 0 <= ours["overall"]["low"] <= ours["overall"]["share"] <= ours["overall"]["high"] <= 1
    assert {"facade_material", "floors"} <= set(ours["fields"])
    assert "hard" not in ours["fields"]
    assert ours["days"] > 0
    (pair,) = said["pairs"]
    low, high = pair["better_by"]["low"], pair["better_by"]["high"]
    assert low <= ours["overall"]["share"] - other["overall"]["share"] <= high
    written = page.read_text()
    assert said["disagreements"]
    assert all(one in written for one in said["disagreements"])
    assert "data:image/jpeg;base64," in written
    assert {path: path.stat().st_mtime_ns for path in desk.settings.home.rglob("*.parquet")} == before

"""What ``vlm-assets plan`` says of a forecast."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest

from tests.support.measurements import MEASURED
from vlm_assets.commands.plan import alone, sentences
from vlm_assets.config.settings import SettingsError, load_settings
from vlm_assets.services.forecast import make_forecast
from vlm_assets.services.small_runs import environment
from vlm_catalog.catalog import Catalog
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import load_schema


def plan_of(settings, measured=MEASURED, **more):
    chosen = {"devices": 1, "devices_here": 1, **more}
    return make_forecast(settings, Catalog.open(settings.home), measured, **chosen)


def test_a_small_job_is_told_in_minutes(uneven) -> None:
    """No person reads 0.0006 days as a minute."""
    slow = replace(MEASURED, batches=((10, 100, 6000.0),) * 4)
    for measured, expected in ((MEASURED, "1: 55 seconds, 2: "), (slow, r"1: \d\d\.\d minutes, 2: ")):
        said = "\n".join(sentences(plan_of(uneven, measured)))
        assert re.search(expected, said.partition("What if")[2])
        assert " days" not in said


def test_what_is_started_to_plan_a_set_asks_that_set_alone(tmp_path, monkeypatch) -> None:
    """A measurement of the descriptions would name the price of another question."""
    (tmp_path / "access_schema.py").write_text(
        "from pydantic import BaseModel\nclass Access(BaseModel):\n    has_ramp: bool\n"
    )
    (tmp_path / "questions.yaml").write_text("access:\n  schema: access_schema:Access\n")
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"VLM_ASSETS_PROMPT": "Describe it."})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLM_ASSETS_QUESTIONS", "questions.yaml")
    settings = load_settings(home=tmp_path / "home")
    with pytest.raises(SettingsError, match="no question set 'ramp'; there is access"):
        alone(settings, "ramp")
    own = alone(settings, "access")
    assert own.descriptions.name == "property_access"
    monkeypatch.setattr(os, "environ", environment(own))
    assert str(tmp_path) in os.environ["PYTHONPATH"].split(os.pathsep), "its runs work in other folders"
    started = load_settings(home=tmp_path / "home")
    assert started.questions is None
    schema = load_schema("access_schema:Access")
    for asked in (own, started):
        assert asked.description_schema == "access_schema:Access"
        assert build_prompt(schema, asked.prompt).digest == build_prompt(schema, None).digest

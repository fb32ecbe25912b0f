"""``vlm-assets devices``: what is held against which device, and taking one back."""

import json

import pytest
from typer.testing import CliRunner

from resources.devices.errors import DeviceError
from vlm_assets.cli.main import app
from vlm_assets.resource_settings import build_gpu
from vlm_assets.settings import load_settings


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:2")
    return tmp_path


def run(home, *arguments):
    return CliRunner().invoke(app, ["devices", "--home", str(home), *arguments])


def test_a_left_out_device_is_shown_with_the_way_back_and_taken_back(home):
    """The command that the alert names works as it is written there."""
    left_out = build_gpu(load_settings()).left_out()
    for occurrence in ("r1", "r2"):
        left_out.note_failure("cpu-1", occurrence=occurrence, why="It is lost.")
    shown = json.loads(run(home, "--json").stdout)
    assert [(one["id"], one["state"]) for one in shown] == [("cpu-1", "left out"), ("cpu-0", "free")][::-1]
    way_back = f"It is lost. When it is sound again: vlm-assets devices --home {home} --take-back cpu-1"
    assert way_back in run(home).stdout
    assert "used again" in run(home, "--take-back", "cpu-1").stdout
    assert not left_out.records()
    assert isinstance(run(home, "--take-back", "cpu-1").exception, DeviceError)

"""``vlm-assets pause`` and ``resume``: what they say is so."""

import pytest
from typer.testing import CliRunner

from resources.state.database import open_state
from resources.state.pause import pause_of
from vlm_assets.cli.main import app
from vlm_assets.operate.terminal import CommandError


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_folder_without_a_data_set_is_not_paused(command, tmp_path, monkeypatch):
    """With a misspelt home a person would read that all is paused, and reboot while it works elsewhere."""
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    misspelt = tmp_path / "hoem"
    refused = CliRunner().invoke(app, [command, "--home", str(misspelt)])
    assert isinstance(refused.exception, CommandError)
    assert str(misspelt) in str(refused.exception)
    assert not misspelt.exists()


def test_a_home_is_paused_and_resumed(tmp_path, monkeypatch):
    """Where anything was ever done, the commands do what they say, catalogue or not."""
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    state = tmp_path / ".state"
    state.mkdir()
    paused = CliRunner().invoke(app, ["pause", "--home", str(tmp_path)])
    assert paused.exit_code == 0, paused.output
    assert pause_of(open_state(state)) is not None
    assert CliRunner().invoke(app, ["resume", "--home", str(tmp_path)]).exit_code == 0
    assert pause_of(open_state(state)) is None

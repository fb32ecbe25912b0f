"""``vlm-assets devices``: what is held against which device, and taking one back."""

import json

import pytest
from typer.testing import CliRunner

from vlm_assets.commands import device_commands, terminal
from vlm_assets.commands.main import app
from vlm_assets.config.resource_settings import build_gpu
from vlm_assets.config.settings import load_settings
from vlm_assets.services.command_error import CommandError
from vlm_durable.state import nodes as nodes_module
from vlm_durable.state.database import open_state
from vlm_durable.state.nodes import DEAD_SECONDS, NodeRecord, Nodes
from vlm_durable.state.pause import pause_of
from vlm_durable.state.workers import Workers
from vlm_engine.devices.find import DeviceError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:2")
    return tmp_path


def run(home, *arguments):
    return CliRunner().invoke(app, ["devices", "--home", str(home), *arguments])


def test_a_left_out_device_is_shown_with_the_way_back_and_taken_back(home):
    """The command that the alert names works as it is written there."""
    left_out = build_gpu(load_settings()).left_out_devices()
    for occurrence in ("r1", "r2"):
        left_out.note_failure("cpu-1", occurrence=occurrence, why="It is lost.")
    shown = json.loads(run(home, "--json").stdout)
    assert [(one["id"], one["state"]) for one in shown] == [("cpu-1", "left out"), ("cpu-0", "free")][::-1]
    way_back = f"It is lost. When it is sound again: `vlm-assets devices --take-back cpu-1 --home {home}`"
    assert way_back in run(home).stdout
    assert "used again" in run(home, "--take-back", "cpu-1").stdout
    assert not left_out.records()
    assert isinstance(run(home, "--take-back", "cpu-1").exception, DeviceError)


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_folder_without_a_data_set_is_not_paused(command, home):
    """With a misspelt home a person would read that all is paused, and reboot while it works elsewhere."""
    misspelt = home / "hoem"
    refused = run(misspelt, command)
    assert isinstance(refused.exception, CommandError)
    assert str(misspelt) in str(refused.exception)
    assert not misspelt.exists()


def test_a_home_is_paused_and_resumed(home):
    """Where anything was ever done, the commands do what they say, catalogue or not."""
    state = home / ".state"
    state.mkdir()
    paused = run(home, "pause")
    assert paused.exit_code == 0, paused.output
    assert pause_of(open_state(state)) is not None
    assert run(home, "resume").exit_code == 0
    assert pause_of(open_state(state)) is None


def test_a_pause_waits_for_a_run_that_has_no_device_yet(home, monkeypatch):
    """It would take the device that comes free, while a person already reboots."""
    monkeypatch.setattr(device_commands, "DRAIN_SECONDS", 0.1)
    state = open_state(home / ".state")
    with Workers(state).begin(run_id="r1", asset="property_descriptions", partition="k", expected=2):
        paused = run(home, "pause")
    assert "k is worked on" in paused.output
    assert "can be rebooted" not in paused.output


def test_one_node_is_drained_and_taken_back(home, monkeypatch):
    """The others go on; a misspelt name changes nothing. Only a dead one is forgotten: its runs end."""
    state = open_state(home / ".state")
    Nodes(state).beat(NodeRecord("one", "boot", 1, "10.0.0.1", 1))
    assert "There is no node onne" in str(run(home, "pause", "--node", "onne").exception)
    assert "holds no run" in run(home, "pause", "--node", "one").output
    assert not Nodes(state).snapshot().slots
    assert pause_of(state) is None
    assert "takes work again" in run(home, "resume", "--node", "one").output
    assert Nodes(state).snapshot().slots == 1
    assert "is not dead" in str(run(home, "--forget-node", "one").exception)
    assert Nodes(state).snapshot().nodes, "all its runs would be ended"
    assert "No node onne" in str(run(home, "--forget-node", "onne").exception)
    before = nodes_module._now
    monkeypatch.setattr(nodes_module, "_now", lambda connection: before(connection) + DEAD_SECONDS + 1)
    assert "is forgotten" in run(home, "--forget-node", "one").output
    assert not Nodes(state).snapshot().nodes


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_only_the_named_home_is_read(command, tmp_path, monkeypatch):
    """A default home that nobody can read stops no pause of another."""
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path / "default"))
    for name in ("default", "named"):
        (tmp_path / name / ".state").mkdir(parents=True, mode=0o755)
    read = []
    whole = terminal.settings_of_home

    def load():
        settings = whole()
        read.append(settings.home)
        return settings

    monkeypatch.setattr(terminal, "settings_of_home", load)
    named = ["--home", str(tmp_path / "named")]
    for words in (["devices", command, *named], ["devices", *named, command]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert set(read) == {tmp_path / "named"}

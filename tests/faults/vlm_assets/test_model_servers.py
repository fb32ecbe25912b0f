"""What ends a model server that waits for its next partition: the end of Dagster, and a pause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resources.devices.find import find_devices
from resources.devices.loaded_servers import LoadedServers
from resources.engine.server.owned_server import start_or_adopt
from resources.engine.server.server_plan import ServerPlan
from vlm_assets.operate.dagster_server.server import dagster_server
from vlm_assets.operate.main import app

STUB = Path(__file__).parents[1] / "resources" / "engine" / "server" / "stub_server.py"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home on whose only device a server waits."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    command = f"{sys.executable} -I -S {STUB} {{port}} {tmp_path} serves"
    plan = ServerPlan(command, "a-model", None, "exact", idle_seconds=60.0, grace_seconds=0.5)
    device = find_devices("cpu:1", {})[0]
    start_or_adopt(device, plan, state_directory=tmp_path / ".state").release()
    return tmp_path


def test_the_end_of_dagster_ends_its_model_servers(home: Path) -> None:
    """After `make run`, or `vlm-assets serve`, nothing stays on the devices."""
    servers = LoadedServers(home / ".state")
    (home / "dagster").mkdir()
    with dagster_server(home, home / "dagster", port=1, grace_seconds=0.5):
        assert [one.device for one in servers.living()] == ["cpu-0"]
    assert not list(servers.living())


def test_a_pause_ends_model_servers_and_devices_shows_them(home: Path) -> None:
    """Before a reboot: what waits on a device is shown, and ended with the pause."""
    shown = CliRunner().invoke(app, ["devices"]).stdout
    assert "cpu-0  CPU slot 0 of 1: free. A server of a-model lives there (pid " in shown
    paused = CliRunner().invoke(app, ["pause"])
    assert (paused.exit_code, "No device is held" in paused.stdout) == (0, True)
    assert not list(LoadedServers(home / ".state").living())

"""What ends a model server: the end of Dagster, a pause, and on Ray the end of the run that started it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlm_assets.commands.main import app
from vlm_assets.webserver.server import dagster_server
from vlm_durable.state.nodes import RunLocks
from vlm_engine.devices.find import find_devices
from vlm_engine.devices.loaded_servers import LoadedServers
from vlm_engine.server.owned_server import OwnedServer
from vlm_engine.server.server_plan import ServerPlan

STUB = Path(__file__).parents[1] / "vlm_engine" / "server" / "stub_server.py"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home on whose only device a server waits."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    command = f"{sys.executable} -I -S {STUB} {{port}} {tmp_path} serves"
    plan = ServerPlan(command, "a-model", None, "exact", idle_seconds=60.0, grace_seconds=0.5)
    device = find_devices("cpu:1", {})[0]
    OwnedServer(device, plan, state_directory=tmp_path / ".state").release()
    return tmp_path


def test_the_end_of_dagster_ends_its_model_servers(home: Path) -> None:
    """After `make run`, or `vlm-assets serve`, nothing stays on the devices."""
    servers = LoadedServers(home / ".state")
    (home / "dagster").mkdir()
    with dagster_server(home, home / "dagster", port=3770, grace_seconds=0.5):
        assert [one.device for one in servers.living()] == ["cpu-0"]
    assert not list(servers.living())


def test_a_pause_ends_model_servers_and_devices_shows_them(home: Path) -> None:
    """Before a reboot: what waits on a device is shown, and ended with the pause."""
    shown = CliRunner().invoke(app, ["devices"]).stdout
    assert "cpu-0  CPU slot 0 of 1: free. A server of a-model lives there (pid " in shown
    paused = CliRunner().invoke(app, ["devices", "pause"])
    assert (paused.exit_code, "No device is held" in paused.stdout) == (0, True)
    assert not list(LoadedServers(home / ".state").living())


# A run's process on a node, from its first moment on; what Dagster would execute has come to its model.
RUN = """
import sys
from vlm_engine.devices.find import find_devices
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import load_schema
from sensors.dagster_internals import launchers
from vlm_cluster import ray_run
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.config.settings import current_settings

def work(arguments):
    settings = current_settings()
    device = find_devices(settings.devices, {}, node="one")[0]
    model = build_vision_language_model(settings)
    schema = load_schema(settings.description_schema)
    engine = model.load(device, schema=schema, prompt=build_prompt(schema, settings.prompt))
    print(device.id, flush=True)
    sys.stdin.readline()
    engine.close()

launchers.execute = work
ray_run.main([])
"""


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "killed"])
def test_on_ray_a_model_server_ends_with_its_run(tmp_path: Path, killed: bool) -> None:
    """For Ray the GPU is free from then on: nothing of the run may stay there, however the run ended."""
    state = tmp_path / "home" / ".state"
    environment = os.environ | {
        "VLM_RAY_RUN": "a-run",
        "VLM_ASSETS_HOME": str(tmp_path / "home"),
        "VLM_ASSETS_DEVICES": "cpu:1",
        "VLM_ASSETS_RAY_ADDRESS": "http://10.0.0.1:8265",
        "VLM_ASSETS_STATE_URL": "postgresql+psycopg2://u:p@10.0.0.1/d",
        "VLM_ASSETS_STORE": "s3://bucket/prefix",
        "VLM_ASSETS_SERVER_COMMAND": f"{sys.executable} -I -S {STUB} {{port}} {tmp_path} serves",
    }
    run = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert run.stdin is not None and run.stdout is not None
    device = run.stdout.readline().strip()
    record = LoadedServers(state).living_on(device)
    assert record is not None and RunLocks(state).living().keys() == {"a-run"}
    left = [record.supervisor.pid, record.reaper.pid, *json.loads((tmp_path / "pids.json").read_text())]
    open_ends = [os.pidfd_open(pid) for pid in left]
    if killed:
        os.killpg(run.pid, signal.SIGKILL)  # as Ray ends a job that does not end by itself
    run.communicate()
    assert run.returncode == (-signal.SIGKILL if killed else 0)
    for pidfd in open_ends:
        assert select.select([pidfd], [], [], 60.0)[0], "an orphan of the run lives on"
        os.close(pidfd)
    assert not list(LoadedServers(state).living()) and not RunLocks(state).living()

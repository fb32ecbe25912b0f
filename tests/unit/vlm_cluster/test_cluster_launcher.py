"""What the core asks the launcher of a cluster, and whence its address comes."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.support.command_line import run_command
from tests.support.homes import Dataset
from tests.support.measurements import MEASURED
from vlm_assets.commands.status_view import view
from vlm_assets.component import PropertyDescriptionsComponent
from vlm_assets.config.component_settings import keep_settings, settings_of_home
from vlm_assets.config.extensions import launcher_of
from vlm_assets.config.resource_settings import (
    build_gpu,
    build_model_server,
    control_state,
    prepared_runs,
    runs_at_once,
)
from vlm_assets.config.settings import Settings, SettingsError, load_settings
from vlm_assets.home_definitions import build_defs
from vlm_assets.services import small_runs
from vlm_assets.services.measurement import keep_measurement
from vlm_assets.services.pace import range_size_advice
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_catalog.listing import IngestRequest
from vlm_durable.files.sealed_json import read_sealed, write_sealed
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.state import nodes as nodes_module
from vlm_durable.state.nodes import DEAD_SECONDS, NodeDevice, NodeRecord, Nodes
from vlm_durable.state.pause import pause_node

RAY = {"RAY_ADDRESS": "http://10.0.0.1:8265"}
POSTGRES = {"STATE_URL": "postgresql+psycopg2://u@10.0.0.1/d"}
STORE = {"STORE": "s3://bucket/data"}


def on_ray(settings: Settings) -> Settings:
    """These settings with the address of Ray, and with the control state where it is."""
    store = S3Folder.parse("s3://bucket/data")
    return settings.model_copy(update={"ray_address": "http://10.0.0.1:8265", "store": store})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (RAY, "VLM_ASSETS_RAY_ADDRESS=.* share Postgres, and VLM_ASSETS_STATE_URL is not set"),
        (RAY | POSTGRES, "share an S3 store, and VLM_ASSETS_STORE is not set"),
        (
            {"RAY_ADDRESS": "http://me:word@10.0.0.1:8265"} | POSTGRES | STORE,
            "VLM_ASSETS_RAY_ADDRESS=.*http://HOST:8265, without a name or a password",
        ),
    ],
)
def test_several_machines_are_refused_where_they_share_too_little(
    values: dict[str, str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would work alone on the same partitions; the setting that is missing is named."""
    for name, value in values.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    with pytest.raises(SettingsError, match=sentence):
        load_settings(home=tmp_path)


def test_the_address_chooses_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, this machine's own launches the runs, as where no cluster is installed."""
    assert not launcher_of(load_settings(home=tmp_path)).has_sensors
    for name, value in {**RAY, **POSTGRES, **STORE}.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    settings = load_settings(home=tmp_path)
    text = launcher_of(settings).dagster_settings(settings)
    assert yaml.safe_load(str(text))["run_launcher"]["class"] == "ClusterRunLauncher"


def test_no_component_and_no_home_names_the_address(tmp_path: Path) -> None:
    """Ray runs any command of whoever names its server, and a home may be a copy of somebody else's."""
    several = {name.lower(): value for name, value in {**RAY, **POSTGRES, **STORE}.items()}
    houses = {"images": "photographs", "model": "someone/model"}

    def settings_of(**more: object) -> Settings:
        component = PropertyDescriptionsComponent.resolve_from_yaml(yaml.safe_dump({**houses, **more}))
        return component.to_settings(tmp_path, name="houses")

    with pytest.raises(SettingsError, match=r"ray_address=.*need `vlm-assets serve`, and no component"):
        settings_of(settings=several)
    settings = settings_of()
    keep_settings(settings, tmp_path)
    file = settings.state_directory / "component.json"
    kept = read_sealed(file)
    write_sealed(file, {**kept, "settings": {**kept["settings"], "ray_address": RAY["RAY_ADDRESS"]}})
    with pytest.raises(SettingsError, match=r"ray_address=.*no component"):
        settings_of_home(home=settings.home)


def test_the_nodes_alone_say_how_many_runs_work_and_who_watches_them(dataset: Dataset) -> None:
    """A limit that counts the head's devices would look like one that a person set, and stay for good."""
    settings = on_ray(dataset.settings)
    assert (runs_at_once(settings), prepared_runs(settings)) == (0, 0)
    assert (runs_at_once(dataset.settings) > 0, build_gpu(dataset.settings).node) == (True, "")
    assert build_gpu(settings).node == socket.gethostname()
    sensors = {
        name: {sensor.name for sensor in build_defs(chosen).get_repository_def().sensor_defs}
        for name, chosen in {"here": dataset.settings, "cluster": settings}.items()
    }
    assert sensors["cluster"] - sensors["here"] == {"cluster", "taking_over"}
    assert sensors["here"] - sensors["cluster"] == {"worker_health"}


def test_a_model_server_ends_at_once_and_a_launch_takes_longer(uneven: Settings) -> None:
    """Ray gives a run's devices to another; it starts runs slower, so that larger partitions are enough."""
    clustered = on_ray(uneven)
    assert build_model_server(clustered).idle_seconds < build_model_server(uneven).idle_seconds
    keep_measurement(uneven, MEASURED)
    request = IngestRequest(Path("list.csv"), image_root=Path("photos"))
    assert range_size_advice(uneven, 3000, 3.25, request) is None
    # 49 times 21.5 s of start-up, at 0.325 s a property.
    assert "--range-size 5000`" in str(range_size_advice(clustered, 3000, 3.25, request))


def test_a_measured_run_stays_on_this_machine(uneven: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its home is its own: it reaches neither Ray nor what the machines share."""
    for name, value in {**RAY, **POSTGRES, **STORE}.items():
        monkeypatch.setenv(f"VLM_ASSETS_{name}", value)
    environment = small_runs._apart(uneven, ())
    assert {f"VLM_ASSETS_{name}" for name in (*RAY, *POSTGRES, *STORE)}.isdisjoint(environment)


def test_the_devices_of_all_nodes_are_shown_by_node(dataset: Dataset, monkeypatch) -> None:
    """Where each is, how hot it is, what speaks against it, and which node is silent."""
    settings = on_ray(dataset.settings)
    nodes = Nodes(control_state(settings))
    gpu = NodeDevice("GPU-1", "a GPU", 71, "GPU-1 is throttled.")
    nodes.beat(NodeRecord("one", "boot", 1, "10.0.0.1", 1, (gpu,)))
    nodes.beat(NodeRecord("head", "boot", 1, "10.0.0.9", 0))
    pause_node(control_state(settings), "one", "a new fan", now=1.0)
    status = read_status(settings, Catalog.open(settings.home))
    (device,) = [device for device in status.devices if device.id == "GPU-1"]
    assert (device.node, device.temperature, device.is_here) == ("one", 71, True)
    assert "a new fan" in device.trouble and "throttled" in device.trouble
    console = Console(file=io.StringIO(), width=120)
    console.print(view(status))
    assert "at 71 °C" in console.file.getvalue()
    before = nodes_module._now
    monkeypatch.setattr(nodes_module, "_now", lambda connection: before(connection) + DEAD_SECONDS + 1)
    status = read_status(settings, Catalog.open(settings.home))
    assert not next(device for device in status.devices if device.id == "GPU-1").is_here
    assert "Node one: silent" in " ".join(status.warnings) and "counts as dead" in " ".join(status.warnings)
    assert "Node head" not in " ".join(status.warnings), "it takes no runs at any time"
    nodes.beat(NodeRecord("new name of one", "boot", 1, "10.0.0.1", 1, (gpu,)))
    (device,) = [
        device
        for device in read_status(settings, Catalog.open(settings.home)).devices
        if device.id == "GPU-1"
    ]
    assert (device.node, device.is_here) == ("new name of one", True), "the dead node's GPU is another's now"


def test_the_command_devices_lists_those_of_all_nodes(dataset: Dataset, monkeypatch) -> None:
    """Even where no node beats, none of this machine's stands among them: no run gets it."""
    home, settings = dataset.settings.home, on_ray(dataset.settings)
    monkeypatch.setattr("vlm_assets.commands.device_commands.chosen_settings", lambda _: settings)
    assert json.loads(run_command(home, "devices", "--json").output) == []
    gpu = NodeDevice("GPU-1", "a GPU", 71, "GPU-1 is throttled.")
    Nodes(control_state(dataset.settings)).beat(NodeRecord("one", "boot", 1, "10.0.0.1", 1, (gpu,)))
    (device,) = json.loads(run_command(home, "devices", "--json").output)
    assert (device["id"], device["node"], device["state"]) == ("GPU-1", "one", "free")
    assert device["sentences"] == ["one beats; 0 runs.", "71 °C.", "GPU-1 is throttled."]

"""What Prometheus is told, read by Prometheus' own parser: the same as status says."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from vlm_assets.commands.main import app
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.metrics import metrics_of
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_durable.state.pause import pause
from vlm_engine.devices.left_out import LeftOutDevices

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "operations.md"

Values = dict[tuple[str, ...], float]


def told(home: Path, *arguments: str) -> str:
    done = CliRunner().invoke(
        app, ["status", "--prometheus", "--home", str(home), *arguments], catch_exceptions=False
    )
    assert done.exit_code == 0
    return done.stdout


def parsed(text: str) -> dict[str, Values]:
    """Values by metric and by labels, the home's left out."""
    return {
        family.name.removeprefix("vlm_assets_"): {
            tuple(value for name, value in sorted(sample.labels.items()) if name != "home"): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def test_prometheus_reads_what_status_says(dataset) -> None:
    """Rate, done, failed, states: a graph and a terminal never disagree."""
    settings: Settings = dataset.settings
    found = parsed(told(settings.home))
    status = read_status(settings, Catalog.open(settings.home))
    assert found["properties"] == {(): 9.0}
    assert found["properties_done"] == {("property_descriptions",): 9.0, ("property_embeddings",): 9.0}
    assert (found["properties_ok"], found["properties_failed"]) == ({(): 8.0}, {("missing",): 1.0})
    assert found["partitions"]["property_descriptions", "done"] == 3.0
    assert sum(found["partitions"].values()) == len(status.partitions)
    assert found["properties_per_second"][()] == status.properties_per_second
    assert found["left_seconds"] == {(): 0.0}
    assert (found["uncopied_segments"], found["copy_lag_seconds"]) == ({(): 0.0}, {(): 0.0})
    assert (found["paused"], found["dagster_up"], found["runs"]) == ({(): 0.0}, {(): 0.0}, {})


def test_what_a_pager_needs_is_there(dataset) -> None:
    """A device that was left out, an alert that stands and a pause each change a figure."""
    settings: Settings = dataset.settings.model_copy(update={"devices": "cpu:1"})
    state = control_state(settings)
    for occurrence in ("a", "b", "c"):
        LeftOutDevices(state).note_failure("cpu-0", occurrence=occurrence, why="it computes nonsense")
    Outbox(control_state(settings)).post(
        Alert("sensor_silent", "sensor/alerts", "1", "error", "silent", "Look.")
    )
    pause(state, "the night", now=1e9)
    values = {one.name: one.samples for one in metrics_of(settings).collect()}
    states = {one.labels["state"]: one.value for one in values["vlm_assets_device_state"]}
    assert states == {"working": 0.0, "free": 0.0, "left out": 1.0, "away": 0.0}
    alerts = {one.labels["severity"]: one.value for one in values["vlm_assets_alerts_open"]}
    assert alerts == {"error": 1.0, "warning": 0.0}
    assert values["vlm_assets_paused"][0].value == 1.0


def test_the_file_for_node_exporter_is_replaced_whole(dataset, tmp_path) -> None:
    """Node exporter reads at any moment: it finds the old figures or the new ones."""
    file = tmp_path / "vlm_assets.prom"
    file.write_text("half a li")
    assert told(dataset.settings.home, "--file", str(file)) == ""
    assert parsed(file.read_text())["properties"] == {(): 9.0}
    assert list(tmp_path.glob("*.prom*")) == [file]


def test_a_rate_that_is_not_known_is_left_out(empty) -> None:
    """Zero would be a lie, and would raise an alarm before the first row."""
    found = parsed(told(empty.settings.home))
    assert (found["properties_per_second"], found["left_seconds"]) == ({}, {})
    assert found["properties_done"] == {("property_descriptions",): 0.0, ("property_embeddings",): 0.0}


def test_every_name_is_documented_and_no_other(dataset) -> None:
    """Whoever writes a rule or a panel finds the names in the handbook."""
    section = DOCUMENT.read_text().partition("## Prometheus")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(vlm_assets_\w+)", section, re.MULTILINE)
    names = [f"vlm_assets_{name}" for name in parsed(told(dataset.settings.home))]
    assert sorted(documented) == sorted(names)

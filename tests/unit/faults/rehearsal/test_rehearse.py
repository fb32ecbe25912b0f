"""The rehearsal: a small month on a simulated clock, and that it would notice what it is there to notice."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from faults.rehearsal import rehearse as rehearse_module
from faults.rehearsal.dagster_in_memory import DagsterInMemory
from faults.rehearsal.partition_life import PartitionLife
from faults.rehearsal.rehearse import Scenario, draw_timeline, program, rehearse
from sensors.dagster_internals.events import DagsterFacts
from tests.support.measurements import MEASURED
from vlm_assets.config.settings import load_settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.small_runs import MeasuredRun

SMALL = Scenario(seed=3, days=1.0, devices=4, nodes=2, faults=16, properties=300)


def test_memory_answers_all_that_the_sensors_ask():
    """No question of a rehearsal goes to an instance of Dagster, which it does not have."""
    asked = {name for name in dir(DagsterFacts) if not name.startswith("_")}
    assert asked <= vars(DagsterInMemory).keys()


@pytest.fixture
def settings(tmp_path):
    return load_settings(home=tmp_path / "home", range_size=100)


def test_a_small_month_of_faults_loses_nothing_and_tells_a_person(settings):
    """Faults of all kinds: each property once, at most a minute of work again, and every kind told."""
    found = rehearse(settings, SMALL)
    assert (found.lost, found.doubled, found.unfinished) == (0, 0, 0)
    assert found.nothing_is_lost
    assert found.deaths >= 5
    seconds_each = SMALL.days * 86_400 * SMALL.devices / SMALL.properties
    assert found.recomputed * seconds_each <= found.deaths * (60.0 + seconds_each), "a minute each, and a row"
    assert SMALL.days < found.days_simulated < 2 * SMALL.days
    assert {"device_left_out", "worker_stuck", "run_failed"} <= found.alerts_by_kind.keys()
    assert not found.open_alerts
    assert draw_timeline(found).startswith(b"\x89PNG")
    assert not settings.home.exists(), "the settings' own home is left alone"


def test_rows_that_a_start_does_not_find_are_counted(settings, monkeypatch):
    """A rehearsal of a journal that forgets or repeats a row says so: its zero means something."""
    restored = PartitionLife.restored

    def forgets_one(life):
        found = restored(life)
        return [found[1], *found[1:]] if len(found) > 1 else found

    monkeypatch.setattr(PartitionLife, "restored", forgets_one)
    found = rehearse(settings, replace(SMALL, days=0.4, faults=12, properties=200))
    assert found.lost > 0
    assert found.doubled > 0
    assert not found.nothing_is_lost


def test_the_same_seed_is_replayed_exactly_in_another_process(tmp_path, monkeypatch):
    """A failing seed can be looked at: all that it says is the same, but the seconds that it took."""
    monkeypatch.setenv("VLM_ASSETS_RANGE_SIZE", "100")
    asked = [
        *("--home", str(tmp_path), "--properties", "150", "--days", "0.2", "--devices", "2", "--nodes", "2"),
        *("--faults", "8", "--seed", "11", "--json"),
    ]
    # Python draws another order of sets in each process.
    here = CliRunner().invoke(program, asked).stdout
    command = [sys.executable, "-m", "faults.rehearsal", *asked]
    there = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    said = json.loads(here)
    assert said | {"seconds": 0} == json.loads(there) | {"seconds": 0}
    assert said.keys() >= {"lost", "doubled", "recomputed", "alerts", "days_simulated"}


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """Where the command keeps its result while it works."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("VLM_ASSETS_RANGE_SIZE", "10")
    return folder


def rehearse_as_json(home, days, faults):
    asked = ["--home", str(home), "--properties", "40", "--days", days, "--faults", faults]
    return CliRunner().invoke(program, [*asked, "--devices", "1", "--nodes", "1", "--json"])


def test_a_partition_that_had_an_error_is_counted_in_the_json(settings, temporary_folder, monkeypatch):
    """A process that ends with an error of its own in the rehearsed month costs nobody the report of it."""
    monkeypatch.setattr(PartitionLife, "live", lambda *_, **__: (0, "DiskFullError"))
    result = rehearse_as_json(settings.home, "0.2", "3")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["errors"]["DiskFullError"] > 0


def test_a_rehearsal_that_breaks_leaves_the_days_that_were_over(settings, temporary_folder, monkeypatch):
    """Minutes of work are not lost by an error near the end, and the place of the result was said."""
    assert rehearse_as_json(settings.home, "1.5", "0").exit_code == 0
    assert not list(temporary_folder.iterdir()), "a whole result is on the terminal, and nowhere else"
    monkeypatch.setattr(rehearse_module, "_compared", lambda *_: 1 / 0)
    result = rehearse_as_json(settings.home, "1.5", "0")
    assert isinstance(result.exception, ZeroDivisionError)
    (file,) = temporary_folder.glob("*/rehearsal.json")
    assert f"so far is in {file}" in result.stderr
    assert 0 < json.loads(file.read_text())["rows"] < 40


def test_a_scenario_that_cannot_be_is_refused(settings):
    """A sentence says what to change where partitions start for longer than the run may take."""
    with pytest.raises(CommandError, match="RANGE_SIZE"):
        rehearse(settings, replace(SMALL, days=0.0025, properties=600))


def test_a_rehearsal_without_faults_takes_as_long_as_the_plan(settings, monkeypatch):
    """Runs beside each other share cores, the last one has them alone, in both: within 5% of each other."""
    run = MeasuredRun(20, 185.0, 2, seconds=12.0, alone_seconds=8.0, between_seconds=1.5)
    measured = replace(MEASURED, run=run)
    monkeypatch.setattr(rehearse_module, "_measured", lambda settings: (measured, 2))
    for properties in (60, 140, 400):
        scenario = Scenario(faults=0, properties=properties, devices=2)
        found = rehearse(settings.model_copy(update={"range_size": 20}), scenario)
        assert found.days_simulated == pytest.approx(found.days_planned, rel=0.05)


def test_machines_that_nobody_named_are_said_to_be_assumed(settings):
    """Where nothing was measured, a person sees that the machines are not theirs."""
    asked = [
        "--home",
        str(settings.home),
        "--properties",
        "20",
        "--days",
        "0.02",
        "--faults",
        "0",
    ]
    assert "are assumed" in CliRunner().invoke(program, asked).stdout
    told = CliRunner().invoke(program, [*asked, "--devices", "2", "--nodes", "1"]).stdout
    assert "2 devices" in told
    assert "are assumed" not in told

"""The terminal's backfill with real processes: its own Dagster, or the one that runs on the home already."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
import yaml
from rich.console import Console

from examples.rendered_properties import write_example
from tests.support.processes import descendants, has_ended
from vlm_assets import webserver as dagster_server
from vlm_assets.automation.dataset_progress import progress_metadata
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.commands.run import INTERRUPTED, run_backfill
from vlm_assets.config.settings import load_settings
from vlm_assets.services.status import read_status

RANGE_SIZE = 4
PROGRAM = Path(sys.executable).with_name("vlm-assets")

RUN = """
import sys
from pathlib import Path
from vlm_assets.config.settings import load_settings
from vlm_assets.commands.run import run_backfill
if __name__ == "__main__":
    home = Path(sys.argv[1])
    sys.exit(run_backfill(load_settings(home=home), port=3500, exit_when_done=True))
"""

# Two starts of Dagster and a run, a process with a model, for each partition.
pytestmark = pytest.mark.serves


def test_interrupted_backfill_is_gone_on_with(
    tmp_path: Path, scripted_runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves no process and exit code 130; the next start adds no backfill and completes this one."""
    for name, value in scripted_runs.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TESTS_SCRIPTED_MODELS", "1.0")  # so that one is running when Ctrl-C comes
    home = tmp_path / "home"
    ingest(write_example(home, properties=2 * RANGE_SIZE, seed=7), home, range_size=RANGE_SIZE)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    first = subprocess.Popen([sys.executable, script, home], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    said = []
    for line in first.stdout:
        said.append(line)
        if " 1 running" in line:
            break
    started = descendants(first.pid)
    first.send_signal(signal.SIGINT)
    said += first.stdout.readlines()
    assert first.wait(60) == INTERRUPTED
    assert all(map(has_ended, started))
    launched = next(line for line in said if line.startswith("Launched backfill")).split()[2]

    terminal = io.StringIO()
    code = run_backfill(
        load_settings(home=home),
        port=3500,
        exit_when_done=True,
        console=Console(file=terminal, soft_wrap=True),
    )
    assert code == 0, terminal.getvalue()
    assert f"Going on with backfill {launched}" in terminal.getvalue()
    assert "Launched backfill" not in terminal.getvalue()
    assert "2 of 2 partitions are complete." in terminal.getvalue()
    keys = {one.key for one in Catalog.open(home).ranges}
    for asset in ("property_descriptions", "property_embeddings"):
        assert {file.stem for file in (home / asset).glob("*.parquet")} == keys


@pytest.mark.long
def test_run_waits_while_the_database_of_dagster_is_away(tmp_path: Path, postgres_server) -> None:
    """A real Postgres goes down while partitions run, and comes back: `run` says so, and ends as always."""
    home = tmp_path / "home"
    ingest(write_example(home, properties=2 * RANGE_SIZE, seed=7), home, range_size=RANGE_SIZE)
    postgres_server.empty()
    settings = load_settings(home=home)
    settings.dagster_home.mkdir()
    template = Path(dagster_server.__file__).with_name("dagster.yaml").read_text()
    storage = {"postgres": {"postgres_url": postgres_server.url}}
    (settings.dagster_home / "dagster.yaml").write_text(template + yaml.safe_dump({"storage": storage}))
    script = tmp_path / "run.py"
    script.write_text(RUN)
    said = ""
    with subprocess.Popen(
        [sys.executable, script, home], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            said += line
            print(line, end="", flush=True)
            if " 1 running" in line and "asking again" not in said:
                postgres_server.stop()
            elif "asking again" in line:
                time.sleep(15)  # so long is it away
                postgres_server.start()
    assert run.returncode == 0, said
    assert "asking again until there is an answer" in said, said
    assert "There are answers again." in said
    assert "2 of 2 partitions are complete." in said
    assert '{"' not in said, "sentences alone"


def test_run_uses_the_dagster_that_runs_and_takes_the_tail_when_asked(
    tmp_path: Path, scripted_runs: dict[str, str]
) -> None:
    """`run KEY` and `run` leave the tail alone; `run --missing` makes a partition of it and runs that.

    Whoever is asked meanwhile says the same rate and the same time left.
    """
    home = tmp_path / "home"
    ingest(write_example(home, properties=3, seed=7), home, range_size=2)
    catalog = Catalog.open(home)
    assert (len(catalog.ranges), catalog.waiting) == (1, 1)
    first = catalog.ranges[0].key
    environment = {**os.environ, **scripted_runs, "VLM_ASSETS_HOME": str(home), "VLM_ASSETS_DEVICES": "cpu:2"}
    environment["TESTS_SCRIPTED_MODELS"] = "0.5"  # long beside the steps of each clock
    environment["VLM_ASSETS_MODEL"] = "example"

    def said_by(*arguments: str) -> str:
        done = subprocess.run(
            [PROGRAM, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    serving = subprocess.Popen(
        [PROGRAM, "serve", "--port", "3600"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        assert any("Schedules, sensors and alerts are on" in line for line in serving.stdout)
        said = said_by("run", first)
        assert "Dagster runs on this home already" in said
        assert "1 of 1 partition is complete." in said
        assert {file.stem for file in (home / "property_embeddings").iterdir()} == {first}
        assert "In no partition yet: 1" in said_by("run")
        assert Catalog.open(home).tail == catalog.tail
        command = [PROGRAM, "run", "--missing"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            lines = []
            while not lines or not RATE.search(lines[-1]):
                lines.append(next(running.stdout))
            # Launched, and not at work before the daemon has looked for it and a process has started.
            agree_on_the_rate(home, before=said, now=lines[-1])
            said = "".join([*lines, *running.stdout])
        assert running.returncode == 0, said
        assert f"partition {catalog.tail} now" in said
        assert "2 of 2 partitions are complete." in said
        assert "Nothing to do: there is no such partition." in said_by("run", "--failed")
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.wait(60)
    assert Catalog.open(home).tail is None
    keys = {one.key for one in Catalog.open(home).ranges}
    for asset in ("property_descriptions", "property_embeddings"):
        assert {file.stem for file in (home / asset).iterdir()} == keys


RATE = re.compile(r"(\d+) properties, ([\d.]+)/s, (\S+) left")


def agree_on_the_rate(home: Path, *, before: str, now: str) -> None:
    """Terminal, `status --json`, progress page, picture and the partition's page: one rate, one time left.

    before: what the terminal said until one partition was done. now: with one property left, none at work.
    """
    read = read_status(load_settings(home=home, model="example"), Catalog.open(home))
    status = json.loads(json.dumps(read.as_json()))
    rate, left = status["properties_per_second"], status["seconds_left"]
    assert left == pytest.approx(1 / rate)
    assert RATE.findall(before)[-1] == ("2", f"{rate:.2f}", "0:00:00")
    assert RATE.findall(now) == [("2", f"{rate:.2f}", str(timedelta(seconds=round(left))))]
    assert sum(one["properties_per_second"] or 0 for one in status["devices"]) == pytest.approx(rate)
    page = progress_metadata(read)
    assert page["properties/s"].value == round(rate, 2)
    assert page["hours left"].value == round(left / 3600, 2)
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        (record,) = instance.fetch_materializations(dg.AssetKey("property_descriptions"), limit=1).records
        assert record.asset_materialization is not None
        of_partition = record.asset_materialization.metadata["properties/s"].value
    # A run's own rate counts until its last commit, which comes just after the last row.
    assert of_partition == pytest.approx(rate, rel=0.25)

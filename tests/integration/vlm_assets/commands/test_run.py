"""The terminal's backfill with real processes and a Dagster of its own."""

import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from examples.rendered_properties import write_example
from tests.support.processes import descendants, has_ended
from vlm_assets import webserver as dagster_server
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.commands.run import INTERRUPTED, run_backfill
from vlm_assets.config.settings import load_settings

RANGE_SIZE = 4

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

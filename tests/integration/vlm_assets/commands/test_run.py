"""The terminal's backfill with real processes and a Dagster of its own.

That one which is interrupted goes on with the next start is in ``test_running_dagster.py``.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from examples.rendered_properties import write_example
from vlm_assets import webserver as dagster_server
from vlm_assets.config.settings import load_settings
from vlm_catalog.ingest import ingest

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


@pytest.mark.serves
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
    assert '{"' not in said and "WARNING" not in said, "sentences alone"

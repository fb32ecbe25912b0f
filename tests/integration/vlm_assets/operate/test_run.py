"""``run_backfill`` with real processes: interrupted, gone on with, finished, and nothing left behind."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from examples.rendered_properties import write_example
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.operate.dagster_server.server import free_port
from vlm_assets.operate.run import INTERRUPTED, run_backfill

RANGE_SIZE = 4

RUN = """
import sys
from pathlib import Path
from vlm_assets.operate.run import run_backfill
if __name__ == "__main__":
    home = Path(sys.argv[1])
    sys.exit(run_backfill(home=home, dagster_home=home / "dagster", slots=1, port=3500, exit_when_done=True))
"""

# Two starts of Dagster and a run, a process with a model, for each partition.
pytestmark = pytest.mark.timeout(600)


def test_interrupted_backfill_is_gone_on_with(tmp_path: Path) -> None:
    """Ctrl-C leaves no process and exit code 130; the next start adds no backfill and completes this one."""
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
    started = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGINT)
    said += first.stdout.readlines()
    assert first.wait(60) == INTERRUPTED
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    launched = next(line for line in said if line.startswith("Launched backfill")).split()[2]

    terminal = io.StringIO()
    code = run_backfill(
        home=home,
        dagster_home=home / "dagster",
        slots=1,
        port=free_port(3500),
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

"""``vlm-assets serve`` with real processes: the Dagster of a home as a service manager runs it."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from examples.rendered_properties import write_example
from vlm_assets.catalog.ingest import ingest
from vlm_assets.operate.dagster_server.api import DagsterApi

PROGRAM = Path(sys.executable).with_name("vlm-assets")


def test_one_dagster_serves_a_home_until_it_is_told_to_end(tmp_path: Path) -> None:
    """Pages, daemon and schedules are up, a second one is refused, and SIGTERM leaves no process behind."""
    home = tmp_path / "home"
    ingest(write_example(home, properties=2, seed=7), home, range_size=2)
    command = [PROGRAM, "serve", "--home", home, "--port", "3600"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    said = []
    for line in served.stdout:
        said.append(line)
        if line.startswith("Schedules"):
            break
    address = next(line for line in said if line.startswith("Starting")).split()[3]
    assert DagsterApi(address).definitions_loaded()
    started = psutil.Process(served.pid).children(recursive=True)
    assert any("dagster-daemon" in word for one in started for word in one.cmdline())

    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 2
    assert "already" in second.stderr

    served.send_signal(signal.SIGTERM)
    assert served.wait(60) == 0
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

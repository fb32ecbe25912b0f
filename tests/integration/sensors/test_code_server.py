"""Dagster's code server: whether it would launch a run, and which of its processes serves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from sensors.dagster_internals.code_server import can_launch, serving_process
from tests.support.waiting import wait_until

DEFINITIONS = "import dagster as dg\ndefs = dg.Definitions()\n"


def test_a_server_that_is_up_and_hangs_launches_nothing(tmp_path):
    """It has its socket and takes connections: only a question that a launch would wait for too tells."""
    socket = tmp_path / "socket"
    (tmp_path / "few.py").write_text(DEFINITIONS)
    command = [Path(sys.executable).with_name("dagster"), "api", "grpc", "--socket", socket, "-f", "few.py"]
    assert not can_launch(socket, seconds=1), "nothing is there yet"
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"DAGSTER_HOME": ""}) as process:
        try:
            wait_until(lambda: can_launch(socket, seconds=5), "a server", seconds=120)
            assert serving_process(os.getpid()).pid == process.pid
            process.send_signal(signal.SIGSTOP)
            assert not can_launch(socket, seconds=1)
            process.send_signal(signal.SIGCONT)
            assert can_launch(socket, seconds=30)
        finally:
            process.kill()
    assert serving_process(os.getpid()) is None

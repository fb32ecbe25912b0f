"""What a Dagster that runs does about a code server that launches no run any more."""

import signal
import subprocess

import pytest

from resources.alerts.outbox import Outbox
from vlm_assets.webserver import server as server_module
from vlm_assets.webserver.api import DagsterApi
from vlm_assets.webserver.process_group import ProcessGroup
from vlm_assets.webserver.server import LAUNCHING, dagster_server
from vlm_durable.files.processes import ProcessIdentity
from vlm_durable.state.database import open_state


@pytest.fixture
def hanging():
    """A process that SIGTERM does not end."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def test_a_code_server_that_launches_nothing_is_restarted_and_a_person_is_told(dataset, hanging, monkeypatch):
    """A loaded machine is given three looks; once runs are launched again, that is told too."""
    reloads: list[str] = []
    answers = iter([False, False, True, False, False, False, True])
    monkeypatch.setattr(server_module, "can_launch", lambda socket, seconds: next(answers))
    monkeypatch.setattr(server_module, "serving_process", lambda pid: ProcessIdentity.from_pid(hanging.pid))
    monkeypatch.setattr(ProcessGroup, "pid_of", lambda self, name: 0)
    monkeypatch.setattr(DagsterApi, "reload_definitions", lambda self: reloads.append(self.url))
    monkeypatch.setattr(DagsterApi, "definitions_loaded", lambda self: True)
    monkeypatch.setattr(server_module, "_LOOK_AFTER_SECONDS", 0.0)
    settings = dataset.settings
    settings.dagster_home.mkdir()
    outbox = Outbox(open_state(settings.state_directory))
    with dagster_server(settings.home, settings.dagster_home, port=3970, grace_seconds=1.0) as server:
        for _ in range(5):
            server.watch(0.0)
        assert hanging.poll() is None
        assert LAUNCHING not in outbox.open_subjects()
        server.watch(0.0)
        assert hanging.wait(10) == -signal.SIGKILL
        assert reloads == [server.address]
        assert outbox.open_subjects()[LAUNCHING].kind == "launches_nothing"
        server.watch(0.0)
        assert LAUNCHING not in outbox.open_subjects()

"""``vlm-assets serve`` with real processes: the Dagster of a home as a service manager runs it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resources.alerts.outbox import Outbox
from tests.support.processes import command_line, descendants, has_ended
from tests.support.waiting import wait_until
from vlm_assets.webserver.api import DagsterApi
from vlm_durable.state.database import open_state

KEY = "000000000-000000007"
PROGRAM = Path(sys.executable).with_name("vlm-assets")

pytestmark = pytest.mark.serves


@pytest.fixture
def served(desk) -> Iterator[subprocess.Popen]:
    """``vlm-assets serve`` of a home with one published partition, which its Dagster does not know."""
    assert desk.materialize().success
    process = subprocess.Popen(command(desk), stdout=subprocess.PIPE, text=True)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(120)


def command(desk) -> list[str | Path]:
    return [PROGRAM, "serve", "--home", desk.settings.home, "--port", "3700"]


def address_when_up(served: subprocess.Popen) -> str:
    """Reads until everything is started; gives the address of the pages."""
    address = ""
    for line in served.stdout:
        address = line.split()[3] if line.startswith("Starting Dagster on") else address
        if line.startswith("Schedules"):
            return address
    raise AssertionError("it ended")


def wait_until_published(api: DagsterApi) -> None:
    """Until Dagster shows the published partition as done, which the reconciliation sensor tells it."""
    asset = "property_descriptions"
    wait_until(lambda: KEY in api.partition_keys(asset).materialized, "published", every=1.0)


def test_one_dagster_serves_a_home_until_it_is_told_to_end(desk, served) -> None:
    """A second one is refused; a history damaged while it is served is told, kept, begun anew, and filled.

    Pages, daemon and schedules are up, and SIGTERM leaves no process behind.
    """
    dagster_home = desk.settings.dagster_home
    api = DagsterApi(address_when_up(served), dagster_home)
    assert api.definitions_loaded()
    second = subprocess.run(command(desk), capture_output=True, text=True, timeout=120)
    assert second.returncode == 1
    assert "already" in second.stderr

    wait_until_published(api)
    for name in ("runs.db", "runs/index.db"):
        with (dagster_home / "history" / name).open("r+b") as database:
            database.write(b"\0not a database\0" * 300)
    wait_until_published(DagsterApi(address_when_up(served), dagster_home))
    (aside,) = dagster_home.glob("history.damaged-*")
    assert (aside / "runs.db").read_bytes().startswith(b"\0not a database")
    alerts = Outbox(open_state(desk.settings.state_directory)).open_subjects()
    assert str(aside) in alerts["state/Dagster's history"].next_step
    assert desk.materialize().success

    started = descendants(served.pid)
    assert any("dagster-daemon" in word for process in started for word in command_line(process))
    served.send_signal(signal.SIGTERM)
    assert served.wait(60) == 0
    assert all(map(has_ended, started))

"""``vlm-assets serve`` with real processes: the Dagster of a home as a service manager runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from resources.alerts.outbox import Outbox
from tests.support.dagster_pages import partition_keys
from tests.support.processes import command_line, descendants, has_ended
from tests.support.waiting import wait_until
from vlm_assets.automation.dataset_progress import progress_metadata
from vlm_assets.config.settings import load_settings
from vlm_assets.services.status import read_status
from vlm_assets.webserver.api import DagsterApi
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state

DESCRIPTIONS, EMBEDDINGS = "property_descriptions", "property_embeddings"
PROGRAM = Path(sys.executable).with_name("vlm-assets")

pytestmark = pytest.mark.serves


@dataclass
class Served:
    """A home of three properties in ranges of two, and ``vlm-assets serve`` over it."""

    home: Path
    environment: dict[str, str]
    process: subprocess.Popen[str]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command on the home, which has ended."""
        return subprocess.run(
            [PROGRAM, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def said_by(self, *arguments: str) -> str:
        """What a command prints; it must succeed."""
        done = self.call(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def api_when_up(self) -> DagsterApi:
        """Reads until everything is started."""
        assert self.process.stdout is not None
        address = ""
        for line in self.process.stdout:
            address = line.split()[3] if line.startswith("Starting Dagster on") else address
            if line.startswith("Schedules, sensors and alerts are on"):
                return DagsterApi(address, self.home / "dagster")
        raise AssertionError("it ended")

    def done(self, asset: str) -> set[str]:
        """The keys of the partitions that are published."""
        return {file.stem for file in (self.home / asset).glob("*.parquet")}


@pytest.fixture(scope="module")
def served(
    listing: Path, tmp_path_factory: pytest.TempPathFactory, scripted_runs: dict[str, str]
) -> Iterator[Served]:
    """One Dagster for both tests, with a partition and a tail."""
    home = tmp_path_factory.mktemp("served") / "home"
    few = listing.with_name("served.jsonl")
    few.write_text("".join(listing.read_text().splitlines(keepends=True)[5:8]))
    ingest(few, home, range_size=2)
    environment = {
        **os.environ,
        **scripted_runs,
        "VLM_ASSETS_HOME": str(home),
        "VLM_ASSETS_DEVICES": "cpu:2",
        "VLM_ASSETS_MODEL": "example",
        "TESTS_SCRIPTED_MODELS": "0.5",  # long beside the steps of each clock
    }
    command = [PROGRAM, "serve", "--port", "3600"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    yield Served(home, environment, process)
    process.send_signal(signal.SIGTERM)
    process.wait(120)


def test_run_uses_the_dagster_that_runs_and_takes_the_tail_when_asked(served: Served) -> None:
    """`run KEY` and `run` leave the tail alone; `run --missing` makes a partition of it and runs that.

    Whoever is asked meanwhile says the same rate and the same time left.
    """
    catalog = Catalog.open(served.home)
    assert (len(catalog.ranges), catalog.waiting) == (1, 1)
    first = catalog.ranges[0].key
    served.api_when_up()
    said = served.said_by("run", first)
    assert "Dagster runs on this home already" in said
    assert "1 of 1 partition is complete." in said
    assert served.done(EMBEDDINGS) == {first}
    assert "In no partition yet: 1" in served.said_by("run")
    assert Catalog.open(served.home).tail == catalog.tail
    command = [PROGRAM, "run", "--missing"]
    with subprocess.Popen(command, env=served.environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines = []
        while not lines or not RATE.search(lines[-1]):
            lines.append(next(running.stdout))
        # Launched, and not at work before the daemon has looked for it and a process has started.
        agree_on_the_rate(served.home, before=said, now=lines[-1])
        said = "".join([*lines, *running.stdout])
    assert running.returncode == 0, said
    assert f"partition {catalog.tail} now" in said
    assert "2 of 2 partitions are complete." in said
    assert "Nothing to do: there is no such partition." in served.said_by("run", "--failed")
    assert Catalog.open(served.home).tail is None
    keys = {one.key for one in Catalog.open(served.home).ranges}
    assert served.done(DESCRIPTIONS) == served.done(EMBEDDINGS) == keys


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


def test_one_dagster_serves_a_home_until_it_is_told_to_end(served: Served) -> None:
    """A second one is refused; a history damaged while it is served is told, kept, begun anew, and filled.

    Pages, daemon and schedules are up, and SIGTERM leaves no process behind.
    """
    published = served.done(DESCRIPTIONS)
    assert published, "by the test before"
    second = served.call("serve", "--port", "3600")
    assert second.returncode == 1
    assert "already" in second.stderr

    dagster_home = served.home / "dagster"
    for name in ("runs.db", "runs/index.db"):
        with (dagster_home / "history" / name).open("r+b") as database:
            database.write(b"\0not a database\0" * 300)
    api = served.api_when_up()
    assert api.definitions_loaded()
    # By the reconciliation sensor.
    wait_until(lambda: partition_keys(api, DESCRIPTIONS).materialized == published, "filled", every=1.0)
    (aside,) = dagster_home.glob("history.damaged-*")
    assert (aside / "runs.db").read_bytes().startswith(b"\0not a database")
    alerts = Outbox(open_state(served.home / ".state")).open_subjects()
    assert str(aside) in alerts["state/Dagster's history"].next_step

    started = descendants(served.process.pid)
    assert any("dagster-daemon" in word for process in started for word in command_line(process))
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    assert all(map(has_ended, started))

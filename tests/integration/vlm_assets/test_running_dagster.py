"""A running Dagster takes new ranges from an ingest, and starts a backfill with the heaviest one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
import pytest
from typer.testing import CliRunner

from tests.support.waiting import wait_until
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.commands.main import app
from vlm_assets.services.doctor.service_checks import pool_findings
from vlm_assets.webserver.api import CodeLocationError
from vlm_assets.webserver.home import POOL, prepare_dagster_home
from vlm_assets.webserver.server import DagsterServer, dagster_server

DESCRIPTIONS = "property_descriptions"
LIGHT, MIDDLE, HEAVY = (f"{start:09d}-{start:09d}" for start in range(3))

# Real servers and real runs, each a process with a model.
pytestmark = [pytest.mark.serves, pytest.mark.timeout(600)]


@dataclass
class Running:
    """A home and the Dagster that runs on it."""

    home: Path
    listing: Path
    server: DagsterServer
    has_daemon: bool = False

    def start_daemon(self) -> None:
        """Unless a test before has started it."""
        if not self.has_daemon:
            self.server.start_daemon()
        self.has_daemon = True

    def wait_until(self, reached: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
        wait_until(reached, what, seconds=seconds, every=0.2, pause=self.server.watch)


@pytest.fixture(scope="module")
def running(
    listing: Path, tmp_path_factory: pytest.TempPathFactory, quick_daemon: dict[str, str]
) -> Iterator[Running]:
    """Dagster over the lightest range alone, one for all tests; the listing has two more."""
    home = tmp_path_factory.mktemp("running") / "home"
    images = [uri for line in listing.read_text().splitlines() for uri in json.loads(line)["images"]]
    lines = [
        json.dumps({"property_id": f"p{number}", "images": images[:count]}) + "\n"
        for number, count in enumerate((1, 2, 4))
    ]
    uneven, first = listing.with_name("uneven.jsonl"), listing.with_name("first.jsonl")
    uneven.write_text("".join(lines))
    first.write_text(lines[0])
    ingest(first, home, range_size=1)
    dagster_home = home / "dagster"
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=1)
    with dagster_server(
        home, dagster_home, port=3400, grace_seconds=10.0, environment=quick_daemon
    ) as server:
        server.start_pages()
        yield Running(home, uneven, server)


def test_definitions_that_nobody_serves_are_loaded_again(
    running: Running, launch_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that serves them is killed, as it ends by itself: what is launched afterwards runs."""
    monkeypatch.setattr("vlm_assets.webserver.server._LOOK_AFTER_SECONDS", 2.0)
    api = running.server.api
    running.start_daemon()
    children = psutil.Process().children(recursive=True)
    (serving,) = (one for one in children if {"api", "grpc"} <= set(one.cmdline()))
    serving.kill()

    def noticed() -> bool:
        try:
            return not api.definitions_loaded()
        except CodeLocationError:
            return True

    # By the pages: what is looked at before is still in their memory.
    wait_until(noticed, "noticed", seconds=60, every=0.2, pause=running.server.group.watch)

    def loaded() -> bool:
        try:
            return api.definitions_loaded()
        except CodeLocationError:
            return False

    running.wait_until(loaded, "definitions loaded again")
    assert api.partition_keys(DESCRIPTIONS).rest == {LIGHT}
    with dg.DagsterInstance.from_config(str(running.home / "dagster")) as instance:
        run = launch_run(api, [DESCRIPTIONS], LIGHT)
        done = dg.DagsterRunStatus.SUCCESS
        running.wait_until(lambda: instance.get_run_by_id(run).status is done, "a run launched afterwards")


def test_new_ranges_are_seen_at_once_and_run_heaviest_first(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ingest` lets the running Dagster read its definitions anew; a backfill of all starts the heaviest."""
    monkeypatch.setenv("VLM_ASSETS_HOME", str(running.home))
    api = running.server.api
    assert not {MIDDLE, HEAVY} & api.partition_keys(DESCRIPTIONS).rest
    said = CliRunner().invoke(app, ["ingest", str(running.listing), "--home", str(running.home)])
    assert f"Dagster at {running.server.address} has read its definitions anew" in said.output
    assert {MIDDLE, HEAVY} <= api.partition_keys(DESCRIPTIONS).rest

    with dg.DagsterInstance.from_config(str(running.home / "dagster")) as instance:
        # No device until all are queued: what is queued first must not be taken first for that alone.
        instance.event_log_storage.set_concurrency_slots(POOL, 0)
        backfill = api.launch_backfill([DESCRIPTIONS], [LIGHT, MIDDLE, HEAVY], title="all", tags={})
        running.start_daemon()
        of_it = {"dagster/backfill": backfill}
        queued = dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED], tags=of_it)
        running.wait_until(lambda: instance.get_runs_count(queued) == 3, "three runs queued")
        told = CliRunner().invoke(app, ["status", "--prometheus", "--home", str(running.home)]).stdout
        assert f'vlm_assets_runs{{home="{running.home}",status="queued"}} 3.0' in told
        (found,) = pool_findings(api.queue(POOL), 1)
        assert found[0] == "error", "a pool of 0 is found by the doctor"
        assert "3 runs wait" in found[1]
        taken: list[str] = []
        for slots in (1, 2, 3):
            instance.event_log_storage.set_concurrency_slots(POOL, slots)
            running.wait_until(lambda left=3 - slots: instance.get_runs_count(queued) == left, "a run taken")
            left = {run.tags["dagster/partition"] for run in instance.get_runs(queued)}
            taken += {LIGHT, MIDDLE, HEAVY} - left - set(taken)
    assert taken == [HEAVY, MIDDLE, LIGHT]

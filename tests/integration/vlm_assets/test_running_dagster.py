"""One running Dagster: an interrupted backfill, retries, a repair, new ranges, definitions that are lost."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.execution.backfill import BulkActionStatus
from typer.testing import CliRunner

from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY
from sensors.retry_schedule import BUTTON, SCHEDULE
from tests.support.dagster_pages import partition_keys
from tests.support.listings import read_source, write_listing
from tests.support.processes import command_line, descendants, has_ended
from tests.support.waiting import wait_until
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.commands.main import app
from vlm_assets.commands.run import INTERRUPTED
from vlm_assets.config.settings import Settings, load_settings
from vlm_assets.services.backfill import Backfill
from vlm_assets.services.doctor.machine_checks import pool_findings
from vlm_assets.services.home_audit import audit
from vlm_assets.webserver.api import CodeLocationError
from vlm_assets.webserver.home import POOL, prepare_dagster_home
from vlm_assets.webserver.server import DagsterServer, dagster_server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.files.layout import Home

DESCRIPTIONS, EMBEDDINGS = "property_descriptions", "property_embeddings"
BOTH = [DESCRIPTIONS, EMBEDDINGS]
LONG = 60
"""Properties of the range that takes a while."""

# Real servers and real runs.
pytestmark = pytest.mark.serves

LAUNCH_BUTTON = """
mutation($selector: JobOrPipelineSelector!, $config: RunConfigData) {
  launchRun(executionParams: {selector: $selector, runConfigData: $config}) {
    __typename ... on PythonError { message }
  }
}
"""


@dataclass
class Running:
    """A home of a long range, four small ones and one of a single image, and the Dagster that runs on it.

    uneven: a listing of two properties more, the second of which has more images than the first. again: a
    `run` that goes on with the backfill of the last two small ranges, which was interrupted.
    """

    home: Path
    server: DagsterServer
    instance: dg.DagsterInstance
    launch_run: Callable[..., str]
    uneven: Path
    again: subprocess.Popen[str]

    @property
    def settings(self) -> Settings:
        return load_settings(home=self.home, devices="cpu:1")

    @property
    def keys(self) -> list[str]:
        return [one.key for one in Catalog.open(self.home).ranges]

    def wait_until(self, reached: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        wait_until(reached, what, seconds=seconds, every=0.2, pause=self.server.watch)

    def runs(self, key: str, **tags: str) -> list[dg.DagsterRun]:
        return list(self.instance.get_runs(dg.RunsFilter(tags={"dagster/partition": key, **tags})))

    def spoil(self, key: str) -> Path:
        """A file where the partition's journal belongs: its materialization fails. Gives the file."""
        place = Home(self.home).asset(DESCRIPTIONS).partition(key).journals
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        return place

    def fail(self, key: str) -> None:
        """Launch a partition as a person does, and wait until it has failed."""
        run = self.launch_run(self.server.api, BOTH, key)
        failed = dg.DagsterRunStatus.FAILURE
        self.wait_until(lambda: self.instance.get_run_by_id(run).status is failed, "failed")

    def published(self, key: str) -> bool:
        if not (self.home / EMBEDDINGS / f"{key}.parquet").exists():
            return False
        return all(key in partition_keys(self.server.api, asset).materialized for asset in BOTH)

    def skipped(self) -> list[str]:
        """What the schedule's last ticks said."""
        (state,) = [one for one in self.instance.all_instigator_state() if one.name == SCHEDULE]
        ticks = self.instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=3)
        return [tick.skip_reason or "" for tick in ticks]


@pytest.fixture(scope="module")
def running(
    listing: Path,
    tmp_path_factory: pytest.TempPathFactory,
    launch_run: Callable[..., str],
    scripted_runs: dict[str, str],
) -> Iterator[Running]:
    """The daemon looks every minute, and waits three seconds before a first new attempt."""
    folder = tmp_path_factory.mktemp("running")
    home, listed = folder / "home", read_source(listing)
    images = [uri for some in listed.values() for uri in some]

    def list_and_ingest(properties: dict[str, list[str]], range_size: int) -> Path:
        # Beside the images.
        path = write_listing(listing.with_name(f"running-{range_size}.jsonl"), properties)
        ingest(path, home, range_size=range_size)
        return path

    list_and_ingest({f"long-{n}": images[:1] for n in range(LONG)}, LONG)
    list_and_ingest(dict(itertools.islice(listed.items(), 8)), 2)
    path = list_and_ingest({"light": images[:1]}, 1)
    write_listing(path, {"light": images[:1], "p2": images[:2], "p4": images[:4]})
    dagster_home, catalog = home / "dagster", Catalog.open(home)
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=1)
    environment = {
        **scripted_runs,
        "VLM_ASSETS_RETRY_MINUTES": "0.05",
        # Small steps that take a moment, so that a test can act between two commits.
        "TESTS_SCRIPTED_MODELS": "0.3",
        "VLM_ASSETS_BATCH_SIZE": "1",
        "VLM_ASSETS_COMMIT_SECONDS": "0.5",
    }
    command = [Path(sys.executable).with_name("vlm-assets"), "run", *(one.key for one in catalog.ranges[3:5])]
    own = {**os.environ, **environment, "VLM_ASSETS_HOME": str(home), "VLM_ASSETS_DEVICES": "cpu:1"}
    # Long enough that it still works when Ctrl-C comes.
    slow = {**own, "TESTS_SCRIPTED_MODELS": "3.0"}
    with subprocess.Popen(command, env=slow, stdout=subprocess.PIPE, text=True) as run:
        launched = interrupt(run)
    with (
        dagster_server(home, dagster_home, port=3500, grace_seconds=10.0, environment=environment) as server,
        dg.DagsterInstance.from_config(str(dagster_home)) as instance,
    ):
        server.start_pages()
        again = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True)
        try:
            assert again.stdout is not None
            line = next(line for line in again.stdout if "backfill" in line)
            assert f"Going on with backfill {launched}" in line
            server.start_daemon()
            yield Running(home, server, instance, launch_run, path, again)
        finally:
            again.kill()
            again.wait()


def serving_definitions(server: DagsterServer) -> psutil.Process:
    """The process that serves the definitions: the code server's child."""
    below = descendants(server.group.pid_of("code-server"))
    (serving,) = (process for process in below if {"api", "grpc"} <= set(command_line(process)))
    return serving


def interrupt(run: subprocess.Popen[str]) -> str:
    """Press Ctrl-C while a `run` works in a Dagster of its own; gives the backfill that it launched."""
    assert run.stdout is not None
    said = []
    while not said or " 1 running" not in said[-1]:
        said.append(next(run.stdout))
    started = descendants(run.pid)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == INTERRUPTED
    assert started and all(map(has_ended, started))
    return next(line for line in said if line.startswith("Launched backfill")).split()[2]


def test_interrupted_backfill_is_gone_on_with(running: Running) -> None:
    """Ctrl-C leaves no process and exit code 130; the next `run` completes this backfill, and adds none."""
    running.wait_until(lambda: running.again.poll() is not None, "the end of the backfill")
    assert "2 of 2 partitions are complete." in running.again.communicate()[0]
    assert running.again.returncode == 0
    assert all(map(running.published, running.keys[3:5]))
    backfills = running.instance.get_backfills()
    assert len(backfills) == 1, [(backfill.status, backfill.error) for backfill in backfills]


def test_the_schedule_materializes_a_failed_partition_again(running: Running) -> None:
    """It fails, the cause goes away, and the next tick publishes it: nobody pressed anything."""
    key = running.keys[1]
    place = running.spoil(key)
    running.fail(key)
    place.unlink()
    running.wait_until(lambda: running.published(key), "published by the schedule")
    (ours,) = running.runs(key, **{LAUNCHED_BY: RETRY})
    succeeded = dg.DagsterRunStatus.SUCCESS
    running.wait_until(lambda: running.instance.get_run_by_id(ours.run_id).status is succeeded, "ended")
    assert ours.tags["dagster/schedule_name"] == SCHEDULE


def test_a_pause_is_what_the_schedule_says_and_the_button_tries_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused, the page of the schedule says since when and why; lifted, a person need not wait for it."""
    key = running.keys[2]
    place = running.spoil(key)
    running.fail(key)
    monkeypatch.setenv("VLM_ASSETS_HOME", str(running.home))
    paused = CliRunner().invoke(app, ["devices", "pause", "--home", str(running.home), "--reason", "a move"])
    assert paused.exit_code == 0, paused.output
    assert "No device is held" in paused.output
    place.unlink()
    running.wait_until(lambda: any("because a move" in said for said in running.skipped()), "said so")
    assert not running.runs(key, **{LAUNCHED_BY: RETRY})
    assert "lifted" in CliRunner().invoke(app, ["devices", "resume", "--home", str(running.home)]).output

    answer = running.server.api.ask(
        LAUNCH_BUTTON,
        selector={
            "repositoryLocationName": "vlm_assets",
            "repositoryName": "__repository__",
            "pipelineName": BUTTON,
        },
        config={"ops": {"ask_for_a_look": {"config": {"at_once": True}}}},
    )
    assert answer["launchRun"]["__typename"] == "LaunchRunSuccess", answer
    running.wait_until(lambda: running.published(key), "published by the button")
    assert len(running.runs(key, **{LAUNCHED_BY: RETRY})) == 1


def test_a_repair_is_launched_in_the_running_dagster(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both copies lost: one backfill with `recompute: true`, and afterwards the audit is clean."""
    key, settings = running.keys[1], running.settings
    running.wait_until(lambda: running.again.poll() is not None, "the end of the backfill")
    if not running.published(key):  # By the schedule, where the test before ran.
        running.launch_run(running.server.api, BOTH, key)
        running.wait_until(lambda: running.published(key), "published")
    monkeypatch.setenv("VLM_ASSETS_HOME", str(running.home))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    paths = settings.descriptions.partition(key)
    paths.published.unlink()
    paths.version(0).unlink()
    done = CliRunner().invoke(app, ["repair", "--yes"])
    assert done.exit_code == 0, done.output
    (launched,) = [line for line in done.output.splitlines() if line.startswith("Launched backfill")]
    of_it = dg.RunsFilter(tags={"dagster/backfill": launched.split()[2]})

    def ended() -> list[dg.DagsterRun]:
        runs = list(running.instance.get_runs(of_it))
        return runs if all(run.is_finished for run in runs) else []

    runs = wait_until(ended, "the repair", every=0.2, pause=running.server.watch)
    assert [run.status for run in runs] == [dg.DagsterRunStatus.SUCCESS]
    found = audit(settings, Catalog.open(running.home), deep=True)
    assert found.ok, found.wrong
    whole = 2 * sum(map(running.published, running.keys[1:5]))
    assert found.total(DESCRIPTIONS).rows == found.total(EMBEDDINGS).rows == whole


def test_definitions_that_nobody_serves_are_loaded_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that serves them is killed, as it ends by itself: what is launched afterwards runs."""
    monkeypatch.setattr("vlm_assets.webserver.server._LOOK_AFTER_SECONDS", 2.0)
    api, light = running.server.api, running.keys[5]
    serving_definitions(running.server).kill()

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
    assert light in partition_keys(api, DESCRIPTIONS).rest
    run = running.launch_run(api, [DESCRIPTIONS], light)
    done = dg.DagsterRunStatus.SUCCESS
    running.wait_until(
        lambda: running.instance.get_run_by_id(run).status is done, "a run launched afterwards"
    )


def test_a_backfill_outlives_definitions_that_nobody_serves(
    listing: Path, tmp_path: Path, scripted_runs: dict[str, str]
) -> None:
    """The daemon reads a backfill while they are gone, as Ctrl-C leaves it: it waits, and is not given up."""
    home, dagster_home = tmp_path / "home", tmp_path / "home" / "dagster"
    ingest(listing, home, range_size=8)
    (key, *_) = [bounds.key for bounds in Catalog.open(home).ranges]
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=1)
    with (
        dagster_server(home, dagster_home, port=3500, grace_seconds=9.0, environment=scripted_runs) as server,
        dg.DagsterInstance.from_config(str(dagster_home)) as instance,
    ):
        server.start_pages()
        backfill = server.api.launch_backfill(BOTH, [key], title="one partition", tags={})
        serving_definitions(server).kill()
        server.start_daemon()
        log = server.logs / "daemon.log"

        def was_read() -> bool:
            return f"Backfill {backfill} was unable to continue" in log.read_text()

        def given_up() -> bool:
            return instance.get_backfill(backfill).status is not BulkActionStatus.REQUESTED

        # Without `server.watch`, which would load them again.
        wait_until(lambda: was_read() or given_up(), "read", seconds=60, every=0.2, pause=server.group.watch)
        assert not given_up()


def test_new_ranges_are_seen_at_once_and_run_heaviest_first(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ingest` lets the running Dagster read its definitions anew; a backfill of all starts the heaviest.

    Meanwhile `run` says of each partition what the pages show.
    """
    monkeypatch.setenv("VLM_ASSETS_HOME", str(running.home))
    api = running.server.api
    running.wait_until(lambda: running.again.poll() is not None, "the end of the backfill")
    assert len(running.keys) == 6
    said = CliRunner().invoke(app, ["ingest", str(running.uneven), "--home", str(running.home)])
    assert f"Dagster at {running.server.address} has read its definitions anew" in said.output
    *_, light, middle, heavy = running.keys
    assert {middle, heavy} <= partition_keys(api, DESCRIPTIONS).rest

    instance, dagster = running.instance, DagsterFacts(running.instance)
    # No device until all are queued: what is queued first must not be taken first for that alone.
    instance.event_log_storage.set_concurrency_slots(POOL, 0)
    of_it: dict[str, str] = {}

    def all_queued() -> bool:
        # The daemon reads new ranges some seconds after the webserver, and gives up what it has not read yet.
        if not of_it or dagster.backfill(of_it["dagster/backfill"]).error:
            of_it["dagster/backfill"] = api.launch_backfill(
                [DESCRIPTIONS], [light, middle, heavy], title="all", tags={}
            )
        return instance.get_runs_count(queued()) == 3

    def queued() -> dg.RunsFilter:
        return dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED], tags=of_it)

    running.wait_until(all_queued, "three runs queued")
    assert dagster.unfinished_backfills([EMBEDDINGS]) == []
    assert dagster.unfinished_backfills(BOTH)[-1].keys == {DESCRIPTIONS: {light, middle, heavy}}
    now = Backfill(api, dagster, running.settings, running.keys).progress()
    pages = [partition_keys(api, asset) for asset in BOTH]
    assert now.under_way == pages[0].running | pages[1].running == {light, middle, heavy}
    assert now.done == pages[0].materialized & pages[1].materialized
    assert now.failed == pages[0].failed | pages[1].failed
    told = CliRunner().invoke(app, ["status", "--prometheus", "--home", str(running.home)]).stdout
    assert f'vlm_assets_runs{{home="{running.home}",status="queued"}} 3.0' in told
    (found,) = pool_findings(api.queue(POOL), 1)
    assert found[0] == "error", "a pool of 0 is found by the doctor"
    assert "3 runs wait" in found[1]
    taken: list[str] = []
    for slots in (1, 2, 3):
        instance.event_log_storage.set_concurrency_slots(POOL, slots)
        running.wait_until(lambda left=3 - slots: instance.get_runs_count(queued()) == left, "a run taken")
        left = {run.tags["dagster/partition"] for run in instance.get_runs(queued())}
        taken += {light, middle, heavy} - left - set(taken)
    assert taken == [heavy, middle, light]


@pytest.mark.long
def test_a_pause_drains_what_works_and_it_goes_on_afterwards(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed, no failure, the device free; Dagster's own retry waits for the end and finishes it."""
    key = running.keys[0]
    monkeypatch.setenv("VLM_ASSETS_HOME", str(running.home))
    settings = running.settings
    # Else a run of that backfill is the one that waits, and the retry stays in the queue.
    running.wait_until(lambda: running.again.poll() is not None, "the end of the backfill")
    running.server.api.launch_backfill(BOTH, [key], title="long", tags={})
    running.wait_until(lambda: committed_rows(settings.descriptions, key) > 0, "first commit")
    paused = CliRunner().invoke(app, ["devices", "pause", "--home", str(running.home)])
    assert paused.exit_code == 0, paused.output
    (ended, *_) = running.runs(key)[::-1]
    running.wait_until(lambda: running.instance.get_run_by_id(ended.run_id).is_finished, "the run ended")
    tags = running.instance.get_run_by_id(ended.run_id).tags
    assert tags["dagster/failure_reason"] == "UNEXPECTED_TERMINATION"
    committed = committed_rows(settings.descriptions, key)
    assert 0 < committed < LONG

    running.wait_until(lambda: len(running.runs(key)) == 2, "retried by Dagster")
    retry = running.runs(key)[0].run_id
    running.wait_until(
        lambda: any("Waiting, without a device" in one.message for one in running.instance.all_logs(retry)),
        "the retry waits",
    )
    assert committed_rows(settings.descriptions, key) == committed
    assert CliRunner().invoke(app, ["devices", "resume", "--home", str(running.home)]).exit_code == 0
    running.wait_until(lambda: running.published(key), "published")
    assert running.instance.get_run_by_id(retry).tags["dagster/retry_number"] == "1"

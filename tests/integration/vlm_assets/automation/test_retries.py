"""A failed partition comes right by itself: real daemon, real schedule, real runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
from typer.testing import CliRunner

from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY
from sensors.retry_schedule import BUTTON, SCHEDULE
from tests.support.waiting import wait_until
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.commands.main import app
from vlm_assets.config.settings import load_settings
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import DagsterServer, dagster_server
from vlm_durable.files.layout import Home

DESCRIPTIONS, EMBEDDINGS = "property_descriptions", "property_embeddings"
BOTH = [DESCRIPTIONS, EMBEDDINGS]
LONG = 60
"""Properties of the range that takes a while."""

pytestmark = [pytest.mark.serves, pytest.mark.timeout(900)]

LAUNCH_BUTTON = """
mutation($selector: JobOrPipelineSelector!, $config: RunConfigData) {
  launchRun(executionParams: {selector: $selector, runConfigData: $config}) {
    __typename ... on PythonError { message }
  }
}
"""


@dataclass
class Running:
    """A home of two small ranges and a long one, and the Dagster that runs on it."""

    home: Path
    server: DagsterServer
    instance: dg.DagsterInstance
    launch_run: Callable[..., str]

    @property
    def keys(self) -> list[str]:
        return [one.key for one in Catalog.open(self.home).ranges]

    def wait_until(self, reached: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        wait_until(reached, what, seconds=seconds, every=0.5, pause=self.server.group.watch)

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
        done = (self.server.api.partition_keys(asset).materialized for asset in BOTH)
        return all(key in keys for keys in done) and (self.home / EMBEDDINGS / f"{key}.parquet").exists()

    def skipped(self) -> list[str]:
        """What the schedule's last ticks said."""
        (state,) = [one for one in self.instance.all_instigator_state() if one.name == SCHEDULE]
        ticks = self.instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=3)
        return [tick.skip_reason or "" for tick in ticks]


@pytest.fixture(scope="module")
def running(
    listing: Path, tmp_path_factory: pytest.TempPathFactory, launch_run: Callable[..., str]
) -> Iterator[Running]:
    """The daemon looks every minute, and waits three seconds before a first new attempt."""
    home = tmp_path_factory.mktemp("home")
    few = listing.with_name("few.jsonl")
    few.write_text("".join(listing.read_text().splitlines(keepends=True)[:4]))
    ingest(few, home, range_size=2)
    images = json.loads(few.read_text().splitlines()[0])["images"][:1]
    lines = [json.dumps({"property_id": f"long-{n}", "images": images}) + "\n" for n in range(LONG)]
    few.write_text("".join(lines))
    ingest(few, home, range_size=LONG)
    dagster_home = home / "dagster"
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=1)
    told = {
        "VLM_ASSETS_RETRY_MINUTES": "0.05",
        # Small steps, so that a test can act between two commits.
        "VLM_ASSETS_BATCH_SIZE": "1",
        "VLM_ASSETS_COMMIT_SECONDS": "0.5",
    }
    with (
        dagster_server(home, dagster_home, port=3500, grace_seconds=10.0, environment=told) as server,
        dg.DagsterInstance.from_config(str(dagster_home)) as instance,
    ):
        server.start_pages()
        server.start_daemon()
        yield Running(home, server, instance, launch_run)


def test_the_schedule_materializes_a_failed_partition_again(running: Running) -> None:
    """It fails, the cause goes away, and the next tick publishes it: nobody pressed anything."""
    key = running.keys[0]
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
    key = running.keys[1]
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


@pytest.mark.long
def test_a_pause_drains_what_works_and_it_goes_on_afterwards(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed, no failure, the device free; Dagster's own retry waits for the end and finishes it."""
    key = running.keys[2]
    monkeypatch.setenv("VLM_ASSETS_HOME", str(running.home))
    settings = load_settings(home=running.home)
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

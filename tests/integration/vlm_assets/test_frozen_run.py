"""A run that is frozen and terminated by force: what is launched next runs, and its device is free again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import dagster as dg
import psutil
import pytest

from resources.alerts.outbox import Outbox
from tests.support.dagster_pages import partition_keys
from tests.support.listings import share_images
from tests.support.processes import has_ended
from tests.support.waiting import wait_until
from vlm_assets.webserver import server as server_module
from vlm_assets.webserver.api import DagsterUnreachableError
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import LAUNCHING, dagster_server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers

DESCRIPTIONS = "property_descriptions"
LONG, SHORT = 3000, 2
TERMINATE = """
mutation($run: String!) {
  terminateRun(runId: $run, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) { __typename }
}
"""


@pytest.mark.serves
@pytest.mark.long
def test_a_frozen_run_that_is_terminated_stops_no_launch_and_keeps_no_device(
    listing: Path, tmp_path: Path, launch_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code server waits for it for ever, and each launch for that: it is restarted, and a person is told.

    The frozen process is killed though it holds its heartbeat, and a run beside it goes on.
    """
    monkeypatch.setattr(server_module, "_LOOK_AFTER_SECONDS", 5.0)
    monkeypatch.setattr(server_module, "_LAUNCH_SECONDS", 3)
    home = tmp_path / "home"
    for numbers in (range(2 * LONG), range(2 * LONG, 2 * LONG + SHORT)):
        few = share_images(listing, "frozen.jsonl", (f"p{n}" for n in numbers), 1)
        ingest(few, home, range_size=min(LONG, len(numbers)), close=True)
    frozen_key, long_key, next_key = (one.key for one in Catalog.open(home).ranges)
    dagster_home = home / "dagster"
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=3)
    environment = {"VLM_ASSETS_DEVICES": "cpu:2", "VLM_ASSETS_BATCH_SIZE": "1"}
    workers, outbox = Workers(open_state(home / ".state")), Outbox(open_state(home / ".state"))

    def computed(run_id: str) -> int:
        return next((one.computed for one in workers.living() if one.run_id == run_id), 0)

    with (
        dagster_server(home, dagster_home, port=3760, grace_seconds=5.0, environment=environment) as server,
        dg.DagsterInstance.from_config(str(dagster_home)) as instance,
    ):
        wait = partial(wait_until, every=0.2, pause=server.watch)
        server.start_pages()
        server.start_daemon()
        frozen, beside = (launch_run(server.api, [DESCRIPTIONS], key) for key in (frozen_key, long_key))
        wait(lambda: computed(frozen) and computed(beside), "first rows")
        (pid,) = (one.pid for one in workers.living() if one.run_id == frozen)
        process = psutil.Process(pid)
        process.suspend()
        with monkeypatch.context() as impatient:
            # Dagster's answer waits for the process too, for a minute.
            impatient.setattr("vlm_assets.webserver.api._SECONDS", 2.0)
            with contextlib.suppress(DagsterUnreachableError):
                server.api.ask(TERMINATE, run=frozen)
        launch_run(server.api, [DESCRIPTIONS], next_key)
        wait(lambda: LAUNCHING in outbox.open_subjects(), "a person is told")
        wait(lambda: LAUNCHING not in outbox.open_subjects(), "runs are launched again")
        before = computed(beside)
        wait(lambda: has_ended(process), "killed")
        assert instance.get_run_by_id(frozen).status is dg.DagsterRunStatus.CANCELED
        wait(lambda: next_key in partition_keys(server.api, DESCRIPTIONS).materialized, "launched meanwhile")
        wait(lambda: computed(beside) > before > 0, "the run beside it goes on")
        wait(lambda: not any(one.endswith("/lease") for one in outbox.open_subjects()), "its device is free")

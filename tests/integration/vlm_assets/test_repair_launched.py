"""``vlm-assets repair`` beside a running Dagster: what must be computed is launched there and comes out."""

from __future__ import annotations

import dataclasses

import dagster as dg
import pytest
from typer.testing import CliRunner

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.commands.main import app
from vlm_assets.services.home_audit import audit
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import dagster_server
from vlm_engine.devices import leases

KEY = "000000000-000000007"
BOTH = ("property_descriptions", "property_embeddings")

# A start of Dagster and a run with a model.
pytestmark = [pytest.mark.serves, pytest.mark.timeout(400)]


@pytest.fixture
def materialized(desk, monkeypatch):
    """The desk on Dagster's own state, with both assets published and its device given back."""
    home, dagster_home = desk.settings.home, desk.settings.dagster_home
    prepare_dagster_home(dagster_home, catalog_id=Catalog.open(home).catalog_id, slots=1)
    monkeypatch.setattr(leases, "_lease", None)
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        desk = dataclasses.replace(desk, instance=instance)
        done = desk.materialize(*BOTH)
        assert done.success, done.failure
        leases._lease.release()
        yield desk


def test_a_repair_is_launched_in_the_running_dagster(materialized, monkeypatch):
    """Both copies lost: one backfill with `recompute: true`, and afterwards the audit is clean."""
    desk = materialized
    home, dagster_home = desk.settings.home, desk.settings.dagster_home
    monkeypatch.setenv("VLM_ASSETS_HOME", str(home))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    desk.file.unlink()
    desk.paths.version(0).unlink()
    with dagster_server(home, dagster_home, port=3700) as server:
        server.start_pages()
        done = CliRunner().invoke(app, ["repair", "--yes"])
        assert done.exit_code == 0, done.output
        (launched,) = [line for line in done.output.splitlines() if line.startswith("Launched backfill")]
        # It looks for backfills when it starts, and then every 30 s.
        server.start_daemon()
        of_it = dg.RunsFilter(tags={"dagster/backfill": launched.split()[2]})
        while not (runs := desk.instance.get_runs(of_it)) or not all(run.is_finished for run in runs):
            server.group.watch(0.2)
    assert [run.status for run in runs] == [dg.DagsterRunStatus.SUCCESS]
    found = audit(desk.settings, Catalog.open(home), deep=True)
    assert found.ok, found.wrong
    assert found.total(BOTH[0]).rows == found.total(BOTH[1]).rows == 8

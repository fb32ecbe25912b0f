"""``vlm-assets repair`` beside a running Dagster: what must be computed is launched there and comes out."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vlm_assets.audit.audit import audit
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.cli import app
from vlm_assets.orchestrator.home import prepare_dagster_home
from vlm_assets.orchestrator.server import dagster_server, free_port

KEY = "000000000-000000007"
BOTH = ("property_descriptions", "property_embeddings")

# A start of Dagster, and twice its daemon's loop and a run with a model.
pytestmark = pytest.mark.timeout(400)


def wait_for(server, backfill: str) -> None:
    while server.api.backfill(backfill, BOTH[0]).unfinished:
        server.group.watch(1.0)
    assert server.api.backfill(backfill, BOTH[0]).status == "COMPLETED_SUCCESS"


def test_a_repair_is_launched_in_the_running_dagster(desk, monkeypatch):
    """Both copies lost: one backfill with `recompute: true`, and afterwards the audit is clean."""
    home, dagster_home = desk.settings.home, desk.settings.dagster_home
    monkeypatch.setenv("VLM_ASSETS_HOME", str(home))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    catalog = Catalog.open(home)
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=1)
    with dagster_server(home, dagster_home, port=free_port(3700)) as server:
        server.start_pages()
        server.start_daemon()
        wait_for(server, server.api.launch_backfill(BOTH, [KEY], title="first", tags={}))
        desk.file.unlink()
        (desk.file.parent / ".backup" / f"{KEY}.0.parquet").unlink()
        done = CliRunner().invoke(app, ["repair", "--yes"])
        assert done.exit_code == 0, done.output
        (launched,) = [line for line in done.output.splitlines() if line.startswith("Launched backfill")]
        wait_for(server, launched.split()[2])
    found = audit(desk.settings, catalog, deep=True)
    assert found.ok, found.wrong
    assert found.total(BOTH[0]).rows == found.total(BOTH[1]).rows == 8

"""A home whose `.state` is a link to another device, as it is for a home on NFS."""

import pytest

from vlm_assets.config.resource_settings import control_state
from vlm_assets.services.home_audit import audit
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.pause import pause, resume


@pytest.mark.usefixtures("scripted_engine")
def test_all_work_is_done_with_the_state_on_another_device(desk, listing, tmp_path, elsewhere):
    """No step moves a file between the two: ingest, publication, replacement and audit are as ever."""
    home = tmp_path / "nfs"
    home.mkdir()
    assert home.stat().st_dev != elsewhere.stat().st_dev
    (home / ".state").symlink_to(elsewhere)
    ingest(listing, home, range_size=8)
    machine = desk.changed(home=home)
    pause(control_state(machine.settings), "", now=1.0)
    resume(control_state(machine.settings))
    for config in (None, {"recompute": True}):
        done = machine.materialize(config=config)
        assert done.success, done.failure
    assert machine.materialize("property_embeddings").success
    assert {"high_water_marks", "state.db", "liveness.db"} <= {one.name for one in elsewhere.iterdir()}
    catalog = Catalog.open(home)
    assert audit(machine.settings, catalog, deep=True).findings == ()
    found = read_status(machine.settings, catalog)
    assert found.ok + sum(found.failed_by_kind.values()) == 8

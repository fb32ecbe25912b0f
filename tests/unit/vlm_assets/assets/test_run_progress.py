"""Progress: what it says of a materialization while it runs."""

from __future__ import annotations

import dagster as dg
import pyarrow as pa

from resources.journal.journal import Journal
from resources.state.database import open_state
from resources.state.workers import Phase, Workers
from vlm_assets.assets.run_progress import Progress

SCHEMA = pa.schema([("property_id", pa.string()), ("ordinal", pa.int64())])


def test_a_commit_beside_a_long_batch_is_said_at_once(tmp_path):
    """Its worker has just committed: it is not ended as one that stands still."""
    state = open_state(tmp_path)
    workers = Workers(state)
    with (
        workers.begin(run_id="r", asset="a", partition="k", expected=2) as beat,
        Journal.open(
            tmp_path / "journal",
            key="k",
            generation="g",
            fingerprints={},
            schema=SCHEMA,
            expected_ids={"p0", "p1"},
            high_water_mark=tmp_path / "marks" / "k.g.json",
        ) as journal,
    ):
        context = dg.build_asset_context()
        progress = Progress(context, expected=2, restored=0, journal=journal, beat=beat, state=state)
        progress.start()
        before = beat.worker.moved
        journal.submit(pa.table({"property_id": ["p0"], "ordinal": [0]}, schema=SCHEMA))
        journal.flush()
        (worker,) = workers.living()
    assert (worker.phase, worker.committed, worker.computed) == (Phase.WORKING, 1, 0)
    assert worker.moved > before

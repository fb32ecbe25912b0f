"""A real model whose answers are cut off: the partition stops early, and what it committed stays."""

import json

from sensors.dagster_internals.runs import NEEDS_PERSON
from vlm_assets.assets.garbage import WINDOW
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.catalog.ingest import ingest

PROPERTIES = 56


def test_a_partition_of_garbage_stops_early_and_keeps_what_is_committed(desk, listing):
    """Stopped after about a window of refused answers, not at the end; a person who expects them goes on."""
    images = json.loads(listing.read_text().splitlines()[0])["images"][:1]
    many = listing.with_name("many.jsonl")
    many.write_text(
        "".join(json.dumps({"property_id": f"g{n}", "images": images}) + "\n" for n in range(PROPERTIES))
    )
    key = ingest(many, desk.settings.home, range_size=PROPERTIES).new_ranges[0].key
    cut_off = desk.changed(max_new_tokens=2, batch_size=8)
    stopped = cut_off.materialize(key=key)
    assert not stopped.success
    assert f"of the model's last {WINDOW} answers are no descriptions" in stopped.failure
    assert not stopped.published
    tags = desk.instance.get_run_by_id(stopped.result.run_id).tags
    assert tags[NEEDS_PERSON] == stopped.result.run_id, "its failed rows are new rows: for a person"
    assert not stopped.checks
    committed = committed_rows(desk.settings.descriptions, key)
    assert WINDOW <= committed < PROPERTIES

    refused = cut_off.changed(invalid_share_stop=1.0).materialize(key=key)
    assert not refused.checks["failed_share"].passed, "worked to its end, and refused by the check"
    assert committed_rows(desk.settings.descriptions, key) == PROPERTIES

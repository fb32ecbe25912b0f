"""A real model whose answers are cut off: the partition stops early, and what it committed stays."""

import json

import pyarrow.parquet as pq

from vlm_assets.garbage import WINDOW
from vlm_assets.ingest import ingest

PROPERTIES = 56


def test_a_partition_of_garbage_stops_early_and_goes_on_when_that_is_put_right(desk, listing, tmp_path):
    """Stopped after about a window of refused answers, not at the end; nothing is published."""
    images = json.loads(listing.read_text().splitlines()[0])["images"][:1]
    many = listing.with_name("many.jsonl")
    many.write_text(
        "".join(json.dumps({"property_id": f"g{n}", "images": images}) + "\n" for n in range(PROPERTIES))
    )
    report = ingest(many, desk.settings.home, range_size=PROPERTIES)
    key = report.new_ranges[0].key
    cut_off = desk.changed(max_new_tokens=2, batch_size=8)
    stopped = cut_off.materialize(key=key)
    assert not stopped.success
    assert "GarbageOutputError" in str(stopped.result.all_events)
    assert not stopped.published
    restored = cut_off.changed(invalid_share_stop=1.0, failed_share_error=1.0).materialize(key=key)
    assert restored.success
    (event,) = restored.published
    assert WINDOW <= event.metadata["restored rows"].value < PROPERTIES, "committed rows were kept"
    file = desk.settings.descriptions_directory / f"{key}.parquet"
    assert set(pq.read_table(file)["error_kind"].to_pylist()) == {"truncated"}

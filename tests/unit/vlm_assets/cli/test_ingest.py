"""``vlm-assets ingest``: what a program reads of an ingest."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from vlm_assets.cli.main import app


def test_an_ingest_as_json(tmp_path) -> None:
    """Counts and partitions are values, and what a person would read is there as sentences."""
    listing = tmp_path / "listing.jsonl"
    listing.write_text(
        "".join(json.dumps({"property_id": f"p{n}", "images": ["a.jpg"]}) + "\n" for n in range(5))
    )
    arguments = ["ingest", str(listing), "--home", str(tmp_path / "home"), "--range-size", "2", "--json"]
    told = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert (told["new"], told["rows"], told["waiting"]) == (5, 5, 1)
    assert told["new_ranges"] == ["000000000-000000001", "000000002-000000003"]
    assert any("new partitions" in sentence for sentence in told["said"])

"""Daemon, webserver, code server and a run, all real: from a failing check to the message on the receiver."""

import json
import re
import time
from datetime import UTC, datetime

import pytest

from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.operate.backfill import ASSETS
from vlm_assets.operate.dagster_server.home import prepare_dagster_home
from vlm_assets.operate.dagster_server.server import dagster_server, free_port

WITHIN_SECONDS = 60.0

# A start of Dagster, and a run with a model.
pytestmark = [pytest.mark.serves, pytest.mark.timeout(600)]


def test_a_failing_check_is_on_the_receiver_within_a_minute(tmp_path, receiver):
    """Every image is missing, the share of failed rows is too high: the person is told, with a link."""
    home, dagster_home = tmp_path / "home", tmp_path / "home" / "dagster"
    listing = tmp_path / "listing.jsonl"
    listing.write_text(
        "".join(json.dumps({"property_id": f"p{n}", "images": [f"{n}.jpg"]}) + "\n" for n in range(4))
    )
    ingest(listing, home, range_size=4)
    catalog = Catalog.open(home)
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=1)
    environment = {"VLM_ASSETS_ALERT_TARGETS": receiver.url(), "VLM_ASSETS_DEVICES": "cpu:1"}
    with dagster_server(home, dagster_home, port=free_port(3600), environment=environment) as server:
        server.start_pages()
        key = catalog.ranges[0].key
        server.api.launch_backfill(ASSETS[:1], [key], title="one partition", tags={})
        server.start_daemon()
        arrived, message = told(receiver, f"failed_share failed: property_descriptions {key}")
        body = message["message"]
        (since,) = re.findall(r"^Since: (.*) UTC$", body, re.MULTILINE)
        failed = datetime.fromisoformat(since).replace(tzinfo=UTC).timestamp()
        print(f"\nfrom the failing check to the message: {arrived - failed:.0f} s")
        assert arrived - failed <= WITHIN_SECONDS
        assert f"Partition: {key}" in body
        assert "Found: 4 of 4 failed" in body
        assert f"Look: {server.address}/runs/" in body
        assert "Next step: `vlm-assets show ID`" in body


def told(receiver, title: str) -> tuple[float, dict]:
    """When the message with this title came, and the message."""
    count = 0
    while True:
        count += 1
        receiver.wait_for(count, seconds=300)
        if receiver.messages[count - 1]["title"] == title:
            return time.time(), receiver.messages[count - 1]

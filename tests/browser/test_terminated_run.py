"""A run that a person terminates drains: what is finished is committed, and the next start goes on."""

from __future__ import annotations

import pyarrow.parquet as pq

from tests.support.dagster_pages import partition_keys
from tests.support.listings import share_images
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.config.settings import load_settings
from vlm_catalog.ingest import ingest

DESCRIPTIONS = "property_descriptions"
PROPERTIES = 60


RUNS = """
query($key: String!) {
  runsOrError(filter: {tags: [{key: "dagster/partition", value: $key}]}) {
    ... on Runs { results { runId status } }
  }
}
"""
TERMINATE = """
mutation($run: String!) { terminateRun(runId: $run) { __typename } }
"""


def _add_range(desk) -> str:
    """One more range whose properties share a few images, so that it takes a while to describe."""
    listing = share_images(desk.listing, "long.jsonl", (f"long-{n}" for n in range(PROPERTIES)), 2)
    before = set(desk.keys)
    ingest(listing, desk.home, range_size=PROPERTIES)
    (key,) = set(desk.keys) - before
    desk.server.api.reload_definitions()
    return key


def _runs(desk, key: str) -> list[dict[str, str]]:
    """The runs of a partition, newest first."""
    return desk.server.api.ask(RUNS, key=key)["runsOrError"]["results"]


def _committed(desk, key: str) -> int:
    return committed_rows(load_settings(home=desk.home).descriptions, key)


def test_terminate_commits_what_is_finished_and_the_next_start_goes_on(desk, launch_run) -> None:
    """Terminated in mid-partition: nothing published, nothing lost, the device free, the rest done later."""
    api = desk.server.api
    key = _add_range(desk)
    run = launch_run(api, [DESCRIPTIONS], key)
    desk.wait_until(lambda: _committed(desk, key) > 0, "first commit")
    api.ask(TERMINATE, run=run)
    desk.wait_until(lambda: _runs(desk, key)[0]["status"] == "CANCELED", "canceled")

    committed = _committed(desk, key)
    assert 0 < committed < PROPERTIES
    assert key not in partition_keys(api, DESCRIPTIONS).materialized
    file = desk.home / DESCRIPTIONS / f"{key}.parquet"
    assert not file.exists()

    launch_run(api, [DESCRIPTIONS], key)
    desk.wait_until(lambda: key in partition_keys(api, DESCRIPTIONS).materialized, "materialized")
    ids = pq.read_table(file)["property_id"].to_pylist()
    assert ids == [f"long-{n}" for n in range(PROPERTIES)]
    assert _restored_rows(desk, key) == committed, "what was committed was not computed again"


def _restored_rows(desk, key: str) -> int:
    answer = desk.server.api.ask(
        """
        query($asset: AssetKeyInput!, $keys: [String!]) {
          assetOrError(assetKey: $asset) {
            ... on Asset {
              assetMaterializations(partitions: $keys, limit: 1) {
                metadataEntries { label ... on IntMetadataEntry { intValue } }
              }
            }
          }
        }
        """,
        asset={"path": [DESCRIPTIONS]},
        keys=[key],
    )
    (event,) = answer["assetOrError"]["assetMaterializations"]
    return next(entry["intValue"] for entry in event["metadataEntries"] if entry["label"] == "restored rows")

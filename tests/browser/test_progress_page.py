"""The page of the whole dataset: one button, and all partitions in one picture."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.support.dagster_pages import partition_keys

DESCRIPTIONS = "property_descriptions"
PROGRESS = "dataset_progress"


LATEST = """
query($asset: AssetKeyInput!) {
  assetOrError(assetKey: $asset) { ... on Asset { assetMaterializations(limit: 1) { timestamp } } }
}
"""


def _latest(desk) -> list[dict[str, str]]:
    """When it was materialized last, or nothing."""
    found = desk.server.api.ask(LATEST, asset={"path": [PROGRESS]})["assetOrError"]
    return found.get("assetMaterializations", [])


def test_all_partitions_are_one_picture(desk, page: Page) -> None:
    """Materialize on the page of dataset_progress draws all partitions inline, with the figures beside it."""
    before = _latest(desk)
    page.goto(f"/assets/{PROGRESS}")
    page.get_by_role("button", name="Materialize").first.click()
    desk.wait_until(lambda: _latest(desk) != before, "materialized")

    done = str(len(partition_keys(desk.server.api, DESCRIPTIONS).materialized))
    page.goto(f"/assets/{PROGRESS}")
    row = page.get_by_role("row", name=re.compile(r"^partitions done"))
    expect(row.get_by_role("cell").last).to_have_text(done, timeout=60_000)
    page.get_by_role("row", name=re.compile(r"^progress")).get_by_text("[Show Markdown]").click()
    drawn = page.get_by_role("dialog").locator("img").first
    expect(drawn).to_be_visible()
    assert drawn.evaluate("image => image.naturalWidth") > 800

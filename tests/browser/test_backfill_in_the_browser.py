"""What a person does and sees in Dagster's pages, in a real browser, with real runs behind them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, expect

from resources.alerts.outbox import Outbox
from tests.support.dagster_pages import partition_keys
from vlm_assets.config.settings import load_settings
from vlm_assets.services.backfill import dagster_facts
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state

DESCRIPTIONS = "property_descriptions"
CHECKS = (
    "failed_share",
    "ids_conserved",
    "images_used",
    "published_file",
    "row_count",
    "row_schema",
    "unique_ids",
)
RANGE_SIZE = 6


def _launch(page: Page, *, partitions: str, button: str) -> None:
    page.goto(f"/assets/{DESCRIPTIONS}")
    page.get_by_role("button", name="Materialize…").first.click()
    page.get_by_role("button", name=partitions, exact=True).click()
    page.get_by_role("button", name=button, exact=True).click()
    expect(page.get_by_text("Launch runs to materialize")).to_have_count(0)
    page.goto("about:blank")  # a page of what runs asks and draws all the time: a core, while the test waits


def test_all_partitions_are_backfilled_and_green(desk, page: Page, picture: Callable[[str], None]) -> None:
    """Materialize, All, Launch backfill: every partition turns green, with its numbers and pictures."""
    api = desk.server.api
    _launch(page, partitions="All", button="Launch backfill")
    desk.wait_until(lambda: partition_keys(api, DESCRIPTIONS).materialized == set(desk.keys), "all green")

    page.goto(f"/assets/{DESCRIPTIONS}?view=partitions&partition={desk.keys[1]}")
    expect(page.get_by_text(f"Materialized ({len(desk.keys)})", exact=True)).to_be_visible()
    expect(page.get_by_text("Failed (0)", exact=True)).to_be_visible()
    expect(page.get_by_role("row", name=re.compile(r"^expected\s*6"))).to_be_visible()
    expect(page.get_by_role("row", name=re.compile(r"^device\s*cpu-0"))).to_be_visible()
    page.get_by_role("row", name=re.compile(r"^contact sheet")).get_by_text("[Show Markdown]").click()
    sheet = page.get_by_role("dialog").get_by_alt_text("images of the property").first
    expect(sheet).to_be_visible()
    assert sheet.evaluate("image => image.naturalWidth") > 50
    picture("contact-sheet")

    page.goto(f"/assets/{DESCRIPTIONS}?view=checks")
    expect(page.get_by_text("Succeeded", exact=True)).to_have_count(len(CHECKS))
    for name in CHECKS:
        expect(page.get_by_text(name, exact=True).first).to_be_visible()
    page.goto(f"/assets/{DESCRIPTIONS}")
    expect(page.get_by_text("Latest materialization", exact=True)).to_be_visible()
    expect(page.get_by_text(re.compile("|".join(desk.keys))).first).to_be_visible()
    # A failed row is a finding, not a failed partition: WARN at most.
    assert _errors(desk) == []


def _errors(desk) -> list[tuple[str, str | None]]:
    """The checks that failed, each with its partition."""
    with dagster_facts(load_settings(home=desk.home)) as dagster:
        results = list(dagster.latest_results([DESCRIPTIONS]))
    return [(result.check, result.partition) for result in results if result.stops]


@pytest.fixture
def described(desk) -> None:
    """All partitions are published: by the test above, or where it does not run, by a backfill."""
    api = desk.server.api
    if not partition_keys(api, DESCRIPTIONS).materialized:
        api.launch_backfill([DESCRIPTIONS], desk.keys, title="all", tags={})
        desk.wait_until(lambda: partition_keys(api, DESCRIPTIONS).materialized == set(desk.keys), "all green")


@pytest.mark.usefixtures("described")
def test_partition_without_images_is_red_and_says_what_to_do(
    desk, page: Page, picture: Callable[[str], None]
) -> None:
    """Images that vanish after the ingest: the new partition is red, nothing is published, others stay.

    A person is told: expected, found, what to do, a link that shows it. It prints how long the message took
    from the failing check to their receiver.
    """
    api = desk.server.api
    before = set(desk.keys)
    ingest(desk.listing, desk.home, range_size=RANGE_SIZE)
    (key,) = set(desk.keys) - before
    catalog = Catalog.open(desk.home)
    (added,) = [one for one in catalog.ranges if one.key == key]
    for uris in catalog.slice(added)["image_uris"].to_pylist():
        for uri in uris:
            catalog.image_path(uri).unlink(missing_ok=True)
    api.reload_definitions()

    _launch(page, partitions="Missing", button="Launch 1 run")
    desk.wait_until(lambda: key in partition_keys(api, DESCRIPTIONS).failed, f"{key} red")

    page.goto(f"/assets/{DESCRIPTIONS}?view=partitions&partition={key}")
    expect(page.get_by_text("Failed (1)", exact=True)).to_be_visible()
    page.goto(f"/assets/{DESCRIPTIONS}?view=checks&checkDetail=failed_share")
    expect(page.get_by_text("Failed", exact=True).first).to_be_visible()
    expect(page.get_by_text(f"found {RANGE_SIZE} of {RANGE_SIZE} failed")).to_be_visible()
    expect(page.get_by_text(key).first).to_be_visible()
    picture("failed-check")
    assert _errors(desk) == [("failed_share", key)]
    published = Path(desk.home, DESCRIPTIONS)
    assert not (published / f"{key}.parquet").exists()
    assert {file.stem for file in published.glob("*.parquet")} == before
    assert all(pq.read_metadata(file).num_rows == RANGE_SIZE for file in published.glob("*.parquet"))

    outbox = Outbox(open_state(desk.home / ".state"))
    told = f"{DESCRIPTIONS}/{key}/failed_share"
    desk.wait_until(lambda: told in outbox.open_subjects(), "the alert", seconds=60.0)
    alert = outbox.open_subjects()[told]
    assert alert.partition == key
    assert alert.expected
    assert f"{RANGE_SIZE} of {RANGE_SIZE} failed" in str(alert.actual)
    assert "vlm-assets show" in alert.next_step

    title = f"failed_share failed: {DESCRIPTIONS} {alert.partition}"
    receiver = desk.receiver
    desk.wait_until(lambda: title in receiver.titles, "the message")
    number = receiver.titles.index(title)
    body = receiver.messages[number]["message"]
    (since,) = re.findall(r"^Since: (.*) UTC$", body, re.MULTILINE)
    seconds = receiver.times[number] - datetime.fromisoformat(since).replace(tzinfo=UTC).timestamp()
    print(f"\nfrom the failing check to the message: {seconds:.0f} s")
    assert f"Partition: {alert.partition}" in body
    assert f"Found: {RANGE_SIZE} of {RANGE_SIZE} failed" in body
    assert f"Look: {desk.server.address}/runs/" in body
    assert "Next step: `vlm-assets show ID --home " in body

    page.goto(f"/{alert.page}")
    expect(page.get_by_text("Failure", exact=True).first).to_be_visible()
    expect(page.get_by_text(key).first).to_be_visible()
    expect(page.get_by_text("STEP_FAILURE", exact=True).first).to_be_visible()
    picture("alert-link")


@pytest.mark.usefixtures("described")
def test_a_deleted_file_is_put_back_by_the_button(desk, page: Page, picture: Callable[[str], None]) -> None:
    """A published file that vanished: `failed_partitions_now` tries its partition again, and it is whole."""
    api, key = desk.server.api, desk.keys[0]
    published = desk.home / DESCRIPTIONS / f"{key}.parquet"
    content = published.read_bytes()
    published.unlink()
    page.goto("/locations/vlm_assets/jobs/failed_partitions_now/playground")
    page.get_by_text("Launch Run", exact=True).click()
    desk.wait_until(published.exists, "the file is back")
    assert published.read_bytes() == content
    desk.wait_until(lambda: key not in partition_keys(api, DESCRIPTIONS).running, "the run has ended")

    page.goto(f"/assets/{DESCRIPTIONS}?view=partitions&partition={key}")
    expect(page.get_by_role("row", name=re.compile(r"^verified"))).to_contain_text("was restored from")
    picture("retried-partition")

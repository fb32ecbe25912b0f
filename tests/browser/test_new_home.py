"""A person opens the pages of a new, empty home: they say what to do first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from rich.console import Console

from vlm_assets.webserver.server import DagsterServer, dagster_server, prepare_home
from vlm_catalog.ingest import ingest

EMPTY = "This home has no photographs yet."
INGEST = re.compile(r"^vlm-assets ingest FOLDER --home \S+/new$")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "new"


@pytest.fixture
def server(home: Path) -> Iterator[DagsterServer]:
    """The Dagster of a home in which nothing is, as ``vlm-assets serve`` starts it. No sensor has ticked."""
    prepare_home(home, home / "dagster", slots=1, console=Console(quiet=True))
    with dagster_server(home, home / "dagster", port=3310, grace_seconds=10.0) as started:
        started.start_pages()
        yield started


@pytest.fixture
def page(browser: Browser, server: DagsterServer) -> Iterator[Page]:
    opened = browser.new_page(base_url=server.address, viewport={"width": 1440, "height": 900})
    yield opened
    opened.close()


def test_the_first_pages_of_a_new_home_say_what_to_do(
    page: Page, server: DagsterServer, home: Path, tmp_path: Path
) -> None:
    """Whoever opens the address at once reads which command takes photographs in; after it, no more."""
    page.goto("/")
    expect(page).to_have_url(re.compile("/assets/dataset_progress$"))
    for asset in ("dataset_progress", "property_catalog"):
        page.goto(f"/assets/{asset}")
        expect(page.get_by_text(EMPTY)).to_be_visible()
        expect(page.locator("code", has_text=INGEST)).to_be_visible()
    (tmp_path / "images" / "p1").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "p1" / "1.jpg")
    ingest(tmp_path / "images", home)
    server.api.reload_definitions()
    page.goto("/assets/property_catalog")
    expect(page.get_by_text("One row a property")).to_be_visible()
    expect(page.get_by_text(EMPTY)).to_be_hidden()

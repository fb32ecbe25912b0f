"""One Dagster with a small example for all browser tests, and a browser to look at it.

Both end with the tests of this folder: a Dagster that waits takes a sixth of a core.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from examples.rendered_properties import write_example
from tests.support.alert_receiver import AlertReceiver
from tests.support.waiting import wait_until
from vlm_assets.assets.property_catalog import record_catalog
from vlm_assets.webserver.home import prepare_dagster_home
from vlm_assets.webserver.server import DagsterServer, dagster_server
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest

RANGE_SIZE = 6
FIRST_RANGES = 2
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--no-first-run",
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
]
WITHOUT_FOLDERS = """folders => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        for (const folder of folders) {
            texts.currentNode.data = texts.currentNode.data.replaceAll(folder + "/", "");
            texts.currentNode.data = texts.currentNode.data.replaceAll(folder, ".");
        }
    }
}"""
NOTHING_MOVES = """() => document.getAnimations().every(
    one => one.playState === "finished" || one.effect.getComputedTiming().endTime === Infinity
)"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-screenshots", action="store_true", help="Write the screenshots of docs/images anew."
    )


@dataclass
class Desk:
    """A home, its running Dagster, the listing of more properties than are catalogued yet, who is told."""

    home: Path
    server: DagsterServer
    listing: Path
    receiver: AlertReceiver

    _has_daemon: bool = False

    @property
    def keys(self) -> list[str]:
        return [one.key for one in Catalog.open(self.home).ranges]

    def _start_daemon(self) -> None:
        if not self._has_daemon:
            self._has_daemon = True
            self.server.start_daemon()

    def wait_until(self, reached: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
        """Wait for what Dagster says of itself; a process that ends meanwhile is an error at once.

        Who waits first starts the daemon.
        """
        self._start_daemon()
        wait_until(reached, what, seconds=seconds, every=0.5, pause=self.server.group.watch)


@pytest.fixture(scope="package")
def desk(
    tmp_path_factory: pytest.TempPathFactory, scripted_runs: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[Desk]:
    """Dagster over two ranges of six properties; the listing holds one range more.

    The documents' screenshots show what the example's model says; all else is the same with a scripted one.
    """
    home = tmp_path_factory.mktemp("home")
    listing = write_example(home, properties=RANGE_SIZE * (FIRST_RANGES + 1), seed=7)
    first = listing.with_name("first.jsonl")
    lines = listing.read_text().splitlines(keepends=True)
    first.write_text("".join(lines[: RANGE_SIZE * FIRST_RANGES]))
    ingest(first, home, range_size=RANGE_SIZE)
    dagster_home = home / "dagster"
    catalog = Catalog.open(home)
    prepare_dagster_home(dagster_home, catalog_id=catalog.catalog_id, slots=1)
    record_catalog(dagster_home, catalog)
    receiver = AlertReceiver()
    shown = request.config.getoption("--update-screenshots")
    environment = {
        **({} if shown else scripted_runs | {"TESTS_SCRIPTED_MODELS": "0.2"}),
        # Small steps, so that a test can act between two commits.
        "VLM_ASSETS_BATCH_SIZE": "2",
        "VLM_ASSETS_COMMIT_SECONDS": "0.5",
        "VLM_ASSETS_ALERT_TARGETS": receiver.url(),
    }
    with dagster_server(home, dagster_home, port=3300, grace_seconds=10.0, environment=environment) as server:
        server.start_pages()
        yield Desk(home, server, listing, receiver)
    receiver.down()


@pytest.fixture(scope="package")
def browser(program: Callable[[str], Path]) -> Iterator[Browser]:
    """Debian's Chromium."""
    # As long as a page's own limit below: a machine that runs a model beside it shows things late.
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program("chromium"), args=CHROMIUM)
        yield started
        started.close()


@pytest.fixture(scope="package")
def person(browser: Browser, desk: Desk) -> BrowserContext:
    """Whose pages of Dagster share what they fetched: its scripts are many megabytes."""
    return browser.new_context(base_url=desk.server.address, viewport={"width": 1440, "height": 900})


@pytest.fixture
def page(person: BrowserContext, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of Dagster's; if the test fails, a picture of it is kept in .pytest_cache/screenshots."""
    failed_before = request.session.testsfailed
    opened = person.new_page()
    opened.set_default_timeout(60_000)
    yield opened
    if request.session.testsfailed > failed_before:
        folder = request.config.rootpath / ".pytest_cache" / "screenshots"
        folder.mkdir(parents=True, exist_ok=True)
        opened.screenshot(path=folder / f"{re.sub(r'[^a-z0-9_]+', '-', request.node.name)}.png")
    opened.close()


@pytest.fixture
def screenshot(
    page: Page, desk: Desk, request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[str], Path]:
    """Takes a screenshot of what stands still, without the folders of this machine."""
    # Stack traces and messages name them, and they are nobody's business.
    known = (desk.home, request.config.rootpath, Path(sys.prefix))
    folders = list(dict.fromkeys(str(path) for one in known for path in (one, one.resolve())))

    def take(name: str) -> Path:
        taken = tmp_path / f"{name}.png"
        # Icons and figures come one by one, a dialog fades in, and a spinner may turn for ever.
        page.wait_for_load_state("networkidle")
        page.wait_for_function(NOTHING_MOVES)
        page.evaluate(WITHOUT_FOLDERS, folders)
        page.screenshot(path=taken)
        shown = page.locator("body").inner_text()
        assert [folder for folder in folders if folder in shown] == []
        return taken

    return take


@pytest.fixture
def picture(screenshot: Callable[[str], Path], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a screenshot, which replaces the one in docs/images only if asked to."""

    def take(name: str) -> None:
        taken = screenshot(name)
        if request.config.getoption("--update-screenshots"):
            folder = request.config.rootpath / "docs" / "images"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(taken, folder / taken.name)

    return take

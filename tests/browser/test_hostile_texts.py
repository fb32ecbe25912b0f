"""Ids, answers, file names and reasons that are markup, on every page that we make."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from vlm_assets.assets import markdown
from vlm_assets.assets.partition_page import SheetRow, contact_sheet, read_quality
from vlm_assets.automation.dataset_audit import audit_metadata
from vlm_assets.automation.dataset_progress import progress_metadata
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.ingest import ingest
from vlm_assets.commands.audit import audit
from vlm_assets.commands.html_page import Card
from vlm_assets.commands.html_page import page as html_page
from vlm_assets.config.settings import Settings
from vlm_assets.services.status import read_status
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_durable.versions.published import PublishedPartitions
from vlm_results.dataset_quality import check_results, quality_metadata
from vlm_results.quality import look_at_quality
from vlm_results.review import Accuracy

pytestmark = pytest.mark.timeout(600)

PROPERTIES = 40


class Spy:
    """A server that writes down each path that anybody fetches from it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        spy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                spy.paths.append(self.path)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def spy() -> Iterator[Spy]:
    started = Spy()
    yield started
    started.server.shutdown()
    started.server.server_close()


def markup(spy: Spy, name: str) -> str:
    """What makes a browser fetch an image, in markdown, in HTML, and out of a table's cell."""
    at = f"{spy.address}/{name}"
    return f"| ![x]({at}1) <img src='{at}2'> `![x]({at}3) [a]({at}4) \n\n![x]({at}5)"


@pytest.fixture
def hostile(tmp_path: Path, spy: Spy) -> Settings:
    """A home whose ids, image names, answers, kinds and reasons of failure are all markup."""
    entries = []
    (tmp_path / "images").mkdir()
    for number in range(PROPERTIES):
        image = f"{number} ![x]({spy.address.replace('/', '|')}|name).jpg"
        Image.new("RGB", (16, 16), "red").save(tmp_path / "images" / image)
        entries.append({"property_id": f"{number} {markup(spy, 'id')}".replace("\n", " "), "images": [image]})
    listing = tmp_path / "listing.jsonl"
    listing.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    settings = Settings(home=tmp_path / "home")
    ingest(listing, settings.home, image_root=tmp_path / "images", close=True)
    catalog = Catalog.open(settings.home)
    (partition,) = catalog.ranges
    ids = catalog.slice(partition)["property_id"].to_pylist()
    answer = {
        "summary": markup(spy, "summary"),
        "building_type": markup(spy, "type"),
        markup(spy, "field"): "flat",
    }
    bad = [{"uri": markup(spy, "uri"), "kind": "damaged", "error": markup(spy, "image")}]
    rows = [
        {
            "property_id": property_id,
            "ordinal": ordinal,
            "status": "failed" if ordinal == 0 else "ok",
            "error_kind": markup(spy, "kind") if ordinal == 0 else None,
            "error": markup(spy, "reason") if ordinal == 0 else None,
            "attempts": 1,
            "images_seen": 1,
            "images_failed": bad,
            "fingerprint": "f",
            "inputs_digest": "i",
            "description": answer,
        }
        for ordinal, property_id in enumerate(ids)
    ]
    table = pa.Table.from_pylist(rows)
    published = PublishedPartitions(settings.descriptions)
    staged = published.stage(
        partition.key, table.to_batches(), table.schema, expected_ids=ids, fingerprint="f", metadata={}
    )
    with staged:
        published.publish(staged)
    (settings.descriptions.published / "![x](name).parquet").write_bytes(b"nothing")
    return settings


def pages(settings: Settings, spy: Spy) -> dict[str, dict[str, dg.MetadataValue]]:
    """What each page of ours shows of this home, by the functions that the assets call."""
    catalog = Catalog.open(settings.home)
    rows = PartitionRows(settings.descriptions.partition(catalog.ranges[0].key).published)
    counts = read_quality(rows)
    sheet = [
        SheetRow(row["property_id"], [None], row.get("description"), row.get("error"))
        for row in (*counts.sample, *counts.failed)
    ]
    found = look_at_quality(settings, catalog)
    status = replace(read_status(settings, catalog), warnings=(markup(spy, "warning"),))
    return {
        "quality": quality_metadata(found, Accuracy({}, 0)),
        "audit": audit_metadata(audit(settings, catalog)),
        "progress": progress_metadata(status),
        "partition": {
            "sheet": markdown.metadata(contact_sheet(sheet)),
            "counts": markdown.metadata(counts.table()),
        },
    }


def show(page: Page, name: str, metadata: Mapping[str, object]) -> None:
    """Open the events of an asset, where Dagster renders all markdown, and wait for its images."""
    page.goto(f"/assets/hostile_{name}?view=events")
    for key in metadata:
        expect(page.get_by_role("cell", name=key, exact=True).first).to_be_visible()
    page.wait_for_load_state("networkidle")


def test_no_page_fetches_what_a_stranger_wrote(desk, page: Page, hostile: Settings, spy: Spy) -> None:
    """A page of ours asks nobody else for anything. One with real markup does, so the spy sees it."""
    raw = {"raw": {"raw": dg.MarkdownMetadataValue(f"![x]({spy.address}/raw)")}}
    ours = pages(hostile, spy)
    with dg.DagsterInstance.from_config(str(desk.home / "dagster")) as instance:
        for name, metadata in {**raw, **ours}.items():
            event = dg.AssetMaterialization(f"hostile_{name}", metadata=metadata)
            instance.report_runless_asset_event(event)
    with page.expect_response(f"{spy.address}/raw"):
        show(page, "raw", raw["raw"])
    assert spy.paths == ["/raw"]
    for name, metadata in ours.items():
        show(page, name, metadata)
    assert spy.paths == ["/raw"]


def test_a_check_says_what_a_stranger_wrote_as_text(desk, page: Page, hostile: Settings, spy: Spy) -> None:
    """Its description and its metadata fetch nothing."""
    with dg.DagsterInstance.from_config(str(desk.home / "dagster")) as instance:
        for result in check_results(look_at_quality(hostile, Catalog.open(hostile.home))):
            instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset_key=dg.AssetKey("dataset_quality"),
                    check_name=str(result.check_name),
                    passed=True,
                    description=result.description,
                    metadata=result.metadata,
                )
            )
    for check in ("alike", "answers", "consistent"):
        page.goto(f"/assets/dataset_quality?view=checks&checkDetail={check}")
        expect(page.get_by_text("Execution history").first).to_be_visible()
        page.wait_for_load_state("networkidle")
    page.goto("/assets/dataset_quality")
    page.wait_for_load_state("networkidle")
    assert spy.paths == []


def test_a_page_of_html_shows_it_as_text(browser: Browser, tmp_path: Path, spy: Spy) -> None:
    """The pages that commands write fetch nothing either, and run nothing."""
    evil = f"{markup(spy, 'html')}<script>fetch('{spy.address}/script')</script>"
    card = Card(evil, evil, [None], {evil: evil, "list": [evil]})
    written = tmp_path / "page.html"
    written.write_text(html_page(evil, [card], tables=[(evil, (evil,), [(evil,)])]))
    opened = browser.new_page()
    opened.goto(written.as_uri())
    opened.wait_for_load_state("networkidle")
    assert opened.locator("img").count() == 0
    assert spy.paths == []
    opened.close()

"""The review's page in a real browser: a person judges a property by keyboard or mouse, and it is kept."""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from playwright.sync_api import expect

from vlm_assets.assets.truth import verdicts
from vlm_assets.config.settings import load_settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.versions.published import PublishedPartitions

PROGRAM = Path(sys.executable).with_name("vlm-assets")
ANSWER = {"floors": 2, "kind": "<b>villa</b>", "has_pool": True}


@pytest.fixture
def home(tmp_path):
    """Two properties with an image each, and one that cannot be shown, described and published."""
    for name, colour in (("p1", "red"), ("p2", "blue")):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (64, 48), colour).save(tmp_path / "images" / name / "1.jpg")
        (tmp_path / "images" / name / "2 <b>.jpg").write_bytes(b"no image")
    settings = load_settings(home=tmp_path / "home")
    ingest(tmp_path / "images", settings.home, close=True)
    (one,) = Catalog.open(settings.home).ranges
    ids = Catalog.open(settings.home).slice(one)["property_id"].to_pylist()
    made = {"status": "ok", "fingerprint": "f", "inputs_digest": "i", "description": ANSWER}
    rows = [{"property_id": id_, "ordinal": n, **made} for n, id_ in enumerate(ids)]
    table = pa.Table.from_pylist(rows)
    published = PublishedPartitions(settings.descriptions)
    staged = published.stage(
        one.key, table.to_batches(), table.schema, expected_ids=ids, fingerprint="f", metadata={}
    )
    with staged:
        published.publish(staged)
    return settings.home


@pytest.fixture
def address(home):
    """Where the page of ``vlm-assets review`` is."""
    command = [PROGRAM, "review", "--home", home, "--port", "3250"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def test_a_property_is_judged_by_keyboard(browser, address, home):
    """Right, wrong with what is right, Enter: kept at once, shown as text, and the next one comes."""
    page = browser.new_page()
    page.on("dialog", lambda dialog: dialog.accept("3"))
    page.goto(address)
    expect(page.locator("#note")).to_contain_text("1 of 2")
    expect(page.locator("#images img")).to_have_count(1)
    expect(page.locator("#fields")).to_contain_text("<b>villa</b>")
    judged = page.locator("#title").inner_text()
    page.keyboard.press("c")
    expect(page.locator("tr").first).to_contain_text("2 → 3")
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    expect(page.locator("#note")).to_contain_text("2 of 2, 1 reviewed")
    expect(page.locator("#accuracy")).to_contain_text("floors 0% (0% to 79%) of 1")
    (kept,) = verdicts(home).values()
    assert (kept.property_id, kept.wrong, set(kept.right)) == (judged, ("floors",), {"kind", "has_pool"})
    assert kept.true_fields == {**ANSWER, "floors": 3}
    refused = page.request.post(f"{address}/verdict/0", data="{}", headers={"origin": "http://evil.example"})
    assert refused.status == 403
    page.close()


def test_a_property_is_judged_by_mouse(browser, address, home):
    """Without a keyboard too, on a tablet; and an image that cannot be shown is named, as text."""
    page = browser.new_page()
    page.on("dialog", lambda dialog: dialog.accept("3"))
    page.goto(address)
    expect(page.locator("#images .gone")).to_contain_text("2 <b>.jpg cannot be shown")
    judged = page.locator("#title").inner_text()
    page.locator("tr", has_text="floors").get_by_role("button", name="correct").click()
    page.locator("tr", has_text="kind").get_by_role("button", name="wrong").click()
    page.get_by_role("button", name="All others right").click()
    page.get_by_role("button", name="Keep and go on").click()
    expect(page.locator("#note")).to_contain_text("2 of 2, 1 reviewed")
    page.get_by_role("button", name="Back").click()
    expect(page.locator("#note")).to_contain_text("1 of 2, 1 reviewed")
    page.get_by_role("button", name="Skip").click()
    expect(page.locator("#note")).to_contain_text("2 of 2")
    (kept,) = verdicts(home).values()
    assert (kept.property_id, kept.wrong, kept.right) == (judged, ("floors", "kind"), ("has_pool",))
    assert kept.true_fields == {"floors": 3, "has_pool": True}
    page.close()

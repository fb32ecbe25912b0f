"""Ids, answers, file names, reasons and texts of a schema that are markup, on every page that we make."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import dagster as dg
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.hostile_home import MATH, SCHEMA, Spy, hostile_home, install_schema
from tests.support.http_stub import Request, serving
from vlm_assets.assets import markdown
from vlm_assets.assets.fingerprint import Fingerprint
from vlm_assets.assets.partition_page import SheetRow, contact_sheet, read_quality
from vlm_assets.assets.property_catalog import catalog_metadata
from vlm_assets.automation.dataset_audit import audit_metadata
from vlm_assets.automation.dataset_plan import plan_metadata
from vlm_assets.automation.dataset_progress import progress_metadata
from vlm_assets.commands import comparison_view, property_view
from vlm_assets.commands.html_page import page as html_page
from vlm_assets.config.settings import Settings
from vlm_assets.services.comparison import Comparison, Result
from vlm_assets.services.forecast import make_forecast
from vlm_assets.services.home_audit import audit
from vlm_assets.services.intervals import Share
from vlm_assets.services.measurement import Measurement
from vlm_assets.services.status import read_status
from vlm_assets.services.trial import Trial
from vlm_catalog.catalog import Catalog
from vlm_durable.files.sealed_json import write_sealed
from vlm_durable.versions.partition_rows import PartitionRows
from vlm_engine.ladder import Described
from vlm_results import explore, search
from vlm_results.dataset_quality import check_results, quality_metadata
from vlm_results.quality import assess_quality
from vlm_results.review import Accuracy, accuracy, draw_sample, published_answers
from vlm_results.review_page import review_app
from vlm_training.description_model import TrainingWork

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from vlm_training.training_plan import TrainingPlan


Metadata = Mapping[str, dg.MetadataValue]

FOREIGN = "img:not([src^='data:']), iframe, object, embed, [onerror], [onload]"
"""What no page of ours has."""


@pytest.fixture(scope="module")
def spy() -> Iterator[Spy]:
    paths: list[str] = []

    def note(request: Request) -> None:
        paths.append(request.path)
        request.respond(204)

    with serving(note) as port:
        yield Spy(port, paths)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, spy: Spy) -> Iterator[Settings]:
    """A home whose ids, image names, answers, schema, settings and reasons of failure are all markup."""
    install_schema(spy)
    yield hostile_home(tmp_path_factory.mktemp("hostile"), spy)
    del sys.modules[SCHEMA]


@pytest.fixture
def nothing_fetched(spy: Spy) -> Iterator[None]:
    """Whatever the test opened, nobody fetched anything for a stranger, and no stranger's script ran."""
    spy.paths.clear()
    yield
    assert spy.paths == []


def shown_text(place: Page | Locator) -> str:
    """What a person reads, without the invisible spaces that let long words break."""
    body = place.locator("body") if isinstance(place, Page) else place
    return body.inner_text().replace("\N{ZERO WIDTH SPACE}", "")


def expect_as_text(text: str, spy: Spy, *names: str) -> None:
    """The markup of each of these names stands there as it was written."""
    assert [name for name in names if spy.first(name) not in text] == []


def progress_page(settings: Settings, spy: Spy) -> Metadata:
    """Of a home that is stale since its schema, its prompt, its model and its options changed."""
    status = read_status(settings, Catalog.open(settings.home))
    return progress_metadata(replace(status, warnings=(*status.warnings, spy.markup("warning"))))


def audit_page(settings: Settings, spy: Spy) -> Metadata:
    """Of a home with a foreign file; and with what a partition of strange ids may be said to have."""
    found = audit(settings, Catalog.open(settings.home))
    problem = replace(found.findings[0], sentence=spy.markup("problem"), key=spy.markup("key"))
    return audit_metadata(replace(found, findings=(*found.findings, problem)))


def partition_page(settings: Settings) -> Metadata:
    rows = PartitionRows(settings.descriptions.partition(Catalog.open(settings.home).ranges[0].key).published)
    counts = read_quality(rows)
    sheet = [
        SheetRow(row["property_id"], [None], row.get("description"), row.get("error"))
        for row in (*counts.sample, *counts.failed)
    ]
    return {
        "sheet": markdown.metadata(contact_sheet(sheet)),
        "counts": markdown.metadata(counts.table()),
    }


def quality_page(settings: Settings, spy: Spy) -> Metadata:
    catalog = Catalog.open(settings.home)
    found = assess_quality(settings, catalog)
    reviewed = accuracy(settings.home, published_answers(settings, catalog))
    assert {one.check for one in found.findings} == {"alike", "answers", "consistent"}
    assert spy.markup("field") in reviewed.fields
    return quality_metadata(found, Accuracy(reviewed.fields, 1))


def plan_page(settings: Settings, spy: Spy) -> Metadata:
    measured = Measurement(
        name="m",
        at=0.0,
        model=spy.markup("model"),
        engine="transformers",
        device=f"GPU-1 ({spy.markup('device')})",
        max_pixels=1,
        batch_size=1,
        batch_images=1,
        load_seconds=1.0,
        cpu_seconds=1.0,
        batches=((1, 1, 1.0),),
        row_bytes=1.0,
        commit_seconds=1.0,
        start_seconds=1.0,
    )
    plan = make_forecast(settings, Catalog.open(settings.home), measured, devices=1, devices_here=1)
    return plan_metadata(replace(plan, notes=(*plan.notes, spy.markup("note"))))


def model_page(settings: Settings, spy: Spy) -> Metadata:
    work = TrainingWork(settings, "variant", cast("TrainingPlan", None), Fingerprint({}), ())
    work.paths.record.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(
        work.paths.record,
        {"sequence": 1, "figures": {spy.markup("field"): 0.5}, "asked": spy.markup("asked")},
    )
    return work.metadata(spy.markup("done"))


def catalog_page(settings: Settings, spy: Spy) -> Metadata:
    report = dg.MetadataValue.text(spy.markup("report"))
    return {"report": report, **catalog_metadata(Catalog.open(settings.home))}


def read(page: Page, name: str, metadata: Metadata) -> str:
    """Open the events of an asset and all of its markdown; give the text.

    Dagster renders what is short in its place, and what is long when somebody asks for it.
    """
    page.goto(f"/assets/hostile_{name}?view=events")
    for key in metadata:
        expect(page.get_by_role("cell", name=key, exact=True).first).to_be_visible()
    texts = [shown_text(page)]
    links = page.get_by_text("[Show Markdown]")
    dialog = page.get_by_role("dialog")
    for number in range(links.count()):
        links.nth(number).click()
        expect(dialog).to_be_visible()
        page.wait_for_load_state("networkidle")
        texts.append(shown_text(dialog))
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
    return "\n".join(texts)


def test_no_page_of_dagsters_fetches_what_a_stranger_wrote(
    desk, page: Page, hostile: Settings, spy: Spy
) -> None:
    """Each page shows it as text and asks nobody for anything. One with real markup does: the spy sees it."""
    stale = ("old_model", "old_prompt", "prompt", "old_field", "field", "option", "chosen")
    answers = ("id", "summary", "value", "always", "kind")
    pages: dict[str, tuple[Metadata, tuple[str, ...]]] = {
        "quality": (quality_page(hostile, spy), (*answers, "field", "contradiction")),
        "audit": (audit_page(hostile, spy), ("problem", "key")),
        "progress": (progress_page(hostile, spy), ("kind", "warning", *stale)),
        "partition": (partition_page(hostile), (*answers, "flag", "reason")),
        "plan": (plan_page(hostile, spy), ("device", "note")),
        "model": (model_page(hostile, spy), ("field", "asked", "done")),
        "catalog": (catalog_page(hostile, spy), ("report",)),
    }
    raw: Metadata = {
        "short": dg.MarkdownMetadataValue(f"![x]({spy.address}/short)"),
        "long": dg.MarkdownMetadataValue(f"![x]({spy.address}/long) {'long ' * 300}"),
    }
    spy.paths.clear()
    with dg.DagsterInstance.from_config(str(desk.home / "dagster")) as instance:
        for name, (metadata, _) in {"raw": (raw, ()), **pages}.items():
            event = dg.AssetMaterialization(f"hostile_{name}", metadata=metadata)
            instance.report_runless_asset_event(event)
    read(page, "raw", raw)
    assert sorted(set(spy.paths)) == ["/long", "/short"]
    spy.paths.clear()
    for name, (metadata, names) in pages.items():
        expect_as_text(read(page, name, metadata), spy, *names)
    assert spy.paths == []


@pytest.mark.usefixtures("nothing_fetched")
def test_a_check_says_what_a_stranger_wrote_as_text(desk, page: Page, hostile: Settings, spy: Spy) -> None:
    """Its description and its metadata fetch nothing."""
    expected = {"alike": "value", "answers": "always", "consistent": "contradiction"}
    results = check_results(assess_quality(hostile, Catalog.open(hostile.home)))
    with dg.DagsterInstance.from_config(str(desk.home / "dagster")) as instance:
        for result in results:
            instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset_key=dg.AssetKey("dataset_quality"),
                    check_name=str(result.check_name),
                    passed=result.passed,
                    severity=result.severity,
                    description=result.description,
                    metadata=result.metadata,
                )
            )
    assert {result.check_name for result in results if not result.passed} == expected.keys()
    for check, name in expected.items():
        page.goto(f"/assets/dataset_quality?view=checks&checkDetail={check}")
        expect(page.get_by_text("Execution history").first).to_be_visible()
        page.wait_for_load_state("networkidle")
        expect_as_text(shown_text(page), spy, name)
    page.goto("/assets/dataset_quality")
    page.wait_for_load_state("networkidle")


def test_a_page_of_a_command_shows_it_as_text(
    browser: Browser, tmp_path, hostile: Settings, spy: Spy
) -> None:
    """``show``, ``search`` and ``compare`` write pages that fetch nothing and run nothing."""
    catalog = Catalog.open(hostile.home)
    property_id = catalog.slice(catalog.ranges[0])["property_id"][1].as_py()
    failed = Described(
        property_id,
        1,
        "failed",
        spy.markup("kind"),
        spy.markup("reason"),
        None,
        None,
        1,
        1,
        (),
        1,
        1,
        None,
        1.0,
    )
    trial = Trial(
        (failed,), 1, "d", 1, 1.0, 1.0, 1, ((1, 1, 1.0),), not_used={property_id: spy.markup("left")}
    )
    share = Share(0.5, 0.4, 0.6, 9)
    result = Result(
        spy.markup("variant"),
        "m",
        share,
        share,
        1.0,
        1.0,
        1.0,
        1.0,
        None,
        share,
        {spy.markup("field"): share},
    )
    comparison = Comparison(
        1,
        None,
        (result,),
        (),
        (property_id,),
        {property_id: {spy.markup("differs"): {spy.markup("variant"): spy.markup("said")}}},
        {property_id: {spy.markup("differs"): spy.markup("truth")}},
    )
    cards = [
        property_view._card(property_view.read_property(hostile, catalog, property_id), catalog),
        *search.cards(hostile, catalog, [search.Hit(property_id, 1, 0.5)]),
        *comparison_view.cards(trial, catalog),
        *comparison_view.comparison_cards(comparison, catalog),
    ]
    opened = browser.new_page()
    raw, ours = tmp_path / "raw.html", tmp_path / "page.html"
    raw.write_text(spy.markup("raw"))
    ours.write_text(html_page(spy.markup("title"), cards, tables=comparison_view.tables(comparison)))
    spy.paths.clear()
    opened.goto(raw.as_uri())
    opened.wait_for_load_state("networkidle")
    assert sorted(spy.paths) == ["/raw2", "/raw6", "/raw7"]
    opened.goto(ours.as_uri())
    opened.wait_for_load_state("networkidle")
    assert len(spy.paths) == 3
    assert opened.locator(f"{FOREIGN}, script").count() == 0
    assert opened.locator("img").count() == len(cards)
    assert "eval(atob(" in shown_text(opened)
    expect_as_text(
        shown_text(opened), spy, "id", "field", "summary", "raw", "model", "device", "image", "title"
    )
    expect_as_text(shown_text(opened), spy, "kind", "reason", "left", "variant", "differs", "said", "truth")
    opened.close()


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The address of a page while it is served."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield "http://{}:{}/".format(*listening.getsockname())
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.usefixtures("nothing_fetched")
def test_a_review_shows_it_as_text(browser: Browser, hostile: Settings, spy: Spy) -> None:
    """The question for a correction, the correction, what is suspicious and the accuracy too."""
    catalog = Catalog.open(hostile.home)
    drawn = draw_sample(hostile, catalog, count=3, seed=2, suspicious=False)
    sample = [replace(one, why=spy.markup("why")) for one in drawn]
    asked: list[str] = []
    opened = browser.new_page()
    opened.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept(spy.markup("better"))))
    with served(review_app(hostile, catalog, sample)) as address:
        opened.goto(address)
        expect(opened.locator("#note")).to_contain_text("1 of 3")
        for key in ("ArrowDown", "c", "a", "Enter"):
            opened.keyboard.press(key)
        expect(opened.locator("#note")).to_contain_text("2 of 3")
        opened.keyboard.press("b")
        expect(opened.locator("#note")).to_contain_text("1 of 3")
        expect(opened.locator("#fields")).to_contain_text("→")
        expect_as_text(
            shown_text(opened), spy, "id", "why", "summary", "field", "constant", "always", "better"
        )
        assert spy.first("field") in opened.locator("#accuracy").inner_text()
        assert asked == [f"What is right for {spy.markup('field')}?"]
        assert "eval(atob(" in opened.locator("#images .gone").inner_text()
        assert MATH in opened.locator("#fields").inner_text()
        assert opened.locator("img").count() == 1
        assert opened.locator(f"{FOREIGN}, script:not([src='/review.js'])").count() == 0
        opened.close()


@pytest.mark.long
@pytest.mark.usefixtures("nothing_fetched")
def test_the_page_of_explore_shows_it_as_text(browser: Browser, hostile: Settings, spy: Spy) -> None:
    """The library's page: `make test-long` installs this extra, which brings half a gigabyte."""
    from embedding_atlas import server

    table = explore.explore_table(hostile, Catalog.open(hostile.home), sample=3)
    app = server.make_server(
        explore._source(table), static_path=explore._static(), duckdb_uri="wasm", cors=False
    )
    opened = browser.new_page(viewport={"width": 2400, "height": 1200})
    with served(app) as address:
        opened.goto(address)
        expect(opened.locator("table").get_by_text(spy.first("id")).first).to_be_visible()
        opened.wait_for_load_state("networkidle")
        expect_as_text(shown_text(opened), spy, "id", "field", "summary", "always", "model", "device")
        assert opened.locator("[onerror], [onload], iframe, script[src*='http']").count() == 0
        opened.close()

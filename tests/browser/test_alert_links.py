"""The links of alerts that lead to no run: each shows what it is about, in the pages as they are today."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from sensors.alerts import alert_of, queue_stands
from sensors.dagster_internals.events import CheckEvaluation
from sensors.ticks import Ticks
from vlm_durable.state.database import open_state


def test_the_links_lead_to_the_queue_the_check_the_sensors_and_the_daemon(desk, page: Page, tmp_path) -> None:
    """A link that ends at an error is no next step."""
    drift = CheckEvaluation(
        "property_descriptions", "published_file", desk.keys[0], False, "ERROR", "gone", {}, "", 1.0, 1
    )
    ticks = Ticks(open_state(tmp_path))
    ticks.record("published_file_drift", 1.0)
    (silent,) = ticks.silent_sensors({"published_file_drift": 60.0}, since=0.0, now=1e6)
    stands = queue_stands(3, 0.0, now=1e6)
    shown = {
        stands: "View queue configuration",
        alert_of(drift): "The file on disk is what was published last",
        silent: "published_file_drift",
        ticks.silence(now=1e6): "Daemon statuses",
    }
    for alert, text in shown.items():
        page.goto(f"/{alert.page}")
        expect(page.get_by_text(text).first).to_be_visible()
        assert page.get_by_text("Unexpected").count() == 0

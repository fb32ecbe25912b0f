"""A partition with too many failed rows is refused by name, and published once a person accepts them."""

import io

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from vlm_assets.assets.materialize import ACCEPTED_FAILED
from vlm_assets.commands.status_view import view
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_durable.versions.published import PublishedPartitions

KEY = "000000000-000000007"
ACCEPT = {"accept_failed": True}

pytestmark = pytest.mark.usefixtures("scripted_engine")


@pytest.fixture
def gone(images_away):
    """Three of the eight properties have lost their images."""
    images_away.take(*images_away.ids[:3])
    return images_away


def record(desk):
    return PublishedPartitions(desk.settings.descriptions).record(KEY)


def severity(done):
    check = done.checks["failed_share"]
    return None if check.passed else check.severity.value


def said(desk):
    """What ``vlm-assets status`` prints."""
    said = io.StringIO()
    status = read_status(desk.settings, Catalog.open(desk.settings.home))
    Console(width=2000, file=said).print(view(status))
    return said.getvalue()


def test_the_refusal_names_the_setting_and_the_command(desk, gone):
    """Who reads it knows how to publish it once, and how to publish such partitions always."""
    refused = desk.materialize()
    assert severity(refused) == "ERROR"
    assert "VLM_ASSETS_FAILED_SHARE" in refused.failure
    assert f"vlm-assets run {KEY} --accept-failed" in refused.failure
    shown = said(desk)
    assert f"vlm-assets run {KEY} --accept-failed" in shown
    assert f"3 of 8 properties failed (3 missing). First: {gone.ids[0]}: missing: " in shown


def test_accepted_failures_are_published_and_only_warn_from_then_on(desk, gone):
    """The published record says how many, who and when; nothing is computed for it."""
    assert not desk.materialize().success
    done = desk.materialize(config=ACCEPT)
    assert done.success, done.failure
    assert severity(done) == "WARN"
    accepted = record(desk).metadata[ACCEPTED_FAILED]
    assert accepted["rows"] == 3
    assert f"{accepted['by']} accepted 3 at {accepted['at']}" in done.checks["failed_share"].description
    assert "--accept-failed" not in done.checks["failed_share"].description
    assert pq.read_table(desk.file)["status"].to_pylist().count("failed") == 3
    again = desk.materialize()
    assert again.success, again.failure
    assert severity(again) == "WARN"
    shown = said(desk)
    assert "failed: 3 missing" in shown
    assert f"{gone.ids[0]}: missing: " in shown


def test_a_better_result_is_not_refused_again(desk, gone):
    """No more failures than were accepted: published with a warning, and the acceptance stands."""
    assert not desk.materialize().success
    assert desk.materialize(config=ACCEPT).success
    gone.put_back(gone.ids[0])
    done = desk.materialize(config={"retry_failed": True})
    assert done.success, done.failure
    assert severity(done) == "WARN"
    assert record(desk).metadata[ACCEPTED_FAILED]["rows"] == 2
    gone.put_back(*gone.ids)
    healed = desk.materialize(config={"retry_failed": True})
    assert healed.success, healed.failure
    assert severity(healed) is None
    assert ACCEPTED_FAILED not in record(desk).metadata


def test_a_worse_result_than_was_accepted_is_refused(desk, gone):
    """Three failures were accepted, and not a fourth."""
    gone.put_back(gone.ids[0])
    assert not desk.materialize().success
    assert desk.materialize(config=ACCEPT).success
    gone.take(gone.ids[0])
    refused = desk.materialize(config={"recompute": True})
    assert not refused.success
    assert " accepted 2 at " in refused.failure
    assert "stays in place" in refused.failure

"""The audit in Dagster: one check that is green only for a dataset that is whole."""

from __future__ import annotations

import dagster as dg
import pytest

from tests.support.damage import flip_bit
from vlm_assets.automation.dataset_audit import LastAudit, why_due
from vlm_assets.home_definitions import build_defs

DAY = 24 * 3600.0
FIRST = "000000000-000000002"


@pytest.fixture
def materialize(dataset):
    """Materializes the audit as Dagster's page does, without a partition."""

    def run(**config: bool) -> dg.ExecuteInProcessResult:
        defs = build_defs(dataset.settings)
        return dg.materialize(
            defs.assets,
            selection=["dataset_audit"],
            resources=defs.resources,
            run_config={"ops": {"dataset_audit": {"config": config}}},
        )

    return run


def test_a_whole_dataset_passes_its_check(materialize):
    """The numbers that a person looks for are on the page, and the check is green."""
    done = materialize()
    (check,) = done.get_asset_check_evaluations()
    assert check.passed
    (event,) = done.asset_materializations_for_node("dataset_audit")
    assert "| property\\_descriptions | 9 | 8 | 1 | 0 | 0 | 0 | 0 |" in event.metadata["counts"].value
    assert event.metadata["problems"].value == 0


def test_a_wrong_dataset_fails_its_check_and_says_where(dataset, materialize):
    """Damage that only a full read shows turns the check red, with the partition named."""
    path = dataset.descriptions.path(FIRST)
    flip_bit(path, -40)
    done = materialize(deep=True)
    assert done.success, "the audit itself did its work"
    (check,) = done.get_asset_check_evaluations()
    assert not check.passed
    assert check.severity is dg.AssetCheckSeverity.ERROR
    assert check.metadata["finding"].value == "digest_differs", "the alert has it from here"
    (event,) = done.asset_materializations_for_node("dataset_audit")
    assert FIRST in event.metadata["found"].value


@pytest.mark.parametrize(
    ("seconds", "problems", "is_due"),
    [(DAY - 1, 0, False), (DAY, 0, True), (3599, 2, False), (3600, 2, True), (-30 * DAY, 0, True)],
    ids=["today", "a day ago", "faults just now", "faults an hour ago", "the clock was put back"],
)
def test_an_audit_is_due_each_day_and_each_hour_while_something_is_wrong(seconds, problems, is_due):
    """A time that lies ahead keeps no audit off for a month."""
    last = LastAudit(100 * DAY, problems)
    assert (why_due(last, works=False, now=last.at + seconds) is not None) == is_due

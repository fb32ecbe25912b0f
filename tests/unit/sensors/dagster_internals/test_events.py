"""The results of checks are found by when they came."""

import dagster as dg

from sensors.published_file_drift import evaluation
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.published import Verification


def test_a_result_is_found_by_when_it_came_not_by_when_its_check_was_planned(orchestrator):
    """A check that was planned early and finished late is not overlooked by who read on meanwhile."""
    early = orchestrator.created("a")
    found = dg.AssetCheckEvaluation(dg.AssetKey("first"), "file", passed=True, metadata={}, partition="b")
    orchestrator.dagster.report_evaluation(found)
    cursor = orchestrator.dagster.newest_evaluation()
    assert orchestrator.dagster.evaluations_since(cursor)[0] == []
    orchestrator.behaviour.of_key["a"] = "check"
    orchestrator.ends(early, "check")
    (late,), after = orchestrator.dagster.evaluations_since(cursor)
    assert (late.asset, late.check, late.partition, late.passed) == ("first", "sound", "a", False)
    assert late.run_id == early.run_id
    assert orchestrator.dagster.evaluations_since(after)[0] == []


def test_a_description_is_markdown_on_the_page_and_text_to_everybody_else(orchestrator):
    """An id that is an image was fetched by whoever opened the page; an alert has no backslashes in it."""
    foreign = Finding(FindingKind.IDS, "first", "b", "a foreign id ![x](http://a.b/c).")
    found = evaluation("first", "b", Verification("b", None, (foreign,)), 1.0)
    assert r"\!\[x\]" in found.description
    orchestrator.dagster.report_evaluation(found)
    (read,), _ = orchestrator.dagster.evaluations_since(0)
    assert read.description == "Expected a file with its record; found a foreign id ![x](http://a.b/c)."

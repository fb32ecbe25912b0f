"""The results of checks are found by when they came."""

import dagster as dg


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

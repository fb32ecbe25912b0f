"""What is read from Dagster's tables, a look at a time, is what Dagster says."""

import dagster as dg

from sensors.dagster_history import (
    LAUNCHED_BY,
    NO_ATTEMPT,
    RETRY,
    PartitionHistory,
    evaluations_since,
    newest_evaluation,
    report_evaluation,
    run_states,
    runs_with_key,
    unfinished_partitions,
)


def evaluate(orchestrator, key, passed, severity=dg.AssetCheckSeverity.ERROR):
    report_evaluation(
        orchestrator.instance,
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey("first"),
            check_name="file",
            passed=passed,
            metadata={"found": dg.MetadataValue.int(7)},
            severity=severity,
            partition=key,
        ),
    )


def test_a_result_is_found_by_when_it_came_not_by_when_its_check_was_planned(orchestrator):
    """A check that was planned early and finished late is not overlooked by who read on meanwhile."""
    early = orchestrator.created("a")
    evaluate(orchestrator, "b", passed=True)
    cursor = newest_evaluation(orchestrator.instance)
    assert evaluations_since(orchestrator.instance, cursor)[0] == []
    orchestrator.behaviour.of_key["a"] = "check"
    orchestrator.ends(early, "check")
    (late,), after = evaluations_since(orchestrator.instance, cursor)
    assert (late.asset, late.check, late.partition, late.passed) == ("first", "sound", "a", False)
    assert late.run_id == early.run_id
    assert evaluations_since(orchestrator.instance, after)[0] == []


def test_a_look_that_reads_on_says_what_a_first_look_says(orchestrator):
    """Whatever happened in between: attempts, materializations and failed checks are the same."""
    kept = PartitionHistory(["first", "second"])
    for step in (
        lambda: orchestrator.materialize("a"),
        lambda: evaluate(orchestrator, "a", passed=False),
        lambda: orchestrator.behaviour.of_key.update(b="fail"),
        lambda: orchestrator.materialize("b"),
        lambda: evaluate(orchestrator, "b", passed=False, severity=dg.AssetCheckSeverity.WARN),
        lambda: evaluate(orchestrator, "c", passed=False),
        lambda: evaluate(orchestrator, "c", passed=True),
        lambda: evaluate(orchestrator, "d", passed=False),
        lambda: orchestrator.materialize("d"),
        lambda: orchestrator.created("d"),
    ):
        step()
        kept.look(orchestrator.instance)
        fresh = PartitionHistory(["first", "second"])
        fresh.look(orchestrator.instance)
        assert kept.open_attempts == fresh.open_attempts
        assert kept.materialized == fresh.materialized
        assert {key: [one.check for one in each] for key, each in kept.failing("first").items()} == {
            key: [one.check for one in each] for key, each in fresh.failing("first").items()
        }
    assert set(kept.failing("first")) == {"a"}
    assert set(kept.open_attempts["first"]) == {"b", "d"}


def test_a_check_that_was_only_planned_hides_no_failure(orchestrator):
    """A run that ended before its checks leaves them planned for ever: the result before it stands."""
    orchestrator.behaviour.of_key["a"] = "check"
    orchestrator.materialize("a")
    orchestrator.created("a")
    first = PartitionHistory(["first"])
    first.look(orchestrator.instance)
    assert set(first.failing("first")) == {"a"}


def test_the_states_of_runs_tell_who_launched_and_what_ended_them(orchestrator):
    """Status, partition, run key and tags, without a run's body."""
    ours = orchestrator.created("a", **{LAUNCHED_BY: RETRY, "dagster/run_key": "a:1"})
    retried = orchestrator.created("b", **{"dagster/retry_number": "1"})
    by_hand = orchestrator.created("c", **{NO_ATTEMPT: "another run, of which this is a retry"})
    states = run_states(orchestrator.instance, [ours.run_id, retried.run_id, by_hand.run_id, "gone"])
    assert [states[run.run_id].is_by_hand for run in (ours, retried, by_hand)] == [False, False, True]
    assert states.keys() == {ours.run_id, retried.run_id, by_hand.run_id}
    assert not states[ours.run_id].finished
    assert states[by_hand.run_id].interrupted_by is None
    assert runs_with_key(orchestrator.instance, ["a:1", "a:2"])["a:1"].run_id == ours.run_id
    assert unfinished_partitions(orchestrator.instance) == {"a", "b", "c"}
    orchestrator.ends(ours, "interrupt")
    assert unfinished_partitions(orchestrator.instance) == {"b", "c"}
    ended = run_states(orchestrator.instance, [ours.run_id])[ours.run_id]
    assert ended.finished
    assert ended.interrupted_by == "UNEXPECTED_TERMINATION"

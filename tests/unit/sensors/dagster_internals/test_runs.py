"""What is said of runs without reading their bodies is what Dagster says."""

from sensors.dagster_internals.runs import (
    LAUNCHED_BY,
    NO_ATTEMPT,
    RETRY,
    run_states,
    runs_with_key,
    unfinished_partitions,
)


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

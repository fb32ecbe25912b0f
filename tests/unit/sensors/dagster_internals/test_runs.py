"""What is said of runs without reading their bodies is what Dagster says."""

from resources.dagster_names import NO_ATTEMPT
from sensors.dagster_internals.runs import GOES_ON_WITH, LAUNCHED_BY, RETRY, UNFINISHED


def test_a_run_of_ours_that_a_person_re_executes_is_by_hand(orchestrator):
    """Dagster hands all tags on but for the parent: ours goes on with one run, the re-execution with ours."""
    ours = {LAUNCHED_BY: RETRY, GOES_ON_WITH: "before", "dagster/parent_run_id": "before"}
    goes_on = orchestrator.created("a", **ours)
    again = orchestrator.created("a", **ours | {"dagster/parent_run_id": goes_on.run_id})
    states = orchestrator.dagster.run_states([goes_on.run_id, again.run_id])
    assert not states[goes_on.run_id].is_by_hand
    assert states[again.run_id].is_by_hand


def test_the_states_of_runs_tell_who_launched_and_what_ended_them(orchestrator):
    """Status, partition, run key and tags, without a run's body."""
    ours = orchestrator.created("a", **{LAUNCHED_BY: RETRY, "dagster/run_key": "a:1"})
    retried = orchestrator.created("b", **{"dagster/retry_number": "1"})
    by_hand = orchestrator.created("c", **{NO_ATTEMPT: "another run, of which this is a retry"})
    states = orchestrator.dagster.run_states([ours.run_id, retried.run_id, by_hand.run_id, "gone"])
    assert [states[run.run_id].is_by_hand for run in (ours, retried, by_hand)] == [False, False, True]
    assert states.keys() == {ours.run_id, retried.run_id, by_hand.run_id}
    assert not states[ours.run_id].finished
    assert states[by_hand.run_id].interrupted_by is None
    assert orchestrator.dagster.runs_with_key(["a:1", "a:2"])["a:1"].run_id == ours.run_id
    assert {one.partition for one in orchestrator.dagster.runs_in(UNFINISHED)} == {"a", "b", "c"}
    orchestrator.ends(ours, "interrupt")
    assert {one.partition for one in orchestrator.dagster.runs_in(UNFINISHED)} == {"b", "c"}
    ended = orchestrator.dagster.run_states([ours.run_id])[ours.run_id]
    assert ended.finished
    assert ended.interrupted_by == "UNEXPECTED_TERMINATION"

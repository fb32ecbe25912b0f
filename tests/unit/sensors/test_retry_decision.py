"""Who owns which failure: each line of the table, as a decision about one partition."""

from dagster import DagsterRunStatus

from resources.run_tags import NEEDS_PERSON, NO_ATTEMPT
from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY, RunState
from sensors.retry_decision import INTERRUPTIONS_TOLD, Action, Facts, Policy, decide
from sensors.retry_ledger import Entry

POLICY = Policy(attempts=5, backoff_seconds=600.0)
ENDED = 1_000_000.0


def run(*, by_hand=False, **tags):
    who = {} if by_hand else {LAUNCHED_BY: RETRY}
    tagged = {name.replace("__", "/"): value for name, value in tags.items()}
    return RunState("run", DagsterRunStatus.FAILURE, ENDED - 60, ENDED, {**who, **tagged})


def facts(latest, *, rows=0):
    return Facts("key", "why", latest, rows)


def entry(**fields):
    return Entry("key", **{"launches": 1, "reckoned": "before", **fields})


def test_a_crash_is_dagsters_first_and_an_attempt_when_it_comes_here():
    """Run retries own it while they say so; for a backfill that ended they never come, and we do."""
    crashed = run(dagster__failure_reason="RUN_EXCEPTION", dagster__will_retry="true")
    assert decide(entry(), facts(crashed), POLICY, now=ENDED + 60).action is Action.DAGSTER
    later = decide(entry(), facts(crashed), POLICY, now=ENDED + 600)
    assert (later.action, later.entry.attempts) == (Action.WAIT, 1)


def test_a_termination_from_outside_is_resumed_and_no_attempt():
    """At once the first time; further ones back off, and are still no attempt."""
    ended = run(dagster__failure_reason="UNEXPECTED_TERMINATION")
    first = decide(entry(), facts(ended), POLICY, now=ENDED + 1)
    assert (first.action, first.entry.attempts) == (Action.LAUNCH, 0)
    many = decide(entry(interruptions=INTERRUPTIONS_TOLD), facts(ended), POLICY, now=ENDED + 1)
    assert (many.action, many.entry.attempts) == (Action.WAIT, 0)


def test_no_free_device_is_no_attempt():
    """Waiting in vain says nothing of the partition; Dagster's retries do not inherit that."""
    waited = run(dagster__failure_reason="STEP_FAILURE", **{NO_ATTEMPT: "run"})
    assert decide(entry(), facts(waited), POLICY, now=ENDED + 1).entry.attempts == 0
    inherited = run(dagster__failure_reason="STEP_FAILURE", **{NO_ATTEMPT: "another run"})
    assert decide(entry(), facts(inherited), POLICY, now=ENDED + 1).entry.attempts == 1


def test_a_run_that_stopped_at_garbage_is_a_persons():
    """Its failed rows are new rows, so it would never be given up; the button tries it all the same."""
    garbage = run(dagster__failure_reason="STEP_FAILURE", **{NEEDS_PERSON: "run"})
    assert decide(entry(), facts(garbage, rows=40), POLICY, now=ENDED + 1e6).action is Action.PERSON
    asked = decide(entry(), facts(garbage, rows=40), POLICY, now=ENDED + 1e6, at_once=True)
    assert asked.action is Action.LAUNCH


def test_a_failed_materialization_backs_off_and_is_given_up():
    """Twice as long after each attempt without a new row; after five, a person."""
    for attempts in range(4):
        decision = decide(entry(attempts=attempts), facts(run()), POLICY, now=ENDED)
        assert decision.action is Action.WAIT
        assert decision.entry.not_before == ENDED + 600 * 2 ** (attempts + 1)
    assert decide(entry(attempts=4), facts(run()), POLICY, now=ENDED).action is Action.GIVE_UP
    gone = entry(attempts=5, given_up=True, reckoned="run")
    assert decide(gone, facts(run()), POLICY, now=ENDED + 1e9).action is Action.GIVEN_UP


def test_a_new_row_begins_the_count_anew():
    """Attempts are counted only where nothing was committed since the last one."""
    decision = decide(entry(attempts=4, rows=10), facts(run(), rows=11), POLICY, now=ENDED)
    assert (decision.entry.attempts, decision.entry.rows) == (0, 11)
    assert decision.action is Action.WAIT


def test_the_end_of_a_run_is_counted_once():
    """However many ticks look at it."""
    once = decide(entry(), facts(run()), POLICY, now=ENDED).entry
    assert decide(once, facts(run()), POLICY, now=ENDED).entry == once


def test_a_launch_by_hand_forgives():
    """A person's launch that fails is the first of a new count, and its alert is still to be called off."""
    decision = decide(
        entry(attempts=5, given_up=True, alerted=True), facts(run(by_hand=True)), POLICY, now=ENDED
    )
    assert (decision.action, decision.entry.attempts, decision.entry.given_up) == (Action.WAIT, 0, False)
    assert decision.entry.alerted
    assert decision.entry.launches == 1, "no run key comes twice"


def test_a_clock_that_was_put_back_holds_nothing_up():
    """After a start with a clock years ahead, what failed then is tried again now, and not years later."""
    failed = run()
    waiting = decide(entry(), facts(failed), POLICY, now=ENDED + 1)
    assert waiting.action is Action.WAIT
    years_earlier = ENDED - 1e8
    assert decide(waiting.entry, facts(failed), POLICY, now=years_earlier).action is Action.LAUNCH
    crashed = run(dagster__failure_reason="RUN_EXCEPTION", dagster__will_retry="true")
    assert decide(entry(), facts(crashed), POLICY, now=years_earlier).action is not Action.DAGSTER

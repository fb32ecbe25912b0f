"""Who owns which failure: each line of the table, as a decision about one partition."""

from dataclasses import replace

from dagster import DagsterRunStatus
from dagster._core.events import RunFailureReason

from resources.dagster_names import NEEDS_PERSON, NO_ATTEMPT, is_tagged, tag_value
from sensors.dagster_internals.runs import LAUNCHED_BY, NEVER_STARTED, RETRY, RunState
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


def test_a_run_that_never_started_is_no_attempt():
    """A machine too busy to start it says nothing of the partition; Dagster's own name of it is checked."""
    assert RunFailureReason.START_TIMEOUT.value == NEVER_STARTED
    late = run(dagster__failure_reason=NEVER_STARTED)
    first = decide(entry(), facts(late), POLICY, now=ENDED + 1)
    assert (first.action, first.entry.attempts) == (Action.LAUNCH, 0)


def test_no_free_device_is_no_attempt():
    """Waiting in vain says nothing of the partition; Dagster's retries do not inherit that."""
    waited = run(dagster__failure_reason="STEP_FAILURE", **{NO_ATTEMPT: "run"})
    assert decide(entry(), facts(waited), POLICY, now=ENDED + 1).entry.attempts == 0
    inherited = run(dagster__failure_reason="STEP_FAILURE", **{NO_ATTEMPT: "another run"})
    assert decide(entry(), facts(inherited), POLICY, now=ENDED + 1).entry.attempts == 1


def test_an_outage_of_one_asset_is_an_attempt_at_another_that_failed_beside_it():
    """Otherwise what fails by a fault of its own would be tried for ever, as long as a disk is away."""
    waited = run(dagster__failure_reason="STEP_FAILURE", **{NO_ATTEMPT: tag_value("run", ["a", "c"])})
    for assets, attempts in (({"a"}, 0), ({"a", "c"}, 0), ({"a", "b"}, 1), ({"b"}, 1), ((), 0)):
        told = Facts("key", "why", waited, 0, frozenset(assets))
        assert decide(entry(), told, POLICY, now=ENDED + 1).entry.attempts == attempts, assets


def test_a_tag_goes_on_to_hold_for_the_assets_that_it_named():
    """Each set of a run notes its own failure; a note about the whole run stays one."""
    first = tag_value("run", ["b"])
    both = tag_value("run", ["a"], before=first)
    assert [is_tagged(both, "run", assets) for assets in (["a"], ["a", "b"], ["c"], [])] == [
        True,
        True,
        False,
        True,
    ]
    assert not is_tagged(both, "retry", ["a"]), "Dagster's run retries inherit it"
    assert tag_value("retry", ["c"], before=both) == "retry c"
    assert is_tagged(tag_value("run", ["a"], before=tag_value("run")), "run", ["c"])
    assert is_tagged(tag_value("run", before=both), "run", ["c"])


def test_a_run_that_stopped_at_garbage_is_a_persons():
    """Its failed rows are new rows, so it would never be given up; the button tries it all the same."""
    garbage = run(dagster__failure_reason="STEP_FAILURE", **{NEEDS_PERSON: "run"})
    assert garbage.needs_person_for(["asset"])
    left = replace(facts(garbage, rows=40), for_person=garbage)
    assert decide(entry(), left, POLICY, now=ENDED + 1e6).action is Action.PERSON
    asked = decide(entry(), left, POLICY, now=ENDED + 1e6, at_once=True)
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


INTERRUPTED = run(dagster__failure_reason="UNEXPECTED_TERMINATION")


def after(decisions, *ends, rows=0):
    """The entry after runs that ended so, one after the other, each hours after the back-off of the last."""
    latest, standing = decisions, ENDED
    for number, end in enumerate(ends):
        one = replace(end, run_id=f"run-{number}", ended_at=standing)
        latest = decide(latest, facts(one, rows=rows), POLICY, now=standing).entry
        standing += 1e6
    return latest


def test_no_number_of_interruptions_is_an_attempt():
    """A partition on a machine that is restarted each night is never given up; a person is told meanwhile."""
    standing = after(entry(), *[INTERRUPTED] * 12)
    assert (standing.attempts, standing.interruptions, standing.given_up) == (0, 12, False)
    assert standing.interruptions >= INTERRUPTIONS_TOLD
    mixed = after(entry(), *[INTERRUPTED, run()] * 4)
    assert mixed.attempts == 4, "each failure between them is one, and none of them takes it back"
    assert after(entry(), *[run()] * 4, INTERRUPTED).attempts == 4


def test_interruptions_are_counted_in_a_row_and_without_a_new_row():
    """A failure of another kind, or a new row, begins their count anew."""
    assert after(entry(), INTERRUPTED, INTERRUPTED, run()).interruptions == 0
    assert after(entry(), INTERRUPTED, run(), INTERRUPTED).interruptions == 1
    assert after(entry(interruptions=5, attempts=2), INTERRUPTED, rows=7).interruptions == 1
    moved = decide(entry(interruptions=5, attempts=2), facts(INTERRUPTED, rows=7), POLICY, now=ENDED + 1)
    assert (moved.action, moved.entry.attempts) == (Action.LAUNCH, 0), "it moves: nothing is waited for"


def test_interruptions_back_off_by_their_own_number():
    """At once, then twice as long each time; failures before them do not count, and it has an end."""
    waits = []
    for number in range(10):
        standing = entry(interruptions=number, attempts=3)
        waits.append(decide(standing, facts(INTERRUPTED), POLICY, now=ENDED).entry.not_before - ENDED)
    assert waits[:4] == [0, 1200, 2400, 4800]
    assert waits[-1] == waits[-2] == 600 * 2**6


def test_an_interrupted_launch_by_hand_goes_on_at_once():
    """A person's launch that a reboot ended is resumed, and is the first interruption of a new count."""
    ended = run(by_hand=True, dagster__failure_reason="UNEXPECTED_TERMINATION")
    decision = decide(entry(attempts=4, interruptions=7), facts(ended), POLICY, now=ENDED + 1)
    assert (decision.action, decision.entry.attempts, decision.entry.interruptions) == (Action.LAUNCH, 0, 1)
    failed = decide(entry(attempts=4, interruptions=7), facts(run(by_hand=True)), POLICY, now=ENDED + 1)
    assert (failed.action, failed.entry.interruptions) == (Action.WAIT, 0)
    assert failed.entry.not_before == ENDED + 600


def test_a_partition_that_was_given_up_comes_back_by_a_new_row_or_a_person_alone():
    """Time does not bring it back; rows that somebody's run committed do, and so does the button."""
    gone = entry(attempts=5, given_up=True, rows=3)
    assert decide(gone, facts(run(), rows=3), POLICY, now=ENDED + 1e9).action is Action.GIVEN_UP
    assert decide(gone, facts(INTERRUPTED, rows=3), POLICY, now=ENDED + 1e9).action is Action.GIVEN_UP
    assert decide(gone, facts(run(), rows=4), POLICY, now=ENDED + 1e9).action is Action.LAUNCH
    asked = decide(gone, facts(run(), rows=3), POLICY, now=ENDED, at_once=True)
    assert (asked.action, asked.entry.attempts, asked.entry.given_up) == (Action.LAUNCH, 0, False)

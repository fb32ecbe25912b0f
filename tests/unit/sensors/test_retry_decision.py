"""Who owns which failure: lines of the table, and any sequence of ends of runs against counting by hand."""

from dataclasses import replace

import pytest
from dagster import DagsterRunStatus
from dagster._core.events import RunFailureReason
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from resources.dagster_names import NEEDS_PERSON, NEVER_STARTED, NO_ATTEMPT, is_tagged, tag_value
from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY, RunState
from sensors.retry_decision import Action, Facts, Policy, decide
from sensors.retry_ledger import Entry

POLICY = Policy(attempts=5, backoff_seconds=600.0)
ENDED = 1_000_000.0
STEP, CRASH = {"dagster/failure_reason": "STEP_FAILURE"}, {"dagster/failure_reason": "RUN_EXCEPTION"}
OUTSIDE = {"dagster/failure_reason": "UNEXPECTED_TERMINATION"}


def run(tags, *, by_hand=False, run_id="run", ended=ENDED):
    who = {} if by_hand else {LAUNCHED_BY: RETRY}
    return RunState(run_id, DagsterRunStatus.FAILURE, ended - 60, ended, {**who, **tags})


def facts(latest, *, rows=0):
    return Facts("key", "why", latest, rows)


def entry(**fields):
    return Entry("key", **{"launches": 1, "reckoned": "before", **fields})


class RetryStates(RuleBasedStateMachine):
    """One partition through whatever its runs and people do.

    ends: of the runs since the last launch by hand, that one with them, oldest first: whether each was
    interrupted, and whether it committed a row. forgiven: how many of them a person's button forgave.
    """

    def __init__(self):
        super().__init__()
        self.entry, self.runs, self.rows = entry(alerted=True), 0, 0
        self.ends: list[tuple[bool, bool]] = []
        self.forgiven = 0
        self.given_up = self.at_once = self.by_hand = False

    def decide(self, after, **how):
        """Decide so many seconds after the last run ended, and keep the entry; gives the action."""
        decision = decide(
            self.entry, facts(self.latest, rows=self.rows), POLICY, now=self.ended + after, **how
        )
        self.entry = decision.entry
        return decision.action

    @property
    def since_row(self):
        """The ends after the last that committed a row, and how many there were before them."""
        first = max((at + 1 for at, (_, progress) in enumerate(self.ends) if progress), default=0)
        return self.ends[first:], first

    @property
    def attempts(self):
        """Failures without a new row. A person's own launch is none, and the button forgives earlier ones."""
        ends, first = self.since_row
        return sum(
            not interrupted
            for at, (interrupted, _) in enumerate(ends, start=first)
            if at >= self.forgiven and not (self.by_hand and at == 0)
        )

    @property
    def interruptions(self):
        """Interruptions in a row; a new row begins their number anew."""
        count = 0
        for interrupted, progress in reversed(self.ends):
            if not interrupted:
                break
            count += 1
            if progress:
                break
        return count

    @property
    def wait(self):
        """Seconds from the last end: none at the first interruption, then twice as long each time."""
        if self.at_once or self.interruptions == 1:
            return 0
        return 600 * 2 ** min(self.interruptions - 1 if self.interruptions else self.attempts, 6)

    @rule(
        tags=st.sampled_from([STEP, STEP, CRASH, OUTSIDE]),
        by_hand=st.sampled_from([False, False, False, True]),
        new_rows=st.sampled_from([0, 0, 1]),
        times=st.integers(1, 10),
    )
    def runs_end(self, tags, by_hand, new_rows, times):
        """Some runs end alike, one after another; the first may be a person's, and may commit a row."""
        for number in range(times):
            self.runs += 1
            self.ended = ENDED + 1e6 * self.runs
            self.latest = run(
                tags, by_hand=by_hand and not number, run_id=f"run-{self.runs}", ended=self.ended
            )
            if by_hand and not number:
                self.ends, self.forgiven, self.given_up, self.by_hand = [], 0, False, True
            progress = bool(new_rows and not number)
            self.rows += progress
            self.ends.append((tags is OUTSIDE, progress))
            self.given_up = self.given_up and not progress
            self.at_once = False
            self.looks(1.0)

    @precondition(lambda self: self.ends)
    @rule(after=st.sampled_from([1.0, 0.5, 1.001, -1e8]), waits=st.booleans())
    def looks(self, after, waits=False):
        """A tick: just after the end, around the end of the back-off, or by a clock that was put back."""
        after = after * self.wait if waits and after > 0 else after
        action = self.decide(after)
        if self.given_up:
            assert action is Action.GIVEN_UP
        elif self.attempts >= 5:
            assert action is Action.GIVE_UP
            self.given_up = True
        elif 0 < after < self.wait:
            assert action is Action.WAIT
        else:
            assert action is Action.LAUNCH
        self.counts()

    def counts(self):
        """The entry is what was counted by hand, and an alert that is open stays noted."""
        assert (self.entry.attempts, self.entry.interruptions) == (self.attempts, self.interruptions)
        assert (self.entry.rows, self.entry.given_up) == (self.rows, self.given_up)
        assert (self.entry.launches, self.entry.alerted) == (1, True), "no run key comes twice"

    @precondition(lambda self: self.ends)
    @rule()
    def a_person_presses_the_button(self):
        """The schedule waits for no back-off, and tries a partition again that it had given up."""
        self.forgiven, self.given_up, self.at_once = len(self.ends), False, True
        assert self.decide(1.0, at_once=True) is Action.LAUNCH
        self.counts()


TestRetryStates = RetryStates.TestCase
TestRetryStates.settings = settings(max_examples=60, stateful_step_count=20)


RETRIED = {**CRASH, "dagster/will_retry": "true"}
OUTAGE = {**STEP, NO_ATTEMPT: tag_value("run", ["a", "c"])}
FAILED = (Action.WAIT, 1)
RESUMED = (Action.LAUNCH, 0)


@pytest.mark.parametrize(
    ("tags", "assets", "seconds", "decided"),
    [
        pytest.param(STEP, (), 1, FAILED, id="failed"),
        pytest.param(RETRIED, (), 60, (Action.DAGSTER, 0), id="Dagster retries it"),
        pytest.param(RETRIED, (), 600, FAILED, id="Dagster forgot it: its backfill had ended"),
        pytest.param(RETRIED, (), -1e8, (Action.LAUNCH, 1), id="a clock that was put back holds nothing up"),
        pytest.param(OUTSIDE, (), 1, RESUMED, id="ended from outside"),
        pytest.param({"dagster/failure_reason": NEVER_STARTED}, (), 1, RESUMED, id="never started"),
        pytest.param({**STEP, NO_ATTEMPT: "run"}, (), 1, RESUMED, id="no device"),
        pytest.param({**STEP, NO_ATTEMPT: "another run"}, (), 1, FAILED, id="a tag that it inherited"),
        pytest.param(OUTAGE, "a", 1, RESUMED, id="an outage of its asset"),
        pytest.param(OUTAGE, "ac", 1, RESUMED, id="an outage of both"),
        pytest.param(OUTAGE, "ab", 1, FAILED, id="an outage, and a fault of its own beside it"),
        pytest.param(OUTAGE, "b", 1, FAILED, id="an outage of another"),
        pytest.param(OUTAGE, (), 1, RESUMED, id="an outage, of what is not known"),
    ],
)
def test_who_owns_the_end_of_a_run(tags, assets, seconds, decided):
    """Dagster, nobody (it is resumed at once), or the partition, as an attempt that is backed off from."""
    ended = replace(facts(run(tags)), assets=frozenset(assets))
    decision = decide(entry(), ended, POLICY, now=ENDED + seconds)
    assert (decision.action, decision.entry.attempts) == decided


def test_dagsters_own_name_of_a_run_that_never_started():
    """It would be an attempt under another name."""
    assert RunFailureReason.START_TIMEOUT.value == NEVER_STARTED


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
    garbage = run({**STEP, NEEDS_PERSON: "run"})
    assert garbage.needs_person_for(["asset"])
    left = replace(facts(garbage, rows=40), for_person=garbage)
    assert decide(entry(), left, POLICY, now=ENDED + 1e6).action is Action.PERSON
    asked = decide(entry(), left, POLICY, now=ENDED + 1e6, at_once=True)
    assert asked.action is Action.LAUNCH

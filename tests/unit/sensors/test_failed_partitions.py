"""The scheduled re-materialization: what a real Dagster shows, then a table of ticks over one in memory."""

import time
from dataclasses import replace

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill

from faults.rehearsal.dagster_in_memory import INTERRUPTED
from resources.dagster_names import NEEDS_PERSON
from sensors.cancels import Cancel, Cancelled, updated
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import GOES_ON_WITH, LAUNCHED_BY, RETRY, RunState
from sensors.retry_ledger import (
    TickRequest,
    done_again_since,
    forget_request,
    pending_request,
    request_tick,
)
from sensors.retry_schedule import answer_button, run_request
from sensors.sensor_definition import Situation
from vlm_durable.state.database import open_state
from vlm_durable.state.pause import pause, resume

HOUR = 3600.0
ASSETS = ("first", "beside", "second")
S = dg.DagsterRunStatus


def test_a_failed_partition_is_tried_again_after_the_back_off(orchestrator):
    """Not before the back-off, then once, with what is made from it; a success ends the matter."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    assert orchestrator.tick() == []
    orchestrator.ahead += 11 * 60
    (launch,) = orchestrator.look().launches
    assert (launch.key, launch.assets) == ("a", ASSETS)
    orchestrator.behaviour.of_key.clear()
    orchestrator.launch(launch)
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == []
    assert orchestrator.ledger == {}


def test_what_dagster_notes_of_an_end_decides(orchestrator):
    """Interrupted, no device: resumed at once. A crash is left to Dagster's run retries for five minutes.

    A refusing check that says so goes to a person, once; a file that is not what was published is put right.
    """
    for key, does in (("a", "interrupt"), ("b", "outage"), ("c", "check"), ("d", "fail")):
        orchestrator.ends(orchestrator.created(key), does)
    refused, crashed = orchestrator.instance.get_runs(limit=2)[::-1]
    orchestrator.instance.add_run_tags(refused.run_id, {NEEDS_PERSON: refused.run_id})
    orchestrator.instance.add_run_tags(crashed.run_id, {"dagster/will_retry": "true"})
    orchestrator.materialize("e")
    orchestrator.instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(dg.AssetKey("first"), "file", passed=False, metadata={}, partition="e")
    )
    ticked = orchestrator.look()
    assert [launch.key for launch in ticked.launches] == ["e", "b", "a"]
    assert ticked.sentence == "3 tried again; 1 left to Dagster's run retries, 1 left to a person."
    assert orchestrator.told == [("partition_needs_person", "c")]


def test_what_a_person_cancelled_stays_so_until_launched_by_hand(orchestrator):
    """Through a restart and a lost memory. A re-execution of a run of ours is a launch by hand.

    A stuck worker that a person cancels in the seconds before its end is cancelled; what nobody cancelled
    is resumed.
    """
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    (launch,) = orchestrator.look(at_once=True).launches
    tags = {LAUNCHED_BY: RETRY, "dagster/run_key": launch.run_key}
    ours = orchestrator.cancelled("a", **tags)
    orchestrator.cancelled("b", **INTERRUPTED)
    orchestrator.behaviour.interrupted.add("b")
    assert "2 cancelled by a person" in orchestrator.look().sentence
    for path in [orchestrator.state / "state.db", *(orchestrator.state / "copies").iterdir()]:
        path.unlink()
    orchestrator.restart()
    resume(open_state(orchestrator.state))
    assert orchestrator.tick() == []
    assert set(orchestrator.failed_partitions.cancels.read()) == {"a", "b"}
    again = orchestrator.created("a", **tags, **{"dagster/parent_run_id": ours.run_id})
    orchestrator.ends(again, "fail")
    orchestrator.postpone(again)
    orchestrator.look()
    assert set(orchestrator.failed_partitions.cancels.read()) == {"b"}
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == ["a"]


def test_what_a_backfill_will_launch_is_queued(orchestrator):
    """After a restart a new backfill covers what was interrupted: no second run is launched beside it."""
    orchestrator.behaviour.interrupted.update("ab")
    backfill = PartitionBackfill.from_asset_partitions(
        backfill_id="b",
        asset_graph=orchestrator.job.asset_layer.asset_graph,
        partition_names=["a"],
        asset_selection=[dg.AssetKey("first"), dg.AssetKey("second")],
        backfill_timestamp=0.0,
        tags={"stale": "keep"},
        dynamic_partitions_store=orchestrator.instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    orchestrator.instance.add_backfill(backfill)
    (unfinished,) = orchestrator.dagster.unfinished_backfills(["first", "beside"])
    assert (unfinished.keys, unfinished.tags) == ({"first": {"a"}}, {"stale": "keep"})
    assert orchestrator.dagster.unfinished_backfills(["beside"]) == []
    assert [launch.key for launch in orchestrator.look().launches] == ["b"]
    orchestrator.instance.update_backfill(backfill.with_status(BulkActionStatus.CANCELING))
    assert orchestrator.dagster.awaited_partitions(["first"]) == set()
    assert orchestrator.dagster.backfill("b").unfinished
    orchestrator.instance.update_backfill(backfill.with_status(BulkActionStatus.COMPLETED_SUCCESS))
    assert not orchestrator.dagster.backfill("b").unfinished
    assert orchestrator.dagster.unfinished_backfills(["first"]) == []
    orchestrator.behaviour.interrupted.remove("b")
    assert orchestrator.tick() == ["a"]


def test_a_run_goes_on_with_the_one_before_where_that_was_asked_for_more(orchestrator):
    """Under the root run of the first, so that its generation is resumed; else it is a run of its own."""
    orchestrator.behaviour.of_key["a"] = "interrupt"
    orchestrator.materialize("a")
    (before,) = orchestrator.instance.get_runs()
    (launch,) = orchestrator.look().launches
    assert launch.after == before.run_id
    for goes_on in (False, True):
        made = run_request(orchestrator.dagster, launch, lambda *_, on=goes_on: ({"ops": {}}, on))
        assert (made.partition_key, made.run_key) == ("a", launch.run_key)
        for tag in ("dagster/root_run_id", "dagster/parent_run_id", GOES_ON_WITH):
            assert made.tags.get(tag) == (before.run_id if goes_on else None)


@pytest.mark.parametrize("created", [False, True], ids=["before the run", "before its queueing"])
def test_a_tick_that_was_killed_launches_nothing_twice(orchestrator, created):
    """Killed between the note and the launch, the same run key is asked for again; later, by another tick."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    (launch,) = orchestrator.look(tick="killed").launches
    if created:
        orchestrator.created("a", **{"dagster/run_key": launch.run_key, LAUNCHED_BY: RETRY})
    orchestrator.restart()
    (again,) = orchestrator.look(tick="killed").launches
    assert again.run_key == launch.run_key
    assert orchestrator.look(tick="the button, meanwhile").launches == ()
    orchestrator.ahead += HOUR
    (later,) = orchestrator.look(tick="the next").launches
    assert later.run_key == launch.run_key
    runs = orchestrator.instance.get_runs(dg.RunsFilter(tags={"dagster/run_key": launch.run_key}))
    assert runs == [], "what was created and never queued was taken away"
    orchestrator.behaviour.of_key.clear()
    orchestrator.launch(later)
    assert orchestrator.look(tick="the next").launches == ()


def test_two_looks_at_once_launch_a_partition_once_and_leave_no_wish_unanswered(orchestrator):
    """The button is pressed while the schedule ticks: what one wrote down, the other does not launch.

    The look that came to nothing is repeated, in whichever code server it was.
    """
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    other = replace(orchestrator)
    launched = []
    orchestrator.failed_partitions.watched = replace(
        orchestrator.failed_partitions.watched,
        rows=lambda key: launched or launched.extend(other.look(tick="the button").launches) or 0,
    )
    state, wish = open_state(orchestrator.state), TickRequest("pressed", at_once=True)
    request_tick(state, wish)
    at = Situation(DagsterFacts(orchestrator.instance), time.time() + HOUR)
    void = answer_button(orchestrator.failed_partitions, lambda key, assets, before: ({}, False), at)
    assert (void.requests, "Another look was under way" in void.sentence) == ((), True)
    assert [one.key for one in launched] == ["a"]
    assert pending_request(state) == wish
    answer_button(orchestrator.failed_partitions, lambda key, assets, before: ({}, False), at)
    assert pending_request(state) is None


def test_a_run_that_a_person_deletes_hides_nothing(orchestrator):
    """What the disk says counts then. A cancelled run that is deleted stays so and takes no place."""
    orchestrator.behaviour.of_key["b"] = "fail"
    orchestrator.materialize("b")
    (run,) = orchestrator.instance.get_runs()
    orchestrator.look()
    orchestrator.behaviour.interrupted.add("b")
    orchestrator.instance.delete_run(run.run_id)
    orchestrator.failed_partitions.cap = 1
    (launch,) = orchestrator.look(at_once=True).launches
    assert launch.key == "b"
    run = orchestrator.cancelled("b", **{LAUNCHED_BY: RETRY, "dagster/run_key": launch.run_key})
    orchestrator.look()
    orchestrator.instance.delete_run(run.run_id)
    orchestrator.behaviour.interrupted.add("a")
    assert orchestrator.tick() == ["a"], "b stays cancelled"


def test_what_is_under_way_is_not_launched_twice_where_the_ledger_lost_it(orchestrator):
    """A restored database may be an hour old: the runs that Dagster knows are believed."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    (launch,) = orchestrator.look().launches
    orchestrator.created("a", **{"dagster/run_key": launch.run_key})
    (orchestrator.state / "state.db").unlink()
    assert orchestrator.tick() == []
    assert orchestrator.ledger == {}


def test_a_new_database_is_read_from_its_start(orchestrator, another_instance):
    """After the database was replaced, nothing that the old one said is believed."""
    orchestrator.behaviour.of_key["a"] = "fail"
    for _ in range(3):
        orchestrator.materialize("a")
    orchestrator.look()
    orchestrator.instance = another_instance
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == []


def fails(home, keys="a", seconds=HOUR, **how):
    """Runs of these partitions that fail, and the time that passes then."""
    for key in keys:
        home.ends(key, **how)
    home.clock.now += seconds


def does(home, **told):
    """What the disk, the settings and the processes say from now on."""
    for name, value in told.items():
        setattr(home.behaviour, name, value)


def awaits(home):
    """A backfill that will launch it."""
    home.dagster.awaited.add("a")


def launches(home):
    """The runs of a tick are under way."""
    for launch in home.look().launches:
        home.dagster.launch(launch.key, ASSETS, **{"dagster/run_key": launch.run_key})


def pauses(home):
    """A person pauses everything."""
    pause(open_state(home.state), "it is moved", now=1_800_000_000.0)


def cancels(home):
    """A person cancels a run of it and deletes the run; its work is on disk."""
    run_id = home.ends("a", status=S.CANCELED)
    home.look()
    home.dagster.delete_run(run_id)
    does(home, interrupted={"a"})


def checks(home, severity=dg.AssetCheckSeverity.ERROR):
    """It is made, and its file fails a check afterwards."""
    home.materialize("a")
    home.evaluated("a", severity)


def counts(home, rows):
    """This is how committed rows are counted from now on."""
    home.failed_partitions.watched = replace(home.failed_partitions.watched, rows=rows)


WELL = "Every partition is as it should be"
LEFT_OUT = "GPU-0 is left out: vlm-assets devices --take-back GPU-0"
STALE = "1 made under other settings, left to a person, 1 waiting for their turn"
CRASHED = {"dagster/will_retry": "true"}
TICKS = [
    ("nothing was started", lambda home: None, "", WELL),
    ("all is made", lambda home: home.materialize("a"), "", WELL),
    ("it failed just now", lambda home: fails(home, seconds=1), "", "1 wait"),
    ("it failed an hour ago", fails, "a", "1 tried again"),
    ("interrupted", lambda home: fails(home, seconds=1, **INTERRUPTED), "a", "1 tried again"),
    ("made by hand since", lambda home: (fails(home), home.materialize("a")), "", WELL),
    ("no partition of this catalogue", lambda home: fails(home, "z"), "", WELL),
    ("a run is under way", lambda home: (checks(home), home.dagster.launch("a", ["beside"])), "", WELL),
    ("a process works on it", lambda home: (fails(home), does(home, working={"a"})), "", WELL),
    ("a backfill will run it", lambda home: (fails(home), awaits(home)), "", "1 waiting for their turn"),
    (
        "Dagster retries it",
        lambda home: fails(home, seconds=240, **CRASHED),
        "",
        "1 left to Dagster's run retries",
    ),
    ("Dagster was to retry it", lambda home: fails(home, **CRASHED), "a", "1 tried again"),
    ("the cap", lambda home: fails(home, "abcdef"), "fed", "3 tried again; 3 waiting for their turn"),
    (
        "as many are being launched",
        lambda home: (fails(home, "abcdef"), home.look()),
        "",
        "3 being launched, 3 waiting for their turn",
    ),
    (
        "as many are under way",
        lambda home: (fails(home, "abcdef"), launches(home)),
        "",
        "3 under way, 3 waiting for their turn",
    ),
    ("paused", lambda home: (fails(home), pauses(home)), "", "Nothing is started: paused since 2027-"),
    (
        "every device is left out",
        lambda home: (fails(home), does(home, no_device=LEFT_OUT)),
        "",
        f"Nothing is started, because every device is left out. {LEFT_OUT}",
    ),
    ("its journal is on disk", lambda home: does(home, interrupted={"a"}), "a", "1 tried again"),
    (
        "its file is gone",
        lambda home: (home.materialize("a"), does(home, missing={"a"})),
        "a",
        "1 tried again",
    ),
    ("a check failed", checks, "a", "1 tried again"),
    ("a check warned", lambda home: checks(home, dg.AssetCheckSeverity.WARN), "", WELL),
    ("made again after the check", lambda home: (checks(home), home.materialize("a")), "", WELL),
    (
        "a file of other settings is gone",
        lambda home: (home.materialize("a"), does(home, missing={"a"}, stale={"a"})),
        "",
        STALE,
    ),
    ("the settings changed since", lambda home: (fails(home), does(home, stale={"a"})), "", STALE),
    (
        "its run says what happens to it",
        lambda home: (fails(home), does(home, stale={"a"}, decides=True)),
        "a",
        "1 tried again",
    ),
    ("cancelled", lambda home: (fails(home), cancels(home)), "", "1 cancelled by a person"),
    ("it needs a person", lambda home: fails(home, for_person=ASSETS), "", "1 left to a person"),
]
"""What happened before, the partitions that are launched (the heaviest first), and what the page says."""


@pytest.mark.parametrize(
    ("arrange", "launched", "words"), [row[1:] for row in TICKS], ids=[row[0] for row in TICKS]
)
def test_a_tick_launches_and_says_why_not(home, arrange, launched, words):
    """Paused, stale, queued, cancelled, left to another: what is not as it should be is launched or named."""
    arrange(home)
    ticked = home.look()
    assert "".join(launch.key for launch in ticked.launches) == launched
    assert ticked.sentence.removeprefix("Nothing to try again now: ").startswith(words), ticked.sentence


def presses(home):
    """A person has pressed the button, and its sensor ticks. Gives what the tick decides."""
    state = open_state(home.state)
    if pending_request(state) is None:
        request_tick(state, TickRequest("pressed", at_once=True))
    return answer_button(home.failed_partitions, lambda *_: ({}, False), Situation(home.dagster, home.now))


def test_a_button_starts_nothing_either_where_there_is_no_device_and_nothing_is_lost(home):
    """The request stands until a device is back and the pause ends; meanwhile no tick writes a log."""
    fails(home, seconds=1)
    does(home, no_device=LEFT_OUT)
    answer = presses(home)
    assert (answer.requests, answer.logged, LEFT_OUT in answer.sentence) == ((), (), True)
    does(home, no_device=None)
    state = open_state(home.state)
    pause(state, "the machine is moved", now=home.now)
    assert "because the machine is moved" in presses(home).sentence
    resume(state)
    assert pending_request(state) is not None
    assert [request.partition_key for request in presses(home).requests] == ["a"]
    assert pending_request(state) is None


def test_the_button_tries_all_that_was_given_up_however_many(home):
    """The next ticks launch what the cap leaves no room for at once, and no alert stays open."""
    home.behaviour.of_key = dict.fromkeys("abcdef", "fail")
    for key in "abcdef":
        home.materialize(key)
    for _ in range(40):
        home.clock.now += 12 * HOUR
        home.tick()
    assert home.told == [("partition_given_up", key) for key in "abcdef"]
    home.behaviour.of_key.clear()
    launched = home.tick(at_once=True)
    assert len(launched) == home.cap == 3
    for _ in range(2):
        launched += home.tick()
    assert (sorted(launched), home.told) == (list("abcdef"), [])


def test_nothing_is_decided_while_committed_rows_cannot_be_counted(home):
    """A store that is away makes no attempt look fruitless, and is asked once a tick."""
    fails(home, "ab", seconds=1)
    home.look()
    fails(home, "ab", **{LAUNCHED_BY: RETRY})
    counted, asked, before = home.failed_partitions.watched.rows, [], home.ledger
    counts(home, asked.append)
    assert "2 decided when the store answers" in home.look().sentence
    assert (len(asked), home.ledger) == (1, before)
    counts(home, counted)
    assert home.tick() == ["b", "a"]


def test_what_commits_no_new_row_is_given_up_until_a_person_wants_it(home):
    """One alert that says so, then nothing; the button and a launch by hand begin anew, a success ends it."""
    home.behaviour.of_key["a"] = "fail"
    home.materialize("a")

    def ticks(count):
        """How many runs are launched at so many ticks, each half a day after the one before."""
        launched = []
        for _ in range(count):
            home.clock.now += 12 * HOUR
            launched += home.tick()
        return len(launched)

    assert ticks(2) == 2
    home.behaviour.rows["a"] = 1
    assert (ticks(5), home.told) == (5, []), "what gets on is not given up"
    assert (ticks(5), home.told) == (0, [("partition_given_up", "a")])
    assert home.tick(at_once=True) == ["a"], "the button tries what was given up, without a back-off"
    assert ticks(7) == 4
    home.materialize("a")
    assert ticks(1) == 1
    home.behaviour.of_key.clear()
    home.materialize("a")
    assert (home.tick(), home.told, home.ledger) == ([], [], {})


def test_interruptions_are_resumed_and_told_once_if_they_repeat(home):
    """No attempt is counted; three without a new row are one warning, and the next tick goes on."""
    home.behaviour.of_key["a"] = "interrupt"
    home.materialize("a")
    assert (home.tick(), home.told) == (["a"], [])
    for _ in range(5):
        home.clock.now += 12 * HOUR
        assert home.tick() == ["a"]
    assert home.told == [("interrupted_again", "a")]
    assert [event.happening for event in home.failed_partitions.outbox.recent(9)] == ["raised"]
    assert home.ledger["a"].attempts == 0


@pytest.mark.parametrize("tags", [INTERRUPTED, {"dagster/failure_reason": "START_TIMEOUT"}])
def test_an_interrupted_run_of_a_stale_partition_is_told_once(home, tags):
    """It ended before its journal was there: nothing resumes it, and no alert of failed runs tells of it."""
    home.materialize("a")
    home.behaviour.stale.add("a")
    for _ in range(2):
        home.ends("a", **tags)
        for _ in range(3):
            home.clock.now += HOUR
            assert home.tick() == []
    assert home.told == [("partition_needs_person", "a")]
    raised = home.failed_partitions.outbox.recent(9)
    assert [event.happening for event in raised] == ["raised", "raised"], "once for each run"
    assert "asks" in raised[0].alert.next_step
    home.materialize("a")
    assert (home.tick(), home.told) == ([], [])


def remembered(home):
    return {done.key: done for done in done_again_since(open_state(home.state), 0.0)}


def test_what_was_tried_again_and_is_done_is_remembered_for_a_month(home):
    """In the morning a person reads what was retried, by us or by Dagster after a crash, and why."""
    home.materialize("d", tags={"dagster/retry_number": "2"})
    fails(home, "abce", seconds=1)
    home.tick()
    home.behaviour.of_key = {"b": "fail", "e": "fail"}
    home.materialize("c")
    home.clock.now += HOUR
    assert home.tick() == ["e", "b", "a"]
    for run_id in [run.run_id for run in home.dagster.runs.values() if run.partition == "e"]:
        home.dagster.delete_run(run_id)
    home.clock.now += 10 * HOUR
    home.restart()
    home.tick()
    seen = remembered(home)
    assert sorted(seen) == ["a", "d"], "b is not done, c was put right by a person, e is forgotten"
    assert (seen["a"].runs, seen["a"].why[:11]) == (1, "first: run ")
    assert (seen["d"].runs, seen["d"].why) == (2, "its run crashed: Dagster's run retries")
    home.behaviour.missing.add("a")
    home.tick()
    assert remembered(home) == seen
    home.clock.now += 40 * 24 * HOUR
    home.behaviour.missing.clear()
    home.tick()
    assert list(remembered(home)) == ["a"], "d was a month ago"


def test_what_needs_a_person_keeps_no_other_asset_of_its_run_from_being_tried_again(home):
    """What Dagster skipped is made by itself; what needs a person is told once."""
    home.ends("a", made=["first"], for_person=["beside"])
    home.ends("b", made=["second"], for_person=["first"])
    home.clock.now += HOUR
    launches = {launch.key: launch for launch in home.look().launches}
    assert {key: launch.assets for key, launch in launches.items()} == {"a": ("second",), "b": ("beside",)}
    needed = [("partition_needs_person", key) for key in "ab"]
    assert home.told == needed
    home.ends("a", of=["second"], made=["second"], **{"dagster/run_key": launches["a"].run_key})
    home.clock.now += HOUR
    assert [launch.key for launch in home.look().launches] == ["b"]
    assert home.told == needed
    assert [asset for asset in ASSETS if home.ledger["a"].needs_person(asset)] == ["beside"]
    home.dagster.materialize("first", "b")
    home.ends("b", of=["beside"], **{"dagster/run_key": launches["b"].run_key})
    home.look()
    assert home.ledger["b"].told is None, "nothing is left to a person any more"


def test_a_persons_button_tries_all_that_is_wrong_again(home):
    """Also what needs a person; what is made from it follows, and what is made already does not."""
    home.ends("a", made=["beside"], for_person=["first"])
    home.ends("b", made=["second"], for_person=["first"])
    launches = {launch.key: launch.assets for launch in home.look(at_once=True).launches}
    assert launches == {"a": ("first", "second"), "b": ASSETS}


def test_a_persons_button_tries_all_that_needs_a_person_however_many(home):
    """Each once: the next ticks launch the rest, and what ends the same way is left to a person again."""
    fails(home, "abcdef", for_person=ASSETS)
    assert home.tick() == []
    launched = home.tick(at_once=True)
    assert len(launched) == home.cap == 3
    left = min(set("abcdef") - set(launched))
    for launch in home.look().launches:
        launched.append(launch.key)
        again = {LAUNCHED_BY: RETRY, "dagster/run_key": launch.run_key}
        if launch.key == left:
            home.ends(left, for_person=ASSETS, **again)
        else:
            home.materialize(launch.key, tags=again)
    home.clock.now += HOUR
    assert (sorted(launched), home.tick()) == (list("abcdef"), [])
    assert home.told == [("partition_needs_person", left)]


OURS = {LAUNCHED_BY: RETRY, "dagster/run_key": "a:1:0"}


@pytest.mark.parametrize(
    ("seconds", "tags", "stands"),
    [
        (2, {}, False),
        (0, {}, True),
        (2, OURS, True),
        (2, {"dagster/retry_number": "1"}, True),
        (2, {**OURS, "dagster/parent_run_id": "ours"}, False),
        (2, {"dagster/partition": "b"}, True),
    ],
    ids=["by hand", "in the second of the cancel", "ours", "Dagster's", "our run, re-executed", "another"],
)
def test_a_cancel_ends_with_a_launch_by_hand(seconds, tags, stands):
    """A person who launches a cancelled partition wants it; what we launched says nothing."""
    of_a = {"dagster/partition": "a"}
    cancelled = RunState("r", S.CANCELED, 90.0, 100.0, of_a)
    later = RunState("l", S.STARTED, 100.0 + seconds, None, {**of_a, **tags})
    before = updated(Cancelled(), [cancelled], [], 105.0)
    assert before.partitions == {"a": Cancel("r", 100.0)}
    for after in (updated(before, [], [later], 110.0), updated(Cancelled(), [cancelled], [later], 110.0)):
        assert set(after.partitions) == ({"a"} if stands else set())
    failed = replace(cancelled, status=S.FAILURE, tags={**of_a, **INTERRUPTED})
    assert updated(Cancelled(), [failed], [], 105.0).partitions == {}


@pytest.mark.parametrize(
    ("seconds", "launched"), [(5, ["a"]), (-5, [])], ids=["after the request", "before it"]
)
def test_a_launch_by_hand_while_the_cancelled_run_still_ends_lifts_the_cancel(home, seconds, launched):
    """What counts is when the person asked to end it, although its process takes its time to commit."""
    first = home.dagster.launch("a", ["first"])
    home.clock.now += 60
    start = home.clock.now
    if seconds < 0:
        second = home.dagster.launch("a", ["second"])
        home.clock.now -= seconds
    home.dagster.change(first, S.CANCELING)
    if seconds > 0:
        home.clock.now += seconds
        second = home.dagster.launch("a", ["first"], S.QUEUED)
    home.clock.now = start + 60
    home.dagster.change(first, S.CANCELED)
    home.look()
    home.clock.now += 600
    home.dagster.change(second, S.FAILURE)
    home.look()
    home.clock.now += HOUR
    assert home.tick() == launched


def test_dagster_says_when_a_person_asked_to_end_a_run(orchestrator):
    """Its log has it; that of a run that ended without a request has not."""
    run, other = orchestrator.created("a"), orchestrator.created("b")
    orchestrator.instance.report_run_canceling(run)
    assert orchestrator.dagster.cancel_requested_at(run.run_id) == pytest.approx(time.time(), abs=60)
    orchestrator.instance.report_run_canceled(other)
    assert orchestrator.dagster.cancel_requested_at(other.run_id) is None


@pytest.mark.parametrize("put_back", [0, 2 * HOUR])
def test_a_cancel_after_the_clock_was_put_back_stands(home, put_back):
    """All runs are read once more then: nobody is overruled until the clock comes to where it was."""
    home.ends("b", status=S.CANCELED)
    home.look()
    home.clock.now -= put_back
    checks(home)
    (launch,) = home.look().launches
    home.ends("a", status=S.CANCELED, **{LAUNCHED_BY: RETRY, "dagster/run_key": launch.run_key})
    for _ in range(24):
        home.clock.now += 600
        assert home.tick() == []
    assert set(home.failed_partitions.cancels.read()) == {"a", "b"}


def test_a_wish_for_a_look_is_answered_once(tmp_path):
    """A wish that comes while one is being answered is not forgotten with it."""
    state = open_state(tmp_path)
    first, second = TickRequest("r1", at_once=False), TickRequest("r2", at_once=True)
    assert pending_request(state) is None
    request_tick(state, first)
    assert pending_request(state) == first
    request_tick(state, second)
    forget_request(state, first)
    assert pending_request(state) == second
    forget_request(state, second)
    assert pending_request(state) is None

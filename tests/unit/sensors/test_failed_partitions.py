"""The scheduled re-materialization against a real Dagster instance, with the clock moved on by hand."""

import time
from dataclasses import replace

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill

from resources.dagster_names import NEEDS_PERSON, NO_ATTEMPT, tag_value
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY
from sensors.retry_ledger import (
    Attempts,
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


def test_nothing_is_done_where_all_is_well(orchestrator):
    """A dataset that was not started, or is complete, is left alone."""
    assert orchestrator.look().sentence == "Every partition is as it should be."
    orchestrator.materialize("a")
    assert orchestrator.tick() == []
    assert orchestrator.told == []


def test_a_failed_partition_is_tried_again_after_the_back_off(orchestrator):
    """Not before the back-off, then once, with what stands downstream; a success ends the matter."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    assert orchestrator.tick() == []
    orchestrator.ahead += 11 * 60
    (launch,) = orchestrator.look().launches
    assert (launch.key, launch.assets) == ("a", ("first", "beside", "second"))
    orchestrator.behaviour.of_key.clear()
    orchestrator.launch(launch)
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == []
    assert Attempts(open_state(orchestrator.state)).read() == {}


def remembered(orchestrator):
    return {one.key: one for one in done_again_since(open_state(orchestrator.state), 0.0)}


def test_what_was_tried_again_and_is_done_is_remembered(orchestrator):
    """The ledger forgets what is well; in the morning a person reads what was retried, and why."""
    orchestrator.behaviour.of_key.update(a="fail", b="fail", c="fail")
    for key in "abc":
        orchestrator.materialize(key)
    orchestrator.behaviour.of_key = {"b": "fail"}
    orchestrator.materialize("c")
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == ["b", "a"]
    orchestrator.ahead += 10 * HOUR
    orchestrator.restart()
    orchestrator.tick()
    seen = remembered(orchestrator)
    assert list(seen) == ["a"], "b is not done, and c was put right by a person"
    assert seen["a"].runs == 1
    assert seen["a"].why.startswith("first: run ")
    orchestrator.behaviour.of_key.clear()
    orchestrator.materialize("b")
    orchestrator.tick()
    assert sorted(remembered(orchestrator)) == ["a", "b"]
    orchestrator.behaviour.missing.add("a")
    assert orchestrator.tick() == ["a"]
    assert remembered(orchestrator)["a"] == seen["a"]
    orchestrator.ahead += 40 * 24 * HOUR
    orchestrator.behaviour.missing.clear()
    orchestrator.tick()
    assert list(remembered(orchestrator)) == ["a"], "b was a month ago"


def test_what_dagster_started_again_after_a_crash_is_remembered(orchestrator):
    """No tick of ours had a part in it, and it was retried all the same."""
    orchestrator.materialize("a", tags={"dagster/retry_number": "2"})
    orchestrator.materialize("b")
    orchestrator.tick()
    (done,) = remembered(orchestrator).values()
    assert (done.key, done.runs, done.why) == ("a", 2, "its run crashed: Dagster's run retries")
    orchestrator.ahead += HOUR
    orchestrator.tick()
    assert remembered(orchestrator) == {"a": done}


def test_what_commits_no_new_row_is_given_up_until_a_person_wants_it(orchestrator):
    """After five such attempts one alert, then nothing; a launch by hand, or the button, begins anew."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")

    def ticks(count):
        """What is launched at so many ticks, each half a day after the one before."""
        launched = []
        for _ in range(count):
            orchestrator.ahead += 12 * HOUR
            launched += orchestrator.tick()
        return len(launched)

    for row in range(1, 4):
        assert ticks(2) == 2
        orchestrator.behaviour.rows["a"] = row
    assert orchestrator.told == [], "what gets on is never given up, however often it fails"
    assert ticks(5) == 5
    assert ticks(5) == 0
    assert orchestrator.told == [("partition_given_up", "a")]
    orchestrator.ahead = 0.0
    orchestrator.materialize("a")
    assert orchestrator.tick(at_once=False) == []
    assert orchestrator.tick(at_once=True) == ["a"], "the button waits for no back-off"
    assert ticks(7) == 4
    assert orchestrator.tick(at_once=True) == ["a"], "and tries what was given up"
    orchestrator.behaviour.of_key.clear()
    orchestrator.materialize("a")
    assert orchestrator.tick() == []
    assert orchestrator.told == []
    assert Attempts(open_state(orchestrator.state)).read() == {}


@pytest.mark.parametrize("end", ["interrupt", "outage"])
def test_interruptions_are_resumed_at_once_and_told_only_if_they_repeat(orchestrator, end):
    """A SIGTERM from outside, or no server, is no attempt: resumed at once, told after three without rows."""
    orchestrator.behaviour.of_key["a"] = end
    orchestrator.materialize("a")
    assert orchestrator.tick() == ["a"]
    assert orchestrator.told == []
    for _ in range(5):
        orchestrator.ahead += 12 * HOUR
        assert orchestrator.tick() == ["a"]
    assert orchestrator.told == [("interrupted_again", "a")]
    assert Attempts(open_state(orchestrator.state)).read()["a"].attempts == 0


def test_what_a_person_cancelled_stays_so_until_launched_by_hand(orchestrator):
    """Through restarts and a lost memory; a new launch by hand makes it everyone's business again."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.cancelled("a")
    orchestrator.cancelled("b")
    orchestrator.behaviour.interrupted.add("b")
    assert orchestrator.tick() == []
    orchestrator.restart()
    orchestrator.ahead += 24 * HOUR
    ticked = orchestrator.look()
    assert not ticked.launches
    assert "2 cancelled by a person" in ticked.sentence


def test_a_cancel_ends_with_a_launch_by_hand_and_not_with_one_of_ours(orchestrator):
    """A person who launches a cancelled partition wants it; what we launched says nothing."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.cancelled("a")
    orchestrator.tick()
    stands = orchestrator.failed_partitions.cancels.read
    assert set(stands()) == {"a"}
    # Seconds are what the database keeps of a run's creation.
    started = stands()["a"].at
    orchestrator.materialize("a", tags={"vlm-assets/launched-by": "retry"})
    orchestrator.tick()
    assert set(stands()) == {"a"}
    wait_for_second_after(orchestrator, started)
    orchestrator.materialize("a")
    orchestrator.tick()
    assert stands() == {}
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == ["a"]


def wait_for_second_after(orchestrator, at):
    """Runs are created until the database's clock, which counts seconds, is past ``at``."""
    while True:
        run = orchestrator.created("f")
        record = orchestrator.instance.get_run_record_by_id(run.run_id)
        orchestrator.instance.delete_run(run.run_id)
        if record.create_timestamp.timestamp() > at:
            return


def test_a_failed_run_that_a_person_deletes_hides_nothing(orchestrator):
    """What the disk says of the partition counts then: an interrupted one is resumed."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    (run,) = orchestrator.instance.get_runs(limit=1)
    orchestrator.materialize("b")
    orchestrator.look()
    orchestrator.behaviour.interrupted.add("a")
    orchestrator.instance.delete_run(run.run_id)
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == ["a"]


def test_a_persons_cancel_of_a_stuck_worker_wins(orchestrator):
    """Terminated in the seconds after it was called stuck, or after it found no device: it is not resumed."""
    outside = {"dagster/failure_reason": "UNEXPECTED_TERMINATION"}
    orchestrator.cancelled("a", **outside)
    run = orchestrator.created("b")
    orchestrator.instance.add_run_tags(run.run_id, {NO_ATTEMPT: run.run_id})
    orchestrator.instance.report_run_canceled(run)
    orchestrator.instance.report_run_failed(orchestrator.created("c", **outside))
    assert orchestrator.tick() == ["c"], "what nobody cancelled is"


def test_a_re_execution_by_hand_of_a_run_of_ours_is_a_launch_by_hand(orchestrator):
    """It inherits the schedule's tags; the cancel ends with it all the same."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    (launch,) = orchestrator.look(at_once=True).launches
    tags = {LAUNCHED_BY: RETRY, "dagster/run_key": launch.run_key}
    ours = orchestrator.created("a", **tags)
    orchestrator.instance.report_run_canceled(ours)
    assert orchestrator.look().launches == ()
    stands = orchestrator.failed_partitions.cancels.read
    wait_for_second_after(orchestrator, stands()["a"].at)
    orchestrator.materialize("a", tags={**tags, "dagster/parent_run_id": ours.run_id})
    orchestrator.look()
    assert stands() == {}


def test_cancelled_runs_that_are_deleted_take_no_place_of_those_tried_again(orchestrator):
    """Three of three places were waited for that nobody would ever take: nothing was tried again any more."""
    for key in "abc":
        orchestrator.behaviour.of_key[key] = "fail"
        orchestrator.materialize(key)
    launches = orchestrator.look(at_once=True).launches
    assert len(launches) == orchestrator.cap
    runs = [
        orchestrator.created(one.key, **{LAUNCHED_BY: RETRY, "dagster/run_key": one.run_key})
        for one in launches
    ]
    for run in runs:
        orchestrator.instance.report_run_canceled(run)
    orchestrator.look()
    for run in runs:
        orchestrator.instance.delete_run(run.run_id)
    orchestrator.behaviour.of_key["d"] = "fail"
    orchestrator.materialize("d")
    (launch,) = orchestrator.look(at_once=True).launches
    assert launch.key == "d"


def test_what_runs_or_is_queued_is_left_alone(orchestrator):
    """By Dagster's word, or because a living process holds its heartbeat's lock."""
    orchestrator.behaviour.of_key.update(a="fail", b="fail")
    orchestrator.materialize("a")
    orchestrator.materialize("b")
    orchestrator.created("a")
    orchestrator.behaviour.working.add("b")
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == []


def test_what_a_backfill_will_launch_is_queued(orchestrator):
    """After a restart a new backfill covers what was interrupted: no second run is launched beside it."""
    orchestrator.behaviour.interrupted.update("ab")
    backfill = PartitionBackfill.from_asset_partitions(
        backfill_id="b",
        asset_graph=orchestrator.job.asset_layer.asset_graph,
        partition_names=["a"],
        asset_selection=[dg.AssetKey("first"), dg.AssetKey("second")],
        backfill_timestamp=0.0,
        tags={},
        dynamic_partitions_store=orchestrator.instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    orchestrator.instance.add_backfill(backfill)
    assert [launch.key for launch in orchestrator.look().launches] == ["b"]
    orchestrator.instance.update_backfill(backfill.with_status(BulkActionStatus.COMPLETED_SUCCESS))
    orchestrator.behaviour.interrupted.remove("b")
    assert orchestrator.tick() == ["a"]


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_goes_on_with_the_one_before_where_that_was_asked_for_more(orchestrator, goes_on):
    """Under the root run of the first, so that its generation is resumed; else it is a run of its own."""
    orchestrator.behaviour.of_key["a"] = "interrupt"
    orchestrator.materialize("a")
    (before,) = orchestrator.instance.get_runs()
    (launch,) = orchestrator.look().launches
    assert launch.after == before.run_id
    made = run_request(orchestrator.dagster, launch, lambda key, assets, config: ({"ops": {}}, goes_on))
    assert (made.partition_key, made.run_key) == ("a", launch.run_key)
    assert made.tags.get("dagster/root_run_id") == (before.run_id if goes_on else None)


def test_dagster_retries_a_crash_first(orchestrator):
    """A run that Dagster says it retries is left to it for five minutes, then taken over."""
    run = orchestrator.created("a")
    orchestrator.instance.add_run_tags(run.run_id, {"dagster/will_retry": "true"})
    orchestrator.instance.report_run_failed(run)
    orchestrator.ahead += 4 * 60
    ticked = orchestrator.look()
    assert "left to Dagster's run retries" in ticked.sentence
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == ["a"]


def test_launches_stay_under_the_cap_heaviest_first(orchestrator):
    """All that fails at once is tried a few at a time, and no more are queued beside those that run."""
    for key in "abcdef":
        orchestrator.behaviour.of_key[key] = "fail"
        orchestrator.materialize(key)
    orchestrator.ahead += HOUR
    launches = orchestrator.look().launches
    assert [launch.key for launch in launches] == ["f", "e", "d"]
    for launch in launches:
        orchestrator.created(launch.key, **{"dagster/run_key": launch.run_key})
    ticked = orchestrator.look()
    assert not ticked.launches
    assert "3 waiting for their turn" in ticked.sentence


@pytest.mark.parametrize("created", [False, True], ids=["before the run", "before its queueing"])
def test_a_tick_that_was_killed_launches_nothing_twice(orchestrator, created):
    """Killed between the note and the launch, the same run key is asked for again; later, by another tick."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    (launch,) = orchestrator.look(tick="killed").launches
    if created:
        orchestrator.created("a", **{"dagster/run_key": launch.run_key, "vlm-assets/launched-by": "retry"})
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


def refuse(orchestrator, **tags):
    """A run of partition a that a check refuses."""
    orchestrator.behaviour.of_key["a"] = "check"
    orchestrator.materialize("a")
    (run,) = orchestrator.instance.get_runs(limit=1)
    orchestrator.instance.add_run_tags(run.run_id, dict.fromkeys(tags.values(), run.run_id))
    return run


def test_a_refused_partition_is_tried_again_while_rows_have_a_try_left(orchestrator):
    """A failed check is a failed partition; the launch goes on with what that run was asked for."""
    run = refuse(orchestrator)
    orchestrator.ahead += HOUR
    (launch,) = orchestrator.look().launches
    assert (launch.key, launch.after) == ("a", run.run_id)


def test_a_refused_partition_whose_tries_are_spent_goes_to_a_person_once(orchestrator):
    """Missing images come back by no number of retries: one alert, no run."""
    refuse(orchestrator, tag=NEEDS_PERSON)
    for _ in range(5):
        orchestrator.ahead += HOUR
        assert orchestrator.tick() == []
    assert orchestrator.told == [("partition_needs_person", "a")]
    assert orchestrator.instance.get_runs_count() == 1


def ends_partly(orchestrator, key, made=(), for_person=()):
    """A run of all assets that makes some, and fails with others left to a person."""
    run = orchestrator.created(key)
    orchestrator.made(key, *made)
    orchestrator.instance.add_run_tags(run.run_id, {NEEDS_PERSON: tag_value(run.run_id, for_person)})
    orchestrator.ends(run, "fail")


def test_what_needs_a_person_keeps_no_other_asset_of_its_run_from_being_tried_again(orchestrator):
    """What Dagster skipped is made by itself, and what needs a person is told once and stays."""
    ends_partly(orchestrator, "a", made=["first"], for_person=["beside"])
    ends_partly(orchestrator, "b", made=["second"], for_person=["first"])
    orchestrator.ahead += HOUR
    launches = {launch.key: launch for launch in orchestrator.look().launches}
    assert {key: launch.assets for key, launch in launches.items()} == {"a": ("second",), "b": ("beside",)}
    needed = [("partition_needs_person", "a"), ("partition_needs_person", "b")]
    assert orchestrator.told == needed
    run = orchestrator.created("a", of=["second"], **{"dagster/run_key": launches["a"].run_key})
    orchestrator.ends(run, "fail")
    orchestrator.made("a", "second")
    orchestrator.ahead += HOUR
    assert [launch.key for launch in orchestrator.look().launches] == ["b"]
    assert orchestrator.told == needed
    entry = Attempts(open_state(orchestrator.state)).read()["a"]
    assert [asset for asset in ("first", "beside", "second") if entry.needs_person(asset)] == ["beside"]


def test_a_persons_button_tries_all_that_is_wrong_again(orchestrator):
    """Also what needs a person; what is made from it follows."""
    ends_partly(orchestrator, "a", made=["beside"], for_person=["first"])
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == []
    (launch,) = orchestrator.look(at_once=True).launches
    assert launch.assets == ("first", "second")


def drifted(orchestrator, key, severity=dg.AssetCheckSeverity.ERROR):
    """What the drift sensor reports: a failed check of a partition, without a run."""
    orchestrator.instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey("first"),
            check_name="file",
            passed=False,
            metadata={},
            severity=severity,
            partition=key,
        )
    )


def test_a_file_that_is_not_what_was_published_is_put_right(orchestrator):
    """Failed checks with severity ERROR and missing files count; warnings and stale output are a person's."""
    for key in "abcd":
        orchestrator.materialize(key)
    drifted(orchestrator, "a")
    drifted(orchestrator, "b", dg.AssetCheckSeverity.WARN)
    orchestrator.behaviour.missing.update("cd")
    orchestrator.behaviour.stale.add("d")
    ticked = orchestrator.look()
    assert [launch.key for launch in ticked.launches] == ["c", "a"]
    assert "1 made under other settings" in ticked.sentence


def test_a_failed_run_over_what_is_stale_by_now_is_left_to_a_person(orchestrator):
    """Its settings changed since: tried again by itself, it would make everything anew under others."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.behaviour.stale.add("a")
    orchestrator.ahead += HOUR
    ticked = orchestrator.look()
    assert ticked.launches == ()
    assert "1 made under other settings" in ticked.sentence
    orchestrator.behaviour.decides = True
    assert [one.key for one in orchestrator.look().launches] == ["a"], "the run itself leaves it alone"


def test_a_materialization_ends_a_failed_check_of_the_one_before(orchestrator):
    """The result of a check for older output is none for the new."""
    orchestrator.materialize("a")
    drifted(orchestrator, "a")
    orchestrator.materialize("a")
    assert orchestrator.tick() == []


def test_work_on_disk_that_dagster_has_forgotten_is_resumed(orchestrator):
    """The database was lost: a journal without a published file tells that it was started."""
    orchestrator.behaviour.interrupted.add("a")
    assert orchestrator.tick() == ["a"]


def test_paused_nothing_starts_and_the_page_says_why(orchestrator):
    """The pause is the first thing that a tick looks at."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    pause(open_state(orchestrator.state), "the machine is moved", now=1_800_000_000.0)
    ticked = orchestrator.look()
    assert not ticked.launches
    assert "paused since 2027-" in ticked.sentence
    assert "because the machine is moved" in ticked.sentence
    resume(open_state(orchestrator.state))
    assert orchestrator.tick() == ["a"]


def test_with_every_device_left_out_nothing_starts_and_the_page_says_why(orchestrator):
    """A run would wait for a device and end; asked for by hand too. What was to be tried again is kept."""
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    orchestrator.behaviour.no_device = "GPU-0 is left out: vlm-assets devices --take-back GPU-0"
    for at_once in (False, True):
        ticked = orchestrator.look(at_once=at_once)
        assert not ticked.launches
        assert "every device is left out" in ticked.sentence
        assert "--take-back GPU-0" in ticked.sentence
    orchestrator.behaviour.no_device = None
    assert orchestrator.tick() == ["a"]


def test_what_is_under_way_is_not_launched_twice_where_the_ledger_lost_it(orchestrator):
    """A restored database may be an hour old: the runs that Dagster knows are believed."""
    orchestrator.behaviour.of_key.update(a="fail", b="fail")
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    (launch,) = orchestrator.look().launches
    orchestrator.created("a", **{"dagster/run_key": launch.run_key})
    (orchestrator.state / "state.db").unlink()
    assert orchestrator.tick() == []
    assert Attempts(open_state(orchestrator.state)).read() == {}


def test_lost_cancels_are_read_again_from_dagster(orchestrator):
    """Dagster's own runs still say what a person cancelled."""
    orchestrator.cancelled("a")
    orchestrator.behaviour.interrupted.add("a")
    orchestrator.tick()
    for path in [orchestrator.state / "state.db", *(orchestrator.state / "copies").iterdir()]:
        path.unlink()
    orchestrator.restart()
    resume(open_state(orchestrator.state))
    assert orchestrator.tick() == []
    assert list(orchestrator.failed_partitions.cancels.read()) == ["a"]


def test_nothing_is_decided_while_committed_rows_cannot_be_counted(orchestrator):
    """A store that is away makes no attempt look fruitless, and is asked once a tick."""
    for key in ("a", "b"):
        orchestrator.behaviour.of_key[key] = "fail"
        orchestrator.materialize(key)
    orchestrator.ahead += HOUR
    watched = orchestrator.failed_partitions.watched
    asked = []
    orchestrator.failed_partitions.watched = replace(watched, rows=asked.append)
    away = orchestrator.look()
    assert away.launches == () and "2 decided when the store answers" in away.sentence, away
    assert len(asked) == 1
    orchestrator.failed_partitions.watched = watched
    assert {one.key for one in orchestrator.look().launches} == {"a", "b"}


def test_two_looks_at_once_launch_a_partition_once_and_leave_no_wish_unanswered(orchestrator):
    """The button is pressed while the schedule ticks: what one wrote down, the other does not launch.

    The look that came to nothing is repeated, in whichever code server it was.
    """
    orchestrator.behaviour.of_key["a"] = "fail"
    orchestrator.materialize("a")
    orchestrator.ahead += HOUR
    launched = []
    orchestrator.failed_partitions.watched = replace(
        orchestrator.failed_partitions.watched,
        rows=lambda key: launched or launched.extend(another_look(orchestrator)) or 0,
    )
    state, wish = open_state(orchestrator.state), TickRequest("pressed", at_once=True)
    request_tick(state, wish)
    at = Situation(DagsterFacts(orchestrator.instance), time.time() + HOUR)
    void = answer_button(orchestrator.failed_partitions, lambda key, assets, before: ({}, False), at)
    assert (void.requests, "Another look was under way" in void.sentence) == ([], True)
    assert [one.key for one in launched] == ["a"]
    assert pending_request(state) == wish
    answer_button(orchestrator.failed_partitions, lambda key, assets, before: ({}, False), at)
    assert pending_request(state) is None


def another_look(orchestrator):
    other = type(orchestrator)(
        orchestrator.instance, orchestrator.state, orchestrator.behaviour, orchestrator.ahead
    )
    return other.look(tick="the button").launches


def test_a_new_database_is_read_from_its_start(orchestrator, another_instance):
    """After the database was replaced, nothing that the old one said is believed."""
    orchestrator.behaviour.of_key["a"] = "fail"
    for _ in range(3):
        orchestrator.materialize("a")
    orchestrator.look()
    orchestrator.instance = another_instance
    orchestrator.ahead += HOUR
    assert orchestrator.tick() == []


def test_a_wish_for_a_look_is_answered_once(orchestrator):
    """A wish that comes while one is being answered is not forgotten with it."""
    state = open_state(orchestrator.state)
    first, second = TickRequest("r1", at_once=False), TickRequest("r2", at_once=True)
    assert pending_request(state) is None
    request_tick(state, first)
    assert pending_request(state) == first
    request_tick(state, second)
    forget_request(state, first)
    assert pending_request(state) == second
    forget_request(state, second)
    assert pending_request(state) is None

"""Delivery to a real HTTP receiver: up, down, hanging, refusing, and what is never told on the way."""

import contextlib
import logging
import multiprocessing
import os
import re
import signal
from dataclasses import replace

import pytest

from resources.alerts import delivery as module
from resources.alerts.alert import DAY_SECONDS, Alert
from resources.alerts.delivery import (
    BURST,
    FIRST_WAIT_SECONDS,
    GRACE_SECONDS,
    LONGEST_WAIT_SECONDS,
    PATIENT_TRIES,
    SINGLY,
    Delivery,
)
from resources.alerts.outbox import HISTORY_SECONDS, Outbox
from resources.alerts.targets import checked_targets, send
from tests.support.alert_receiver import send_from_here
from tests.support.calls import calls_in
from vlm_durable.state.database import ControlState, open_state
from vlm_durable.state.tables import alert_targets

NOW = 1_790_000_000.0
SECRET = "s3cret-pw"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch) -> None:
    """Apprise sends from this process: its command loads every service, half a second of CPU a message."""
    monkeypatch.setattr(module, "send", send_from_here)


@pytest.fixture
def by_command(in_this_process, monkeypatch) -> None:
    """Apprise's own command sends, as outside of tests."""
    monkeypatch.setattr(module, "send", send)


def alert(number=0, **more) -> Alert:
    fields = {"kind": "check_failed", "severity": "error", "next_step": "Do it.", "at": NOW}
    return Alert(subject=f"a/{number}", occurrence="r", title=f"alert {number}", **fields | more)


@pytest.fixture
def outbox(tmp_path) -> Outbox:
    return Outbox(open_state(tmp_path / ".state"))


@pytest.fixture
def delivery(outbox, receiver) -> Delivery:
    return delivery_to(outbox, receiver.url())


def delivery_to(outbox, *urls) -> Delivery:
    """As another process would build it."""
    return Delivery(Outbox(outbox.state), checked_targets(urls), home=outbox.state.directory)


def deliver(delivery, now=NOW, seconds=20.0):
    return delivery.deliver(now=now, seconds=seconds, address="http://127.0.0.1:3000")


@pytest.mark.usefixtures("by_command")
def test_each_alert_and_its_recovery_reach_the_receiver_once(outbox, delivery, receiver):
    """Told once, whatever number of ticks and processes look."""
    outbox.post(alert())
    assert deliver(delivery).sent == 1
    assert deliver(delivery).sent == 0
    other = delivery_to(outbox, receiver.url())
    outbox.note_recovery("a/0", sentence="It passed.", at=NOW)
    assert deliver(other).sent == 1
    assert deliver(delivery).sent == 0
    assert receiver.titles == ["alert 0", "Right again: alert 0"]
    assert [message["type"] for message in receiver.messages] == ["failure", "success"]


def test_a_target_that_is_down_is_tried_again_later_and_later_and_nothing_is_lost(outbox, delivery, receiver):
    """A night without a network: in the morning all of it is there, once, what is many as one."""
    receiver.down()
    outbox.post(alert(0))
    first = deliver(delivery)
    assert (first.sent, first.waiting) == (0, 1)
    assert "target 1 (json) did not take a message" in first.troubles[0]
    outbox.post_all(alert(number) for number in range(1, 101))
    for due in (FIRST_WAIT_SECONDS, 3 * FIRST_WAIT_SECONDS):
        # Not due yet: left alone, whatever is new.
        assert deliver(delivery, NOW + due - 1).troubles == ()
        assert len(deliver(delivery, NOW + due).troubles) == 1
    receiver.up()
    done = deliver(delivery, NOW + 7 * FIRST_WAIT_SECONDS)
    assert (done.sent, done.waiting) == (2, 0)
    assert receiver.titles == ["alert 0", "Alerts: 100 check_failed"]
    assert receiver.repeated() == {}


def test_one_target_that_is_down_keeps_nothing_from_the_other(outbox, receiver):
    """Slack is down, the mail comes."""
    delivery = delivery_to(outbox, "json://127.0.0.1:9/", receiver.url())
    outbox.post(alert())
    done = deliver(delivery)
    assert done.sent == 1
    assert "target 1 (json)" in done.troubles[0]
    assert receiver.titles == ["alert 0"]


@pytest.mark.usefixtures("by_command")
def test_a_target_that_hangs_is_left_when_the_time_is_over(outbox, delivery, receiver):
    """The ticks go on, whatever a target does; what it was not told stays."""
    receiver.answer = None
    outbox.post(alert())
    done = deliver(delivery, seconds=2.0)
    assert (done.sent, done.waiting) == (0, 1)
    assert "no answer in time" in done.troubles[0]
    receiver.answer = 200
    assert deliver(delivery, NOW + 1000).sent == 1
    assert receiver.titles == ["alert 0"]


@pytest.mark.usefixtures("by_command")
def test_a_text_at_which_a_target_hangs_is_told_in_short_in_the_same_time(outbox, delivery, receiver):
    """It holds no later alert up, and takes no more of the tick than any other."""
    receiver.hanging = ("alert 0",)
    outbox.post(alert())
    deliver(delivery, seconds=2.0)
    often = alert_targets.update().values(tries=PATIENT_TRIES)
    outbox.state.write(lambda connection: connection.execute(often).rowcount)
    assert deliver(delivery, NOW + 100, seconds=10.0).sent == 1
    assert receiver.titles == ["An alert that could not be sent here whole"]


@pytest.mark.usefixtures("by_command")
def test_a_refused_message_is_told_when_the_target_takes_it(outbox, delivery, receiver):
    """An error of the receiver's is no delivery."""
    receiver.answer = 500
    outbox.post(alert())
    assert "500" in deliver(delivery).troubles[0]
    receiver.answer = 200
    assert deliver(delivery, NOW + 100).sent == 1


def test_a_message_that_is_never_taken_is_told_in_short_and_holds_no_other_up(outbox, delivery, receiver):
    """A target that chokes on a text gets our own words in its place, with its id, and then all others."""
    receiver.refused = ("alert 0",)
    outbox.post_all(alert(number) for number in range(3))
    now = NOW
    for _ in range(PATIENT_TRIES):
        assert deliver(delivery, now).sent == 0
        now += LONGEST_WAIT_SECONDS
    assert deliver(delivery, now).sent == 3
    assert receiver.titles == ["An alert that could not be sent here whole", "alert 1", "alert 2"]
    assert receiver.ids == [alert(number).id for number in range(3)]


def test_a_target_that_is_down_for_days_is_then_told_whole_and_in_a_group(outbox, delivery, receiver):
    """What waits is told in groups: a flood of a weekend's alerts helps nobody on Monday."""
    receiver.down()
    now = NOW
    for number in range(6):
        outbox.post(alert(number))
        deliver(delivery, now)
        now += LONGEST_WAIT_SECONDS
    receiver.up()
    assert deliver(delivery, now).waiting == 0
    assert receiver.titles == ["alert 0", "Alerts: 5 check_failed"]
    outbox.post(alert("new"))
    assert deliver(delivery, now).sent == 1, "and what is new then is told at once"


def test_two_processes_that_deliver_at_once_tell_nothing_twice(outbox, receiver):
    """The sensor and the machine's timer at the same moment: one of them leaves it to the other."""
    outbox.post_all(alert(number) for number in range(SINGLY))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(2) as pool:
        order = (outbox.state.directory, receiver.url(), manager.Barrier(2))
        assert sum(pool.starmap(deliver_with_another, [order] * 2)) == SINGLY
    assert len(receiver.ids) == SINGLY
    assert receiver.repeated() == {}


def deliver_with_another(directory, url, both_ready) -> int:
    delivery = delivery_to(Outbox(ControlState(directory)), url)
    both_ready.wait()
    done = deliver(delivery)
    return done.sent


def test_a_new_target_is_not_told_what_is_past_and_a_replaced_one_is_told_what_was_not(outbox, receiver):
    """A changed password loses nothing; a target added after months is not flooded."""
    outbox.post(alert(0, at=NOW - DAY_SECONDS - 1))
    assert deliver(delivery_to(outbox)).sent == 0
    wrong = "json://user:old@127.0.0.1:9/"
    assert deliver(delivery_to(outbox, wrong)).troubles == ()
    outbox.post(alert(1))
    assert deliver(delivery_to(outbox, wrong)).waiting == 1
    outbox.post(alert(2))
    deliver(delivery_to(outbox))  # With no target at all it waits for the next one.
    assert deliver(delivery_to(outbox, receiver.url()), NOW + FIRST_WAIT_SECONDS).sent == 2
    assert receiver.titles == ["alert 1", "alert 2"]
    other = receiver.url(secret="user:new")
    assert deliver(delivery_to(outbox, receiver.url(), other)).sent == 0, "beside another: from now on"


def test_of_two_targets_that_are_removed_the_next_one_is_told_all_that_either_was_not(outbox, receiver):
    """One of them was down longer: what waits for it is not lost with the other."""
    first, second = "json://127.0.0.1:9/", receiver.url(secret="user:b")
    deliver(delivery_to(outbox, first, second))
    outbox.post_all([alert(0), alert(1)])
    deliver(delivery_to(outbox, first, second))
    assert receiver.titles == ["alert 0", "alert 1"]
    outbox.post_all(alert(number) for number in range(2, 6))
    assert deliver(delivery_to(outbox, receiver.url()), NOW + LONGEST_WAIT_SECONDS).sent == 2
    assert receiver.titles[2:] == ["alert 0", "Alerts: 5 check_failed"]


def test_a_process_that_is_stopped_while_it_delivers_keeps_the_delivery_from_nobody(outbox, receiver):
    """When its time is over, another process delivers."""
    receiver.answer = None
    outbox.post(alert())
    stopped = multiprocessing.get_context("spawn").Process(
        target=deliver_slowly, args=(outbox.state.directory, receiver.url())
    )
    stopped.start()
    try:
        assert receiver.asked.wait(60)
        os.kill(stopped.pid, signal.SIGSTOP)
        receiver.answer = 200
        over = NOW + 600.0 + GRACE_SECONDS
        assert deliver(delivery_to(outbox, receiver.url()), over - 1).sent == 0
        assert deliver(delivery_to(outbox, receiver.url()), over).sent == 1
        assert receiver.titles == ["alert 0"]
    finally:
        stopped.kill()
        stopped.join()


def deliver_slowly(directory, url) -> None:
    deliver(delivery_to(Outbox(ControlState(directory)), url), seconds=600.0)


def test_the_first_target_of_a_home_is_told_what_was_posted_before_its_first_look(outbox, receiver):
    """What a sensor posts before the alerts sensor has ever ticked is told, and no history of months."""
    outbox.post_all([alert("old", at=NOW - 1e6), alert()])
    assert deliver(delivery_to(outbox, receiver.url())).sent == 1
    assert receiver.titles == ["alert 0"]


@pytest.mark.usefixtures("by_command")
def test_a_password_is_in_no_file_log_message_or_object(outbox, receiver, caplog, capfd):
    """Credentials never appear in text or logs: not when all is well, down, or refused."""
    caplog.set_level(logging.DEBUG)
    delivery = delivery_to(
        outbox, receiver.url(secret=f"user:{SECRET}"), f"json://user:{SECRET}@127.0.0.1:9/"
    )
    outbox.post(alert())
    done = deliver(delivery)
    receiver.answer = 401
    outbox.post(alert(1))
    refused = deliver(delivery, NOW + 100)
    assert receiver.authorizations[0] is not None, "the receiver was not shown the password at all"
    out = capfd.readouterr()
    said = [
        caplog.text,
        out.out,
        out.err,
        repr(delivery.targets),
        repr(done),
        repr(refused),
        str(vars(delivery)),
    ]
    said += [message["message"] for message in receiver.messages]
    assert not [text for text in said if SECRET in text]
    assert not [
        path
        for path in outbox.state.directory.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def test_a_long_history_and_nothing_new_costs_next_to_nothing(outbox, delivery):
    """A tick costs what is new, not what ever was."""
    outbox.post_all(alert(number) for number in range(10_000))
    deliver(delivery)
    assert calls_in(lambda: deliver(delivery, NOW + 1)) < 10_000


def test_a_look_with_nothing_to_tell_writes_nothing(outbox, delivery, receiver):
    """Every 20 s for weeks: not when all is told, nor while a target that is down is left alone."""
    outbox.post(alert(0))
    deliver(delivery)
    with no_write():
        deliver(delivery)
    receiver.down()
    outbox.post(alert(1))
    deliver(delivery)
    with no_write():
        deliver(delivery, NOW + FIRST_WAIT_SECONDS - 1)


@contextlib.contextmanager
def no_write():
    """Any write fails the test."""

    def write(*_, **__):
        raise AssertionError("something was written")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ControlState, "write", write)
        yield


def test_a_few_are_told_one_by_one_and_many_at_once(outbox, delivery, receiver):
    """A storm is one message, which counts its kinds; what is few is read as it is."""
    outbox.post_all(alert(number) for number in range(SINGLY))
    assert deliver(delivery).sent == SINGLY
    outbox.post_all(alert(f"b{number}") for number in range(100))
    outbox.post(alert("other", kind="device_left_out"))
    outbox.note_recovery("a/1", sentence="It passed.", at=NOW)
    assert deliver(delivery).sent == 1
    assert receiver.titles[SINGLY:] == [
        "Alerts: 100 check_failed, 1 device_left_out, 1 check_failed right again"
    ]


def test_a_storm_that_goes_on_is_told_more_and_more_seldom_and_whole(outbox, delivery, receiver):
    """The phone does not ring every half minute of a bad night; nothing is left out; a quiet time ends it."""
    looks = range(0, 3000, 100)
    for seconds in looks:
        outbox.post(alert(seconds))
        deliver(delivery, NOW + seconds)
    assert len(receiver.titles) < BURST + 8
    end = NOW + looks[-1] + LONGEST_WAIT_SECONDS
    assert deliver(delivery, end).waiting == 0
    assert sum(map(how_many, receiver.titles)) == len(looks)
    end += 2 * LONGEST_WAIT_SECONDS
    for number in range(2):
        outbox.post(alert(f"later {number}"))
        assert deliver(delivery, end + number).sent == 1


def how_many(title) -> int:
    found = re.findall(r"(\d+) check_failed", title)
    return int(found[0]) if found else 1


def test_a_clock_that_was_put_back_mutes_nothing(outbox, delivery, receiver):
    """A clock that ran years ahead is put back: the target hears of a new alert at once."""
    outbox.post_all(alert(number) for number in range(100))
    deliver(delivery)
    receiver.answer = 500
    outbox.post(alert("other", kind="another"))
    deliver(delivery)
    receiver.answer = 200
    outbox.post(alert("later"))
    assert deliver(delivery, NOW - 1e8).sent == 2


def test_a_clock_a_little_behind_sends_nothing_that_another_process_sends(outbox, delivery, receiver):
    """At the longest wait too: its end is not yet what a clock that was put back would make of it."""
    receiver.down()
    outbox.post(alert())
    now = NOW
    while now < NOW + 10 * LONGEST_WAIT_SECONDS:
        assert len(deliver(delivery, now).troubles) == 1
        now += LONGEST_WAIT_SECONDS
    assert deliver(delivery, now - LONGEST_WAIT_SECONDS - 1).troubles == ()


def test_old_history_is_forgotten_but_not_what_is_open(outbox, delivery, receiver, caplog):
    """A home of years does not grow without end, forgets nothing that stands, and logs what was not told."""
    outbox.post_all([alert("over"), alert("open")])
    outbox.note_recovery("a/over", sentence="It passed.", at=NOW)
    deliver(delivery)
    receiver.down()
    outbox.post(alert("untold"))
    # Repetitions are never told.
    outbox.post_all([replace(alert("untold"), occurrence=one) for one in "st"], once_while_open=True)
    outbox.note_recovery("a/untold", sentence="It passed.", at=NOW)
    later = NOW + HISTORY_SECONDS + 1
    deliver(delivery_to(outbox), later - 2)
    assert len(outbox.recent(9)) == 5
    deliver(delivery_to(outbox, receiver.url()), later)
    assert list(outbox.open_subjects()) == ["a/open"]
    assert [one.alert.subject for one in outbox.recent(9)] == ["a/open"]
    assert "2 alerts and recoveries, over by now, are deleted before every target was told" in caplog.text


def test_in_postgres_each_reaches_the_receiver_once_and_two_processes_share_the_work(
    postgres_url, receiver, tmp_path
):
    """Several machines keep their state in Postgres."""
    state = ControlState(tmp_path / ".state", postgres_url)
    outbox = Outbox(state)
    other = Outbox(ControlState(tmp_path / ".state", postgres_url))
    assert outbox.post(alert("\udcff", actual="\x00"))
    assert not other.post(alert("\udcff"))
    assert deliver(delivery_to(outbox, receiver.url())).sent == 1
    assert deliver(delivery_to(other, receiver.url())).sent == 0
    receiver.down()
    outbox.post_all(alert(number) for number in range(50))
    assert deliver(delivery_to(other, receiver.url())).waiting == 50
    assert other.note_recovery("a/\udcff", sentence="It passed.", at=NOW)
    assert len(outbox.open_subjects()) == 50
    receiver.up()
    assert deliver(delivery_to(outbox, receiver.url()), NOW + FIRST_WAIT_SECONDS).sent == 2
    assert receiver.repeated() == {}

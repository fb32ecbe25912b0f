"""Delivery to a real HTTP receiver: up, down, hanging, refusing, and what is never told on the way."""

import logging
import time

import pytest

from resources.alerts.alert import Alert
from resources.alerts.delivery import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, Delivery
from resources.alerts.delivery_record import PATIENT_TRIES
from resources.alerts.messages import BURST_SECONDS
from resources.alerts.outbox import Outbox
from resources.alerts.targets import checked_targets

NOW = 1_790_000_000.0
SECRET = "s3cret-pw"


def alert(number=0, **more) -> Alert:
    fields = {"kind": "check_failed", "severity": "error", "next_step": "Do it.", "at": NOW}
    return Alert(subject=f"a/{number}", occurrence="r", title=f"alert {number}", **fields | more)


@pytest.fixture
def outbox(tmp_path) -> Outbox:
    return Outbox(tmp_path / "alerts")


@pytest.fixture
def delivery(outbox, receiver) -> Delivery:
    return Delivery(outbox, checked_targets([receiver.url()]), home=outbox.log.directory)


def deliver(delivery, now=NOW, seconds=30.0):
    return delivery.deliver(now=now, seconds=seconds, address="http://127.0.0.1:3000")


def test_each_alert_and_its_recovery_reach_the_receiver_once(outbox, delivery, receiver):
    """Told once, whatever number of ticks and processes look."""
    outbox.post(alert())
    assert deliver(delivery).told == 1
    assert deliver(delivery).told == 0
    other = Delivery(Outbox(outbox.log.directory), delivery.targets, home=outbox.log.directory)
    outbox.recovered("a/0", occurrence="r2", sentence="It passed.", at=NOW)
    assert deliver(other).told == 1
    assert deliver(delivery).told == 0
    assert receiver.titles == ["alert 0", "Right again: alert 0"]
    assert [message["type"] for message in receiver.messages] == ["failure", "success"]


def test_a_target_that_is_down_is_tried_again_later_and_later_and_nothing_is_lost(outbox, delivery, receiver):
    """A night without a network: in the morning all of it is there, once, what is many as one."""
    receiver.down()
    outbox.post(alert(0))
    first = deliver(delivery)
    assert (first.told, first.waiting) == (0, 1)
    assert "target 1 (json) did not take 1 messages; next try in 30 s" in first.troubles[0]
    outbox.post_all(alert(number) for number in range(1, 101))
    # Not due yet: left alone, whatever is new.
    assert deliver(delivery, NOW + FIRST_WAIT_SECONDS - 1).troubles == ()
    again = deliver(delivery, NOW + FIRST_WAIT_SECONDS)
    assert "next try in 60 s" in again.troubles[0]
    receiver.up()
    done = deliver(delivery, NOW + 3 * FIRST_WAIT_SECONDS)
    assert (done.told, done.waiting) == (2, 0)
    assert receiver.titles == ["alert 0", "100 alerts of the kind check_failed"]
    assert receiver.repeated() == {}


def test_one_target_that_is_down_keeps_nothing_from_the_other(outbox, receiver):
    """Slack is down, the mail comes."""
    targets = checked_targets(["json://127.0.0.1:9/", receiver.url()])
    delivery = Delivery(outbox, targets, home=outbox.log.directory)
    outbox.post(alert())
    done = deliver(delivery)
    assert done.told == 1
    assert "target 1 (json)" in done.troubles[0]
    assert receiver.titles == ["alert 0"]


def test_a_target_that_hangs_is_left_when_the_time_is_over(outbox, delivery, receiver):
    """The ticks go on, whatever a target does; what it was not told stays."""
    receiver.answer = None
    outbox.post(alert())
    done = deliver(delivery, seconds=2.0)
    assert (done.told, done.waiting) == (0, 1)
    assert "no answer in time" in done.troubles[0]
    receiver.answer = 200
    assert deliver(delivery, NOW + 100).told == 1
    assert receiver.titles == ["alert 0"]


def test_a_refused_message_is_told_when_the_target_takes_it(outbox, delivery, receiver):
    """An error of the receiver's is no delivery."""
    receiver.answer = 500
    outbox.post(alert())
    assert "500" in deliver(delivery).troubles[0]
    receiver.answer = 200
    assert deliver(delivery, NOW + 100).told == 1


def test_messages_that_are_never_taken_hold_no_other_up(outbox, delivery, receiver):
    """A target that chokes on two messages still gets all others, and does not get those for ever first."""
    receiver.refused = ("alert 0", "alert 1")
    outbox.post_all(alert(number, kind=f"kind {number}") for number in range(3))
    now = NOW
    for _ in range(PATIENT_TRIES + 2):
        deliver(delivery, now)
        now += LONGEST_WAIT_SECONDS
    assert receiver.titles == ["alert 2"]
    outbox.post(alert(3))
    deliver(delivery, now)
    assert receiver.titles == ["alert 2", "alert 3"]


def test_a_target_that_is_down_for_days_costs_little_room_and_is_then_told_in_groups(
    outbox, delivery, receiver
):
    """Growth is bounded: what waits is counted, and the record stays small."""
    receiver.down()
    now = NOW
    for number in range(14):
        outbox.post(alert(number))
        deliver(delivery, now)
        now += LONGEST_WAIT_SECONDS
    assert (outbox.log.directory / "delivery.json").stat().st_size < 15_000
    receiver.up()
    assert deliver(delivery, now).waiting == 4
    assert deliver(delivery, now + BURST_SECONDS).waiting == 0
    assert receiver.titles[-1] == "4 alerts of the kind check_failed"
    assert receiver.repeated() == {}


def test_a_second_deliverer_leaves_it_to_the_first(outbox, delivery):
    """The sensor and the machine's timer at the same moment tell nothing twice."""
    outbox.post(alert())
    with delivery._only():
        assert deliver(delivery) is None
    assert deliver(delivery).told == 1


def test_a_record_that_does_not_verify_is_kept_aside_and_everything_is_told_again(outbox, delivery, receiver):
    """Unreadable is not empty: better twice, with the same id, than not at all."""
    outbox.post(alert())
    deliver(delivery)
    record = outbox.log.directory / "delivery.json"
    record.write_bytes(record.read_bytes()[:-40])
    assert deliver(delivery).told == 1
    assert receiver.repeated() == {alert().id: 2}
    assert list((outbox.log.directory / "unreadable").glob("delivery.json.*"))


def test_an_alert_that_was_damaged_before_it_was_told_is_itself_told(outbox, delivery, receiver):
    """A flipped bit never makes an alert vanish without a word."""
    outbox.post(alert(0))
    outbox.post(alert(1))
    path = outbox.log.path
    path.write_bytes(path.read_bytes().replace(b"alert 0", b"alert 8"))
    deliver(delivery)
    assert receiver.titles == ["alert 1", "1 alerts on disk were damaged before they were told"]


def test_a_new_target_is_not_told_what_is_past_and_a_replaced_one_is_told_what_was_not(outbox, receiver):
    """A changed password loses nothing; a target added after months is not flooded."""
    home = outbox.log.directory
    outbox.post(alert(0))
    assert deliver(Delivery(outbox, (), home=home)).told == 0
    wrong = checked_targets(["json://user:old@127.0.0.1:9/"])
    assert deliver(Delivery(outbox, wrong, home=home)).troubles == ()
    outbox.post(alert(1))
    assert deliver(Delivery(outbox, wrong, home=home)).waiting == 1
    right = checked_targets([receiver.url()])
    assert deliver(Delivery(outbox, right, home=home)).told == 1
    assert receiver.titles == ["alert 1"]


def test_a_full_disk_does_not_repeat_what_cannot_be_struck_off(outbox, delivery, receiver, monkeypatch):
    """Taken but not recorded: this process knows, and does not ring every half minute."""
    outbox.post(alert())
    receiver.answer = 500
    deliver(delivery)
    receiver.answer = 200
    with monkeypatch.context() as patched:
        patched.setattr(delivery, "_save", full_disk)
        with pytest.raises(OSError, match="full"):
            deliver(delivery, NOW + 100)
    assert receiver.titles == ["alert 0"]
    assert deliver(delivery, NOW + 200).told == 0
    assert receiver.repeated() == {}


def full_disk(_):
    raise OSError(28, "the disk is full")


def test_a_password_is_in_no_file_log_message_or_object(outbox, receiver, caplog, capfd):
    """Credentials never appear in text or logs: not when all is well, down, or refused."""
    caplog.set_level(logging.DEBUG)
    targets = checked_targets([receiver.url(secret=f"user:{SECRET}"), f"json://user:{SECRET}@127.0.0.1:9/"])
    delivery = Delivery(outbox, targets, home=outbox.log.directory)
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
        for path in outbox.log.directory.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def test_a_long_history_and_nothing_new_costs_next_to_nothing(outbox, delivery):
    """A tick costs what is new, not what ever was."""
    outbox.post_all(alert(number) for number in range(10_000))
    deliver(delivery)
    started = time.process_time()
    for number in range(10):
        assert deliver(delivery, NOW + number).told == 0
    assert (time.process_time() - started) / 10 < 0.05

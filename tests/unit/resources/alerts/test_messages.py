"""The words, and when many become one."""

from resources.alerts.alert import Recovery
from resources.alerts.delivery_record import Record, Tray
from resources.alerts.messages import BURST, BURST_SECONDS, SHOWN, SINGLY, Sender, group_of
from resources.alerts.outbox import CARRIED, RAISED, RECOVERED

SENDER = Sender("/srv/properties", "machine", "http://127.0.0.1:3000/")
NOW = 1_790_000_000.0


def raised(alert):
    return {"event": RAISED, "id": alert.id, **alert.as_json()}


def recovered(alert):
    one = Recovery(alert, "run-2", "It passed.", NOW, NOW)
    return {"event": RECOVERED, "id": one.id, **one.as_json()}


def worded(*entries, tray=None, now=NOW):
    tray = tray or Tray()
    for entry in entries:
        tray.take(entry)
    tray.word(now, SENDER)
    messages, tray.flying = tray.flying, []
    return messages


def test_an_alert_says_partition_expected_found_link_next_step_and_id(alert):
    """In the morning one look must tell."""
    (message,) = worded(raised(alert()))
    assert message.title == alert().title
    for said in (
        "Partition: KEY",
        "Expected: 20 rows",
        "Found: 19",
        "Next step: Materialize the partition again.",
        "Look: http://127.0.0.1:3000/runs/run-1",
        f"Id: {alert().id}",
        "From: /srv/properties on machine",
    ):
        assert said in message.body.splitlines()
    assert message.type == "failure"


def test_without_a_known_address_the_page_is_named_all_the_same(alert):
    """Delivered by the machine's timer with Dagster down, an alert still says where to look."""
    tray = Tray()
    tray.take(raised(alert()))
    tray.word(NOW, Sender("/srv", "machine", None))
    assert "Look: /runs/run-1 in the Dagster UI" in tray.flying[0].body


def test_a_recovery_says_what_it_was_and_what_was_seen(alert):
    """Somebody who was woken is told that they can sleep."""
    (message,) = worded(recovered(alert()))
    assert message.title == f"Right again: {alert().title}"
    assert "Now: It passed." in message.body
    assert message.type == "success"


def test_a_few_are_told_one_by_one_and_many_as_one(alert):
    """Ten thousand at once are one message that counts and lists the first few."""
    few = worded(*(raised(alert(str(number))) for number in range(SINGLY)))
    assert len(few) == SINGLY
    (message,) = worded(*(raised(alert(str(number))) for number in range(10_000)))
    assert message.title.startswith("10000 alerts")
    assert message.body.count("\n- ") == SHOWN
    assert message.tells == 10_000
    assert len(message.body) < 3000


def test_kinds_and_recoveries_are_grouped_apart(alert):
    """A storm of one kind hides no single alert of another."""
    storm = [raised(alert(str(number))) for number in range(100)]
    messages = worded(*storm, raised(alert("other", kind="device_left_out")), recovered(alert("1")))
    assert len(messages) == 3


def test_a_storm_that_goes_on_waits_and_is_then_one_message_more(alert):
    """The phone does not ring every half minute of a bad night, and nothing is left out."""
    tray = Tray()
    assert len(worded(*(raised(alert(str(n))) for n in range(100)), tray=tray)) == 1
    later = [raised(alert(str(n))) for n in range(100, 140)]
    assert worded(*later, tray=tray, now=NOW + BURST_SECONDS - 1) == []
    (message,) = worded(tray=tray, now=NOW + BURST_SECONDS + 1)
    assert message.tells == 40


def test_a_clock_that_was_put_back_mutes_nothing(alert):
    """Told and refused with a clock years ahead, what comes now is told now."""
    tray = Tray()
    assert len(worded(*(raised(alert(str(n))) for n in range(100)), tray=tray)) == 1
    tray.next_at = NOW + 1800.0
    assert not tray.is_due(NOW, 1800.0)
    years_earlier = NOW - 1e8
    assert tray.is_due(years_earlier, 1800.0)
    assert len(worded(raised(alert("later")), tray=tray, now=years_earlier)) == 1


def test_a_trickle_is_told_at_once_up_to_the_limit(alert):
    """Below the limit nothing is held back: a failing check is told within a minute."""
    tray = Tray()
    told = [worded(raised(alert(str(n))), tray=tray, now=NOW + n) for n in range(BURST + 3)]
    assert [len(one) for one in told] == [1] * BURST + [0] * 3


def test_a_group_keeps_the_same_id_for_the_same_alerts(alert):
    """Composed again after a kill, it is the same message."""
    storm = [raised(alert(str(number))) for number in range(50)]
    assert worded(*storm)[0].id == worded(*storm)[0].id
    assert worded(*storm)[0].id != worded(*storm[1:])[0].id


def test_what_is_carried_into_a_new_file_is_not_told_again(alert):
    """A new file is no news."""
    assert group_of({**raised(alert()), "event": CARRIED}) is None
    assert worded({**raised(alert()), "event": CARRIED}) == []


def test_the_record_comes_back_as_it_was(alert):
    """What one process left, the next goes on with."""
    tray = Tray(tries=2, next_at=NOW)
    for number in range(10):
        tray.take(raised(alert(str(number))))
    tray.word(NOW, SENDER)
    tray.take(raised(alert("waiting")))
    record = Record("ab" * 16, None, {"key": tray})
    assert Record.from_bytes(record.as_bytes()) == record

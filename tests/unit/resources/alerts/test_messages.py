"""The words of messages."""

from resources.alerts.alert import AlertEvent
from resources.alerts.messages import SHOWN, Sender, message_of_many, message_of_one

SENDER = Sender("/srv/properties", "machine", "http://127.0.0.1:3000/")
NOW = 1_790_000_000.0


def raised(alert) -> AlertEvent:
    return AlertEvent("raised", alert, NOW, NOW)


def many(events, count):
    return message_of_many(events[:SHOWN], [str(number) for number in range(count)], SENDER)


def test_an_alert_says_partition_expected_found_link_next_step_and_id(alert):
    """In the morning one look must tell."""
    message = message_of_one(raised(alert()), SENDER)
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
    message = message_of_one(raised(alert()), Sender("/srv", "machine", None))
    assert "Look: /runs/run-1 in the Dagster UI" in message.body


def test_a_recovery_says_what_it_was_and_what_was_seen(alert):
    """Somebody who was woken is told that they can sleep."""
    message = message_of_one(AlertEvent("recovered", alert(), NOW, NOW, "It passed."), SENDER)
    assert message.title == f"Right again: {alert().title}"
    assert "Now: It passed." in message.body
    assert message.type == "success"


def test_a_group_counts_all_and_lists_the_first_few(alert):
    """Ten thousand at once are one message that can be read."""
    message = many([raised(alert(str(number))) for number in range(10)], 10_000)
    assert message.title.startswith("10000 alerts")
    assert message.body.count("\n- ") == SHOWN
    assert message.tells == 10_000
    assert len(message.body) < 3000


def test_a_group_that_was_closed_by_a_person_is_not_called_right_again(alert):
    """Nobody saw whether it is right."""
    message = many([AlertEvent("closed", alert(), NOW, NOW, "A person closed it.")] * 4, 4)
    assert message.title == "Closed by a person: 4 alerts of the kind check_failed"

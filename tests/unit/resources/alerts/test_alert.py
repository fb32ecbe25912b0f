"""What makes two alerts the same one, and the words in which they are told."""

from dataclasses import replace

import pytest

from resources.alerts.alert import LONGEST_TEXT, Alert, AlertEvent, Message, message_about


def test_the_id_is_made_of_kind_subject_and_occurrence_alone(alert):
    """A repeated tick, another process or another wording never makes a second alert of one."""
    one = alert()
    assert one.id == "716e3f2269d1a2cd33ee6e77"
    assert replace(one, title="other", actual="other", at=0.0, severity="warning").id == one.id


@pytest.mark.parametrize("changed", ["kind", "subject", "occurrence"])
def test_another_kind_subject_or_occurrence_is_another_alert(alert, changed):
    """Another time, or another thing, is told again."""
    assert replace(alert(), **{changed: "other"}).id != alert().id


def test_parts_never_run_into_each_other(alert):
    """Subject and occurrence cannot be shifted between each other into the same id."""
    assert alert("a/b", "c").id != alert("a", "b/c").id


def test_an_event_that_version_1_wrote_is_read(alert):
    """After an upgrade what was open is open: version 1 wrote the event's id beside the rest."""
    wrote = {"what": "raised", "id": alert().id, "at": NOW, "since": NOW, "sentence": ""}
    assert AlertEvent.from_json(wrote | {"alert": alert().as_json()}) == raised(alert())


def test_long_texts_are_cut_where_they_are_written_down_and_the_id_stays(alert):
    """A stack trace of megabytes does not fill the file, and a long subject is still itself."""
    long = alert("s" * 3000, actual="x" * 100_000)
    back = Alert.from_json(long.as_json())
    assert back.id == long.id
    assert len(back.actual) <= LONGEST_TEXT


def test_an_event_comes_back_as_it_was(alert):
    """What is read from the database is what was written; an end has an id of its own."""
    one = AlertEvent("recovered", alert(finding="missing"), 5.0, 1.0, "It passed.")
    assert AlertEvent.from_json(one.as_json()) == one
    assert {"what", "at", "since", "sentence", "alert"} == one.as_json().keys()
    assert one.as_json()["alert"]["found"] == "19", "the key that earlier versions wrote"
    assert one.id != AlertEvent("raised", alert(), 1.0, 1.0).id == alert().id


PAGES = "http://127.0.0.1:3000/"
NOW = 1_790_000_000.0


def raised(alert) -> AlertEvent:
    return AlertEvent("raised", alert, NOW, NOW)


def told(event: AlertEvent, address: str | None = PAGES) -> Message:
    return many([(1, event)], event.id, address)


def many(groups: list[tuple[int, AlertEvent]], id_="many", address: str | None = PAGES) -> Message:
    return message_about(groups, id_, origin="/srv/properties on machine", address=address)


def test_an_alert_says_partition_expected_found_link_next_step_and_id(alert):
    """In the morning one look must tell."""
    message = told(raised(alert(finding="missing")))
    assert message.title == alert().title
    for said in (
        "Finding: missing",
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
    message = told(raised(alert()), None)
    assert "Look: /runs/run-1 in the Dagster UI" in message.body


def test_a_recovery_says_what_it_was_and_what_was_seen(alert):
    """Somebody who was woken is told that they can sleep."""
    message = told(AlertEvent("recovered", alert(), NOW, NOW, "It passed."))
    assert message.title == f"Right again: {alert().title}"
    assert "Now: It passed." in message.body
    assert message.type == "success"


def test_a_group_counts_each_kind_and_shows_its_first(alert):
    """Ten thousand at once are one message that can be read, and hide no single alert of another kind."""
    other = alert("cuda:1", kind="device_left_out", title="cuda:1 is left out", next_step="Take it back.")
    warning = alert(kind="check_warning", severity="warning")
    end = AlertEvent("recovered", alert(kind="run_failed"), NOW, NOW, "It was made.")
    message = many([(2, end), (3, raised(warning)), (10_000, raised(alert())), (1, raised(other))])
    assert message.title == (
        "Alerts: 10000 check_failed, 1 device_left_out, 3 check_warning, 2 run_failed right again"
    )
    for said in (
        f"10000 check_failed, the first: {alert().title}",
        "Next step: Materialize the partition again.",
        "1 device_left_out, the first: cuda:1 is left out",
        "Next step: Take it back.",
        "All of them: `vlm-assets alerts`.",
        "Id: many",
    ):
        assert said in message.body.splitlines()
    assert message.type == "failure"


def test_a_group_that_was_closed_by_a_person_is_not_called_right_again(alert):
    """Nobody saw whether it is right."""
    message = many([(4, AlertEvent("closed", alert(), NOW, NOW, "A person closed it."))])
    assert message.title == "Alerts: 4 check_failed closed by a person"
    assert message.type == "success"

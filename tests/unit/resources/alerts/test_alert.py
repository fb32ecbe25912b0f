"""What makes two alerts the same one."""

from dataclasses import replace

import pytest

from resources.alerts.alert import LONGEST_TEXT, Alert, AlertEvent


def test_the_id_is_made_of_kind_subject_and_occurrence_alone(alert):
    """A repeated tick, another process or another wording never makes a second alert of one."""
    one = alert()
    assert one.id == "716e3f2269d1a2cd33ee6e77"
    assert replace(one, title="other", found="other", at=0.0, severity="warning").id == one.id


@pytest.mark.parametrize("changed", ["kind", "subject", "occurrence"])
def test_another_kind_subject_or_occurrence_is_another_alert(alert, changed):
    """Another time, or another thing, is told again."""
    assert replace(alert(), **{changed: "other"}).id != alert().id


def test_parts_never_run_into_each_other(alert):
    """Subject and occurrence cannot be shifted between each other into the same id."""
    assert alert("a/b", "c").id != alert("a", "b/c").id


def test_long_texts_are_cut_where_they_are_written_down_and_the_id_stays(alert):
    """A stack trace of megabytes does not fill the file, and a long subject is still itself."""
    long = alert("s" * 3000, found="x" * 100_000)
    back = Alert.from_json(long.as_json())
    assert back.id == long.id
    assert len(back.found) <= LONGEST_TEXT


def test_an_event_comes_back_as_it_was(alert):
    """What is read from the database is what was written; an end has an id of its own."""
    one = AlertEvent("recovered", alert(), 5.0, 1.0, "It passed.")
    assert AlertEvent.from_json(one.as_json()) == one
    assert one.id != AlertEvent("raised", alert(), 1.0, 1.0).id == alert().id

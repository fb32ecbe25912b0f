"""The outbox: posted once, known to every process, open until it is right again."""

import multiprocessing
import time

import pytest

from resources.alerts import outbox as module
from resources.alerts.outbox import Outbox


@pytest.fixture
def outbox(tmp_path) -> Outbox:
    return Outbox(tmp_path / "alerts")


def test_the_same_occurrence_is_posted_once_by_any_number_of_processes(outbox, alert):
    """A tick that is repeated after a kill tells nothing twice."""
    assert outbox.post(alert())
    assert not outbox.post(alert())
    assert not Outbox(outbox.log.directory).post(alert())


def test_another_occurrence_of_the_same_subject_is_told_and_is_still_one_open_subject(outbox, alert):
    """A second giving-up, after a person began a new count, is told again; it is one thing that is wrong."""
    assert outbox.post(alert(occurrence="run-1"))
    assert outbox.post(alert(occurrence="run-2"))
    assert [one.occurrence for one in outbox.open_subjects().values()] == ["run-2"]


def test_what_comes_again_while_it_is_open_is_noted_and_not_told(outbox, alert, monkeypatch):
    """Each try of a schedule fails anew: that is known, in this process and the next, and no news."""
    monkeypatch.setattr(module, "LONGEST_FILE", 100)

    def tries(*occurrences, kind="k"):
        posted = [alert(occurrence=one, kind=kind, at=float(one[-1])) for one in occurrences]
        return [one.occurrence for one in outbox.post_all(posted, once_while_open=True)]

    assert tries("run-1", "run-2") == ["run-1"]
    assert outbox.begin_new_file_where_long(outbox.log.read().end)
    outbox = Outbox(outbox.log.directory)
    assert tries("run-2", "run-3") == []
    assert outbox.log.read().entries[-1]["occurrence"] == "run-3", "it stands in the file"
    assert tries("run-4", kind="worse") == ["run-4"], "another kind of trouble is news"
    assert tries("run-5", kind="worse") == []
    (recovery,) = outbox.recovered_all([(alert().subject, "run-6", "It passed.")], at=6.0)
    assert (recovery.alert.occurrence, recovery.since) == ("run-5", 4.0)
    assert tries("run-7") == ["run-7"], "it was right in between"


def test_only_what_is_open_recovers_and_only_once(outbox, alert):
    """No notice of a recovery for what nobody was told of."""
    again = {"occurrence": "run-2", "sentence": "It passed.", "at": 2.0}
    assert not outbox.recovered(alert().subject, **again)
    outbox.post(alert())
    assert outbox.recovered(alert().subject, **again)
    assert not Outbox(outbox.log.directory).recovered(alert().subject, **again)
    assert outbox.open_subjects() == {}


def test_a_late_repetition_does_not_open_again_what_is_right(outbox, alert):
    """The alert of a tick that died comes again after the recovery: known, and it stays closed."""
    outbox.post(alert())
    outbox.recovered(alert().subject, occurrence="run-2", sentence="It passed.", at=2.0)
    assert not Outbox(outbox.log.directory).post(alert())
    assert outbox.open_subjects() == {}


def test_a_new_file_knows_what_is_open_and_what_was_told(outbox, alert, monkeypatch):
    """Growth is bounded, and nothing is told twice or forgotten for it."""
    monkeypatch.setattr(module, "LONGEST_FILE", 10_000)
    outbox.post(alert("open"))
    for number in range(30):
        outbox.post(alert("come and gone", str(number)))
    outbox.recovered("come and gone", occurrence="r", sentence="It passed.", at=2.0)
    other = Outbox(outbox.log.directory)
    before = other.open_subjects()
    with outbox.log.locked():
        end = outbox.log.read().end
    assert outbox.begin_new_file_where_long(end)
    assert outbox.log.path.stat().st_size < 3000
    assert other.open_subjects() == before == Outbox(outbox.log.directory).open_subjects()
    assert not other.post(alert("come and gone", "29"))
    assert not outbox.post(alert("open"))


def test_a_file_of_open_alerts_is_not_begun_anew_at_every_look(outbox, alert, monkeypatch):
    """What is carried over does not count as growth."""
    monkeypatch.setattr(module, "LONGEST_FILE", 10_000)
    outbox.post_all(alert(str(number)) for number in range(100))
    with outbox.log.locked():
        assert outbox.log.read().end.offset > 20_000
    assert outbox.begin_new_file_where_long(end_of(outbox))
    assert not outbox.begin_new_file_where_long(end_of(outbox))
    assert len(outbox.open_subjects()) == 100


def test_a_file_that_was_not_read_to_its_end_is_never_put_aside(outbox, alert, monkeypatch):
    """What was not gathered for every target yet stays where it is looked for."""
    monkeypatch.setattr(module, "LONGEST_FILE", 10_000)
    outbox.post_all(alert(str(number)) for number in range(100))
    end = end_of(outbox)
    outbox.post(alert("later"))
    assert not outbox.begin_new_file_where_long(end)


def test_ten_thousand_at_once_cost_one_write_and_a_look_at_nothing_new_costs_nothing(outbox, alert):
    """A storm is posted in about a second; a look after it costs milliseconds."""
    started = time.process_time()
    assert len(outbox.post_all(alert(str(number)) for number in range(10_000))) == 10_000
    assert time.process_time() - started < 5.0
    started = time.process_time()
    for _ in range(10):
        assert len(outbox.open_subjects()) == 10_000
    assert (time.process_time() - started) / 10 < 0.05


def test_several_processes_post_at_once_and_every_line_is_whole(outbox, alert):
    """Workers, sensors and the command line share the file; the same alert is new to exactly one of them."""
    context = multiprocessing.get_context("spawn")
    alerts = [alert(str(number)) for number in range(40)]
    with context.Pool(3) as pool:
        new = pool.starmap(post_each, [(outbox.log.directory, alerts)] * 3)
    assert sum(new) == 40
    assert len(outbox.open_subjects()) == 40
    assert outbox.damaged_lines() == 0


def post_each(directory, alerts) -> int:
    mine = Outbox(directory)
    return sum(mine.post(alert) for alert in alerts)


def end_of(outbox):
    with outbox.log.locked():
        return outbox.log.read().end

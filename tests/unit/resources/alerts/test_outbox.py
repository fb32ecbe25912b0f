"""The outbox: posted once, known to every process, open until it is right again."""

import multiprocessing

import pytest
import sqlalchemy as sa

from resources.alerts.outbox import Outbox
from tests.support.calls import calls_in
from vlm_durable.state import tables
from vlm_durable.state.database import ControlState


@pytest.fixture
def state(tmp_path) -> ControlState:
    return ControlState(tmp_path / ".state")


@pytest.fixture
def outbox(state) -> Outbox:
    return Outbox(state)


def another(outbox) -> Outbox:
    """As another process sees it."""
    return Outbox(ControlState(outbox.state.directory))


def events(outbox) -> list[str]:
    query = sa.select(tables.alert_events.c.what).order_by(tables.alert_events.c.seq)
    return list(outbox.state.read(lambda connection: connection.scalars(query).all()))


def changes(state) -> str:
    """How many transactions have written to the database."""
    query = sa.select(tables.meta.c.value).where(tables.meta.c.name == "changes")
    return state.read(lambda connection: connection.scalar(query))


def test_the_same_occurrence_is_posted_once_by_any_number_of_processes(outbox, alert):
    """A tick that is repeated after a kill tells nothing twice."""
    assert outbox.post(alert())
    assert not outbox.post(alert())
    assert not another(outbox).post(alert())


def test_another_occurrence_of_the_same_subject_is_told_and_is_still_one_open_subject(outbox, alert):
    """A second giving-up, after a person began a new count, is told again; it is one thing that is wrong."""
    assert outbox.post(alert(occurrence="run-1"))
    assert outbox.post(alert(occurrence="run-2"))
    assert [one.occurrence for one in outbox.open_subjects().values()] == ["run-2"]


def test_what_comes_again_while_it_is_open_is_noted_and_not_told(outbox, alert):
    """Each try of a schedule fails anew: that is known, in this process and the next, and no news."""

    def tries(*occurrences, kind="k"):
        posted = [alert(occurrence=one, kind=kind, at=float(one[-1])) for one in occurrences]
        return [one.occurrence for one in outbox.post_all(posted, once_while_open=True)]

    assert tries("run-1", "run-2") == ["run-1"]
    outbox = another(outbox)
    assert tries("run-2", "run-3") == []
    assert events(outbox) == ["raised", "again", "again"], "it stands in the history"
    assert tries("run-4", kind="worse") == ["run-4"], "another kind of trouble is news"
    assert tries("run-5", kind="worse") == []
    (recovery,) = outbox.note_recoveries({alert().subject: "It passed."}, at=6.0)
    assert (recovery.alert.occurrence, recovery.since) == ("run-5", 4.0)
    assert tries("run-7") == ["run-7"], "it was right in between"
    assert [one.alert.occurrence for one in outbox.recent(9)] == ["run-1", "run-4", "run-5", "run-7"]


class Raced(Outbox):
    """Another thread's older look is put in place as soon as this one has looked at what is kept."""

    older = None

    @property
    def _cached(self):
        found, self.kept, self.older = self.kept, self.older or self.kept, None
        return found

    @_cached.setter
    def _cached(self, opened) -> None:
        self.kept = opened


def test_an_older_look_of_another_thread_hides_nothing_that_is_open(state, alert):
    """A subject that is missing from what is open would never be told right again."""
    outbox = Raced(state)
    outbox.post(alert("a"))
    outbox.open_subjects()
    older = outbox.kept
    outbox.post(alert("b"))
    outbox.open_subjects()
    outbox.older = older
    assert list(outbox.open_subjects()) == ["a", "b"]
    assert list(outbox.open_subjects()) == ["a", "b"]


def test_only_what_is_open_recovers_and_only_once(outbox, alert):
    """No notice of a recovery for what nobody was told of."""
    again = {"sentence": "It passed.", "at": 2.0}
    assert not outbox.note_recovery(alert().subject, **again)
    outbox.post(alert())
    assert outbox.note_recovery(alert().subject, **again)
    assert not another(outbox).note_recovery(alert().subject, **again)
    assert outbox.open_subjects() == {}


def test_a_late_repetition_does_not_open_again_what_is_right(outbox, alert):
    """The alert of a tick that died comes again after the recovery: known, and it stays closed."""
    outbox.post(alert())
    outbox.note_recovery(alert().subject, sentence="It passed.", at=2.0)
    assert not another(outbox).post(alert())
    assert outbox.open_subjects() == {}


def test_a_look_that_finds_nothing_new_writes_nothing(outbox, state, alert):
    """Sensors look every few seconds for weeks: a disk that is asleep stays so."""
    outbox.post(alert())
    before = changes(state)
    outbox.post_all([alert()], once_while_open=True)
    outbox.note_recoveries({"something else": "It passed."}, at=2.0)
    assert list(outbox.open_subjects()) == [alert().subject]
    assert changes(state) == before


def test_any_text_and_the_name_of_any_file_can_be_posted(outbox, alert):
    """A file's name may be no Unicode, a stack trace may hold anything."""
    odd = 'ümlaut \n "quoted" \udcff'
    outbox.post(alert(odd, actual="\x00 \ud800"))
    assert list(outbox.open_subjects()) == [odd]
    assert outbox.note_recovery(odd, sentence=odd, at=2.0)


def test_ten_thousand_at_once_cost_one_write_and_a_look_at_nothing_new_costs_nothing(outbox, alert):
    """A storm is one transaction, and a look after it reads none of it again."""
    before = int(changes(outbox.state) or 0)
    assert len(outbox.post_all(alert(str(number)) for number in range(10_000))) == 10_000
    assert int(changes(outbox.state)) == before + 1
    assert len(outbox.open_subjects()) == 10_000
    assert calls_in(outbox.open_subjects) < 10_000


def test_several_processes_post_at_once_and_each_alert_is_new_to_one(outbox, alert):
    """Workers, sensors and the command line share the outbox."""
    context = multiprocessing.get_context("spawn")
    alerts = [alert(str(number)) for number in range(40)]
    with context.Pool(3) as pool:
        new = pool.starmap(post_each, [(outbox.state.directory, alerts)] * 3)
    assert sum(new) == 40
    assert len(outbox.open_subjects()) == 40


def post_each(directory, alerts) -> int:
    mine = Outbox(ControlState(directory))
    return sum(mine.post(alert) for alert in alerts)

"""The last tick of each sensor; silence is judged by each one's own rhythm, where it was expected to tick."""

import errno
import logging

import pytest

from sensors.ticks import LONGEST_SILENCE_SECONDS, Tick, Ticks
from vlm_durable.state.database import ControlState

NOW = 1_790_000_000.0
WATCHED = {"drift": 30.0, "retries": 600.0}


@pytest.fixture
def nobody(tmp_path):
    """Nothing has ticked yet."""
    return Ticks(ControlState(tmp_path))


@pytest.fixture
def ticks(nobody):
    """Both ticked just now."""
    for name, interval in WATCHED.items():
        nobody.record(name, NOW, interval_seconds=interval)
    return nobody


def silent(ticks, now, since=0.0):
    return {one.subject: one for one in ticks.silent_sensors(WATCHED, since=since, now=now)}


def test_the_last_tick_of_each_is_kept_whatever_writes(nobody, tmp_path):
    """Whoever looks sees when each ticked last, and how often it means to."""
    nobody.record("one", 100.0, interval_seconds=30)
    nobody.record("one", 200.0, interval_seconds=30)
    Ticks(ControlState(tmp_path)).record("other", 150.0)
    assert nobody.last() == {
        "one": Tick("one", 200.0, 30.0, since=100.0),
        "other": Tick("other", 150.0, 60.0, since=150.0),
    }
    assert not (tmp_path / "state.db").exists(), "a tick costs no fsync"


def test_before_the_first_tick_there_is_none_and_no_silence(nobody, tmp_path):
    """A new home, installed and not started yet, is no alarm and no error."""
    assert nobody.last() == {}
    assert nobody.silence(now=NOW) is None
    assert not list(tmp_path.iterdir())


def test_after_a_gap_it_ticks_since_then(nobody):
    """Who comes back with the daemon is not taken for one that ticked all the while."""
    for now in (100.0, 400.0, 701.0, 720.0):
        nobody.record("one", now, interval_seconds=600)
    assert nobody.last()["one"].since == 701.0


def test_with_a_full_disk_a_tick_is_not_undone(nobody, monkeypatch, caplog):
    """The work is done; the note alone is missing, and the log says so."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(nobody._state, "beat", full)
    nobody.note("one", 200.0, interval_seconds=60.0, log=lambda: logging.getLogger("tick"))
    assert "could not be noted" in caplog.text


@pytest.mark.parametrize(
    ("after", "names"),
    [
        (LONGEST_SILENCE_SECONDS, set()),
        (LONGEST_SILENCE_SECONDS + 1, {"sensor/drift"}),
        (3000, {"sensor/drift"}),
        (3001, {"sensor/drift", "sensor/retries"}),
    ],
)
def test_each_is_judged_by_five_of_its_own_intervals_and_by_five_minutes_at_least(ticks, after, names):
    """A schedule of ten minutes is not silent after five."""
    assert set(silent(ticks, NOW + after)) == names


def test_what_never_ticked_is_silent_too_but_only_after_it_was_expected(nobody):
    """A sensor that fails in its first line has no tick; one of a Dagster that was down is no alarm."""
    assert silent(nobody, NOW + 10, since=NOW) == {}
    found = silent(nobody, NOW + 400, since=NOW)["sensor/drift"]
    assert found.actual == "no tick ever"
    assert "drift" in found.next_step


def test_the_same_silence_is_one_alert_and_the_next_one_another(ticks):
    """Told once while it lasts, and told again the next time."""
    first = silent(ticks, NOW + 400)["sensor/drift"]
    assert silent(ticks, NOW + 800)["sensor/drift"].id == first.id
    ticks.record("drift", NOW + 900, interval_seconds=30)
    assert silent(ticks, NOW + 1300)["sensor/drift"].id != first.id


def test_only_what_was_silent_and_ticks_is_right_again(ticks):
    """A notice for each silence that ends, and for the daemon as soon as anything asks."""
    seen = {"sensor/drift", "sensor/retries", "daemon", "property_descriptions/KEY/run"}
    assert list(ticks.ticking_again(seen, now=NOW + 1000)) == ["daemon", "sensor/retries"]
    assert list(ticks.ticking_again({"sensor/drift"}, now=NOW + 10)) == ["sensor/drift"]
    assert ticks.ticking_again(set(), now=NOW) == {}


def test_a_daemon_is_silent_when_nothing_ticks_and_once_a_time(ticks):
    """A dead daemon says nothing; the machine's timer does, once."""
    assert ticks.silence(now=NOW + LONGEST_SILENCE_SECONDS) is None
    first = ticks.silence(now=NOW + LONGEST_SILENCE_SECONDS + 1)
    assert first is not None
    assert (first.kind, first.id) == ("daemon_silent", ticks.silence(now=NOW + 9000).id)


def test_the_alerts_sensor_is_looked_at_on_its_own(nobody):
    """While the others tick, it fails, or has failed from the first tick on: nobody in Dagster says so."""
    for after in range(0, 361, 60):
        nobody.record("drift", NOW + after, interval_seconds=30)
    assert nobody.silence(now=NOW + 361).actual == "no tick ever"
    nobody.record("alerts", NOW, interval_seconds=20)
    assert nobody.silence(now=NOW + LONGEST_SILENCE_SECONDS) is None
    silence = nobody.silence(now=NOW + 361)
    assert (silence.kind, silence.subject) == ("sensor_silent", "sensor/alerts")
    nobody.record("alerts", NOW + 370, interval_seconds=20)
    assert nobody.silence(now=NOW + 371) is None
    assert list(nobody.ticking_again({"sensor/alerts"}, now=NOW + 371)) == ["sensor/alerts"]


PUT_BACK = NOW - 30 * 24 * 3600
"""The clock was put back by a month after the last ticks."""


def test_a_silence_after_the_clock_was_put_back_is_told_and_not_a_month_later(ticks):
    """A tick that lies ahead is no news of a sensor, of the daemon or of the alerts sensor."""
    ticks.record("alerts", NOW, interval_seconds=20)
    assert silent(ticks, PUT_BACK + 300, since=PUT_BACK) == {}, "each has its time from then on"
    assert set(silent(ticks, PUT_BACK + 301, since=PUT_BACK)) == {"sensor/drift"}
    assert ticks.ticking_again({"sensor/drift"}, now=PUT_BACK + 301) == {}
    assert ticks.silence(now=PUT_BACK + 301).kind == "daemon_silent"
    for after in range(0, 361, 60):
        ticks.record("drift", PUT_BACK + after, interval_seconds=30)
    assert ticks.silence(now=PUT_BACK + 361).subject == "sensor/alerts"


def test_with_the_clock_just_put_back_the_alerts_sensor_is_no_trouble_of_its_own(nobody):
    """Others that had ticked for long do not take the time for its next tick from it."""
    for at in range(0, 1201, 300):
        nobody.record("retries", NOW + at, interval_seconds=600)
    nobody.record("alerts", NOW + 1200, interval_seconds=20)
    nobody.record("drift", NOW + 700, interval_seconds=30)
    assert nobody.silence(now=NOW + 705) is None


def test_with_the_daemon_just_back_the_alerts_sensor_is_no_trouble_of_its_own(ticks):
    """A new start leaves the sensor the time for its first tick."""
    ticks.record("alerts", NOW, interval_seconds=20)
    assert ticks.silence(now=NOW + 4000).kind == "daemon_silent"
    ticks.record("drift", NOW + 4000, interval_seconds=30)
    assert ticks.silence(now=NOW + 4010) is None

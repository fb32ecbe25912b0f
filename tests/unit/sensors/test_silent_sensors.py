"""Silence is judged by each one's own rhythm, and never while it was not expected to tick."""

import pytest

from sensors.silent_sensors import silent_alerts, silent_daemon, silent_sensors, ticking_again
from sensors.ticks import LONGEST_SILENCE_SECONDS, record_tick

NOW = 1_790_000_000.0
WATCHED = {"drift": 30.0, "retries": 600.0}


@pytest.fixture
def ticks(tmp_path):
    """Both ticked just now."""
    for name, interval in WATCHED.items():
        record_tick(tmp_path, name, NOW, interval_seconds=interval)
    return tmp_path


def silent(ticks, now, since=0.0):
    return {one.subject: one for one in silent_sensors(ticks, WATCHED, since=since, now=now)}


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


def test_what_never_ticked_is_silent_too_but_only_after_it_was_expected(tmp_path):
    """A sensor that fails in its first line has no tick; one of a Dagster that was down is no alarm."""
    assert silent(tmp_path, NOW + 10, since=NOW) == {}
    found = silent(tmp_path, NOW + 400, since=NOW)["sensor/drift"]
    assert found.found == "no tick ever"
    assert "drift" in found.next_step


def test_the_same_silence_is_one_alert_and_the_next_one_another(ticks):
    """Told once while it lasts, and told again the next time."""
    first = silent(ticks, NOW + 400)["sensor/drift"]
    assert silent(ticks, NOW + 800)["sensor/drift"].id == first.id
    record_tick(ticks, "drift", NOW + 900, interval_seconds=30)
    assert silent(ticks, NOW + 1300)["sensor/drift"].id != first.id


def test_only_what_was_silent_and_ticks_is_right_again(ticks):
    """A notice for each silence that ends, and for the daemon as soon as anything asks."""
    seen = {"sensor/drift", "sensor/retries", "daemon", "property_descriptions/KEY/run"}
    assert [one[0] for one in ticking_again(ticks, seen, now=NOW + 1000)] == ["daemon", "sensor/retries"]
    assert [one[0] for one in ticking_again(ticks, {"sensor/drift"}, now=NOW + 10)] == ["sensor/drift"]
    assert ticking_again(ticks, set(), now=NOW) == []


def test_a_daemon_is_silent_when_nothing_ticks_and_once_a_time(ticks):
    """A dead daemon says nothing; the machine's timer does, once."""
    assert silent_daemon(ticks, now=NOW + LONGEST_SILENCE_SECONDS) is None
    first = silent_daemon(ticks, now=NOW + LONGEST_SILENCE_SECONDS + 1)
    assert first is not None
    assert first.id == silent_daemon(ticks, now=NOW + 9000).id


def test_a_home_where_nothing_ever_ticked_has_no_silent_daemon(tmp_path):
    """Installed and not started yet is no alarm."""
    assert silent_daemon(tmp_path / "ticks", now=NOW) is None


def test_the_alerts_sensor_is_looked_at_on_its_own(tmp_path):
    """It fails at each tick while the others tick: nobody inside Dagster would say so."""
    record_tick(tmp_path, "alerts", NOW, interval_seconds=20)
    for after in range(0, 361, 60):
        record_tick(tmp_path, "drift", NOW + after, interval_seconds=30)
    assert silent_alerts(tmp_path, now=NOW + LONGEST_SILENCE_SECONDS) is None
    found = silent_alerts(tmp_path, now=NOW + 361)
    assert found is not None
    assert (found.kind, found.subject) == ("sensor_silent", "sensor/alerts")
    record_tick(tmp_path, "alerts", NOW + 370, interval_seconds=20)
    assert silent_alerts(tmp_path, now=NOW + 371) is None
    assert [one[0] for one in ticking_again(tmp_path, {"sensor/alerts"}, now=NOW + 371)] == ["sensor/alerts"]


def test_an_alerts_sensor_that_never_ticked_is_silent_too(tmp_path):
    """One that fails from the first start has no tick of its own."""
    for after in range(0, 361, 60):
        record_tick(tmp_path, "drift", NOW + after, interval_seconds=30)
    found = silent_alerts(tmp_path, now=NOW + 361)
    assert found is not None
    assert found.found == "no tick ever"


def test_with_the_daemon_down_or_just_back_the_alerts_sensor_is_no_trouble_of_its_own(ticks):
    """A dead daemon is one alert; a new start leaves the sensor the time for its first tick."""
    record_tick(ticks, "alerts", NOW, interval_seconds=20)
    assert silent_alerts(ticks, now=NOW + 4000) is None
    record_tick(ticks, "drift", NOW + 4000, interval_seconds=30)
    assert silent_alerts(ticks, now=NOW + 4010) is None

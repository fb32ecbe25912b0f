"""The judge of progress, by tables: what stands still, what is slow, and which time counts."""

import pytest

from sensors.progress_judge import ProgressLimits, Reading, Standstill, slow_among, slow_since, standstill

LIMITS = ProgressLimits(least=30.0, most=600.0, loading=1800.0, learned_times=2.0)


@pytest.mark.parametrize(
    ("is_paced", "learned", "allowed"),
    [
        (True, 40.0, 80.0),
        (True, 0.5, 30.0),
        (True, 4000.0, 600.0),
        (True, 0.0, 600.0),
        (False, 40.0, 1800.0),
        (False, 0.0, 1800.0),
    ],
    ids=["twice its own time", "a floor", "a ceiling", "nothing learned", "loading", "loading first"],
)
def test_what_work_may_take(is_paced, learned, allowed):
    """At the limit it is sound, and beyond it stands still."""
    reading = Reading(1000.0, is_paced, learned)
    assert standstill(reading, LIMITS, now=1000.0 + allowed) is None
    assert standstill(reading, LIMITS, now=1001.0 + allowed) == Standstill(allowed + 1.0, allowed)


@pytest.mark.parametrize(
    ("now", "watched_since", "seconds"),
    [
        (1081.0, 0.0, 81.0),
        (50_000.0, 49_950.0, None),
        (50_080.0, 50_000.0, None),
        (50_081.0, 50_000.0, 81.0),
        (999.0, 0.0, None),
    ],
    ids=[
        "watched",
        "a gap",
        "at the limit after a gap",
        "beyond it",
        "a reading that is newer than the look",
    ],
)
def test_only_watched_time_counts(now, watched_since, seconds):
    """A machine that slept for a night, or a daemon that was down, makes nobody stand still."""
    verdict = standstill(Reading(1000.0, True, 40.0), LIMITS, now=now, watched_since=watched_since)
    assert verdict == (seconds and Standstill(seconds, 80.0))


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ({"a": 7.0, "b": 10.0, "c": 11.0, "d": 12.0}, {"a": 11.0}),
        ({"a": 7.8, "b": 10.0, "c": 11.0, "d": 12.0}, {}),
        ({"a": 7.0, "b": 10.0}, {}),
        ({"a": 6.9, "b": 10.0}, {"a": 10.0}),
        ({"a": 1.0, "b": 1.0, "c": 10.0, "d": 10.0, "e": 10.0}, {"a": 10.0, "b": 10.0}),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 10.0}, {}),
        ({"a": 7.0}, {}),
        ({}, {}),
    ],
    ids=[
        "far below the others",
        "a little below",
        "at the share",
        "of two",
        "two of five",
        "most are like it",
        "alone",
        "nobody",
    ],
)
def test_slow_is_far_below_the_median_of_the_others(rates, slow):
    """Each is compared with the others alone: among two, its own rate would be half of the median."""
    assert slow_among(rates) == slow


@pytest.mark.parametrize(
    ("before", "slow", "watched_since", "since"),
    [
        ({}, ["a"], 0.0, {"a": 700.0}),
        ({"a": 100.0}, ["a"], 0.0, {"a": 100.0}),
        ({"a": 100.0}, [], 0.0, {}),
        ({"a": 100.0}, ["a"], 650.0, {"a": 700.0}),
    ],
    ids=["new", "goes on", "over", "not watched meanwhile"],
)
def test_slow_without_a_break(before, slow, watched_since, since):
    """Who kept pace for a moment, or was not watched, begins anew."""
    assert slow_since(before, slow, now=700.0, watched_since=watched_since) == since

"""Who stands still and who is slow: by their own rhythm, and only for the time that somebody watched."""

from dataclasses import replace

import pytest

from resources.state.database import open_state
from resources.state.workers import Phase, Workers
from sensors.worker_health import WorkerLimits, slow_since, slow_workers, stuck_workers

LIMITS = WorkerLimits()


@pytest.fixture
def worker(tmp_path):
    with Workers(open_state(tmp_path)).begin(run_id="r", asset="a", partition="k", expected=100) as beat:
        return replace(beat.worker, phase=Phase.WORKING, moved=1000.0, rate=10.0)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"batch_seconds": 40.0}, 80.0),
        ({"batch_seconds": 0.5}, 30.0),
        ({"batch_seconds": 4000.0}, 600.0),
        ({"batch_seconds": 0.0}, 600.0),
        ({"phase": Phase.LOADING}, 1800.0),
        ({"phase": Phase.PUBLISHING}, 1800.0),
        ({"phase": Phase.PREPARING}, 2400.0),
    ],
)
def test_a_worker_has_twice_its_own_time_and_ten_minutes_at_most(worker, change, allowed):
    """A model that loads, and a file that is published, have their own time."""
    one = replace(worker, **change)
    assert not stuck_workers([one], LIMITS, now=1000.0 + allowed, watched_since=0.0)
    (stuck,) = stuck_workers([one], LIMITS, now=1001.0 + allowed, watched_since=0.0)
    assert (stuck.still, stuck.allowed) == (allowed + 1, allowed)


def test_time_that_nobody_watched_makes_nobody_stuck(worker):
    """A machine that slept for a night, or a daemon that was down, must not end every worker."""
    one = replace(worker, batch_seconds=40.0)
    assert not stuck_workers([one], LIMITS, now=50_000.0, watched_since=49_950.0)
    assert stuck_workers([one], LIMITS, now=50_081.0, watched_since=50_000.0)


def test_a_worker_of_another_machine_or_boot_is_not_judged(worker):
    """Its clock and its pid are not ours."""
    for change in ({"host": "other"}, {"boot_id": "other"}):
        assert not stuck_workers([replace(worker, **change)], LIMITS, now=1e9, watched_since=0.0)


def test_a_wall_clock_that_jumps_makes_nobody_stuck(worker):
    """Fault 16: what people read as a time is never used to judge."""
    one = replace(worker, batch_seconds=40.0, beat_at=0.0, committed_at=0.0, started_at=9e9)
    assert not stuck_workers([one], LIMITS, now=1010.0, watched_since=0.0)


def test_slow_is_far_below_the_median_of_the_others_for_long(worker):
    """30% below the others doing the same work, without a break, while it was watched."""
    peers = [replace(worker, run_id=f"p{n}", rate=10.0 + n) for n in range(3)]
    other_asset = replace(worker, run_id="e", asset="b", rate=1000.0)
    assert not slow_workers([replace(worker, rate=7.8), *peers, other_asset], LIMITS)
    (slow,) = slow_workers([replace(worker, rate=7.0), *peers, other_asset], LIMITS)
    assert (slow.worker.run_id, slow.peers) == ("r", 11.0)
    assert not slow_workers([replace(worker, rate=7.0)], LIMITS), "nobody to compare with"

    first = slow_since({}, [slow], now=100.0, watched_since=0.0)
    assert slow_since(first, [slow], now=700.0, watched_since=0.0) == {"r.a": 100.0}
    assert slow_since(first, [slow], now=700.0, watched_since=650.0) == {"r.a": 700.0}
    assert slow_since(first, [], now=700.0, watched_since=0.0) == {}

"""Fault 16: a wall clock that jumps by years between commits, kills and publications changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sensors.progress_judge import ProgressLimits
from sensors.worker_health import stuck_workers
from vlm_assets.config.settings import CHECKOUT
from vlm_durable.files.layout import Home
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers
from vlm_durable.versions.published import PublishedPartitions

SCRIPT = Path(__file__).with_name("jumping_clock.py")
ROWS = 40


@pytest.fixture
def live(program, tmp_path):
    """Runs the script under a clock of its own; the argument says after how many rows it kills itself."""
    program("faketime")
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }

    def run(die_after: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, SCRIPT, tmp_path / "home", str(die_after)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_rows_and_versions_are_in_order_whatever_the_clock_says(live, tmp_path):
    """Killed twice under clocks 30 years apart: nothing lost, nothing twice, and the last version is last."""
    for rows in (12, 28):
        assert live(rows).returncode == -signal.SIGKILL
    whole = live(0)
    assert whole.returncode == 0, whole.stderr
    restored, years, longest, has_rate = whole.stdout.split()
    assert (restored, has_rate) == ("28", "True")
    assert int(years) >= 2, "the clock did jump"
    assert float(longest) < 60, "a learned time is not made of jumps"
    published = PublishedPartitions(Home(tmp_path / "home").asset("a"))
    assert published.verify("k").ok
    assert pq.read_table(published.path("k"))["value"].to_pylist() == list(range(ROWS))
    assert published.record("k").published_at < "2010", "it was published by a clock that was wrong"


def test_a_dead_worker_of_another_year_is_dead_and_a_jump_makes_none_stuck(live, tmp_path):
    """Liveness is a lock, and standing still is told by the clock that never jumps."""
    assert live(8).returncode == -signal.SIGKILL
    workers = Workers(open_state(tmp_path / "home"))
    assert not workers.living()
    (dead,) = workers.dead()
    assert abs(dead.committed_at - time.time()) > 3600, "by its own clock it is elsewhere"
    now = time.monotonic()
    assert not stuck_workers([dead], ProgressLimits(), now=now, watched_since=0.0)
    assert stuck_workers([dead], ProgressLimits(), now=now + 601, watched_since=0.0)

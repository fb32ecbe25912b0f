"""Heartbeats: who lives is told by a lock, how far it is by a record that may be lost."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest

from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Phase, WorkerRecordError, Workers

HOLDER = """
import sys, time
from pathlib import Path
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers
workers = Workers(open_state(Path(sys.argv[1])))
beat = workers.begin(run_id="r2", asset="a", partition="k", expected=9)
print("held", flush=True)
sys.stdin.read()
"""


class Clock:
    """Seconds that stand still until they are moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def workers(tmp_path):
    return Workers(open_state(tmp_path))


def begin(workers, clock, **changes):
    fields = {"run_id": "r1", "asset": "a", "partition": "k", "expected": 100, **changes}
    beat = workers.begin(**fields, clock=clock, monotonic=clock)
    beat.resume(restored=10)
    return beat


def test_a_worker_lives_from_its_begin_to_its_end(workers, clock):
    """The record of a materialization that has ended does not stay behind."""
    with begin(workers, clock):
        (worker,) = workers.living()
        assert (worker.run_id, worker.asset, worker.partition, worker.pid) == ("r1", "a", "k", os.getpid())
        assert worker.is_here
        assert not workers.dead()
    assert not workers.living()
    assert not workers.dead()
    assert not list(workers.directory.iterdir())


def test_a_killed_worker_is_dead_and_can_be_forgotten(workers, tmp_path):
    """A lock that a killed process cannot free itself is freed by the system."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, workers.directory.parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    (worker,) = workers.living()
    assert worker.pid == process.pid
    workers.forget(worker)
    assert workers.living() == [worker], "a living one's files stay"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not workers.living()
    assert workers.dead() == [worker]
    workers.forget(worker)
    assert not workers.dead()


def test_a_forked_child_does_not_keep_its_parent_alive(workers):
    """A child made by fork holds no lock of a dead parent's materialization."""
    script = HOLDER.replace("sys.stdin.read()", "import os\nif os.fork() == 0:\n    sys.stdin.read()")
    process = subprocess.Popen(
        [sys.executable, "-c", script, workers.directory.parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    process.wait()
    assert [worker.run_id for worker in workers.dead()] == ["r2"]
    process.stdin.close()


def test_beats_say_rate_and_learned_time(workers, clock):
    """The learned time is the longest between two commits; the rate is of late, not of the whole run."""
    with begin(workers, clock) as beat:
        clock.now += 500  # a model that takes long to load is no slow commit
        beat.enter(Phase.WORKING, device="cpu-0")
        for batch in range(1, 5):
            clock.now += 10
            beat.beat(computed=8 * batch, committed=10 + 8 * (batch // 2) * 2)
        (worker,) = workers.living()
        assert (worker.device, worker.phase, worker.batch_seconds) == ("cpu-0", Phase.WORKING, 20)
        assert worker.rate == pytest.approx(0.8)
        assert (worker.computed, worker.committed, worker.moved) == (32, 42, clock.now)
        for batch in range(5, 45):
            clock.now += 20
            beat.beat(computed=8 * batch, committed=10 + 8 * batch)
        assert workers.living()[0].rate == pytest.approx(0.4)


def test_a_commit_is_said_when_it_happens(workers, clock):
    """Not at the next batch, which may take long: a worker that has just committed does not stand still."""
    with begin(workers, clock) as beat:
        beat.enter(Phase.WORKING)
        clock.now += 5
        beat.beat(computed=8, committed=10)
        clock.now += 30
        beat.commit(18)
        (worker,) = workers.living()
        assert (worker.committed, worker.moved, worker.batch_seconds) == (18, clock.now, 35)
        clock.now += 60
        beat.beat(computed=16, committed=18)
        (worker,) = workers.living()
        assert (worker.computed, worker.moved, worker.batch_seconds) == (16, clock.now - 60, 35), "said once"
    beat.commit(26)
    assert not list(workers.directory.iterdir()), "nothing stays behind its end"


def test_partitions_that_share_the_work_stand_still_only_together(workers, clock):
    """One may have nothing left to commit while the other goes on; one that has ended says nothing."""
    with begin(workers, clock) as beat, begin(workers, clock, asset="b") as other:
        for one in (beat, other):
            one.work_beside([beat, other])
        beat.enter(Phase.LOADING, device="gpu-0")
        assert {(worker.phase, worker.device) for worker in workers.living()} == {(Phase.LOADING, "gpu-0")}
        other.enter(Phase.WORKING)
        for commit in (beat.commit, lambda rows: beat.beat(computed=rows, committed=rows)):
            clock.now += 30
            commit(beat.worker.committed + 8)
            assert [worker.moved for worker in workers.living()] == [clock.now] * 2
        assert {worker.asset: worker.committed for worker in workers.living()} == {"a": 26, "b": 10}
        other.end()
        clock.now += 30
        beat.commit(34)
        beat.enter(Phase.PUBLISHING)
        (worker,) = workers.living()
        assert (worker.asset, worker.phase) == ("a", Phase.PUBLISHING)


def test_partitions_that_share_the_work_have_as_long_for_a_batch(workers, clock):
    """One commits a moment after the other, or has nothing left to commit: that is no pace of its own."""
    with (
        begin(workers, clock) as beat,
        begin(workers, clock, asset="b") as other,
        begin(workers, clock, asset="c") as idle,
    ):
        for one in (beat, other, idle):
            one.work_beside([beat, other, idle])
        beat.enter(Phase.WORKING)
        for _ in range(25):
            clock.now += 100
            beat.commit(beat.worker.committed + 8)
            clock.now += 0.5
            other.commit(other.worker.committed + 8)
        assert [worker.batch_seconds for worker in workers.living()] == pytest.approx([100.5] * 3, abs=0.6)


def test_batches_and_commits_may_be_said_by_two_threads(workers):
    """The commit thread and the work say at once; no word of either is lost."""
    with workers.begin(run_id="r1", asset="a", partition="k", expected=1000) as beat:
        thread = threading.Thread(target=lambda: [beat.commit(rows) for rows in range(1, 501)])
        thread.start()
        for batch in range(1, 501):
            beat.beat(computed=batch, committed=0)
        thread.join()
        assert (beat.worker.computed, beat.worker.committed) == (500, 500)


def test_beats_are_cheap(workers, clock):
    """A thousand batches within a moment write the record once."""
    with begin(workers, clock) as beat:
        beat.enter(Phase.WORKING)
        before = workers.living()[0]
        for batch in range(1000):
            beat.beat(computed=batch, committed=10)
        assert workers.living()[0] == before
        clock.now += 2
        beat.beat(computed=1001, committed=10)
        assert workers.living()[0].computed == 1001


def test_a_record_that_is_gone_is_still_a_living_worker(workers, clock):
    """Unreadable never means nobody: the lock says that it lives, its name whose it is."""
    with begin(workers, clock) as beat:
        (workers.directory.parent / "liveness.db").unlink()
        (worker,) = workers.living()
        assert (worker.run_id, worker.asset, worker.pid) == ("r1", "a", 0)
        assert not worker.is_here
        clock.now += 5
        beat.beat(computed=1, committed=11)
        assert workers.living()[0].committed == 11


@pytest.mark.parametrize("torn", [b'{"run_id": "r1", "as', b"\xff\xfe"])
def test_a_torn_record_hides_no_worker(workers, clock, torn):
    """Heartbeats are not synced: what a power cut tore must not stop who looks at all workers, for ever."""
    with begin(workers, clock) as beat:
        database = workers.directory.parent / "liveness.db"
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("UPDATE workers SET record = CAST(? AS TEXT)", (torn,))
        assert [(one.run_id, one.pid) for one in workers.living()] == [("r1", 0)]
        beat.commit(11)
        assert workers.living()[0].committed == 11


def test_a_beat_that_cannot_be_written_does_not_stop_the_work(workers, clock, caplog):
    """A full or lost state folder costs the heartbeat, not the rows; who lives is known all the same."""
    with begin(workers, clock) as beat:
        database = workers.directory.parent / "liveness.db"
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            workers._state._database._liveness._busy_seconds = 0.1
            workers._state._database._liveness._engine.dispose()
            clock.now += 5
            beat.beat(computed=1, committed=11)
            assert "was not written" in caplog.text
        assert [one.run_id for one in workers.living()] == ["r1"]


def test_a_heartbeat_that_nobody_could_see_is_refused(tmp_path, clock):
    """Without a lock nobody could tell a living worker from a dead one, so it does not start."""
    (tmp_path / "workers").write_text("a file, not a folder")
    with pytest.raises(WorkerRecordError, match="cannot be kept"):
        begin(Workers(open_state(tmp_path)), clock)


@pytest.mark.parametrize(("waited", "began"), [(3600.0, 3600.0), (0.5, 0.0)])
def test_a_run_that_waited_for_another_counts_from_its_device(workers, clock, waited, began):
    """Its preparation went on beside the run before: rates and forecasts do not count it, nor the wait."""
    beat = begin(workers, clock)
    launched = beat.worker.started_at
    beat.enter(Phase.WAITING)
    clock.now += waited / 2
    beat.enter(Phase.WAITING)
    clock.now += waited / 2
    beat.enter(Phase.LOADING, device="GPU-1")
    assert beat.worker.started_at - launched == began

"""vlm_durable/journal/commits.py: when a group is due, who waits, where errors come up."""

import threading

import pyarrow as pa
import pytest

from vlm_durable.journal.commits import CommitPace, CommitThread


class Clock:
    """A clock that only moves when told to."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


class Disk:
    """Takes groups of tables; can be held up and can fail."""

    def __init__(self):
        self.groups = []
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()
        self.committed = threading.Event()
        self.error = None

    def commit(self, tables):
        """What the commit thread calls."""
        self.entered.set()
        assert self.free.wait(10)
        if self.error:
            raise self.error
        self.groups.append([table.num_rows for table in tables])
        self.committed.set()


@pytest.fixture
def disk():
    return Disk()


def thread(disk, clock=None, seconds=30.0, rows=10):
    return CommitThread(disk.commit, CommitPace(seconds, rows, clock or Clock()))


def rows(count):
    return pa.table({"n": list(range(count))})


def test_nothing_is_committed_before_it_is_due(disk):
    """Below both bounds rows wait: commits are grouped."""
    commits = thread(disk)
    commits.submit(rows(4))
    commits.submit(rows(5))
    assert not disk.committed.wait(0.05)
    commits.stop()
    assert disk.groups == [[4, 5]]


def test_enough_rows_are_committed_at_once(disk):
    """The number of rows bounds what a commit holds back."""
    commits = thread(disk)
    commits.submit(rows(4))
    commits.submit(rows(6))
    assert disk.committed.wait(10)
    assert disk.groups == [[4, 6]]
    commits.stop()


@pytest.mark.promise("Finished work stays")
def test_the_oldest_row_never_waits_longer_than_commit_seconds(disk):
    """Age counts from the first waiting table, by the clock that was given."""
    clock = Clock()
    commits = thread(disk, clock)
    commits.submit(rows(1))
    clock.now = 29.0
    commits.submit(rows(1))
    assert not disk.committed.wait(0.05)
    clock.now = 30.0
    commits.submit(rows(1))
    assert disk.committed.wait(10)
    assert disk.groups == [[1, 1, 1]]
    commits.stop()


def test_time_alone_makes_a_commit_due(disk):
    """Nothing more submitted, nobody flushing: the deadline itself commits."""
    commits = CommitThread(disk.commit, CommitPace(0.01, 10))
    commits.submit(rows(1))
    assert disk.committed.wait(10)
    assert disk.groups == [[1]]
    commits.stop()


def test_submitting_does_not_wait_for_a_hanging_disk(disk):
    """The model goes on while a commit hangs; flush is what waits, and it is counted."""
    commits = thread(disk)
    disk.free.clear()
    commits.submit(rows(10))
    assert disk.entered.wait(10)
    for _ in range(100):
        commits.submit(rows(1))
    assert disk.groups == [], "all were taken while the commit hung"
    before = commits.wait_seconds
    disk.free.set()
    commits.flush()
    assert commits.wait_seconds > before
    assert disk.groups == [[10], [1] * 100]
    commits.stop()


def test_an_error_comes_up_at_every_later_call_and_nothing_more_is_committed(disk):
    """A failed commit is never followed by another: order of commits is order of submission."""
    commits = thread(disk)
    disk.error = OSError("no space")
    commits.submit(rows(1))
    for call in (commits.flush, lambda: commits.submit(rows(1)), commits.flush):
        with pytest.raises(OSError, match="no space"):
            call()
    commits.stop()
    assert disk.groups == []


def test_rows_that_waited_behind_a_failed_commit_are_not_committed():
    """The disk works again at once: even so nothing is committed over the gap."""
    entered, free, groups = threading.Event(), threading.Event(), []

    def commit(tables):
        groups.append(len(tables))
        entered.set()
        assert free.wait(10)
        if len(groups) == 1:
            raise OSError("no space")

    commits = CommitThread(commit, CommitPace(30.0, 10, Clock()))
    commits.submit(rows(10))
    assert entered.wait(10)
    commits.submit(rows(10))
    free.set()
    with pytest.raises(OSError, match="no space"):
        commits.flush()
    commits.stop()
    assert groups == [1]

"""Which workers stand still and which are slower than the others, from their heartbeats alone.

What lives here: the limits and the judgement. What does not: what is done about it (``worker_health.py``).
Time is that of the machine's monotonic clock, and counts only while somebody watched: a machine that slept,
or a daemon that was down, makes nobody stuck.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resources.state.workers import Phase, Worker


@dataclass(frozen=True)
class WorkerLimits:
    """How long a worker may stand still, and how slow it may be. All in seconds but ``slow_share``.

    Without a commit for ``learned_times`` its own learned time it is stuck, but not before ``least`` and in
    any case after ``most``. ``loading``: for a model to load, and for a file to be published. ``waiting``:
    for a device, before that. Slower than its peers' median by ``slow_share`` for ``slow`` it is named.
    """

    learned_times: float = 2.0
    least: float = 30.0
    most: float = 600.0
    loading: float = 1800.0
    waiting: float = 600.0
    grace: float = 10.0
    slow_share: float = 0.3
    slow: float = 600.0

    def allowed(self, worker: Worker) -> float:
        """Seconds that this worker may go without a commit, or in its phase."""
        if worker.phase is Phase.WORKING:
            if not worker.batch_seconds:
                return self.most
            return min(max(self.learned_times * worker.batch_seconds, self.least), self.most)
        return self.loading + (self.waiting if worker.phase is Phase.PREPARING else 0.0)


@dataclass(frozen=True)
class Stuck:
    """A worker that stands still. still: seconds; allowed: seconds it had."""

    worker: Worker
    still: float
    allowed: float


def stuck_workers(
    workers: Iterable[Worker], limits: WorkerLimits, *, now: float, watched_since: float
) -> list[Stuck]:
    """The workers of this machine that stand still for longer than they may."""
    found = []
    for worker in workers:
        if worker.is_here:
            still = now - max(worker.moved, watched_since)
            allowed = limits.allowed(worker)
            if still > allowed:
                found.append(Stuck(worker, still, allowed))
    return found


@dataclass(frozen=True)
class Slow:
    """A worker whose rate is far below its peers'. peers: their median, properties a second."""

    worker: Worker
    peers: float


def slow_workers(workers: Sequence[Worker], limits: WorkerLimits) -> list[Slow]:
    """Workers that are slower than the median of those that do the same work beside them, at this moment."""
    found = []
    working = [one for one in workers if one.phase is Phase.WORKING and one.rate > 0]
    for worker in working:
        peers = [one.rate for one in working if one.asset == worker.asset and one.name != worker.name]
        if peers and worker.rate < (1.0 - limits.slow_share) * statistics.median(peers):
            found.append(Slow(worker, statistics.median(peers)))
    return found


def slow_since(
    before: Mapping[str, float], slow: Iterable[Slow], *, now: float, watched_since: float
) -> dict[str, float]:
    """Since when each slow worker has been slow without a break, by its name."""
    return {
        one.worker.name: before.get(one.worker.name, now)
        if before.get(one.worker.name, now) >= watched_since
        else now
        for one in slow
    }

"""A month of decisions without Dagster: retries and reconciliation on one moved clock.

What also watches workers, devices and files for so long is the rehearsal (``faults/rehearsal``).
"""

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import dagster as dg
import pyarrow as pa
import pytest

from faults.rehearsal.dagster_in_memory import INTERRUPTED, DagsterInMemory, SimulatedClock
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.runs import LAUNCHED_BY, RETRY, UNFINISHED
from sensors.failed_partitions import FailedPartitions, Watched
from sensors.reconciliation import end_dead_runs, report_published
from sensors.retry_decision import INTERRUPTIONS_TOLD, Policy
from vlm_durable.files.layout import Home
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import pause, resume
from vlm_durable.state.workers import Workers
from vlm_durable.versions.published import PublishedPartitions

MINUTE, HOUR = 60.0, 3600.0
ASSET = "first"
KEYS = tuple(f"k{n:02}" for n in range(52))
"""Two more are launched by hand on each day but the last."""
POISON, POOR, UNWANTED = "k03", "k05", "k22"
"""Fails always, is interrupted always, and is cancelled before Dagster's database is lost."""
POLICY = Policy(attempts=5, backoff_seconds=10 * MINUTE)
S = dg.DagsterRunStatus


@dataclass
class Launched:
    """What a run does, drawn when it is started. until: unix seconds of its end."""

    key: str
    how: str
    until: float


@dataclass
class Month:
    """A home, its partitions, a person, and Dagster from memory."""

    home: Home
    state: ControlState
    clock: SimulatedClock
    chance: random.Random
    dagster: DagsterInMemory = field(init=False)
    rows: Counter = field(default_factory=Counter)
    work: dict = field(default_factory=dict)
    cancelled: set = field(default_factory=set)
    launches: list = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    is_paused: bool = False

    def __post_init__(self):
        self.dagster = DagsterInMemory(self.clock)
        self.asset = self.home.asset(ASSET)
        self.published = PublishedPartitions(self.asset)
        self.outbox = Outbox(self.state)
        with Workers(self.state).begin(run_id="r", asset=ASSET, partition="", expected=9) as beat:
            self.made = beat.worker
        self.restart()

    def restart(self):
        """The code server was started again: nothing is known but what is on disk."""
        watched = Watched(
            assets=(ASSET,),
            keys=frozenset(KEYS),
            interrupted=lambda asset: self.unpublished(self.rows),
            missing=lambda asset, keys: self.unpublished(keys),
            rows=lambda key: self.rows[key],
            is_stale=lambda asset, key: False,
            working=lambda: {one.partition for one in self.living()},
            heaviest_first=sorted,
        )
        self.retries = FailedPartitions(watched, self.state, policy=POLICY, cap=3)

    def unpublished(self, keys):
        there = set(self.asset.published_keys())
        return [key for key in keys if key not in there]

    # What the sensors see of processes.

    def living(self):
        return [self.worker(run_id) for run_id, one in self.work.items() if one.how != "killed"]

    def dead(self):
        return [self.worker(run_id) for run_id, one in self.work.items() if one.how == "killed"]

    def forget(self, worker):
        del self.work[worker.run_id]

    def worker(self, run_id):
        return replace(self.made, run_id=run_id, partition=self.work[run_id].key)

    # What Dagster and the runs do.

    def start(self, key, **tags):
        assert not [run for run in self.dagster.runs_in(UNFINISHED) if run.partition == key], "one at a time"
        self.rows[key] += 0  # Its journal is there from now on.
        run_id = self.dagster.launch(key, [ASSET], **tags)
        how = self.chance.choices(
            ["succeeds", "fails", "gets on", "is interrupted", "killed", "is cancelled"],
            [40, 15, 9, 9, 18, 9],
        )[0]
        how = {POISON: "fails", POOR: "is interrupted", UNWANTED: "is cancelled"}.get(key, how)
        self.work[run_id] = Launched(key, how, self.clock.now + self.chance.uniform(0.2, 3.0) * HOUR)
        return run_id

    def go_on(self):
        """Let end what ends now."""
        for run_id, one in list(self.work.items()):
            if self.clock.now < one.until or one.how == "killed":
                continue
            del self.work[run_id]
            self.rows[one.key] += one.how in ("succeeds", "gets on")
            if one.how == "succeeds":
                self.publish(one.key, run_id)
                self.dagster.change(run_id, S.SUCCESS)
            elif one.how == "is interrupted":
                self.dagster.change(run_id, S.FAILURE, **INTERRUPTED)
            elif one.how == "is cancelled":
                self.dagster.change(run_id, S.CANCELED)
                self.cancelled.add(one.key)
            else:
                self.dagster.change(run_id, S.FAILURE)

    def publish(self, key, run_id):
        table = pa.table({"property_id": [f"{key}-{n}" for n in range(3)], "ordinal": range(3)})
        staged = self.published.stage(
            key,
            table.to_batches(),
            table.schema,
            expected_ids=table["property_id"].to_pylist(),
            fingerprint="f",
            metadata={},
        )
        self.published.publish(staged)
        self.dagster.materialize(ASSET, key, run_id)

    # The ticks.

    def retry(self):
        ticked = self.retries.tick(self.dagster, tick=f"{self.clock.now}", now=self.clock.now)
        assert not (ticked.launches and self.is_paused), "nothing is launched while paused"
        for one in ticked.launches:
            assert one.key not in self.cancelled, "a cancel stays one"
            tags = {LAUNCHED_BY: RETRY, "dagster/run_key": one.run_key}
            run_id = self.start(one.key, **tags)
            self.launches.append((one.key, self.clock.now, self.rows[one.key], one.run_key, run_id))
        ours = [run for run in self.dagster.runs_in(UNFINISHED) if run.launched_by == RETRY]
        assert len(ours) <= self.retries.cap

    def reconcile(self):
        killed = [worker.run_id for worker in self.dead()]
        ended, _ = end_dead_runs(self.dagster, self, {})
        assert sorted(ended) == sorted(killed), "what is gone is ended, and nothing that lives"
        told = report_published(self.dagster, [self.asset], KEYS, self, tags_of=lambda *_: {})
        self.counts["told again"] += len(told)

    def hour(self):
        for _ in range(2):
            self.go_on()
            self.clock.now += 30 * MINUTE
            self.reconcile()
            self.retry()


@pytest.fixture
def month(tmp_path):
    clock = SimulatedClock(1_790_000_000.0)
    state = ControlState(tmp_path / "state", clock=clock)
    return Month(Home(tmp_path), state, clock, random.Random(7))


@pytest.mark.promise("A month without you")
def test_a_month_of_faults_keeps_every_promise(month):
    """Back-off, five attempts, cancels, pause and one run at a time hold whatever happens for thirty days."""
    for day in range(30):
        for key in KEYS[2 * day : 2 * day + 2]:
            month.start(key)
        if day == 12:
            # Dagster's database is lost with all its runs, and the code server starts again.
            month.work.clear()
            month.dagster = DagsterInMemory(month.clock)
            month.restart()
        for hour in range(24):
            if (day, hour) == (1, 0):
                pause(month.state, "the power is cut", now=month.clock.now)
                month.is_paused = True
            elif (day, hour) == (2, 6):
                resume(month.state)
                month.is_paused = False
            month.hour()
        if day in (5, 20):
            for key in sorted(month.cancelled):
                month.clock.now += 1
                month.start(key)
            month.cancelled.clear()
    assert_backed_off(month)
    assert month.counts["told again"] >= 15, "what was published is known to the new database"
    given_up = {
        alert.partition
        for alert in month.outbox.open_subjects().values()
        if alert.kind == "partition_given_up"
    }
    assert given_up == {POISON}
    told = {alert.kind for alert in month.outbox.open_subjects().values() if alert.partition == POOR}
    assert told == {"interrupted_again"}
    unfinished = set(month.unpublished(KEYS))
    assert unfinished - month.cancelled <= {POISON, POOR, *(one.key for one in month.work.values())}
    run_keys = [run_key for *_, run_key, _ in month.launches]
    assert len(set(run_keys)) == len(run_keys) > 40


def assert_backed_off(month):
    """Launches of a partition without a new row in between come further and further apart, five at most."""
    by_key = defaultdict(list)
    for key, at, rows, _, run_id in month.launches:
        by_key[key].append((at, rows, run_id))
    poisoned = [at for at, *_ in by_key[POISON]]
    # Five of each database's life: a ledger outlives Dagster's database, so five in all.
    assert len(poisoned) == POLICY.attempts
    gaps = [later - earlier for earlier, later in itertools.pairwise(poisoned)]
    assert all(gap >= POLICY.delay(number + 1) for number, gap in enumerate(gaps))
    interrupted = [at for at, *_ in by_key[POOR]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(interrupted)]
    assert all(gap >= POLICY.delay(6) for gap in gaps[10:]), "resumed less and less often"
    assert len(interrupted) > 10 > INTERRUPTIONS_TOLD, "but never given up"

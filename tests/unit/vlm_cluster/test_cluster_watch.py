"""Who lives in a cluster: heartbeats decide, by the database's clock, and nothing else does."""

import json
from dataclasses import asdict

import dagster as dg
import pytest
from dagster import DagsterRunStatus

from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import LAUNCHER_JOB, RunState
from tests.support.calls import calls_in
from vlm_assets.webserver.home import STARTING_SECONDS
from vlm_cluster.cluster_watch import ClusterWatch, ClusterWatcher, TakingOver, take_over, why_gone
from vlm_durable.files.layout import Home
from vlm_durable.mirror.bucket import S3Folder, StoreAwayError, StoreError
from vlm_durable.state.database import open_state
from vlm_durable.state.nodes import ClusterSnapshot, Node, NodeRecord
from vlm_durable.state.pause import Pause
from vlm_durable.versions.stored import StoredPartitions

RUN = "0c9f1d0e-0000-4000-8000-000000000001"
JOB = f"dagster-run-{RUN}"


@dg.job
def nothing():
    """A job whose runs are only ever pretended to be under way."""


class Cluster:
    """Two nodes on a clock of their database; what Ray would say is set."""

    def __init__(self, path, monkeypatch):
        self.now = 1000.0
        self.beats = {"one": 1000.0, "two": 1000.0}
        self.runs = {"one": {RUN}, "two": set()}
        self.pauses = {}
        self.ended, self.stopped = set(), []
        self.instance = dg.DagsterInstance.ephemeral()
        self.dagster = DagsterFacts(self.instance)
        monkeypatch.setattr(DagsterFacts, "job_has_ended", lambda _, job: job in self.ended)
        monkeypatch.setattr(DagsterFacts, "stop_launcher_job", lambda _, job: self.stopped.append(job))
        self.workers = {"one": set(), "two": set()}
        self.instance.event_log_storage.set_concurrency_slots("gpu", 2)
        self.outbox = Outbox(open_state(path))
        self.watcher = ClusterWatcher(self, self.outbox, "gpu")
        self.watch = ClusterWatch()

    def snapshot(self):
        """As ``Nodes`` answers."""
        nodes = {}
        for name, beat in self.beats.items():
            record = NodeRecord(
                name,
                f"boot {name}",
                1,
                "10.0.0.1",
                1,
                runs=frozenset(self.runs[name]),
                workers=frozenset(self.workers.get(name, ())),
            )
            nodes[name] = Node(record, beat, self.now - beat, self.pauses.get(name))
        return ClusterSnapshot(self.now, nodes)

    def passes(self, seconds, *, beating=("one", "two")):
        """Let time pass, with a look every five seconds; in long times as seldom as is no gap."""
        every = 15 if seconds > 60 and not seconds % 15 else 5
        for _ in range(int(seconds // every)):
            self.now += every
            self.beats |= dict.fromkeys(beating, self.now)
            self.looks()

    def looks(self):
        return self.watcher.check(self.watch, self.dagster, unix=self.now)

    def starts(self, status=DagsterRunStatus.STARTED, tags=None):
        job = nothing
        self.instance.create_run_for_job(job, run_id=RUN, status=status, tags=tags or {LAUNCHER_JOB: JOB})

    @property
    def status(self):
        return self.instance.get_run_by_id(RUN).status


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    one = Cluster(tmp_path, monkeypatch)
    one.starts()
    one.looks()
    return one


def test_a_silent_node_is_dead_after_its_time_and_not_before(cluster):
    """Its run is ended as interrupted, so that it goes on elsewhere; its place in the pool goes with it."""
    cluster.passes(25, beating=("two",))
    assert cluster.status is DagsterRunStatus.STARTED
    cluster.passes(5, beating=("two",))
    assert cluster.status is DagsterRunStatus.FAILURE
    assert cluster.dagster.run_states([RUN])[RUN].interrupted_by == "UNEXPECTED_TERMINATION"
    assert cluster.stopped == [JOB]
    (limit,) = cluster.instance.event_log_storage.get_pool_limits()
    assert limit.limit == 1
    assert list(cluster.outbox.open_subjects()) == ["nodes/one"]
    cluster.passes(5)
    assert not cluster.outbox.open_subjects()


def test_who_was_away_declares_nobody_dead_before_a_full_watch(cluster):
    """The database, or the daemon, was away for an hour: every heartbeat is old then."""
    cluster.now += 3600
    cluster.looks()
    cluster.passes(20, beating=())
    assert cluster.status is DagsterRunStatus.STARTED
    cluster.passes(10, beating=("two",))
    assert cluster.status is DagsterRunStatus.FAILURE


def test_what_ray_says_shortens_the_wait_and_means_nothing_while_the_node_beats(cluster):
    """A head that was restarted knows no job, or calls living ones failed."""
    cluster.ended.add(JOB)
    cluster.passes(60)
    assert cluster.status is DagsterRunStatus.STARTED
    cluster.passes(10, beating=("two",))
    assert cluster.status is DagsterRunStatus.STARTED
    cluster.passes(5, beating=("two",))
    assert cluster.status is DagsterRunStatus.FAILURE


def test_a_process_that_is_gone_from_a_node_that_beats_is_ended_at_once(cluster):
    """It was killed, or the machine was started anew under the same name."""
    cluster.runs["one"] = set()
    cluster.passes(5)
    assert cluster.status is DagsterRunStatus.FAILURE


OF_THIS_MACHINE = {".dagster/grpc_info": json.dumps({"host": "localhost"})}
"""What the launcher of this machine's processes tags a run with, before it starts one."""
OF_ANOTHER_RUN = {LAUNCHER_JOB: "dagster-run-0c9f1d0e-0000-4000-8000-000000000002"}
S = DagsterRunStatus


@pytest.mark.parametrize(
    ("status", "tags", "seconds", "then", "stopped"),
    [
        pytest.param(S.STARTING, {LAUNCHER_JOB: JOB}, STARTING_SECONDS, S.FAILURE, [JOB], id="on no node"),
        pytest.param(S.STARTING, {LAUNCHER_JOB: JOB}, 5, S.FAILURE, [JOB], id="Ray says that it ended"),
        pytest.param(S.STARTING, {"a": "b"}, STARTING_SECONDS, S.FAILURE, [JOB], id="before it was tagged"),
        pytest.param(S.STARTING, OF_ANOTHER_RUN, STARTING_SECONDS, S.FAILURE, [JOB], id="its parent's tag"),
        pytest.param(S.STARTING, OF_THIS_MACHINE, STARTING_SECONDS, S.FAILURE, [], id="of this machine"),
        pytest.param(S.CANCELING, OF_THIS_MACHINE, STARTING_SECONDS, S.CANCELED, [], id="cancelled here"),
    ],
)
def test_no_run_stands_in_starting(tmp_path, monkeypatch, status, tags, seconds, then, stopped):
    """It went to a machine that died, or its launch was cut short: its job alone must not begin later.

    What has no partition runs beside Dagster: killed before it said its pid, nobody else would end it.
    """
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.runs["one"] = set()
    cluster.starts(status, tags)
    cluster.ended |= {JOB} if seconds < STARTING_SECONDS else set()
    cluster.looks()
    cluster.passes(seconds)
    assert cluster.status is status
    cluster.passes(5)
    assert (cluster.status, cluster.stopped) == (then, stopped)


def test_a_run_of_this_machine_that_has_begun_is_the_reconciliations(tmp_path, monkeypatch):
    """It has said its pid: whether that lives is seen on this machine, and not by any heartbeat."""
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.runs["one"] = set()
    cluster.starts(DagsterRunStatus.STARTING, OF_THIS_MACHINE)
    monkeypatch.setattr(DagsterFacts, "process_of", lambda _, run_id: (4711, 1.0) if run_id == RUN else None)
    cluster.passes(2 * STARTING_SECONDS)
    assert cluster.status is DagsterRunStatus.STARTING


@pytest.mark.parametrize("is_node", [True, False])
def test_a_run_that_a_person_starts_by_hand_is_no_run_of_rays(tmp_path, monkeypatch, is_node):
    """`dagster asset materialize`: no launcher, no tag. Between its two assets no heartbeat speaks of it."""
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.runs["one"] = set()
    cluster.starts(tags={"a": "b"})
    for worker in (f"{RUN}.property_descriptions", None, f"{RUN}.property_embeddings"):
        cluster.workers["one"] = {worker} - {None} if is_node else set()
        cluster.passes(105)
        assert cluster.status is DagsterRunStatus.STARTED
    cluster.passes(30, beating=("two",))
    assert cluster.status is (DagsterRunStatus.FAILURE if is_node else DagsterRunStatus.STARTED)


def test_the_pool_follows_the_nodes(cluster):
    """A paused node counts no more, a new one does; a lower limit that a person set is kept."""

    def limit():
        return cluster.instance.event_log_storage.get_pool_limits()[0].limit

    cluster.pauses["two"] = Pause(0.0, "", "two")
    cluster.looks()
    assert limit() == 1
    cluster.pauses.clear()
    cluster.beats["three"], cluster.runs["three"] = cluster.now, set()
    cluster.looks()
    assert limit() == 3
    cluster.instance.event_log_storage.set_concurrency_slots("gpu", 2)
    cluster.looks()
    assert limit() == 2


def test_a_run_that_a_person_cancels_is_ended_as_cancelled(cluster):
    """Dagster would start again what a person has just stopped."""
    run = cluster.instance.get_run_by_id(RUN)
    cluster.instance.report_run_canceling(run)
    cluster.passes(30, beating=("two",))
    assert cluster.status is DagsterRunStatus.CANCELED


def test_a_look_at_a_hundred_machines_with_eight_devices_is_short():
    """Who lives is asked every five seconds; the cursor is kept for each of these looks."""
    runs = [RunState(f"run-{n}", DagsterRunStatus.STARTED, 0.0, None) for n in range(800)]
    nodes = {
        f"node-{n}": Node(
            NodeRecord(f"node-{n}", "b", 1, "a", 8, runs=frozenset(one.run_id for one in runs[n::100])),
            1000.0,
            0.0,
        )
        for n in range(100)
    }
    watch, look = ClusterWatch(), ClusterSnapshot(1000.0, nodes)
    asked = {"has_ended": lambda _: True, "has_begun": lambda _: False}

    def look_at_all():
        watch.update(look, runs)
        assert [why_gone(run, watch, look, **asked) for run in runs] == [None] * 800

    assert calls_in(look_at_all) < 100 * len(runs), "not each run for each machine"
    assert look.slots == 800
    assert len(json.dumps(asdict(watch))) < 50_000


def test_what_other_machines_publish_is_taken_over_also_after_an_outage(cluster, tmp_path, monkeypatch):
    """Status, audit and search read it on this machine. One that fails for good delays no other."""
    taken, away = [], [True]

    def pull(_, key):
        if away:
            raise StoreAwayError("the store is away")
        if key == "damaged":
            raise StoreError("no such object")
        taken.append(key)
        return ()

    monkeypatch.setattr(StoredPartitions, "pull", pull)
    stored = [StoredPartitions(Home(tmp_path).asset("a"), S3Folder("bucket", ""))]
    for key in ("damaged", "k", "m"):
        cluster.dagster.report_materialization(dg.AssetMaterialization("a", partition=key))
    so_far = TakingOver()
    assert len(take_over(stored, so_far, cluster.dagster)) == 1, "a store that is away is asked once a look"
    assert so_far.missing[0][1] != "damaged", "the next look begins with another"
    away.clear()
    take_over(stored, so_far, cluster.dagster)
    take_over(stored, so_far, cluster.dagster)
    assert taken == ["k", "m"]
    assert so_far.missing == [("a", "damaged")]

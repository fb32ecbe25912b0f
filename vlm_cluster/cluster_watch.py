"""The nodes of a cluster over time: a silent node counts as dead, and its runs are ended, to go on elsewhere.

Only here is decided which node and run is alive. Heartbeats decide, by the database's clock. A silence counts
only while this sensor ticked: if it was away itself, or could not ask the database, it declares no node dead
before it has watched for that long again. If Ray says that a job has ended, the wait is shorter; no other
answer of Ray counts. Dagster's run retries start a run again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import dagster as dg

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import UNDER_WAY, RunState, first_launcher_job
from sensors.run_end import end_gone_run
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.webserver.home import POOL, STARTING_SECONDS
from vlm_durable.commands import command
from vlm_durable.mirror.bucket import StoreAwayError, StoreError
from vlm_durable.state.nodes import DEAD_SECONDS, SILENT_SECONDS, ClusterSnapshot, Node, Nodes
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError

NAME = "cluster"
TAKING_OVER = "taking_over"
INTERVAL_SECONDS = 5
NODE_DEAD = "node_dead"

_SETTLED_SECONDS = 5.0
_GAP_SECONDS = 15.0
"""The longest gap between two ticks: after a longer one, nothing is known of the time between."""

_TAKING_SECONDS = 3.0
"""How long a tick takes over partitions of other machines: the rest follows at the next ticks."""


@dataclass
class ClusterWatch:
    """The sensor's memory between two ticks; may be lost. All times are of the database's clock.

    at: of the last tick; since: of the first tick after which there was no gap. first_seen: when each run
    that no node has begun was first seen under way. nodes: the node that has begun each other run. slots: of
    the pool.
    """

    at: float = 0.0
    since: float = 0.0
    first_seen: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    slots: int = 0

    def update(self, snapshot: ClusterSnapshot, runs: Iterable[RunState]) -> None:
        """Record where the watched runs are now."""
        if snapshot.now - self.at > _GAP_SECONDS or snapshot.now < self.at:
            self.since = snapshot.now
        self.at = snapshot.now
        run_ids = {run.run_id for run in runs}
        self.nodes = {run_id: name for run_id, name in self.nodes.items() if run_id in run_ids}
        for run_id in run_ids:
            node = snapshot.node_of_run(run_id)
            if node is not None and self.silence(node) <= DEAD_SECONDS:
                self.nodes[run_id] = node.name
        not_begun = run_ids - self.nodes.keys()
        self.first_seen = {run_id: self.first_seen.get(run_id, snapshot.now) for run_id in not_begun}

    def silence(self, node: Node) -> float:
        """The seconds for which a node has been silent, counted only while this sensor ticked."""
        return self.at - max(node.beat_at, min(self.since, self.at))


def why_gone(
    run: RunState,
    watch: ClusterWatch,
    snapshot: ClusterSnapshot,
    *,
    has_ended: Callable[[str], bool],
    has_begun: Callable[[str], bool],
) -> str | None:
    """Why the process of a run under way is certainly gone, as a sentence; None if it may live.

    has_ended: whether Ray says that a job has ended; asked only if heartbeats leave it open. has_begun:
    whether the process of a run on this machine has begun; the reconciliation ends such runs.
    """
    job = _job(run)
    name = watch.nodes.get(run.run_id)
    if name is None:
        age = watch.at - max(watch.first_seen[run.run_id], watch.since)
        if run.is_here:
            if age <= STARTING_SECONDS or has_begun(run.run_id):
                return None
            return f"Its process on this machine did not begin within {age:.0f} s."
        if age > STARTING_SECONDS:
            return f"No node began it within {age:.0f} s."
        return "Ray's job of it ended before it began." if age > _SETTLED_SECONDS and has_ended(job) else None
    node = snapshot.nodes.get(name)
    if node is None:
        return f"The node {name}, where it ran, was forgotten."
    silence = watch.silence(node)
    if silence > DEAD_SECONDS:
        return f"The node {name}, where it ran, is silent for {silence:.0f} s."
    if silence > SILENT_SECONDS:
        return f"Ray's job of it on {name} has ended." if has_ended(job) else None
    # A run that a person started by hand is not listed between its two assets: its node itself ends it.
    if run.run_id in node.record.runs or run.launcher_job is None:
        return None
    return f"Its process on {name} is gone without a word: it was killed, or the node was started anew."


def _is_watched(run: RunState, snapshot: ClusterSnapshot) -> bool:
    """Whether a run is Ray's, or has not begun, or is being cancelled, or is listed by a node.

    Other runs at work are left alone: the reconciliation watches the runs of this machine's code server, and
    nothing watches what a person started by hand on a machine that is no node.
    """
    is_at_work = run.status is dg.DagsterRunStatus.STARTED
    return run.launcher_job is not None or not is_at_work or snapshot.node_of_run(run.run_id) is not None


def _job(run: RunState) -> str:
    """The run's job in Ray. A run whose launch was cut short has no tag of it yet."""
    return run.launcher_job or first_launcher_job(run.run_id)


_GOES_ON = " What was committed is in the journal; the next start of the partition goes on from there."


@dataclass(frozen=True)
class ClusterWatcher:
    """Checks the nodes and runs of a cluster, without Dagster's classes."""

    nodes: Nodes
    outbox: Outbox
    pool: str

    def check(self, watch: ClusterWatch, dagster: DagsterFacts, *, unix: float) -> list[str]:
        """One tick: changes ``watch``, ends runs, fits the pool, posts alerts. Returns sentences.

        Raises ControlStateError; nothing was ended then.
        """
        # Runs are read before nodes: a run under way whose process is gone a moment later has ended.
        under_way = dagster.runs_in(UNDER_WAY)
        snapshot = self.nodes.snapshot()
        runs = [run for run in under_way if _is_watched(run, snapshot)]
        watch.update(snapshot, runs)
        sentences = []
        for run in runs:
            why = why_gone(
                run,
                watch,
                snapshot,
                has_ended=dagster.job_has_ended,
                has_begun=lambda run_id: dagster.process_of(run_id) is not None,
            )
            if why is None:
                continue
            # A job that still waits in Ray must not begin later.
            job = None if run.is_here else _job(run)
            if end_gone_run(dagster, run.run_id, why + _GOES_ON, job=job):
                sentences.append(f"Run {run.run_id} was ended. {why}")
        slots = sum(
            node.record.slots
            for node in snapshot.nodes.values()
            if node.pause is None and watch.silence(node) <= DEAD_SECONDS and not node.is_dead
        )
        dagster.fit_pool(self.pool, previous=watch.slots, slots=slots)
        watch.slots = slots
        self._post_alerts(watch, snapshot, unix)
        sentences += [
            f"{node.name} {node.sentence()}."
            for node in snapshot.nodes.values()
            if node.record.slots and not node.takes_runs
        ]
        return sentences

    def _post_alerts(self, watch: ClusterWatch, snapshot: ClusterSnapshot, unix: float) -> None:
        """Alert of nodes that count as dead; note the recovery of nodes that beat again."""
        open_subjects = {
            subject for subject, alert in self.outbox.open_subjects().items() if alert.kind == NODE_DEAD
        }
        for name, node in snapshot.nodes.items():
            subject = f"nodes/{name}"
            if watch.silence(node) > DEAD_SECONDS and subject not in open_subjects:
                self.outbox.post(
                    Alert(
                        kind=NODE_DEAD,
                        subject=subject,
                        occurrence=f"{node.beat_at:.0f}",
                        severity="error",
                        title=f"The node {name} is silent: it counts as dead",
                        next_step=(
                            "Its partitions go on elsewhere by themselves. Look at the machine"
                            f" ({node.record.address}): power, network, `systemctl status vlm-assets-node`."
                            " It is used again when it beats. Where it is gone for good:"
                            f" {command('devices', '--forget-node', name)}."
                        ),
                        expected="a heartbeat every 3 s",
                        actual=f"none for {node.silent:.0f} s",
                        at=unix,
                    )
                )
            elif subject in open_subjects and watch.silence(node) <= SILENT_SECONDS:
                self.outbox.note_recovery(subject, sentence=f"{name} beats again, and is used.", at=unix)
        for subject in open_subjects - {f"nodes/{name}" for name in snapshot.nodes}:
            self.outbox.note_recovery(subject, sentence="It was forgotten.", at=unix)


@dataclass
class TakingOver:
    """The sensor's memory between two ticks.

    up_to: the last event whose materialization was read. missing: asset and partition of those not taken over
    yet, in this order.
    """

    up_to: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)


def take_over(stored: Sequence[StoredPartitions], memory: TakingOver, dagster: DagsterFacts) -> list[str]:
    """Copy to this machine what other machines published; changes ``memory``. Returns sentences.

    Status, audit, search and export read it here. This has its own sensor, because the sensor of nodes must
    not wait for the store. stored: assets in the store.
    """
    newest = dagster.newest_event()
    by_name = {asset.name: asset for asset in stored}
    published = {
        (name, event.partition)
        for name in by_name
        for event in dagster.materializations_since(name, memory.up_to)
        if event.is_done
    }
    waiting = [*memory.missing, *sorted(published.difference(memory.missing))]
    deadline, sentences, failed = time.monotonic() + _TAKING_SECONDS, [], []
    while waiting and time.monotonic() <= deadline:
        name, key = waiting.pop(0)
        try:
            by_name[name].pull(key)
        except (StoreError, PublishedError, OSError) as error:
            sentences.append(f"{name} {key} is not here yet: {error}")
            failed.append((name, key))
            if isinstance(error, StoreAwayError):
                break
    # Failed partitions come last at the next tick, so that one that always fails delays no other.
    memory.up_to, memory.missing = newest, [*waiting, *failed]
    return sentences


def build_cluster_sensor(nodes: Nodes, outbox: Outbox, *, pool: str, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor that watches the nodes."""
    watcher = ClusterWatcher(nodes, outbox, pool)

    def decide(situation: Situation) -> Decided:
        watch = situation.cursor_as(ClusterWatch)
        sentences = watcher.check(watch, situation.dagster, unix=situation.now)
        return Decided(" ".join(sentences) or "Every node beats and has its runs.", json.dumps(asdict(watch)))

    return build_sensor(
        NAME,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Ends runs whose node is silent or whose process is gone, and lets the pool follow the nodes."
            " It starts nothing."
        ),
        ticks=ticks,
    )


def build_taking_over_sensor(stored: Sequence[StoredPartitions], *, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor that takes over. stored: the assets whose partitions other machines publish in the store."""

    def decide(situation: Situation) -> Decided:
        memory = situation.cursor_as(TakingOver)
        memory.missing = [(name, key) for name, key in memory.missing]
        sentences = take_over(stored, memory, situation.dagster)
        return Decided(" ".join(sentences) or "All that is published is here.", json.dumps(asdict(memory)))

    return build_sensor(
        TAKING_OVER,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description="Takes over what other machines published. It starts nothing.",
        ticks=ticks,
    )


def cluster_sensors(settings: Settings) -> list[dg.SensorDefinition]:
    """Both sensors of a cluster, with these settings."""
    state = control_state(settings)
    ticks = Ticks(state, settings.names)
    stored = [StoredPartitions(asset, settings.mirror) for asset in settings.partitioned_assets]
    return [
        build_cluster_sensor(Nodes(state), Outbox(state), pool=POOL, ticks=ticks),
        build_taking_over_sensor(stored, ticks=ticks),
    ]

"""The nodes of a cluster over time: a silent one counts as dead, and its runs are ended, to go on elsewhere.

What lives here: the one owner of liveness. Heartbeats decide, by the database's clock, and only while
somebody watched: who was away itself, or could not ask the database, declares nobody dead before it has
watched for as long. Ray shortens the wait where it says that a job has ended, and means nothing otherwise.
Also the pool's limit, which follows the nodes, and taking over what other machines published. What does not:
which node a run goes to (the launcher), workers and devices of a node
(``vlm_cluster/node.py``), and starting anything again (Dagster's run retries do that).
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
from sensors.dagster_internals.runs import UNDER_WAY, RunState, first_ray_job
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_durable.commands import command
from vlm_durable.mirror.bucket import StoreAwayError, StoreError
from vlm_durable.state.nodes import DEAD_SECONDS, SILENT_SECONDS, ClusterSnapshot, Node, Nodes
from vlm_durable.versions.partition_files import PublishedError
from vlm_durable.versions.stored import StoredPartitions

NAME = "cluster"
TAKING_OVER = "taking_over"
INTERVAL_SECONDS = 5
NODE_DEAD = "node_dead"

STARTING_SECONDS = 900.0
"""For a run's process to begin: on some node, and by ``dagster.yaml`` on one machine.

Idle, it takes 4 to 11 s; at a load of 16 that becomes minutes, and a run that is ended then begins anew on a
machine just as loaded. Where its machine died, Ray says much sooner that its job has ended.
"""

_SETTLED_SECONDS = 5.0
_GAP_SECONDS = 15.0
"""So long between two looks, and nothing is known of the time between."""

_TAKING_SECONDS = 3.0
"""Of a tick, for partitions that other machines published: the rest follows."""


@dataclass
class ClusterWatch:
    """What is remembered between two looks; may be lost. All times are of the database's clock.

    at: of the last look; since: of the first of those without a gap. first: when each run under way was first
    seen that no node has begun. on: the node that had each of the others. slots: of the pool.
    """

    at: float = 0.0
    since: float = 0.0
    first: dict[str, float] = field(default_factory=dict)
    on: dict[str, str] = field(default_factory=dict)
    slots: int = 0

    def look(self, look: ClusterSnapshot, runs: Iterable[RunState]) -> None:
        """Take note of what there is now. runs: those that are watched."""
        if look.now - self.at > _GAP_SECONDS or look.now < self.at:
            self.since = look.now
        self.at = look.now
        ids = {run.run_id for run in runs}
        self.first = {run: self.first.get(run, look.now) for run in ids}
        self.on = {run: node for run, node in self.on.items() if run in ids}
        for run in ids:
            node = look.node_of_run(run)
            if node is not None and self.silence(node) <= DEAD_SECONDS:
                self.on[run] = node.name
        self.first = {run: first for run, first in self.first.items() if run not in self.on}

    def silence(self, node: Node) -> float:
        """For how long a node has been silent while somebody watched."""
        return self.at - max(node.beat_at, min(self.since, self.at))


def why_over(
    run: RunState,
    watch: ClusterWatch,
    look: ClusterSnapshot,
    *,
    has_ended: Callable[[str], bool],
    has_begun: Callable[[str], bool],
) -> str | None:
    """Why the process of a run under way is certainly gone, as a sentence; None where it may live.

    has_ended: whether Ray says that a job has ended; asked only where heartbeats leave it open. has_begun:
    whether the process of a run on this machine has said so; the reconciliation ends those that have.
    """
    job = _job(run)
    name = watch.on.get(run.run_id)
    if name is None:
        age = watch.at - max(watch.first[run.run_id], watch.since)
        if run.is_here:
            if age <= STARTING_SECONDS or has_begun(run.run_id):
                return None
            return f"Its process on this machine did not begin within {age:.0f} s."
        if age > STARTING_SECONDS:
            return f"No node began it within {age:.0f} s."
        return "Ray's job of it ended before it began." if age > _SETTLED_SECONDS and has_ended(job) else None
    node = look.nodes.get(name)
    if node is None:
        return f"The node {name}, where it ran, was forgotten."
    silence = watch.silence(node)
    if silence > DEAD_SECONDS:
        return f"The node {name}, where it ran, is silent for {silence:.0f} s."
    if silence > SILENT_SECONDS:
        return f"Ray's job of it on {name} has ended." if has_ended(job) else None
    # Between its two assets a run that a person started by hand holds nothing: its node itself ends it.
    if run.run_id in node.record.runs or run.ray_job is None:
        return None
    return f"Its process on {name} is gone without a word: it was killed, or the node was started anew."


def _is_watched(run: RunState, look: ClusterSnapshot) -> bool:
    """Whether it is Ray's, or has not begun, or is being cancelled, or a node says that it has it.

    Left alone is what works elsewhere: the reconciliation knows the runs of this machine's code server, and
    nobody knows what a person started by hand on a machine that is no node.
    """
    is_at_work = run.status is dg.DagsterRunStatus.STARTED
    return run.ray_job is not None or not is_at_work or look.node_of_run(run.run_id) is not None


def _job(run: RunState) -> str:
    """Its job; one whose launch was cut short has no tag yet."""
    return run.ray_job or first_ray_job(run.run_id)


_GOES_ON = " What was committed is in the journal; the next start of the partition goes on from there."


@dataclass(frozen=True)
class ClusterWatcher:
    """One look at the cluster. Plain: what Dagster lends is handed in."""

    nodes: Nodes
    outbox: Outbox
    pool: str

    def look(self, watch: ClusterWatch, dagster: DagsterFacts, *, unix: float) -> list[str]:
        """Change ``watch``, end runs, fit the pool, post alerts. Returns sentences.

        Raises ControlStateError, and then nothing was concluded.
        """
        # Before the nodes: a run that is under way now, and whose process is gone a moment later, has ended.
        under_way = dagster.runs_in(UNDER_WAY)
        look = self.nodes.snapshot()
        runs = [run for run in under_way if _is_watched(run, look)]
        watch.look(look, runs)
        sentences = []
        for run in runs:
            why = why_over(
                run,
                watch,
                look,
                has_ended=dagster.ray_job_has_ended,
                has_begun=lambda run_id: dagster.process_of(run_id) is not None,
            )
            if why is None:
                continue
            if not run.is_here:
                # So that it cannot begin later, where it waits in Ray.
                dagster.stop_ray_job(_job(run))
            if dagster.end_interrupted(run.run_id, why + _GOES_ON):
                sentences.append(f"Run {run.run_id} was ended. {why}")
        slots = sum(
            node.record.slots
            for node in look.nodes.values()
            if node.pause is None and watch.silence(node) <= DEAD_SECONDS and not node.is_dead
        )
        dagster.fit_pool(self.pool, previous=watch.slots, slots=slots)
        watch.slots = slots
        sentences += self._tell(watch, look, unix)
        sentences += [
            f"{node.name} {node.sentence()}."
            for node in look.nodes.values()
            if node.record.slots and not node.takes_runs
        ]
        return sentences

    def _tell(self, watch: ClusterWatch, look: ClusterSnapshot, unix: float) -> list[str]:
        """Alerts of nodes that count as dead, and of those that beat again."""
        open_subjects = {
            subject for subject, alert in self.outbox.open_subjects().items() if alert.kind == NODE_DEAD
        }
        for name, node in look.nodes.items():
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
        for subject in open_subjects - {f"nodes/{name}" for name in look.nodes}:
            self.outbox.note_recovery(subject, sentence="It was forgotten.", at=unix)
        return []


@dataclass
class Taken:
    """up_to: event until which materializations were seen. missing: not taken over yet, in this order."""

    up_to: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)


def take_over(stored: Sequence[StoredPartitions], taken: Taken, dagster: DagsterFacts) -> list[str]:
    """Have this machine hold what others published, and change ``taken``; returns sentences.

    Status, audit, search and export read it here. Apart from who lives, which must wait for no store. stored:
    assets in the store.
    """
    newest = dagster.newest_event()
    by_name = {asset.name: asset for asset in stored}
    published = {
        (name, event.partition)
        for name in by_name
        for event in dagster.materializations_since(name, taken.up_to)
        if event.is_done
    }
    waiting = [*taken.missing, *sorted(published.difference(taken.missing))]
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
    # The next look begins with others: one that fails for good delays none.
    taken.up_to, taken.missing = newest, [*waiting, *failed]
    return sentences


def build_cluster_sensor(nodes: Nodes, outbox: Outbox, *, pool: str, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor that knows who lives."""
    watcher = ClusterWatcher(nodes, outbox, pool)

    def decide(at: Situation) -> Decided:
        watch = at.remembered(ClusterWatch)
        sentences = watcher.look(watch, at.dagster, unix=at.now)
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

    def decide(at: Situation) -> Decided:
        taken = at.remembered(Taken)
        taken.missing = [(name, key) for name, key in taken.missing]
        sentences = take_over(stored, taken, at.dagster)
        return Decided(" ".join(sentences) or "All that is published is here.", json.dumps(asdict(taken)))

    return build_sensor(
        TAKING_OVER,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description="Takes over what other machines published. It starts nothing.",
        ticks=ticks,
    )

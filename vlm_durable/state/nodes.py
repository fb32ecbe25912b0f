"""The nodes of a cluster: each node's heartbeat, which names its devices and its living runs and workers.

The clock is the database's, which all nodes share, so that no node's own clock matters. A node reports its
own processes: a run lives if its node beats and the run's process holds the run's lock. What follows from a
silence is in ``vlm_cluster/cluster_watch.py``.

It is a table of the control state, which several machines share with or without that extension: here stands
which workers of other machines live, what a withdrawal and a pause wait for, and which machine serves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from vlm_durable.files.files import make_directory
from vlm_durable.files.lock_files import create_locked, is_held
from vlm_durable.files.processes import ProcessIdentity, boot_id, process_start
from vlm_durable.state.database import ControlState
from vlm_durable.state.pause import Pause, paused_nodes
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.tables import nodes as _table
from vlm_durable.wording import counted

BEAT_SECONDS = 3.0
SILENT_SECONDS = 10.0
"""A node that is silent for so long is given no run: it may be dead."""
DEAD_SECONDS = 25.0
"""A node that is silent for so long counts as dead: its runs are ended, and go on elsewhere."""

_LOOK_SECONDS = 0.5

SERVE = "vlm-assets serve"
"""The name under which Dagster's daemon beats: a second daemon on one database would launch runs twice."""

_OTHER_NODE = "Give each machine a host name of its own (`hostnamectl set-hostname`)."
_OTHER_SERVE = (
    "One machine at a time runs Dagster on a home: look at its pages there, or end it there. Several machines"
    " work on one home as nodes: vlm-assets-cluster, with VLM_ASSETS_RAY_ADDRESS set."
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeDevice:
    """A device of a node. temperature: degrees Celsius, where known. trouble: why it should not be used."""

    id: str
    name: str
    temperature: int | None = None
    trouble: str = ""


@dataclass(frozen=True)
class NodeRecord:
    """A node's report about itself.

    boot_id, process: they tell it from a later node of its name. address: where others reach it. slots: how
    many runs with a device it can hold at once. runs: ids of the runs whose process lives. workers: names of
    the materializations whose process lives.
    """

    name: str
    boot_id: str
    process: int
    address: str
    slots: int
    devices: tuple[NodeDevice, ...] = ()
    runs: frozenset[str] = frozenset()
    workers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Node:
    """A node's row. beat_at: its last beat; silent: seconds since then; both by the database's clock."""

    record: NodeRecord
    beat_at: float
    silent: float
    pause: Pause | None = None

    @property
    def name(self) -> str:
        """Its host name."""
        return self.record.name

    @property
    def is_dead(self) -> bool:
        """Whether it has been silent for too long."""
        return self.silent > DEAD_SECONDS

    @property
    def takes_runs(self) -> bool:
        """Whether it may be given a run now."""
        return self.silent <= SILENT_SECONDS and self.pause is None and self.record.slots > 0

    def sentence(self) -> str:
        """Its state, for people."""
        if self.is_dead:
            return f"silent for {self.silent:.0f} s: it counts as dead, and its runs go on elsewhere"
        if self.pause is not None:
            return self.pause.sentence()
        if self.silent > SILENT_SECONDS:
            return f"silent for {self.silent:.0f} s: it is given no run"
        if not self.record.slots:
            return "beats, and takes no runs"
        return f"beats; {counted(len(self.record.runs), 'runs')}"


@dataclass(frozen=True)
class ClusterSnapshot:
    """All nodes at one moment. now: by the clock of the database, in unix seconds."""

    now: float
    nodes: Mapping[str, Node] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Runs with a device that the cluster can hold at once."""
        return sum(node.record.slots for node in self.nodes.values() if node.takes_runs)

    def node_of_run(self, run_id: str) -> Node | None:
        """The node that reports the run's process, or a materialization of the run."""
        return self._nodes_by_run.get(run_id)

    @cached_property
    def _nodes_by_run(self) -> Mapping[str, Node]:
        nodes_by_run: dict[str, Node] = {}
        for node in self.nodes.values():
            at_work = (name.partition(".")[0] for name in node.record.workers)
            nodes_by_run.update(dict.fromkeys((*node.record.runs, *at_work), node))
        return nodes_by_run


class Nodes:
    """The nodes of a home. Every method raises ControlStateError where the database does not answer."""

    def __init__(self, state: ControlState) -> None:
        self._state = state

    def snapshot(self) -> ClusterSnapshot:
        """All nodes that ever beat and were not forgotten, by name."""
        pauses = paused_nodes(self._state)

        def read(connection: sa.Connection) -> ClusterSnapshot:
            now = float(connection.execute(sa.select(_now(connection))).scalar_one())
            rows = connection.execute(sa.select(_table).order_by(_table.c.name)).all()
            nodes = [Node(_record(row.record), row.beat_at, now - row.beat_at) for row in rows]
            return ClusterSnapshot(
                now,
                {
                    node.name: Node(node.record, node.beat_at, node.silent, pauses.get(node.name))
                    for node in nodes
                },
            )

        return self._state.read_beats(read)

    @contextlib.contextmanager
    def beating(self, record: Callable[[], NodeRecord], *, other: str = _OTHER_NODE) -> Iterator[None]:
        """Beat for as long as the context lasts, by a thread of its own.

        record: called for the report of each beat. other: advice where another machine beats under the same
        name, which raises ControlStateError. If another machine does so later, this process gets SIGTERM.
        """
        latest = record()
        if not self.beat(latest):
            raise ControlStateError(
                f"{self._another(latest.name, other)} If this machine has just been restarted, start again in"
                f" {DEAD_SECONDS:.0f} s. Nothing was changed."
            )
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_SECONDS):
                try:
                    latest = record()
                    if self.beat(latest):
                        continue
                    _log.error("%s This process ends.", self._another(latest.name, other))
                except Exception as error:  # Whatever it is: a thread that ends here is a machine that dies.
                    _log.warning("The heartbeat of this machine was not written: %s", error)
                    continue
                os.kill(os.getpid(), signal.SIGTERM)  # as its service manager would: runs commit
                return

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _another(self, name: str, other: str) -> str:
        namesake = self.snapshot().nodes.get(name)
        where = (
            f" (it last did {namesake.silent:.0f} s ago, from {namesake.record.address})" if namesake else ""
        )
        return f"Another machine beats as {name}{where}. {other}"

    def wait_for_beats(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait until the heartbeats of all living nodes name everything that began there before this call.

        The second beat from now is sure to: the first may have been composed before.
        """
        began = self.snapshot().now
        later: dict[str, set[float]] = {}
        while True:
            nodes = [node for node in self.snapshot().nodes.values() if not node.is_dead]
            for node in nodes:
                later.setdefault(node.name, set()).add(max(began, node.beat_at))
            if all(len(later[node.name] - {began}) > 1 for node in nodes):
                return
            sleep(_LOOK_SECONDS)

    def beat(self, record: NodeRecord) -> bool:
        """Write the node's heartbeat. False where another living machine has its name."""

        def write(connection: sa.Connection) -> bool:
            now = _now(connection)
            insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
            new = insert(_table).values(name=record.name, record=_json(record), beat_at=now)
            same_boot = _table.c.record["boot_id"].as_string() == record.boot_id
            # One statement: if two machines take a dead node's name at once, only one gets it.
            upsert = new.on_conflict_do_update(
                index_elements=[_table.c.name],
                set_={"record": new.excluded.record, "beat_at": new.excluded.beat_at},
                where=same_boot | (_table.c.beat_at < now - DEAD_SECONDS),
            ).returning(_table.c.name)
            return connection.execute(upsert).first() is not None

        return self._state.beat(write)

    def forget(self, name: str) -> bool:
        """Forget a node that is gone for good. False where the node is unknown, or not dead."""

        def write(connection: sa.Connection) -> bool:
            is_dead = _table.c.beat_at < _now(connection) - DEAD_SECONDS
            return connection.execute(_table.delete().where(_table.c.name == name, is_dead)).rowcount > 0

        return self._state.beat(write)


@contextlib.contextmanager
def only_machine_that_serves(state: ControlState) -> Iterator[None]:
    """Be the one machine that runs Dagster on this database. Raises ControlStateError where another does.

    With SQLite nobody else can: it is on a disk of this machine.
    """
    if not state.is_shared:
        yield
        return
    address = socket.gethostname()
    record = NodeRecord(SERVE, boot_id(), process_start(os.getpid()) or 0, address, slots=0)
    with Nodes(state).beating(lambda: record, other=_OTHER_SERVE):
        yield


class RunLocks:
    """The locks of the runs on this machine: held from the first moment of a run's process to its last."""

    def __init__(self, state_directory: Path) -> None:
        self.directory = state_directory / "runs"

    @contextlib.contextmanager
    def held(self, run_id: str) -> Iterator[None]:
        """Hold the lock of a run for this process. Raises OSError, BlockingIOError where another holds it."""
        make_directory(self.directory)
        path = self.directory / f"{run_id}.lock"
        if is_held(path):
            raise BlockingIOError(f"Another process of this machine works for run {run_id}.")
        process = ProcessIdentity.from_pid(os.getpid())
        lock = create_locked(path, "" if process is None else f"{process.pid} {process.start}")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            lock.close()

    def living(self) -> dict[str, ProcessIdentity | None]:
        """The runs whose process holds its lock, and which process; None where that cannot be read.

        Lock files of dead processes are removed.
        """
        processes: dict[str, ProcessIdentity | None] = {}
        for path in self.directory.glob("*.lock"):
            held = is_held(path)
            if held:
                processes[path.stem] = _process(path)
            elif held is False:
                path.unlink(missing_ok=True)
        return processes


def _process(path: Path) -> ProcessIdentity | None:
    try:
        pid, start = path.read_text().split()
        return ProcessIdentity(int(pid), int(start), boot_id())
    except (OSError, ValueError):
        return None


def _now(connection: sa.Connection) -> sa.ColumnElement[Any]:
    if connection.dialect.name == "postgresql":
        return sa.func.extract("epoch", sa.func.clock_timestamp())
    return (sa.func.julianday("now") - 2440587.5) * 86400.0


def _json(record: NodeRecord) -> dict[str, Any]:
    return {**asdict(record), "runs": sorted(record.runs), "workers": sorted(record.workers)}


def _record(content: Mapping[str, Any]) -> NodeRecord:
    devices: Sequence[Mapping[str, Any]] = content["devices"]
    return NodeRecord(
        **{
            **content,
            "devices": tuple(NodeDevice(**device) for device in devices),
            "runs": frozenset(content["runs"]),
            "workers": frozenset(content["workers"]),
        }
    )

"""Heartbeats of nodes, by the clock of the database, and the locks of runs."""

import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import sqlalchemy as sa

from vlm_durable.state import nodes as nodes_module
from vlm_durable.state.database import ControlState
from vlm_durable.state.nodes import (
    DEAD_SECONDS,
    NodeDevice,
    NodeRecord,
    Nodes,
    RunLocks,
    only_machine_that_serves,
)
from vlm_durable.state.pause import pause_node, pause_of, resume_node
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.workers import Workers

RECORD = NodeRecord(
    "one", "a boot", 7, "10.0.0.1", 2, (NodeDevice("GPU-1", "a GPU", 55),), frozenset({"r"}), frozenset()
)
HOLDER = """
import sys
from pathlib import Path
from vlm_durable.state.nodes import RunLocks
with RunLocks(Path(sys.argv[1])).held("r"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path):
    return ControlState(tmp_path)


def later(monkeypatch, seconds):
    """Have the database's clock be ahead by so much."""
    before = nodes_module._now
    monkeypatch.setattr(nodes_module, "_now", lambda connection: before(connection) + sa.literal(seconds))


def test_a_node_is_what_it_last_said_and_its_silence_is_of_the_databases_clock(state, monkeypatch):
    """No clock of a node or of a watcher matters."""
    monkeypatch.setattr("time.time", lambda: 5.0)
    nodes = Nodes(state)
    nodes.beat(RECORD)
    node = nodes.snapshot().nodes["one"]
    assert node.record == RECORD
    assert 0 <= node.silent < 5
    assert node.takes_runs and nodes.snapshot().slots == 2
    later(monkeypatch, DEAD_SECONDS + 1)
    assert nodes.snapshot().nodes["one"].is_dead
    assert nodes.snapshot().slots == 0
    nodes.beat(RECORD)
    assert not nodes.snapshot().nodes["one"].is_dead


def test_no_error_ends_the_heartbeat(state, monkeypatch):
    """A machine whose database failed once, however that was, beats on: it is not declared dead."""
    monkeypatch.setattr(nodes_module, "BEAT_SECONDS", 0.01)
    failed, beaten = [], threading.Event()

    def record():
        if len(failed) == 1:
            failed.append("once")
            raise RuntimeError("the database fails over")
        failed or failed.append("joined")
        beaten.set() if len(failed) == 2 else None
        return RECORD

    with Nodes(state).beating(record):
        assert beaten.wait(10)


def test_two_machines_of_one_name_are_told_apart(state, monkeypatch):
    """The second one is refused by name; the same machine after a reboot waits until the first is dead."""
    nodes = Nodes(state)
    with nodes.beating(lambda: RECORD):
        pass
    with nodes.beating(lambda: replace(RECORD, process=8)):
        pass
    other = replace(RECORD, boot_id="another boot")
    with pytest.raises(ControlStateError, match="host name of its own"), nodes.beating(lambda: other):
        pass
    later(monkeypatch, DEAD_SECONDS + 1)
    with nodes.beating(lambda: other):
        pass


def test_a_machine_whose_name_another_took_meanwhile_writes_nothing_and_ends(state, monkeypatch):
    """After a cut both would beat: two daemons launch each run twice, two nodes hide each other's runs."""
    monkeypatch.setattr(nodes_module, "BEAT_SECONDS", 0.01)
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    nodes, other = Nodes(state), replace(RECORD, boot_id="another boot")
    try:
        with nodes.beating(lambda: RECORD):
            took = nodes_module._table.update().values(record=nodes_module._json(other))
            state.beat(lambda connection: connection.execute(took))
            assert told.wait(10)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert nodes.snapshot().nodes["one"].record == other


def test_one_machine_at_a_time_runs_dagster_on_a_shared_database(state, monkeypatch):
    """Two daemons would launch each run twice. On a database of this machine nobody else can."""
    with only_machine_that_serves(state):
        assert not Nodes(state).snapshot().nodes
    state.is_shared = True
    with only_machine_that_serves(state), only_machine_that_serves(state):
        pass
    monkeypatch.setattr(nodes_module, "boot_id", lambda: "another machine")
    with pytest.raises(ControlStateError, match="One machine at a time"), only_machine_that_serves(state):
        pass


def test_a_paused_node_takes_nothing_and_the_others_do(state):
    """A drain is of one node; it lasts until it is lifted."""
    nodes = Nodes(state)
    nodes.beat(RECORD)
    nodes.beat(replace(RECORD, name="two"))
    pause_node(state, "one", "a new disk", now=1.0)
    assert [node.takes_runs for node in nodes.snapshot().nodes.values()] == [False, True]
    assert pause_of(state) is None
    assert "--node one" in nodes.snapshot().nodes["one"].sentence()
    assert resume_node(state, "one") and not resume_node(state, "one")
    assert nodes.snapshot().slots == 4


def test_a_runs_lock_lasts_as_long_as_its_process(tmp_path):
    """Killed, it holds none, and what it left is removed."""
    locks = RunLocks(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    assert locks.living()["r"].pid == process.pid
    with pytest.raises(BlockingIOError), locks.held("r"):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert locks.living() == {}
    assert not list(locks.directory.iterdir())


def test_workers_of_other_nodes_live_as_long_as_their_node_says_so(state, tmp_path, monkeypatch):
    """Status, retries and the audit ask who works, wherever that is."""
    state.is_shared = True
    with Workers(ControlState(tmp_path / "elsewhere")).begin(
        run_id="r", asset="a", partition="k", expected=9
    ) as beat:
        Workers(state).write_record(replace(beat.worker, host="one"))
    assert Workers(state).living() == []
    Nodes(state).beat(replace(RECORD, workers=frozenset({"r.a"})))
    assert [one.partition for one in Workers(state).living()] == ["k"]
    assert Workers(state).on_this_machine() == []
    later(monkeypatch, DEAD_SECONDS + 1)
    assert Workers(state).living() == []


def test_what_began_on_another_node_before_its_next_beats_is_waited_for(state, monkeypatch):
    """A beat may be of what was seen before: the second one knows; the dead are waited for by nobody."""
    nodes = Nodes(state)
    nodes.wait_for_beats(sleep=pytest.fail)
    nodes.beat(replace(RECORD, name="gone"))
    later(monkeypatch, DEAD_SECONDS + 1)
    nodes.beat(RECORD)
    beats = []

    def beat(seconds):
        beats.append(nodes.beat(RECORD))

    nodes.wait_for_beats(sleep=beat)
    assert beats == [True, True]

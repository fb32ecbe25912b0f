"""What a node does by itself, without Ray: ends runs that are over, and takes none when its checks hang."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import dagster as dg
import pytest

from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import LAUNCHER_JOB
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import load_settings
from vlm_cluster.node import STALE_SECONDS, NodeWatch, without_slots_if_stale
from vlm_durable.files.processes import ProcessIdentity
from vlm_durable.state.nodes import NodeDevice, NodeRecord, RunLocks
from vlm_durable.state.workers import Workers
from vlm_engine.devices.left_out import LeftOutDevices

RUN = "0c9f1d0e-0000-4000-8000-000000000001"
HOLDER = """
import signal, sys
from pathlib import Path
from vlm_durable.state.nodes import RunLocks
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
with RunLocks(Path(sys.argv[1])).held(sys.argv[2]):
    print("held", flush=True)
    while True:
        signal.pause()
"""


@dg.job
def nothing():
    """A job whose run is only ever pretended to be under way."""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setenv("VLM_ASSETS_HOME", str(tmp_path))
    monkeypatch.setenv("VLM_ASSETS_DEVICES", "cpu:1")
    settings = load_settings()
    return NodeWatch(settings, RunLocks(settings.state_directory), Workers(control_state(settings)))


def test_a_cancel_is_carried_out_without_ray(watch):
    """Else a run stays in CANCELING and holds its device while Ray is away. Told once, it may commit."""
    now = [1000.0]
    watch.clock = lambda: now[0]
    grace = watch.settings.grace_seconds
    command = [sys.executable, "-c", HOLDER, str(watch.settings.state_directory), RUN]
    with (
        dg.DagsterInstance.ephemeral() as instance,
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(process.kill)
        assert process.stdout.readline() == b"held\n"
        instance.create_run_for_job(nothing, run_id=RUN, status=dg.DagsterRunStatus.STARTED)
        assert not watch.check(DagsterFacts(instance))
        instance.report_run_canceling(instance.get_run_by_id(RUN))
        watch.check(DagsterFacts(instance))
        now[0] += grace
        assert "SIGTERM" in " ".join(watch.check(DagsterFacts(instance)))
        assert process.stdout.readline() == b"told\n"
        assert not watch.check(DagsterFacts(instance))
        now[0] += grace
        assert "SIGKILL" in " ".join(watch.check(DagsterFacts(instance)))
        assert process.wait(10) == -signal.SIGKILL


def test_a_device_whose_process_outlives_its_kill_is_left_out(watch, monkeypatch):
    """It waits in the driver of this node: no other run is sent to that device, and people are told."""
    now = [1000.0]
    watch.clock = lambda: now[0]
    process = ProcessIdentity.from_pid(os.getpid())
    with watch.workers.begin(run_id=RUN, asset="a", partition="k", expected=9) as beat:
        made = replace(beat.worker, device="cpu-0")
    monkeypatch.setattr(RunLocks, "living", lambda _: {RUN: process})
    monkeypatch.setattr(Workers, "on_this_machine", lambda _: [made])
    monkeypatch.setattr(ProcessIdentity, "send", lambda *_: True)
    state = control_state(watch.settings)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.create_run_for_job(nothing, run_id=RUN, status=dg.DagsterRunStatus.CANCELED)
        for _ in range(4):
            assert not LeftOutDevices(state).left_out()
            watch.check(DagsterFacts(instance))
            now[0] += watch.settings.grace_seconds
    ((device, record),) = LeftOutDevices(state).left_out().items()
    assert device == "cpu-0"
    assert "outlived its run or its cancel, and does not end" in record.sentence(device)
    assert "devices/cpu-0/left out" in Outbox(state).open_subjects()


def test_a_run_that_was_started_by_hand_and_killed_is_ended(watch):
    """Ray knows nothing of it, and no launcher's process is asked for: nobody else would ever end it."""
    work = (
        "import os, sys, pathlib\n"
        "from vlm_durable.state.database import open_state\n"
        "from vlm_durable.state.workers import Workers\n"
        "workers = Workers(open_state(pathlib.Path(sys.argv[1])))\n"
        "workers.begin(run_id=sys.argv[2], asset='a', partition='k', expected=9)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with dg.DagsterInstance.ephemeral() as instance:
        for run_id, tags in ((RUN, {}), (RUN[:-1] + "2", {LAUNCHER_JOB: f"dagster-run-{RUN[:-1]}2"})):
            instance.create_run_for_job(nothing, run_id=run_id, status=dg.DagsterRunStatus.STARTED, tags=tags)
            command = [sys.executable, "-c", work, str(watch.settings.state_directory), run_id]
            assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert RUN in " ".join(watch.check(DagsterFacts(instance)))
        ended, rays = (instance.get_run_by_id(run_id).status for run_id in (RUN, RUN[:-1] + "2"))
    assert ended is dg.DagsterRunStatus.FAILURE
    assert rays is dg.DagsterRunStatus.STARTED, "whether it lives, the cluster says"
    assert not watch.workers.dead()


def test_a_node_whose_check_hangs_takes_no_runs_and_says_why():
    """A call of the driver that never returns: the node beats on, and no stuck worker would be ended."""
    record = NodeRecord("one", "boot", 1, "10.0.0.1", 2, (NodeDevice("GPU-1", "a GPU", 55),))
    assert without_slots_if_stale(record, STALE_SECONDS) == record
    late = without_slots_if_stale(record, STALE_SECONDS + 1)
    assert late.slots == 0
    assert "61 s ago" in late.devices[0].trouble

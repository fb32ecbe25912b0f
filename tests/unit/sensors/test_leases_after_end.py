"""A device that is held after its run: its process is told of and ended, and none that may still work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import asdict

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from dagster._core.events import EngineEventData

from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.health_watch import Watch
from sensors.leases_after_end import LeasesAfterEnd
from sensors.run_end import RunEnder
from vlm_durable.files.processes import ProcessIdentity, boot_id
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Phase, Workers
from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import DeviceLeases
from vlm_engine.devices.left_out import LeftOutDevices

DEVICE = Device("cpu-0", "cpu", "CPU slot", None, "")
SUBJECT = "devices/cpu-0/lease"
GRACE, SILENCE = 10.0, 1800.0
HOME = "/data/flats/.state"
HERE = {".dagster/grpc_info": json.dumps({"host": "localhost", "socket": "/somewhere"})}
HANGING = """
import logging, signal, sys
from pathlib import Path
from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import LeaseHolder
from vlm_engine.devices.leases import DeviceLeases
leases = DeviceLeases(Path(sys.argv[1]), [Device("cpu-0", "cpu", "CPU slot", None, "")])
holder = LeaseHolder(sys.argv[2], "k", "s", sys.argv[4])
lease = leases.acquire(holder, wait_seconds=0, log=logging.getLogger())
if sys.argv[3] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("held", flush=True)
while True:
    signal.pause()
"""


@dg.job
def nothing():
    """A job whose runs are only ever pretended to be under way."""


class Desk:
    """A Dagster instance, a folder of leases, and processes that hold one; a watch that is ticked by hand."""

    def __init__(self, folder, instance):
        self.folder = folder
        self.instance = instance
        self.workers = Workers(open_state(folder))
        self.outbox = Outbox(open_state(folder))
        self.leases = DeviceLeases(folder / "leases", [DEVICE])
        self.left_out = LeftOutDevices(open_state(folder))
        self.ender = RunEnder(self.outbox, self.left_out, grace=GRACE)
        self.look_after = LeasesAfterEnd(folder / "leases", self.ender, silence=SILENCE, home=HOME)
        self.watch = Watch(boot=boot_id(), at=1000.0, since=1000.0, devices={DEVICE.id: asdict(DEVICE)})
        self.process = None

    def hold(self, run_id, *, deaf=False, home=HOME):
        how = "deaf" if deaf else ""
        command = [sys.executable, "-c", HANGING, self.folder / "leases", run_id, how, home]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"held\n"
        return self.process

    def run(self, status=DagsterRunStatus.SUCCESS, *, tags=HERE, deaf=False, pid=None, home=HOME):
        """A run whose process holds the device, and stands so in Dagster."""
        run = self.instance.create_run_for_job(nothing, tags=tags, status=status)
        process = self.hold(run.run_id, deaf=deaf, home=home)
        event = EngineEventData.in_process(process.pid if pid is None else pid)
        self.instance.report_engine_event("Started process for run.", run, event)
        return run.run_id

    def tick(self, seconds):
        """Whether it is open that the device is held."""
        self.watch.at += seconds
        dagster = DagsterFacts(self.instance)
        self.ender.end(self.look_after.late(self.watch, self.workers.living(), dagster), self.watch, dagster)
        self.look_after.tell_freed(self.watch)
        return SUBJECT in self.outbox.open_subjects()

    def is_left_alone(self):
        return self.process.poll() is None and self.leases.holders() != []

    def ended_by(self):
        return signal.Signals(-self.process.wait(timeout=20))


@pytest.fixture
def desk(tmp_path):
    with dg.DagsterInstance.ephemeral() as instance:
        desk = Desk(tmp_path, instance)
        yield desk
        if desk.process is not None:
            desk.process.kill()
            desk.process.wait()
            desk.process.stdout.close()


@pytest.mark.parametrize("deaf", [False, True], ids=["takes SIGTERM", "takes none"])
def test_a_process_that_hangs_after_its_run_is_ended_and_its_device_freed(desk, deaf):
    """The run is finished and its heartbeat over, so nobody else looks: the device would be lost."""
    run_id = desk.run(deaf=deaf)
    assert not desk.tick(0)
    assert not desk.tick(GRACE + 60), "it may be about to end"
    assert desk.tick(1)
    alert = desk.outbox.open_subjects()[SUBJECT]
    assert (alert.kind, alert.page, alert.partition) == ("lease_held", f"runs/{run_id}", "k")
    assert "held by run" in alert.actual
    if deaf:
        assert desk.tick(GRACE - 1)
        assert desk.is_left_alone(), "it has the grace"
        desk.tick(1)
    assert desk.ended_by() is (signal.SIGKILL if deaf else signal.SIGTERM)
    assert not desk.leases.holders()
    assert not desk.tick(5), "told that it is over"


@pytest.mark.parametrize("status", [DagsterRunStatus.CANCELED, DagsterRunStatus.FAILURE])
def test_a_stopped_process_is_killed_after_the_grace_though_it_holds_its_heartbeat(desk, status):
    """A person ended its run by force: its heartbeat's lock is held for ever, and no SIGTERM reaches it."""
    run_id = desk.run(status)
    with desk.workers.begin(run_id=run_id, asset="a", partition="k", expected=9):
        desk.process.send_signal(signal.SIGSTOP)
        desk.tick(0)
        assert not desk.tick(GRACE)
        assert desk.tick(1)
        assert desk.is_left_alone(), "told to end first: somebody may let it go on"
        desk.tick(GRACE)
        assert desk.ended_by() is signal.SIGKILL
    assert not desk.leases.holders()
    assert not desk.tick(5), "told that it is over"
    assert not desk.left_out.left_out()


def test_who_works_on_after_its_run_has_ended_is_told_to_end_and_has_time_to_commit(desk):
    """Dagster may have started the partition again on another device."""
    run_id = desk.run(DagsterRunStatus.CANCELED)
    with desk.workers.begin(run_id=run_id, asset="a", partition="k", expected=9):
        desk.tick(0)
        assert not desk.tick(GRACE + 60)
        assert desk.is_left_alone()
        assert desk.tick(1)
        assert desk.ended_by() is signal.SIGTERM


def test_who_has_a_heartbeat_is_not_ended_for_a_run_that_dagster_forgot(desk):
    """With its database lost, whoever works is left to finish."""
    run_id = str(uuid.uuid4())
    desk.hold(run_id)
    with desk.workers.begin(run_id=run_id, asset="a", partition="k", expected=9):
        desk.tick(0)
        assert not desk.tick(10 * SILENCE)
    assert desk.is_left_alone()
    desk.tick(0)
    assert not desk.tick(SILENCE), "its time counts from the end of its work"


def test_who_publishes_hides_nobody_who_holds_its_device(desk):
    """A run gives its device back before it publishes: the note of a later holder is its own."""
    desk.run()
    with desk.workers.begin(run_id=str(uuid.uuid4()), asset="a", partition="k", expected=9) as beat:
        beat.enter(Phase.WORKING, device=DEVICE.id)
        desk.tick(0)
        assert not desk.tick(GRACE + 61)
        beat.enter(Phase.PUBLISHING)
        desk.tick(0)
        assert desk.tick(GRACE + 61)


def test_a_device_whose_holder_outlives_sigkill_is_left_out(desk, monkeypatch):
    """It waits in the driver: nobody is sent to a device that stays held, and a person is told."""
    monkeypatch.setattr(ProcessIdentity, "send", lambda self, number: True)
    desk.run(DagsterRunStatus.CANCELED)
    desk.tick(0)
    desk.tick(GRACE + 61)
    desk.tick(GRACE)
    assert not desk.left_out.left_out(), "it was killed a moment ago"
    assert desk.tick(GRACE)
    assert "does not end when it is killed" in desk.left_out.left_out()["cpu-0"].sentence("cpu-0")
    assert desk.tick(5), "told as long as it is held"


OTHER_HOME = "/data/houses/.state"


@pytest.mark.parametrize(
    ("arrange", "seconds"),
    [
        pytest.param(lambda desk: desk.hold(str(uuid.uuid4())), SILENCE, id="Dagster does not know it"),
        pytest.param(lambda desk: desk.hold(str(uuid.uuid4()), home=""), SILENCE, id="a record of format 1"),
        pytest.param(lambda desk: desk.run(home=OTHER_HOME), GRACE + 60, id="another home's run has ended"),
    ],
)
def test_a_process_without_a_living_run_is_ended(desk, arrange, seconds):
    """With its database lost, or the run deleted by hand, only who is silent for as long as a load hangs.

    Of two components of one project either frees a device: the other one's sensors may be off.
    """
    arrange(desk)
    desk.tick(0)
    assert not desk.tick(seconds)
    assert desk.is_left_alone()
    assert desk.tick(1)
    assert desk.ended_by() is signal.SIGTERM
    assert not desk.tick(5)


@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(
            lambda desk: desk.run(DagsterRunStatus.STARTED), id="between two steps, or it publishes"
        ),
        pytest.param(lambda desk: desk.hold("trial"), id="a trial, in front of who started it"),
        pytest.param(
            lambda desk: desk.hold(str(uuid.uuid4()), home=OTHER_HOME), id="another home's, another Dagster's"
        ),
    ],
)
def test_who_may_work_is_left_alone(desk, arrange):
    """Nobody is told of it either: what has no heartbeat here may have one in its own home, or none."""
    arrange(desk)
    desk.tick(0)
    assert not desk.tick(10 * SILENCE)
    assert desk.is_left_alone()


@pytest.mark.parametrize("strange", [{"tags": {}}, {"pid": 1}], ids=["not launched here", "another pid"])
def test_a_process_that_dagster_did_not_start_here_is_told_of_and_left_to_a_person(desk, strange):
    """A notebook that materialized something keeps its device: who owns it decides."""
    desk.run(**strange)
    desk.tick(0)
    assert desk.tick(GRACE + 61)
    assert desk.tick(10 * SILENCE)
    assert desk.is_left_alone()
    alert = desk.outbox.open_subjects()[SUBJECT]
    assert alert.severity == "error"
    assert f"kill {desk.process.pid}" in alert.next_step


@pytest.mark.parametrize("changes", ["host", "process_start", "pid"])
def test_a_note_that_is_not_the_holders_own_ends_nobody(desk, changes):
    """Another machine's, or that of an earlier holder whose pid another process has now."""
    desk.run()
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            path = desk.folder / "leases" / "cpu-0.json"
            record = json.loads(path.read_bytes())
            if changes == "host":
                record["host"] = "another machine"
            elif changes == "process_start":
                record["process_start"] += 1
            else:
                start = ProcessIdentity.from_pid(bystander.pid).start
                record |= {"pid": bystander.pid, "process_start": start}
            path.write_text(json.dumps(record))
            desk.tick(0)
            told = desk.tick(10 * SILENCE)
            assert told is (changes != "host")
            assert desk.is_left_alone()
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_another_users_process_is_named_and_keeps_no_tick(desk, monkeypatch):
    """A signal that may not be sent is said, with what to do, and the tick goes on."""

    def refusing(self, number):
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(ProcessIdentity, "send", refusing)
    desk.run()
    desk.tick(0)
    assert desk.tick(GRACE + 61)
    assert desk.is_left_alone()


def test_time_without_a_watch_does_not_count(desk):
    """A daemon that was down, or a machine that slept, has not seen the process hang."""
    desk.run()
    desk.tick(0)
    desk.watch.since = desk.watch.at + 10 * SILENCE
    assert not desk.tick(10 * SILENCE)
    assert not desk.tick(GRACE + 60)
    assert desk.tick(1)

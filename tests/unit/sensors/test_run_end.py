"""A run is ended in one order, by one module, and a step that fails keeps no other from what it may do."""

from __future__ import annotations

import ast
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from resources.alerts.alert import Alert
from sensors.health_watch import Watch
from sensors.run_end import RunEnder, RunToEnd, end_gone_run
from vlm_durable.files.processes import ProcessIdentity
from vlm_durable.state.sqlite_file import ControlStateError

CHECKOUT = Path(__file__).resolve().parents[3]
GRACE = 10.0
PROCESS = ProcessIdentity(7, 70, "this boot")
STUCK = RunToEnd(
    "r1",
    who="The worker of k",
    why="stands still",
    process=PROCESS,
    alert=Alert("worker_stuck", "a/k/worker", "r1", "error", "It is stuck", "Nothing.", at=1.0),
    device="GPU-1",
    occurrence="a/k",
    kill_counts=True,
)

SIGNALLED = ["fence", "SIGTERM", "tell"]
KILLED = ["fence cancel", "SIGKILL", "free a/k", "tell"]
OUTLIVED = ["fence cancel", "SIGKILL", "free a/k", "free a/k, still", "tell"]


class Recorder:
    """Dagster, processes, devices and people in one: it keeps what was done, and fails at one step."""

    def __init__(self, fails_at=None, error=None):
        self.done = []
        self.fails_at = fails_at
        self.error = error

    def do(self, step):
        self.done.append(step)
        if self.fails_at is not None and step.startswith(self.fails_at):
            raise self.error

    def mark_interrupted(self, run_id):
        self.do("fence")

    def end_cancelled(self, run_id, why):
        self.do("fence cancel")

    def stop_launcher_job(self, job):
        self.do(f"stop {job}")

    def send(self, run, number):
        self.do(number.name)
        return True

    def note_failure(self, device, *, occurrence, why):
        self.do(f"free {occurrence}")

    def free_slots(self, run_id):
        self.do("free")

    def post(self, alert):
        self.do("tell")

    def report_end(self, run_id, why):
        self.do("tell")
        return True


class Desk:
    """An ender, and a watch that is ticked by hand."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.ender = RunEnder(recorder, recorder, grace=GRACE, send=recorder.send)
        self.watch = Watch(at=100.0)

    def tick(self, seconds, *runs):
        """What is done at a tick so much later, and what is said."""
        self.watch.at += seconds
        self.recorder.done = []
        said = self.ender.end(runs or [STUCK], self.watch, self.recorder)
        return self.recorder.done, " ".join(said)


AWAY = RuntimeError("no database")
FULL = ControlStateError("no space")
FOREIGN = PermissionError(1, "not permitted")


@pytest.mark.parametrize(
    ("fails_at", "error", "first", "meanwhile", "after_grace", "after_kill", "said"),
    [
        (None, None, SIGNALLED, ["tell"], KILLED, OUTLIVED, "was killed"),
        ("fence", AWAY, *[["fence", "tell"]] * 4, "Dagster cannot be told"),
        ("fence c", AWAY, SIGNALLED, ["tell"], *[["fence cancel", "tell"]] * 2, "Dagster cannot be told"),
        ("SIG", FOREIGN, SIGNALLED, ["tell"], *[["fence cancel", "SIGKILL", "tell"]] * 2, "another user"),
        ("SIGK", FOREIGN, SIGNALLED, ["tell"], *[["fence cancel", "SIGKILL", "tell"]] * 2, "another user"),
        ("free", FULL, SIGNALLED, ["tell"], KILLED, KILLED, "is not left out for that"),
        ("tell", FULL, SIGNALLED, ["tell"], KILLED, OUTLIVED, "No alert tells of it"),
    ],
    ids=["all well", "fence", "fence before the kill", "signal", "kill", "free", "tell"],
)
def test_the_order_with_each_step_failing(fails_at, error, first, meanwhile, after_grace, after_kill, said):
    """No signal without a fence, SIGKILL after the grace alone, and no message keeps a process alive."""
    desk = Desk(Recorder(fails_at, error))
    assert desk.tick(0)[0] == first
    assert desk.tick(GRACE - 1)[0] == meanwhile
    done, sentences = desk.tick(1)
    assert done == after_grace
    assert said in sentences
    assert desk.tick(GRACE)[0] == after_kill


def test_the_grace_begins_with_the_signal():
    """While Dagster was away, nothing was sent, and the process had no time to commit."""
    desk = Desk(Recorder("fence", AWAY))
    desk.tick(0)
    desk.recorder.fails_at = None
    assert desk.tick(3 * GRACE)[0] == SIGNALLED
    assert desk.tick(GRACE - 1)[0] == ["tell"]
    assert desk.tick(1)[0] == KILLED


def test_a_late_kill_is_no_kill_that_was_outlived():
    """Dagster was away for long after SIGTERM: the first SIGKILL leaves no sound device out."""
    desk = Desk(Recorder())
    assert desk.tick(0)[0] == SIGNALLED
    assert desk.tick(5 * GRACE)[0] == KILLED
    assert desk.tick(GRACE - 1)[0] == KILLED
    assert desk.tick(1)[0] == OUTLIVED


def test_one_run_that_cannot_be_ended_keeps_no_other():
    """Another user's process comes first: the next one is signalled in the same tick."""
    desk = Desk(Recorder("SIG", FOREIGN))
    other = replace(STUCK, run_id="r2", process=replace(PROCESS, pid=8))
    assert desk.tick(0, STUCK, other)[0] == SIGNALLED * 2


@pytest.mark.parametrize("lost", ["cursor", "process"])
def test_no_process_is_told_to_end_twice(lost):
    """Its grace would begin again: a tick that failed lost the cursor, a restart all else."""
    desk = Desk(Recorder())
    assert desk.tick(0)[0] == SIGNALLED
    assert desk.ender.is_ending(desk.watch, "r1", PROCESS)
    if lost == "cursor":
        desk.watch.ending = {}
    else:
        desk.ender = RunEnder(desk.recorder, desk.recorder, grace=GRACE, send=desk.recorder.send)
    assert desk.ender.is_ending(desk.watch, "r1", PROCESS)
    assert not desk.ender.is_ending(desk.watch, "r1", replace(PROCESS, start=71)), "its pid was given anew"
    assert desk.tick(GRACE - 1)[0] == ["tell"]
    assert desk.tick(1)[0] == KILLED


def test_one_process_that_two_have_found_is_ended_once():
    """A stopped worker whose run a person ended by force stands still, and outlives its run."""
    desk = Desk(Recorder())
    late = replace(STUCK, who="Process 7", alert=None, kill_counts=False)
    assert desk.tick(0, STUCK, late)[0] == SIGNALLED


def test_what_has_ended_is_said_and_forgotten():
    """Else the next process of this run would be killed without a word."""
    desk = Desk(Recorder())
    desk.tick(0)
    desk.watch.at += GRACE
    assert "Process 7 of run r1 has ended" in " ".join(desk.ender.end([], desk.watch, desk.recorder))
    assert not desk.watch.ending
    assert desk.tick(GRACE)[0] == SIGNALLED


def test_who_cannot_be_seen_for_a_moment_has_not_ended():
    """A heartbeat that cannot be read: told to end once more, it would lose what it commits."""
    desk = Desk(Recorder())
    living = replace(STUCK, process=ProcessIdentity.from_pid(os.getpid()))
    assert desk.tick(0, living)[0] == SIGNALLED
    desk.watch.at += GRACE
    assert desk.ender.end([], desk.watch, desk.recorder) == []
    assert desk.tick(1, living)[0] == KILLED


def test_a_process_that_is_not_ours_to_end_is_told_of_alone():
    """A person's notebook keeps its device."""
    desk = Desk(Recorder())
    for _ in range(4):
        done, said = desk.tick(GRACE, replace(STUCK, process=None))
        assert done == ["tell"]
        assert "not ended from here" in said


def test_a_process_that_cannot_be_seen_from_here_is_told_of():
    """A worker in another pid namespace of the same boot: no signal reaches it, so a person has to know."""
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    elsewhere = replace(STUCK, process=ProcessIdentity.from_pid(child.pid), alert=None)
    child.communicate()
    ender, watch = RunEnder(Recorder(), Recorder(), grace=GRACE), Watch(at=100.0)
    for _ in range(3):
        assert "end it there" in " ".join(ender.end([elsewhere], watch, Recorder()))
        watch.at += GRACE


def test_a_kill_that_is_not_the_devices_fault_is_not_held_against_it():
    """A process that hangs after its run frees its device when it dies; one that does not die keeps it."""
    desk = Desk(Recorder())
    late = replace(STUCK, kill_counts=False)
    assert desk.tick(0, late)[0] == SIGNALLED
    assert desk.tick(GRACE, late)[0] == ["fence cancel", "SIGKILL", "tell"]
    assert desk.tick(GRACE, late)[0] == OUTLIVED
    nowhere = Desk(Recorder())
    for _ in range(4):
        assert not [step for step in nowhere.tick(GRACE, replace(STUCK, device=None))[0] if "free" in step]


GONE = ["fence", "stop job", "free", "tell"]


@pytest.mark.parametrize("failing", range(len(GONE)), ids=GONE)
def test_a_run_without_a_process_is_ended_in_the_same_order(failing):
    """What fails ends the call, and the next one does it all again: each step may be repeated."""
    recorder = Recorder(GONE[failing], AWAY)
    with pytest.raises(RuntimeError):
        end_gone_run(recorder, "r1", "It is gone.", job="job")
    assert recorder.done == GONE[: failing + 1]
    recorder = Recorder()
    assert end_gone_run(recorder, "r1", "It is gone.", job="job")
    assert recorder.done == GONE
    end_gone_run(recorder, "r1", "It is gone.")
    assert recorder.done == [*GONE, "fence", "free", "tell"], "one that runs here has no job"


ENDS = {
    "mark_interrupted",
    "end_cancelled",
    "report_end",
    "stop_launcher_job",
    "report_run_failed",
    "report_run_canceled",
}


def test_nobody_else_ends_a_run():
    """A second place would have an order of its own."""
    places = set()
    for package in ("sensors", "resources", "vlm_assets", "vlm_cluster", "vlm_training", "vlm_results"):
        for path in (CHECKOUT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            if any(isinstance(call, ast.Attribute) and call.attr in ENDS for call in calls):
                places.add(str(path.relative_to(CHECKOUT)))
    assert places - {"sensors/dagster_internals/runs.py"} == {"sensors/run_end.py"}

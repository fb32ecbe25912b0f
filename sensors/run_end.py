"""Ends runs: the one place that does, in one order: fence, signal, kill, free the device, tell.

Fence: Dagster is told first, so that the end is no failed attempt and overrules no cancel. Signal: SIGTERM,
at which a run commits. Kill: SIGKILL, after a grace. Free: a device whose process outlives even that is left
out. Tell: people and Dagster, last, so that a message that cannot be written keeps no process alive.

Others send the first signal too: Dagster or a launcher at a run that a person terminates, which Dagster has
fenced as being cancelled, and a node that stops, whose runs say themselves that they were interrupted. Each
run hears its first signal alone (``interrupt_once`` in ``resources/interrupts.py``). What does not end is
killed here; a node that stops kills its own after the same grace, and the head ends their runs as gone.

What does not live here: who is to end. Workers that stand still are in ``worker_health.py``, processes that
outlive their run in ``leases_after_end.py`` and ``vlm_cluster/node.py``, runs whose process is gone in
``reconciliation.py``, and in ``cluster_watch.py`` and ``node.py`` of ``vlm_cluster``. Processes that are no
runs have owners of their own.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from sensors.dagster_internals.events import DagsterFacts
from sensors.health_watch import Watch
from vlm_durable.files.processes import ProcessIdentity, boot_id
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_engine.devices.left_out import LeftOutDevices

_KILLED = "A person cancelled this run, its process did not end, and it is killed now."


@dataclass(frozen=True)
class RunToEnd:
    """A run whose process is to end.

    who, why: subject and rest of a sentence. process: None if it may not be ended from here; then people are
    told, and that is all. alert: for people. device: the one that may be the cause, if any. occurrence: of a
    failure of that device. kill_counts: whether it is one if the process has to be killed.
    """

    run_id: str
    who: str
    why: str
    process: ProcessIdentity | None
    alert: Alert | None = None
    device: str | None = None
    occurrence: str = ""
    kill_counts: bool = False


def end_gone_run(dagster: DagsterFacts, run_id: str, why: str, *, job: str | None = None) -> bool:
    """End a run whose process is certainly gone, so that there is nothing to signal or to kill.

    It ends as interrupted, or as cancelled if it is being cancelled. job: its launcher's, if it may still
    begin later: it is stopped instead of a process. Returns False if the run has ended meanwhile.
    """
    dagster.mark_interrupted(run_id)
    if job is not None:
        dagster.stop_launcher_job(job)
    dagster.free_slots(run_id)
    return dagster.report_end(run_id, why)


@dataclass(frozen=True)
class RunEnder:
    """Ends the processes of runs, one step a tick.

    grace: seconds between SIGTERM and SIGKILL. send: signals a run's process; False if it has ended.
    """

    outbox: Outbox
    left_out: LeftOutDevices
    grace: float = 10.0
    send: Callable[[RunToEnd, signal.Signals], bool] = lambda run, number: (
        run.process is not None and run.process.send(number)
    )
    _signalled: dict[str, float] = field(default_factory=dict, init=False)
    """Same as ``Watch.ending``: a failed tick loses its cursor, and the grace would begin again at each."""

    def is_ending(self, watch: Watch, run_id: str, process: ProcessIdentity) -> bool:
        """Whether this process was told to end: it is ended then, whatever it does meanwhile."""
        return _key(run_id, process) in self._signalled.keys() | watch.ending.keys()

    def end(self, runs: Iterable[RunToEnd], watch: Watch, dagster: DagsterFacts) -> list[str]:
        """Take the next step with each of these runs; changes ``watch``. Returns sentences.

        A step that fails is said and tried again at the next tick. It keeps no other run waiting.
        """
        by_key: dict[str, RunToEnd] = {}
        sentences: list[str] = []
        for run in runs:
            if run.process is None:
                sentences += [f"{run.who} {run.why}: it is not ended from here.", *self._post_alert(run)]
            else:
                by_key.setdefault(_key(run.run_id, run.process), run)
        for key, signalled_at in (self._signalled | watch.ending).items():
            watch.ending[key] = signalled_at
            run_id, pid, start = key.split(" ")
            # A heartbeat or a lease may be unreadable for a moment, so the process itself is looked at.
            if key not in by_key and not ProcessIdentity(int(pid), int(start), boot_id()).lives():
                self._signalled.pop(key, None)
                del watch.ending[key]
                watch.killed.pop(key, None)
                sentences.append(f"Process {pid} of run {run_id} has ended; its device is free.")
        for key, run in by_key.items():
            sentences += [*self._take_step(key, run, watch, dagster), *self._post_alert(run)]
        return sentences

    def _take_step(self, key: str, run: RunToEnd, watch: Watch, dagster: DagsterFacts) -> list[str]:
        """Fence, signal or kill, and free the device."""
        is_first = key not in watch.ending
        waited = 0.0 if is_first else watch.at - watch.ending[key]
        kills = not is_first and waited >= self.grace
        if not is_first and not kills:
            return []
        try:
            if kills:
                # Before the kill: the code server reports a killed run as failed, and Dagster would start
                # again what a person has stopped.
                dagster.end_cancelled(run.run_id, _KILLED)
            else:
                dagster.mark_interrupted(run.run_id)
        except Exception as error:  # Dagster's and the database's own
            return [f"{run.who} {run.why}: it is not ended yet, because Dagster cannot be told ({error})."]
        if not kills:
            self._signalled[key] = watch.ending[key] = watch.at
        try:
            if not self.send(run, signal.SIGKILL if kills else signal.SIGTERM):
                return [
                    f"{run.who} {run.why}. This process cannot be seen from here: it has just ended, or it"
                    " runs in another container. If this is said again, end it there."
                ]
        except PermissionError:
            return [
                f"{run.who} {run.why}. It is another user's process and cannot be ended from here: end it as"
                " that user, or run Dagster as the user whose runs they are."
            ]
        if not kills:
            return [f"{run.who} {run.why}: it is told to end (SIGTERM)."]
        # Counted from the kill: Dagster may have been away for long between the two signals.
        killed_at = watch.killed.setdefault(key, watch.at)
        return [
            f"{run.who} {run.why}: it did not end when told to, and was killed (SIGKILL).",
            *self._free(run, outlives_kill=watch.at - killed_at >= self.grace),
        ]

    def _free(self, run: RunToEnd, *, outlives_kill: bool) -> list[str]:
        """Record a process that had to be killed as a failure of its device.

        Python code that waits ends at SIGTERM, but a call into a hung device does not. A process that
        outlives SIGKILL holds its device until the driver, or a reboot, frees it: it is left out at once.
        """
        if run.device is None:
            return []
        whys = {}
        if run.kill_counts:
            whys[run.occurrence] = f"{run.who} {run.why}: it had to be killed."
        if outlives_kill:
            why = f"{run.who} {run.why}, and does not end when it is killed."
            whys = {run.occurrence: why, f"{run.occurrence}, still": why}
        try:
            for occurrence, why in whys.items():
                self.left_out.note_failure(run.device, occurrence=occurrence, why=why)
        except ControlStateError as error:
            return [f"{run.device} is not left out for that: {error}"]
        return []

    def _post_alert(self, run: RunToEnd) -> list[str]:
        try:
            if run.alert is not None:
                self.outbox.post(run.alert)
        except ControlStateError as error:
            return [f"No alert tells of it: {error}"]
        return []


def _key(run_id: str, process: ProcessIdentity) -> str:
    return f"{run_id} {process.pid} {process.start}"

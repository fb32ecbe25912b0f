"""Processes that hold a device though their run has ended: people are told, and the process is ended.

A process may hang at its very end, in the driver or in a library, after its run and its heartbeat have ended.
It may also be stopped (SIGSTOP) at work while a person ends its run by force: then it still holds its
heartbeat's lock, so that lock does not count. ``run_end.py`` ends it.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from resources.alerts.alert import Alert
from sensors.dagster_internals.events import DagsterFacts
from sensors.health_watch import Watch
from sensors.run_end import RunEnder, RunToEnd
from vlm_durable.files.processes import ProcessIdentity, boot_id, is_halted
from vlm_durable.state.workers import Phase, Worker
from vlm_engine.devices.find import Device
from vlm_engine.devices.leases import DeviceLeases, HeldDevice, LeaseRecord

KIND = "lease_held"

_END_SECONDS = 60.0
"""Added to the grace: a process writes its last events, and frees its model, before it ends."""


class RunOfProcess(StrEnum):
    """The state of the run that a process says it works for, as the second half of a sentence."""

    UNDER_WAY = "under way"
    FINISHED = "finished"
    ELSEWHERE = "finished, and was not started by this machine's code server"
    UNKNOWN = "not known to Dagster"


def run_of_process(dagster: DagsterFacts, run_id: str, pid: int) -> RunOfProcess:
    """The state of a run. FINISHED also means: its process began on this machine with this pid."""
    run = dagster.run_states([run_id]).get(run_id)
    if run is None:
        return RunOfProcess.UNKNOWN
    if not run.finished:
        return RunOfProcess.UNDER_WAY
    process = dagster.process_of(run_id)
    is_ours = run.is_here and process is not None and process[0] == pid
    return RunOfProcess.FINISHED if is_ours else RunOfProcess.ELSEWHERE


@dataclass(frozen=True)
class _LateHolder:
    """A held device, the record of its holder, and the state of that holder's run."""

    held: HeldDevice
    record: LeaseRecord
    run: RunOfProcess

    @property
    def process(self) -> ProcessIdentity:
        """The process that the record names."""
        return ProcessIdentity(self.record.pid, self.record.process_start or 0, boot_id())


@dataclass(frozen=True)
class LeasesAfterEnd:
    """Checks who holds a device. directory: of the leases. ender: ends those who hold one for too long.

    silence: seconds that a living process may go without a heartbeat, whatever it loads. If Dagster does not
    know the run, the sensor waits that long. home: the home whose runs these are, as ``LeaseHolder`` has it.
    """

    directory: Path
    ender: RunEnder
    silence: float
    home: str

    def late(self, watch: Watch, living: Sequence[Worker], dagster: DagsterFacts) -> list[RunToEnd]:
        """The processes that hold a device for too long after their run; changes ``watch``.

        living: the workers with a heartbeat. Such a worker is ended only if its run has certainly ended. So
        is a process of another home that shares the devices: it has its heartbeat there, and may have a
        Dagster of its own.
        Raises LeaseDirectoryError.
        """
        leases = DeviceLeases(self.directory, [Device(**fields) for fields in watch.devices.values()])
        leases_held = leases.holders()
        # Who publishes may have given its device back.
        used = {worker.device for worker in living if worker.phase is not Phase.PUBLISHING}
        runs, pids = {worker.run_id for worker in living}, {worker.pid for worker in living}
        late: dict[str, _LateHolder] = {}
        for held in leases_held:
            record = held.record
            if record is None or record.host != socket.gethostname() or not _is_run_id(record.holder.run_id):
                continue
            beats = record.holder.run_id in runs or record.pid in pids
            if held.device.id in used and not beats:
                continue  # The record is an earlier holder's.
            run = run_of_process(dagster, record.holder.run_id, record.pid)
            may_work = beats or not record.holder.is_of(self.home)
            if run is RunOfProcess.UNDER_WAY or (may_work and run is RunOfProcess.UNKNOWN):
                continue
            late[_name(record)] = _LateHolder(held, record, run)
        watch.after_end = {name: max(watch.after_end.get(name, watch.at), watch.since) for name in late}
        return [
            self._run_to_end(watch, name, holder, leases.lock_path(holder.held.device))
            for name, holder in late.items()
            if watch.at - watch.after_end[name] > self._allowed(holder)
            or self.ender.is_ending(watch, holder.record.holder.run_id, holder.process)
        ]

    def tell_freed(self, watch: Watch) -> None:
        """Note the recovery of devices that no late process holds any more."""
        for subject, alert in self.ender.outbox.open_subjects().items():
            if alert.kind == KIND and alert.occurrence not in watch.after_end:
                self.ender.outbox.note_recovery(subject, sentence="The device is free.", at=watch.unix)

    def _allowed(self, holder: _LateHolder) -> float:
        if holder.run is RunOfProcess.UNKNOWN:
            return self.silence
        # A stopped process writes no last events.
        return self.ender.grace if is_halted(holder.record.pid) else self.ender.grace + _END_SECONDS

    def _run_to_end(self, watch: Watch, name: str, holder: _LateHolder, lock: Path) -> RunToEnd:
        # The record may be an earlier holder's: only a process that holds this very lock is ended.
        is_ours = holder.run is not RunOfProcess.ELSEWHERE and holder.process.has_open(lock)
        run_id = holder.record.holder.run_id
        return RunToEnd(
            run_id,
            who=f"Process {holder.record.pid} of run {run_id}",
            why=f"holds {holder.held.device.id}, and its run is {holder.run.value}",
            process=holder.process if is_ours else None,
            alert=self._alert(watch, name, holder, is_ours=is_ours),
            device=holder.held.device.id,
            occurrence=f"held after {run_id}",
        )

    def _alert(self, watch: Watch, name: str, holder: _LateHolder, *, is_ours: bool) -> Alert:
        pid = holder.record.pid
        return Alert(
            kind=KIND,
            subject=f"devices/{holder.held.device.id}/lease",
            occurrence=name,
            severity="warning" if is_ours else "error",
            title=f"{holder.held.device.id} is held by a process whose run is {holder.run.value}",
            next_step=(
                "Nothing for now: it is ended, and the device is free then. If this stays open, the process"
                " hangs in the driver (`nvidia-smi`, the kernel log): reset the device, or reboot."
                if is_ours
                else "Dagster did not start it here as this user, so it is left to you: where nobody needs"
                f" it, `kill {pid}`, and if that does not end it `kill -9 {pid}`."
            ),
            partition=holder.record.holder.partition,
            expected="a process that ends with its run",
            actual=f"{holder.held.sentence()} So for {watch.at - watch.after_end[name]:.0f} s at least.",
            page=None if holder.run is RunOfProcess.UNKNOWN else f"runs/{holder.record.holder.run_id}",
            at=watch.unix,
        )


def _is_run_id(run_id: str) -> bool:
    """Whether Dagster may have given this id. A trial on the command line has an id of another form."""
    try:
        return str(uuid.UUID(run_id)) == run_id
    except ValueError:
        return False


def _name(record: LeaseRecord) -> str:
    return f"{record.device} {record.holder.run_id} {record.pid}"

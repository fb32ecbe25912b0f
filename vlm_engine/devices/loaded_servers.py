"""Model servers that stay loaded on a device between the runs that use them: found, kept or ended.

This module reads the record of each server, which lies beside the leases, says whether its processes live,
and ends them. ``vlm_engine/server/supervisor.py`` starts and watches a server; ``leases.py`` says who may
have the device.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote, unquote

from vlm_durable.files.files import write_replacing
from vlm_durable.files.lock_files import LockFile, acquire_lock, is_held
from vlm_durable.files.processes import ProcessIdentity, boot_id, end_processes, processes_of_group
from vlm_durable.files.sealed_json import refuse_newer_format
from vlm_engine.devices.find import DeviceError, members

FORMAT = 1
_ABOUT = (
    "Truth about where the processes are while the lock on the .supervisor.lock file beside it is held (that"
    " says whether they live); this file may be deleted at any time, and is written again while they do."
)
_LOOK_SECONDS = 0.05
_SLACK_SECONDS = 10.0
_SPEAKING_SECONDS = 10.0
"""A supervisor writes its record within a second of its start, and again where the file is gone."""

_SUPERVISOR_LOCK = ".supervisor.lock"


class LoadedServerError(DeviceError):
    """A server on a device does not say what it is, or does not end."""


@dataclass(frozen=True)
class ServerRecord:
    """A supervisor's record of its server.

    what: for people ("a server of MODEL"). digest, pin (environment variables that choose device and threads)
    and variables (keyed digests of the others, some of which are secret) must be the same for the server to
    be used again. grace_seconds: between SIGTERM and SIGKILL. server: leads a process group of its own. why:
    the cause of its end.
    """

    device: str
    what: str
    digest: str
    pin: Mapping[str, str]
    variables: Mapping[str, str]
    url: str
    command: Sequence[str]
    grace_seconds: float
    since: str
    host: str
    reaper: ProcessIdentity
    supervisor: ProcessIdentity
    server: ProcessIdentity | None = None
    state: Literal["starting", "ready", "ended"] = "starting"
    why: str = ""

    def write(self, path: Path) -> None:
        """Write to ``path``, in the place of an earlier record. Raises OSError."""
        write_replacing(
            path, json.dumps({"format": FORMAT, "about": _ABOUT, **asdict(self)}, indent=2).encode()
        )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The record at ``path``; None where there is no legible one."""
        try:
            fields: dict[str, Any] = json.loads(path.read_bytes())
            refuse_newer_format(fields.pop("format", 0), FORMAT, path)
            fields.pop("about", None)
            for name in ("reaper", "supervisor", "server"):
                fields[name] = fields[name] and ProcessIdentity(**fields[name])
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def sentence(self) -> str:
        """For people: which server is on the device."""
        pid = (self.server or self.supervisor).pid
        does = "lives" if self.state == "ready" else "starts"
        return f"{self.what} {does} there (pid {pid}, since {self.since})."


class ServerFiles:
    """The files of one device's server. lessee: a lock that the run that uses the server holds."""

    def __init__(self, directory: Path, device: str) -> None:
        # Quoted because old drivers write MIG ids with slashes.
        name = quote(device, safe="")
        self.record = directory / f"{name}.json"
        self.key = directory / f"{name}.key"
        self.log = directory / f"{name}.log"
        self.supervisor = directory / f"{name}{_SUPERVISOR_LOCK}"
        self.lessee = directory / f"{name}.lessee.lock"


class LoadedServers:
    """The servers on a home's devices, one a device at most, kept as files in ``STATE/servers``."""

    def __init__(self, state_directory: Path) -> None:
        self.directory = state_directory / "servers"

    def files(self, device: str) -> ServerFiles:
        """The files of a device's server."""
        return ServerFiles(self.directory, device)

    def living(self) -> Iterator[ServerRecord]:
        """All servers that live now and have a record."""
        for lock in sorted(self.directory.glob(f"*{_SUPERVISOR_LOCK}")):
            if is_held(lock):
                device = unquote(lock.name.removesuffix(_SUPERVISOR_LOCK))
                record = ServerRecord.read(self.files(device).record)
                if record is not None and record.supervisor.lives():
                    yield record

    def living_on(self, device: str) -> ServerRecord | None:
        """The server that lives on a device, or None.

        Raises LoadedServerError where a supervisor lives and writes no record for seconds.
        """
        files = self.files(device)
        deadline = time.monotonic() + _SPEAKING_SECONDS
        while is_held(files.supervisor):
            record = ServerRecord.read(files.record)
            # The record may be an earlier supervisor's: this one has only just been started.
            processes = [] if record is None else [record.supervisor, record.server]
            if any(process is not None and process.lives() for process in processes):
                return record
            if time.monotonic() >= deadline:
                raise LoadedServerError(
                    f"A process holds {files.supervisor}, so something lives on {device}, and {files.record}"
                    " does not say what. See who it is with `fuser`, end it, and start again."
                )
            time.sleep(_LOOK_SECONDS)
        return None

    def end_unless(self, device: str, usable_digest: str | None, log: logging.Logger) -> bool:
        """End the device's server, unless it has this digest. Returns whether a server lives there
        afterwards.

        For the process that holds the device's lease. Returns when the memory is free. Raises
        LoadedServerError.
        """
        if not self.directory.exists():
            return False
        for other in self._overlapping(device):
            self.end(other, "another use of the device", log)
        record = self.living_on(device)
        if record is not None and usable_digest is not None and record.digest == usable_digest:
            return True
        self.end(device, "another use of the device", log)
        return False

    def _overlapping(self, device: str) -> list[str]:
        """Other groups of devices that share one with this device and have had a server."""
        names = [unquote(path.name.removesuffix(".json")) for path in sorted(self.directory.glob("*.json"))]
        return [name for name in names if name != device and set(members(name)) & set(members(device))]

    def end(self, device: str, why: str, log: logging.Logger) -> bool:
        """End the device's server, every process of it; False where none lived. Raises LoadedServerError."""
        record = self.living_on(device)
        files = self.files(device)
        freed = partial(_freed, files.supervisor)
        if record is None:
            is_free = freed(_SLACK_SECONDS)
        else:
            log.info("Ending what lives on %s, for %s: %s", device, why, record.sentence())
            patience = record.grace_seconds + _SLACK_SECONDS
            is_free = end_processes(
                record.supervisor.send, freed, grace=patience, kill_seconds=patience
            ) or end_processes(record.reaper.send, freed, grace=None, kill_seconds=_SLACK_SECONDS)
        if not is_free:
            raise LoadedServerError(
                f"What lives on {device} does not end, though it was killed: {record and record.sentence()}"
                " A process that hangs in the driver ends only with a reset of the device, or a reboot."
            )
        _end_remnants(record or ServerRecord.read(files.record))
        return record is not None


def end_loaded_servers(state_directory: Path, log: logging.Logger) -> list[str]:
    """End all servers of a home that no run uses; sentences about those that stay."""
    servers = LoadedServers(state_directory)
    ours: list[tuple[ServerRecord, LockFile]] = []
    staying = []
    try:
        for record in servers.living():
            lock = acquire_lock(servers.files(record.device).lessee, seconds=1.0)
            if lock is None:
                staying.append(f"{record.device} is in use: {record.sentence()}")
            else:
                ours.append((record, lock))
                record.supervisor.send(signal.SIGTERM)  # all at once; each takes its time
        for record, _ in ours:
            try:
                servers.end(record.device, "the end of all", log)
            except LoadedServerError as error:
                staying.append(str(error))
    finally:
        for _, lock in ours:
            lock.close()
    return staying


def _freed(lock: Path, seconds: float) -> bool:
    """Whether a lock comes free in time. Its holders are not our children: there is no event of their end."""
    deadline = time.monotonic() + seconds
    while is_held(lock):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _end_remnants(record: ServerRecord | None) -> None:
    """Kill the remaining processes of a server whose supervisor and reaper were both killed.

    They are those of its process group within its supervisor's session: the system gives neither number to
    others while one process has it.
    """
    if record is None or record.server is None or record.state == "ended":
        return
    if record.host != socket.gethostname() or record.supervisor.boot_id != boot_id():
        return
    for pid, session in processes_of_group(record.server.pid):
        process = ProcessIdentity.from_pid(pid)
        if process is not None and session == record.supervisor.pid:
            with contextlib.suppress(PermissionError):
                process.send(signal.SIGKILL)

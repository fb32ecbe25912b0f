"""Processes that stay on a device between its lessees, such as a model server: found, kept or ended.

What lives here: the record beside the leases, whether its processes live, ending them. What does not: what
a resident does and how it is started (``resources/engine/server``), who may have the device
(``leases.py``). A
*keeper* starts the resident's processes, watches and ends them; a *guard* has them in one process group.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote, unquote

from resources.devices.errors import DeviceError
from resources.processes import ProcessIdentity, boot_id
from resources.storage.files import write_replacing
from resources.storage.lock_files import LockFile, is_held, taken

_ABOUT = (
    "Truth about where the processes are while the lock on the .keeper.lock file beside it is held (that says"
    " whether they live); this file may be deleted at any time, and is written again while they do."
)
_LOOK_SECONDS = 0.05
_SLACK_SECONDS = 10.0
_SPEAKING_SECONDS = 10.0
"""A keeper writes its record within a second of its start, and again where it is gone."""

State = Literal["starting", "ready", "ended"]


class ResidentError(DeviceError):
    """A resident of a device cannot be read, or does not end."""


@dataclass(frozen=True)
class ResidentRecord:
    """What a keeper says about its resident.

    ``what``: for people ("a server of MODEL"). ``digest``, ``pin`` (environment variables that choose device
    and threads) and ``variables`` (keyed digests of the others, some of which are secret): what must be the
    same for it to be used. ``group``: process group of all but the keeper. ``grace_seconds``: between SIGTERM
    and SIGKILL. ``why``: the cause of an end.
    """

    device: str
    what: str
    digest: str
    pin: Mapping[str, str]
    url: str
    command: tuple[str, ...]
    since: str
    grace_seconds: float
    host: str
    keeper: ProcessIdentity
    group: ProcessIdentity | None = None
    server: ProcessIdentity | None = None
    state: State = "starting"
    why: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace what stands at ``path``. Raises OSError."""
        write_replacing(path, json.dumps({"about": _ABOUT, **asdict(self)}, indent=2).encode())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What stands at ``path``; None where nothing legible does."""
        try:
            fields: dict[str, Any] = json.loads(path.read_bytes())
            fields.pop("about", None)
            for name in ("keeper", "group", "server"):
                fields[name] = fields[name] and ProcessIdentity(**fields[name])
            return cls(**{**fields, "command": tuple(fields["command"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def sentence(self) -> str:
        """For people: what lives there."""
        pid = self.server.pid if self.server else self.keeper.pid
        does = "lives" if self.state == "ready" else "starts"
        return f"{self.what} {does} there (pid {pid}, since {self.since})."


class ResidentPaths:
    """The files of one device's resident. ``lessee``: held by the materialization that uses it."""

    def __init__(self, directory: Path, device: str) -> None:
        # Quoted because old drivers write MIG ids with slashes.
        name = quote(device, safe="")
        self.record = directory / f"{name}.json"
        self.key = directory / f"{name}.key"
        self.log = directory / f"{name}.log"
        self.keeper = directory / f"{name}{_KEEPER_LOCK}"
        self.lessee = directory / f"{name}.lessee.lock"


_KEEPER_LOCK = ".keeper.lock"


class Residents:
    """The residents of a home's devices, kept as files in ``STATE/servers``."""

    def __init__(self, state_directory: Path) -> None:
        self.directory = state_directory / "servers"

    def paths(self, device: str) -> ResidentPaths:
        """Where a device's files are."""
        return ResidentPaths(self.directory, device)

    def living(self) -> Iterator[ResidentRecord]:
        """All residents that live now and say who they are."""
        for lock in sorted(self.directory.glob(f"*{_KEEPER_LOCK}")):
            if is_held(lock):
                record = ResidentRecord.read(self.paths(unquote(lock.name.removesuffix(_KEEPER_LOCK))).record)
                if record is not None and record.keeper.lives():
                    yield record

    def of(self, device: str) -> ResidentRecord | None:
        """The resident that lives on a device, or None.

        Raises ResidentError where one lives that does not say who it is, within seconds.
        """
        paths = self.paths(device)
        deadline = time.monotonic() + _SPEAKING_SECONDS
        while is_held(paths.keeper):
            record = ResidentRecord.read(paths.record)
            # The record may be an earlier keeper's: this one has only just been started.
            if record is not None and (record.keeper.lives() or (record.group and record.group.lives())):
                return record
            if time.monotonic() >= deadline:
                raise ResidentError(
                    f"A process holds {paths.keeper}, so something lives on {device}, and {paths.record} does"
                    " not say what. See who it is with `fuser`, end it, and start again."
                )
            time.sleep(_LOOK_SECONDS)
        return None

    def make_way(self, device: str, wanted: str | None, log: logging.Logger) -> bool:
        """End the device's resident, if it is not of digest ``wanted``; whether one lives there afterwards.

        For the process that holds the device's lease. Returns when its memory is free. Raises ResidentError.
        """
        if not self.directory.exists():
            return False
        record = self.of(device)
        if record is not None and wanted is not None and record.digest == wanted:
            return True
        self.end(device, "another use of the device", log)
        return False

    def end(self, device: str, why: str, log: logging.Logger) -> bool:
        """End the device's resident, every process of it; False where none lived. Raises ResidentError."""
        record = self.of(device)
        paths = self.paths(device)
        if record is not None:
            log.info("Ending what lives on %s, for %s: %s", device, why, record.sentence())
            record.keeper.send(signal.SIGTERM)
            patience = record.grace_seconds + _SLACK_SECONDS
            # Twice: the guard ends the others with a grace of its own when its keeper is gone.
            if not _freed(paths.keeper, patience):
                record.keeper.send(signal.SIGKILL)
                _freed(paths.keeper, patience)
        _end_remnants(record or ResidentRecord.read(paths.record))
        if not _freed(paths.keeper, _SLACK_SECONDS):
            raise ResidentError(
                f"What lives on {device} does not end, though it was killed: {record and record.sentence()}"
                " A process that hangs in the driver ends only with a reset of the device, or a reboot."
            )
        return record is not None


def end_residents(state_directory: Path, log: logging.Logger) -> list[str]:
    """End all residents of a home that no materialization uses; sentences about those that stay."""
    residents = Residents(state_directory)
    ours: list[tuple[ResidentRecord, LockFile]] = []
    staying = []
    try:
        for record in residents.living():
            lock = taken(residents.paths(record.device).lessee, seconds=1.0)
            if lock is None:
                staying.append(f"{record.device} is in use: {record.sentence()}")
            else:
                ours.append((record, lock))
                record.keeper.send(signal.SIGTERM)  # all at once; each takes its time
        for record, _ in ours:
            try:
                residents.end(record.device, "the end of all", log)
            except ResidentError as error:
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


def _end_remnants(record: ResidentRecord | None) -> None:
    """Kill what is left of a resident whose keeper and guard were both killed.

    Told by its process group within its keeper's session: neither number is given to others while one
    process has it.
    """
    if record is None or record.group is None or record.state == "ended":
        return
    if record.host != socket.gethostname() or record.keeper.boot_id != boot_id():
        return
    for pid in _members(record.group.pid, record.keeper.pid):
        one = ProcessIdentity.of(pid)
        if one is not None:
            with contextlib.suppress(PermissionError):
                one.send(signal.SIGKILL)


def _members(group: int, session: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries: no Path is made of each
        if name.isdigit():
            # A process may end between the listing and the reading.
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(stat[2]) == group and int(stat[3]) == session:
                    found.append(int(name))
    return found

"""Who holds a device, written beside its lock for people to read; never asked whether the holder lives.

The lock itself is leases.py's.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from resources.devices.find import Device
from resources.processes import process_start
from resources.storage.files import write_replacing

_ABOUT = (
    "For people; this file may be deleted. Whether the device is held is decided by the lock on the .lock "
    "file beside it, which must stay while anything runs."
)


@dataclass(frozen=True)
class LeaseHolder:
    """What the device is used for."""

    run_id: str
    partition: str
    step: str


@dataclass(frozen=True)
class LeaseRecord:
    """One holder. ``process_start`` (clock ticks since boot) tells it from a later one with its pid."""

    device: str
    holder: LeaseHolder
    pid: int
    process_start: int | None
    host: str
    since: str

    def write(self, path: Path) -> None:
        """Replace what stands at ``path``. Raises OSError."""
        write_replacing(path, json.dumps({"about": _ABOUT, **asdict(self)}, indent=2).encode())

    @classmethod
    def read(cls, path: Path) -> LeaseRecord | None:
        """What stands at ``path``; None where nothing legible does."""
        try:
            fields = json.loads(path.read_bytes())
            fields.pop("about", None)
            return cls(**{**fields, "holder": LeaseHolder(**fields["holder"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def written_by_the_dead(self) -> bool:
        """Whether its process is certainly gone; false where that cannot be seen from this machine."""
        return self.host == socket.gethostname() and process_start(self.pid) != self.process_start


@dataclass(frozen=True)
class HeldDevice:
    """A device whose lock is held, and the record beside it, if there is one."""

    device: Device
    record: LeaseRecord | None

    def sentence(self) -> str:
        """Who holds the device, for people."""
        record = self.record
        if record is None or record.written_by_the_dead():
            return f"{self.device.id} is held by a process that has not said who it is."
        holder = record.holder
        return (
            f"{self.device.id} is held by run {holder.run_id} (partition {holder.partition}, {holder.step}), "
            f"pid {record.pid} on {record.host}, since {record.since}."
        )

"""What the watcher of workers and devices remembers between two ticks: the cursor of its sensor.

What lives here: the value, and which of it still holds after a gap or a reboot. What does not: what is
concluded from it (``worker_health.py``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from vlm_durable.files.processes import boot_id
from vlm_engine.devices.find import Device

_BLIND_SECONDS = 120.0
"""After so long without a tick nothing is known of the time between: everybody's time counts anew."""


@dataclass
class Watch:
    """What the watcher remembers between ticks; may be lost, and then everybody's time counts anew.

    at, since: monotonic seconds of the last tick, and of the first of those without a gap. unix: the last
    tick in unix seconds. ended: when
    SIGTERM was sent, by worker. slow: since when, by worker. sick: since when (unix seconds), by device;
    sick_again: since when without a break; sound: since when again; cool: the same of a
    device that was too hot. blind_since: since when (unix seconds)
    the driver does not answer. devices: those seen since this boot; here: those that
    the settings meant at the last look. left_out: those told of. idle: since when
    nobody works. after_end: since when a process holds a device after its run; after_end_told: when SIGTERM
    was sent to it.
    """

    boot: str = ""
    at: float = 0.0
    since: float = 0.0
    unix: float = 0.0
    ended: dict[str, float] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    sick: dict[str, float] = field(default_factory=dict)
    sick_again: dict[str, float] = field(default_factory=dict)
    sound: dict[str, float] = field(default_factory=dict)
    cool: dict[str, float] = field(default_factory=dict)
    blind_since: float | None = None
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    here: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    idle: float | None = None
    after_end: dict[str, float] = field(default_factory=dict)
    after_end_told: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, cursor: str | None, *, now: float, unix: float) -> Watch:
        """The watch of the last tick, or one that begins now (monotonic and unix seconds)."""
        try:
            watch = cls(**json.loads(cursor or "{}"))
            for device in watch.devices.values():
                Device(**device)  # another version's has other fields
        except (ValueError, TypeError, AttributeError):
            watch = cls()
        if watch.boot != boot_id():
            watch = cls(boot=boot_id(), at=now, since=now, left_out=watch.left_out)
        elif now - watch.at > _BLIND_SECONDS:
            watch.since = now
        watch.at, watch.unix = now, unix
        return watch

    def cursor(self) -> str:
        """What Dagster keeps for the next tick."""
        return json.dumps(asdict(self))

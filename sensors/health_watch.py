"""The memory of the watcher of workers and devices between two ticks: the cursor of its sensor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from vlm_durable.files.processes import boot_id
from vlm_engine.devices.find import Device

_BLIND_SECONDS = 120.0
"""The longest gap between two ticks: nobody watched during a longer one, so all times start again."""


@dataclass
class Watch:
    """The watcher's memory between ticks. It may be lost: then all times start again.

    Times are monotonic seconds unless it says otherwise. at: of the last tick; since: of the first tick after
    which there was no gap; unix: of the last tick, in unix seconds.
    ending: by run and process, when SIGTERM was sent; killed: when SIGKILL was first sent.
    slow: by worker, since when it is slow.
    By device: sick: since when it is sick (unix seconds); sick_again: since when without a break;
    sound: since when it is sound again; cool: since when it is not too hot any more.
    blind_since: since when the driver does not answer (unix seconds). devices: those seen since this boot;
    configured: those that the settings named at the last tick; left_out: those left out at the last tick.
    idle: since when no worker works.
    after_end: by process, since when it outlives its run.
    """

    boot: str = ""
    at: float = 0.0
    since: float = 0.0
    unix: float = 0.0
    ending: dict[str, float] = field(default_factory=dict)
    killed: dict[str, float] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    sick: dict[str, float] = field(default_factory=dict)
    sick_again: dict[str, float] = field(default_factory=dict)
    sound: dict[str, float] = field(default_factory=dict)
    cool: dict[str, float] = field(default_factory=dict)
    blind_since: float | None = None
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    configured: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    idle: float | None = None
    after_end: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, cursor: str | None, *, now: float, unix: float) -> Watch:
        """The watch of the last tick, or one that begins now (monotonic and unix seconds)."""
        try:
            fields = json.loads(cursor or "{}")
            if "here" in fields:
                fields["configured"] = fields.pop("here")  # as earlier versions named it
            for earlier in ("ended", "after_end_told"):
                fields.pop(earlier, None)  # a process that was told to end gets SIGTERM once more
            watch = cls(**fields)
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
        """The cursor that Dagster keeps for the next tick."""
        return json.dumps(asdict(self))

"""When each sensor and schedule last ticked, on disk: whoever looks can tell that one has gone silent.

What lives here: one small file a name in ``.state/ticks``. What does not: who is told of a silent one
(``silent_sensors.py``). The files may be deleted: a sensor that ticks writes its own again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from resources.journal.files import temporary_beside

_ABOUT = "The last tick; may be deleted."


@dataclass(frozen=True)
class Tick:
    """The last tick of one sensor or schedule. at, interval_seconds: unix seconds, and its own rhythm."""

    name: str
    at: float
    interval_seconds: float


def record_tick(directory: Path, name: str, now: float, *, interval_seconds: float = 60.0) -> None:
    """Note that ``name`` has ticked, first thing in its tick. directory: HOME/.state/ticks. Raises OSError.

    interval_seconds: how often it means to tick; silence is judged by it. Not synced: it may be lost.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    temporary = temporary_beside(path)
    temporary.write_text(
        json.dumps({"about": _ABOUT, "name": name, "at": now, "interval_seconds": interval_seconds})
    )
    temporary.replace(path)


def last_ticks(directory: Path) -> dict[str, Tick]:
    """The last tick of everything that ever ticked here, by name; what cannot be read is left out."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        try:
            said = json.loads(path.read_bytes())
            tick = Tick(str(said["name"]), float(said["at"]), float(said["interval_seconds"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found[tick.name] = tick
    return found

"""When each sensor and schedule last ticked, on disk: whoever looks can tell that one has gone silent.

What lives here: one small file a name in ``.state/ticks``. What does not: who is told of a silent one
(``silent_sensors.py``). The files may be deleted: a sensor that ticks writes its own again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resources.storage.files import temporary_name

_ABOUT = "The last tick; may be deleted."

LONGEST_SILENCE_SECONDS = 300.0
"""No tick for this long, nor for five of its own intervals, is silence."""

_INTERVALS = 5.0


@dataclass(frozen=True)
class Tick:
    """The last tick of one sensor or schedule that came to its end.

    at: unix seconds. interval_seconds: its own rhythm. since: from when it ticks without a
    gap of LONGEST_SILENCE_SECONDS.
    """

    name: str
    at: float
    interval_seconds: float
    since: float

    def is_quiet(self, now: float) -> bool:
        """Whether it should have ticked since."""
        return now - self.at > longest_silence(self.interval_seconds)


def longest_silence(interval_seconds: float) -> float:
    """Seconds without a tick that are no silence yet for one that means to tick this often."""
    return max(_INTERVALS * interval_seconds, LONGEST_SILENCE_SECONDS)


def note_tick(
    directory: Path, name: str, now: float, *, interval_seconds: float, log: Callable[[], logging.Logger]
) -> None:
    """``record_tick`` as a tick's last act: one that cannot be written is logged, and undoes nothing.

    A tick that fails before comes not here, so that one that fails each time counts as silent. log: of the
    tick, asked for only where there is something to say: Dagster opens a file for it, and removes none.
    """
    try:
        record_tick(directory, name, now, interval_seconds=interval_seconds)
    except OSError as error:
        log().warning(f"The tick could not be noted, so {name} will seem silent: {error}")


def record_tick(directory: Path, name: str, now: float, *, interval_seconds: float = 60.0) -> None:
    """Note that ``name`` has ticked, after its work. directory: HOME/.state/ticks. Raises OSError.

    interval_seconds: how often it means to tick; silence is judged by it. Not synced: it may be lost.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    before = _read(path)
    said = {
        "about": _ABOUT,
        "name": name,
        "at": now,
        "interval_seconds": interval_seconds,
        "since": now if before is None or now - before.at > LONGEST_SILENCE_SECONDS else before.since,
    }
    temporary = temporary_name(path)
    try:
        temporary.write_text(json.dumps(said))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def last_ticks(directory: Path) -> dict[str, Tick]:
    """The last tick of everything that ever ticked here, by name; what cannot be read is left out."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        tick = _read(path)
        if tick is not None:
            found[tick.name] = tick
    return found


def _read(path: Path) -> Tick | None:
    try:
        said = json.loads(path.read_bytes())
        at = float(said["at"])
        # Noted by an earlier version, it ticked at that one time for all that is known.
        since = float(said.get("since", at))
        return Tick(str(said["name"]), at, float(said["interval_seconds"]), since)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

"""The pause: one file that makes every schedule, retry and materialization stand still until it is lifted.

What lives here: the file ``.state/pause.json`` and what it says. What does not: who looks at it and how each
stands still (``vlm_assets/automation/pausing.py``, ``sensors/failed_partitions.py``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from resources.storage.files import sync_directory
from resources.storage.sealed_json import BrokenSealError, unseal, write_sealed

NAME = "pause.json"

_ABOUT = "Truth: while this file stands nothing is started. `vlm-assets resume` removes it."
_UNREADABLE = "{path} does not read, so everything stays paused; `vlm-assets resume` lifts it"


@dataclass(frozen=True)
class Pause:
    """A pause: unix seconds since when, and why, in a person's words."""

    since: float
    reason: str

    def sentence(self) -> str:
        """Since when and why, for pages and logs."""
        when = datetime.fromtimestamp(self.since, UTC).astimezone().isoformat(" ", "minutes")
        because = f" because {self.reason}" if self.reason else ""
        return f"paused since {when}{because}; `vlm-assets resume` goes on"


def pause_of(state_directory: Path) -> Pause | None:
    """The pause that stands, or None. One that cannot be read is a pause too. Raises OSError."""
    path = state_directory / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = unseal(data)
        return Pause(float(found["since"]), str(found["reason"]))
    except (BrokenSealError, KeyError, TypeError, ValueError):
        return Pause(path.stat().st_mtime, _UNREADABLE.format(path=path))


def pause(state_directory: Path, reason: str, *, now: float) -> Pause:
    """Pause, durably when it returns; a pause that stands keeps its beginning. Raises OSError."""
    standing = pause_of(state_directory)
    wanted = Pause(standing.since if standing else now, reason or (standing.reason if standing else ""))
    write_sealed(state_directory / NAME, {"about": _ABOUT, **asdict(wanted)})
    return wanted


def resume(state_directory: Path) -> Pause | None:
    """Lift the pause, durably; gives the one that stood. Raises OSError."""
    standing = pause_of(state_directory)
    if standing is not None:
        (state_directory / NAME).unlink(missing_ok=True)
        sync_directory(state_directory)
    return standing

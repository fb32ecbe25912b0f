"""The pause: while it stands, no schedule, retry or materialization starts anything.

What lives here: setting, reading and lifting it. What does not: how each of them stands still
(``vlm_assets/assets/run_progress.py``, ``sensors/failed_partitions.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from resources.state.database import ControlState
from resources.state.tables import pause as _table


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


def pause_of(state: ControlState) -> Pause | None:
    """The pause that stands, or None. Raises ControlStateError."""
    return state.read(_standing)


def pause(state: ControlState, reason: str, *, now: float) -> Pause:
    """Pause, durably when it returns; a pause that stands keeps its beginning. Raises ControlStateError."""

    def write(connection: sa.Connection) -> Pause:
        standing = _standing(connection)
        wanted = Pause(standing.since if standing else now, reason or (standing.reason if standing else ""))
        connection.execute(_table.delete())
        connection.execute(_table.insert().values(id=1, since=wanted.since, reason=wanted.reason))
        return wanted

    return state.write(write, copy=True)


def resume(state: ControlState) -> Pause | None:
    """Lift the pause, durably; returns the one that stood. Raises ControlStateError."""

    def write(connection: sa.Connection) -> Pause | None:
        standing = _standing(connection)
        connection.execute(_table.delete())
        return standing

    return state.write(write, copy=True)


def _standing(connection: sa.Connection) -> Pause | None:
    row = connection.execute(sa.select(_table.c.since, _table.c.reason)).first()
    return None if row is None else Pause(row.since, row.reason)

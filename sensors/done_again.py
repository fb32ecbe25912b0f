"""What a retry completed: the first thing that a person who slept wants to know in the morning.

What lives here: the table ``done_again``: the latest time of each partition. What does not: what is still
being tried (``attempts.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from resources.state.database import ControlState
from resources.state.tables import done_again as _table

KEPT_SECONDS = 31 * 24 * 3600.0

_LONGEST_WHY = 200


@dataclass(frozen=True)
class DoneAgain:
    """A partition that was completed without a person.

    at: when that was seen (unix seconds). runs: after its first. why: what had been wrong.
    """

    key: str
    at: float
    runs: int
    why: str


def done_again_since(state: ControlState, since: float) -> list[DoneAgain]:
    """What was completed since (unix seconds), oldest first. Raises ControlStateError."""
    query = sa.select(_table.c.partition, _table.c.at, _table.c.runs, _table.c.why)
    query = query.where(_table.c.at >= since).order_by(_table.c.at)
    return state.read(lambda connection: [DoneAgain(*row) for row in connection.execute(query)])


def note_done_again(state: ControlState, done: Collection[DoneAgain], *, now: float) -> None:
    """Note partitions, unless a later time is known; forget those of a month ago."""
    if not done:
        return

    def write(connection: sa.Connection) -> None:
        connection.execute(_table.delete().where(_table.c.at < now - KEPT_SECONDS))
        known = connection.execute(sa.select(_table.c.partition, _table.c.at))
        latest = {row.partition: row.at for row in known}
        for one in done:
            if latest.get(one.key, 0.0) < one.at:
                connection.execute(_table.delete().where(_table.c.partition == one.key))
                row = asdict(one) | {"why": one.why[:_LONGEST_WHY], "partition": one.key}
                del row["key"]
                connection.execute(_table.insert().values(row))

    state.write(write)

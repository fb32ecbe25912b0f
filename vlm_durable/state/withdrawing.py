"""The note of a withdrawal of properties under way, for every machine to see.

A run writes its heartbeat and then reads the note; a withdrawal writes the note and then reads the
heartbeats. So of two that begin at once, one sees the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import sqlalchemy as sa

from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import WITHDRAWING as _NAME
from vlm_durable.state.tables import meta as _table


def begin_withdrawal(state: ControlState, partitions: Collection[str]) -> None:
    """Note durably that properties of these partitions are being withdrawn. Raises ControlStateError."""
    value = json.dumps(sorted(partitions))

    def write(connection: sa.Connection) -> None:
        connection.execute(_table.delete().where(_table.c.name == _NAME))
        connection.execute(_table.insert().values(name=_NAME, value=value))

    state.write(write, copy=True)


def end_withdrawal(state: ControlState) -> None:
    """Remove the note: all is withdrawn, or nothing was. Raises ControlStateError."""
    delete = _table.delete().where(_table.c.name == _NAME)
    state.write(lambda connection: connection.execute(delete), copy=True)


def being_withdrawn(state: ControlState) -> frozenset[str] | None:
    """The partitions of a withdrawal under way; None where there is none. Raises ControlStateError."""
    query = sa.select(_table.c.value).where(_table.c.name == _NAME)
    value = state.read(lambda connection: connection.execute(query).scalar())
    return None if value is None else frozenset(json.loads(value))

"""The note of a withdrawal of properties under way, for every machine to see.

A run writes its heartbeat and then reads the note; a withdrawal writes the note and then reads the
heartbeats. So of two that begin at once, one sees the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import WITHDRAWING, meta, put_row, text_of


def begin_withdrawal(state: ControlState, partitions: Collection[str]) -> None:
    """Note durably that properties of these partitions are being withdrawn. Raises ControlStateError."""
    value = json.dumps(sorted(partitions))
    state.write(lambda connection: put_row(connection, meta, name=WITHDRAWING, value=value), copy=True)


def end_withdrawal(state: ControlState) -> None:
    """Remove the note: all is withdrawn, or nothing was. Raises ControlStateError."""
    delete = meta.delete().where(meta.c.name == WITHDRAWING)
    state.write(lambda connection: connection.execute(delete), copy=True)


def being_withdrawn(state: ControlState) -> frozenset[str] | None:
    """The partitions of a withdrawal under way; None where there is none. Raises ControlStateError."""
    value = state.read(lambda connection: text_of(connection, WITHDRAWING))
    return None if value is None else frozenset(json.loads(value))

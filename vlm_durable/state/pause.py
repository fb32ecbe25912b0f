"""The pause: while it stands, no schedule, retry or materialization starts anything, here or on one node."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from vlm_durable.commands import command
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import node_pauses as _of_nodes
from vlm_durable.state.tables import pause as _table
from vlm_durable.wording import moment


@dataclass(frozen=True)
class Pause:
    """A pause. since: unix seconds. reason: in a person's words. node: the paused node; None: all work."""

    since: float
    reason: str
    node: str | None = None

    def sentence(self) -> str:
        """Since when and why, for pages and logs."""
        when = moment(self.since)
        because = f" because {self.reason}" if self.reason else ""
        if self.node is not None:
            go_on = f"{command('devices', 'resume', '--node', self.node)}"
            return f"the node {self.node} is paused since {when}{because}; {go_on} has it take work again"
        return f"paused since {when}{because}; {command('devices', 'resume')} goes on"


def pause_of(state: ControlState) -> Pause | None:
    """The pause that stands, or None. Raises ControlStateError."""
    return state.read(_standing)


def pause(state: ControlState, reason: str, *, now: float) -> Pause:
    """Pause, durably when it returns; a pause that stands keeps its beginning. Raises ControlStateError."""

    def write(connection: sa.Connection) -> Pause:
        current = _standing(connection)
        new_pause = Pause(current.since if current else now, reason or (current.reason if current else ""))
        connection.execute(_table.delete())
        connection.execute(_table.insert().values(id=1, since=new_pause.since, reason=new_pause.reason))
        return new_pause

    return state.write(write, copy=True)


def resume(state: ControlState) -> Pause | None:
    """Lift the pause, durably; returns the one that stood. Raises ControlStateError."""

    def write(connection: sa.Connection) -> Pause | None:
        current = _standing(connection)
        connection.execute(_table.delete())
        return current

    return state.write(write, copy=True)


def paused_nodes(state: ControlState) -> dict[str, Pause]:
    """The pauses of single nodes, by node. Raises ControlStateError."""
    query = sa.select(_of_nodes).order_by(_of_nodes.c.node)
    rows = state.read(lambda connection: connection.execute(query).all())
    return {row.node: Pause(row.since, row.reason, row.node) for row in rows}


def pause_node(state: ControlState, node: str, reason: str, *, now: float) -> Pause:
    """Pause one node, durably; a pause that stands keeps its reason. Raises ControlStateError."""

    def write(connection: sa.Connection) -> Pause:
        query = sa.select(_of_nodes).where(_of_nodes.c.node == node)
        if (row := connection.execute(query).first()) is not None:
            return Pause(row.since, row.reason, node)
        connection.execute(_of_nodes.insert().values(node=node, since=now, reason=reason))
        return Pause(now, reason, node)

    return state.write(write, copy=True)


def resume_node(state: ControlState, node: str) -> bool:
    """Let a node take work again, durably. Returns whether it was paused. Raises ControlStateError."""
    delete = _of_nodes.delete().where(_of_nodes.c.node == node)
    return state.write(lambda connection: connection.execute(delete).rowcount > 0, copy=True)


def _standing(connection: sa.Connection) -> Pause | None:
    row = connection.execute(sa.select(_table.c.since, _table.c.reason)).first()
    return None if row is None else Pause(row.since, row.reason)

"""Partitions that a person cancelled: each is kept until it is launched by hand again.

A cancelled partition is not a failed one: a retry would restart what a person has just stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import sqlalchemy as sa

from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import CANCELS_LOOKED_UNTIL as LOOKED_UNTIL
from vlm_durable.state.tables import cancels, meta, put_row, text_of

if TYPE_CHECKING:
    from sensors.dagster_internals.events import DagsterFacts
    from sensors.dagster_internals.runs import RunState

_OVERLAP_SECONDS = 120.0
_NOTE_SECONDS = 86_400.0


@dataclass(frozen=True)
class Cancel:
    """A run that a person ended, and when (unix seconds): from then on a launch by hand lifts the cancel.

    That is the run's end, or the person's request to end it if a launch by hand came in between.
    """

    run_id: str
    at: float


@dataclass(frozen=True)
class Cancelled:
    """Cancelled partitions by key. read_until: all runs that ended before it (unix seconds) are counted."""

    partitions: dict[str, Cancel] = field(default_factory=dict)
    read_until: float = 0.0


def updated(
    cancelled: Cancelled,
    ended: Iterable[RunState],
    created: Iterable[RunState],
    now: float,
    requested_at: Callable[[str], float | None] = lambda run_id: None,
) -> Cancelled:
    """The cancels after these runs: ended are cancelled runs, created are runs of any kind.

    requested_at: when a person asked to end a run (unix seconds); None if nobody knows. Runs that were
    counted before change nothing.
    """
    by_hand: dict[str, float] = {}
    for run in created:
        if run.partition is not None and run.is_by_hand:
            by_hand[run.partition] = max(run.created_at, by_hand.get(run.partition, 0.0))
    partitions = dict(cancelled.partitions)
    for run in ended:
        if run.partition is not None and run.ended_at is not None and run.interrupted_by is None:
            at = run.ended_at
            if run.created_at < by_hand.get(run.partition, 0.0) <= at:
                # A run may take minutes to end. Its log is read only here, because that costs milliseconds.
                at = requested_at(run.run_id) or at
            latest = partitions.get(run.partition)
            if latest is None or latest.at < at:
                partitions[run.partition] = Cancel(run.run_id, at)
    # A run that a person created after the cancel lifts it. The database keeps times in whole seconds.
    standing = {key: cancel for key, cancel in partitions.items() if by_hand.get(key, 0.0) <= cancel.at}
    return Cancelled(standing, now)


class Cancels:
    """The cancels of one home, brought up to date from Dagster's runs."""

    def __init__(self, state: ControlState) -> None:
        self._state = state
        self._read_until = 0.0

    def update(self, dagster: DagsterFacts, now: float) -> dict[str, Cancel]:
        """Read new runs and write the cancels down; returns those that stand. Raises ControlStateError."""
        recorded = self._state.read(_read)
        # This process reads runs only once, also those after the last write. After the database was restored,
        # all runs are read again.
        since = max(recorded.read_until, self._read_until) if recorded.read_until else 0.0
        since -= _OVERLAP_SECONDS
        # So are they after the clock was put back: what a person cancelled since then ended before ``since``.
        was_put_back = since > now
        if was_put_back:
            since = 0.0
        # Not at the top: ``vlm-assets status`` reads cancels, and importing Dagster takes a second.
        from dagster import DagsterRunStatus

        ended = dagster.runs_ended_since(max(since, 0.0), [DagsterRunStatus.CANCELED])
        oldest = min([since, *(run.created_at for run in ended)])
        created = dagster.runs_created_since(max(oldest, 0.0)) if recorded.partitions or ended else []
        requested_at = cache(dagster.cancel_requested_at)
        cancelled = updated(recorded, ended, created, now, requested_at)
        changed = cancelled.partitions != recorded.partitions
        if changed or was_put_back or now - recorded.read_until > _NOTE_SECONDS:

            def write(connection: sa.Connection) -> Cancelled:
                # Another tick may have written meanwhile.
                latest = updated(_read(connection), ended, created, now, requested_at)
                _write(connection, latest)
                return latest

            cancelled = self._state.write(write, copy=changed)
        self._read_until = now
        return cancelled.partitions

    def read(self) -> dict[str, Cancel]:
        """The cancels that were written down last. Raises ControlStateError."""
        return self._state.read(_read).partitions


def _read(connection: sa.Connection) -> Cancelled:
    rows = connection.execute(sa.select(cancels.c.partition, cancels.c.run_id, cancels.c.at))
    partitions = {row.partition: Cancel(row.run_id, row.at) for row in rows}
    return Cancelled(partitions, float(text_of(connection, LOOKED_UNTIL) or 0.0))


def _write(connection: sa.Connection, cancelled: Cancelled) -> None:
    connection.execute(cancels.delete())
    rows = [
        {"partition": key, "run_id": cancel.run_id, "at": cancel.at}
        for key, cancel in cancelled.partitions.items()
    ]
    if rows:
        connection.execute(cancels.insert(), rows)
    put_row(connection, meta, name=LOOKED_UNTIL, value=repr(cancelled.read_until))

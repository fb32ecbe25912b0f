"""How a materialization stands still: one that starts waits, one that works commits and ends as interrupted.

What lives here: looking at the pause at the start and at each batch. What does not: the pause itself
(``resources/state/pause.py``), and the schedules, which look at it themselves.

A run that starts while paused waits, and does not end: ended, a backfill's whole queue would go through the
devices in minutes and leave a failed run for each partition. Waiting, no more runs than there are devices
hold a process each, without a device and without a model; all others stay queued, and when the pause is
lifted everything goes on by itself. A run that works ends, so that its device is free: Dagster retries it as
one that was interrupted, and the retry waits like any other start.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import dagster as dg

from resources.journal.journal import Journal
from resources.state.database import ControlState
from resources.state.pause import Pause, pause_of
from resources.state.sqlite_file import ControlStateError
from resources.state.workers import WorkerBeat
from vlm_assets.assets.run_progress import Progress

_LOOK_SECONDS = 1.0

_working: set[str] = set()
"""Runs that have begun to work in this process, and may hold a device."""


def wait_while_paused(
    context: dg.AssetExecutionContext,
    state: ControlState,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when nothing is paused. A run that has worked already ends instead, as ``end_if_paused`` does.

    There is no event to wait for: the pause may come from another machine. A control state that cannot be
    read is waited for too: it may hold a pause.
    """
    standing = _pause_or_trouble(state)
    if standing is None:
        return
    if isinstance(standing, Pause) and context.run.run_id in _working:
        _end(context, standing)
    said = standing.sentence() if isinstance(standing, Pause) else str(standing)
    context.log.warning(f"Waiting, without a device: {said}.")
    while _pause_or_trouble(state) is not None:
        sleep(_LOOK_SECONDS)
    context.log.info("Nothing is paused any more: going on.")


def end_if_paused(context: dg.AssetExecutionContext, state: ControlState) -> None:
    """Raise DagsterExecutionInterruptedError where a pause stands: what is submitted will be committed.

    Work goes on where the control state cannot be read: rows are committed without it.
    """
    standing = _pause_or_trouble(state)
    if isinstance(standing, Pause):
        _end(context, standing)
    if standing is not None:
        context.log.warning(f"A pause would not be noticed now: {standing}")


def _pause_or_trouble(state: ControlState) -> Pause | ControlStateError | None:
    try:
        return pause_of(state)
    except ControlStateError as error:
        return error


def _end(context: dg.AssetExecutionContext, pause: Pause) -> None:
    said = f"Interrupted, with all finished rows committed: {pause.sentence()}."
    context.log.warning(said)
    raise dg.DagsterExecutionInterruptedError(said)


class PausableProgress(Progress):
    """Progress that ends the work at the next batch where a pause stands."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        *,
        expected: int,
        restored: int,
        journal: Journal,
        beat: WorkerBeat,
        state: ControlState,
    ) -> None:
        super().__init__(context, expected=expected, restored=restored, journal=journal, beat=beat)
        self._state = state
        _working.add(context.run.run_id)

    def load(self, device: str | None) -> None:
        """The device came free: where a pause began while it was waited for, it is not used."""
        end_if_paused(self._context, self._state)
        super().load(device)

    def start(self) -> None:
        """The model is loaded; a pause that began meanwhile ends the work before it starts."""
        end_if_paused(self._context, self._state)
        super().start()

    def advance(self, rows: int) -> None:
        """Count rows, which are submitted already, so that a pause loses none of them."""
        super().advance(rows)
        end_if_paused(self._context, self._state)

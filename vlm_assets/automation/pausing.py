"""How a materialization stands still: one that starts waits, one that works commits and ends as interrupted.

What lives here: looking at the pause at the start and at each batch. What does not: the pause itself
(``resources/state/pause.py``), the schedules, which look at it themselves.

A run that starts while paused waits, and does not end: ended, a backfill's whole queue would go through the
devices in minutes and leave a failed run for each partition. Waiting, no more runs than there are devices
hold a process each, without a device and without a model; all others stay queued, and when the pause is
lifted everything goes on by itself. A run that works ends, so that its device is free: Dagster retries it as
one that was interrupted, and the retry waits like any other start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg

from resources.journal.journal import Journal
from resources.state.pause import Pause, pause_of
from resources.state.workers import WorkerBeat
from vlm_assets.assets.run_progress import Progress

_LOOK_SECONDS = 1.0

_working: set[str] = set()
"""Runs that have begun to work in this process, and may hold a device."""


def wait_while_paused(
    context: dg.AssetExecutionContext,
    state_directory: Path,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when nothing is paused. A run that has worked already ends instead, as ``end_if_paused`` does.

    There is no event to wait for: a file may appear on a shared file system from another machine.
    """
    pause = pause_of(state_directory)
    if pause is None:
        return
    if context.run.run_id in _working:
        _end(context, pause)
    context.log.warning(f"Waiting, without a device: {pause.sentence()}.")
    while pause_of(state_directory) is not None:
        sleep(_LOOK_SECONDS)
    context.log.info("The pause is lifted: going on.")


def end_if_paused(context: dg.AssetExecutionContext, state_directory: Path) -> None:
    """Raise DagsterExecutionInterruptedError where a pause stands: what is submitted will be committed."""
    pause = pause_of(state_directory)
    if pause is not None:
        _end(context, pause)


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
        state_directory: Path,
    ) -> None:
        super().__init__(context, expected=expected, restored=restored, journal=journal, beat=beat)
        self._state_directory = state_directory
        _working.add(context.run.run_id)

    def load(self, device: str | None) -> None:
        """The device came free: where a pause began while it was waited for, it is not used."""
        end_if_paused(self._context, self._state_directory)
        super().load(device)

    def start(self) -> None:
        """The model is loaded; a pause that began meanwhile ends the work before it starts."""
        end_if_paused(self._context, self._state_directory)
        super().start()

    def advance(self, rows: int) -> None:
        """Count rows, which are submitted already, so that a pause loses none of them."""
        super().advance(rows)
        end_if_paused(self._context, self._state_directory)

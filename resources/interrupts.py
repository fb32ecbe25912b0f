"""How signals interrupt a run: the first one does, as in Dagster, and every later one changes nothing.

Several may tell a run to end: Dagster or a launcher when a person terminates it, a node that stops, and
whoever ends runs (``sensors/run_end.py``). A second interrupt would break into the commit of what is
finished. A process that does not end is killed after the grace.

Dagster sets a handler of its own before each step of an asset's generator and of an IO manager, and takes it
away after it (``raise_interrupts_as``). So ours is set again in each of them, and none is left behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import TypeVar

import dagster as dg

_T = TypeVar("_T")

_interrupted: set[str] = set()
"""Runs that a signal has interrupted in this process."""


def interrupt_once(run_id: str) -> None:
    """Have SIGTERM and SIGINT interrupt this run unless one has, until Dagster's present handler ends.

    Later ones are not ignored but handled: a program that is started then would ignore them too.
    """

    def interrupt(*_: object) -> None:
        if run_id not in _interrupted:
            _interrupted.add(run_id)
            raise dg.DagsterExecutionInterruptedError

    if threading.current_thread() is threading.main_thread():  # Only there Dagster interrupts a run.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, interrupt)


def emit(run_id: str, *events: _T) -> Iterator[_T]:
    """Yield events of an asset; between them, and after the last one, ``interrupt_once`` holds again."""
    for event in events:
        yield event
        interrupt_once(run_id)

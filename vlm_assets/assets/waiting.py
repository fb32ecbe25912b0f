"""Waiting, without a device, for what a materialization cannot do without: a model server, the images.

What lives here: the wait, and that its end in vain is no attempt at the partition. What does not: the wait
for a device (``resources/gpu``), and what is asked (``expected_model.py``, ``images_away.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

import dagster as dg

from resources.devices.leases import Clock
from vlm_assets.assets.materialize import note_no_attempt
from vlm_assets.automation.pausing import wait_while_paused
from vlm_assets.control_state import control_state
from vlm_assets.settings import Settings

_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_WAIT_SECONDS: Final = 30.0

_T = TypeVar("_T")


def when_it_is_there(
    context: dg.AssetExecutionContext,
    settings: Settings,
    find: Callable[[], _T],
    *,
    lacking: type[Exception],
    title: str,
    clock: Clock = time,
) -> _T:
    """What ``find`` gives, once no pause stands and it no longer raises ``lacking``.

    It is waited for as a device is, so that a backfill's queue does not run through. Raises ``lacking``, with
    ``title`` before its sentence, after ``device_wait_seconds``.
    """
    wait_while_paused(context, control_state(settings))
    deadline = clock.monotonic() + settings.device_wait_seconds
    wait = _FIRST_WAIT_SECONDS
    while True:
        try:
            return find()
        except lacking as error:
            left = deadline - clock.monotonic()
            if left <= 0:
                note_no_attempt(context)
                raise lacking(f"{title}: waited {settings.device_wait_seconds:.0f} s, and {error}") from error
            if wait == _FIRST_WAIT_SECONDS:
                said = str(error).rstrip(".")
                context.log.warning(f"Waiting, without a device, up to {left:.0f} s: {said}.")
        clock.sleep(min(wait, left))
        wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
        wait_while_paused(context, control_state(settings))

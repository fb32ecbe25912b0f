"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    reached: Callable[[], T],
    what: str = "it",
    *,
    seconds: float = 300.0,
    every: float = 0.1,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Ask until the answer is true, and give it; after so many seconds fail with ``what``.

    pause: waits ``every`` so many seconds between two questions, such as a server's ``watch``, which raises
    where one of its processes has ended.
    """
    deadline = time.monotonic() + seconds
    while not (answer := reached()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        pause(every)
    return answer

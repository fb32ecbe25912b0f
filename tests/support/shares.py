"""Sweeps whose cases repeat one branch: each day `make test` takes another share, `make test-long` takes all.

``TESTS_SHARE`` is the number of the share, which the first lines of a run name, or "all".
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from datetime import date
from typing import TypeVar

T = TypeVar("T")

SHARE = os.environ.get("TESTS_SHARE") or str(date.today().toordinal())
ALL = SHARE == "all"


def share_of(cases: Sequence[T], parts: int) -> Sequence[T]:
    """Each ``parts``-th of the cases: over as many days, all of them. At least one."""
    if ALL:
        return cases
    parts = min(parts, len(cases))
    return cases[int(SHARE) % parts :: parts]


def described() -> str:
    """The line that says how to repeat this run."""
    return f"share of sweeps: TESTS_SHARE={SHARE}"


def count_share(first: int, parts: int) -> Iterator[int]:
    """Each ``parts``-th number from ``first`` on, without end, as ``share_of`` takes them."""
    return itertools.count(first) if ALL else itertools.count(first + int(SHARE) % parts, parts)

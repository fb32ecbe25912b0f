"""How numbers are put into sentences for people."""

from __future__ import annotations

from datetime import datetime
from typing import Final

_ENDS: Final = {"ies": "y", "ches": "ch", "shes": "sh", "xes": "x", "sses": "ss", "s": ""}
"""Endings of plurals, and of their singulars."""


def counted(number: int, plural: str, singular: str | None = None) -> str:
    """A number and a noun as people write them: ``1 property``, ``1,350 new partitions``.

    singular: where more than the ending differs: ``"partitions are left", "partition is left"``.
    """
    if number != 1:
        return f"{number:,} {plural}"
    if singular is None:
        ends = ((plural.removesuffix(of_many), of_one) for of_many, of_one in _ENDS.items())
        singular = next((begin + end for begin, end in ends if begin != plural), plural)
    return f"{number:,} {singular}"


UNITS: Final = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))


def moment(unix: float, *, timespec: str = "minutes") -> str:
    """A time of this machine's zone, from unix seconds."""
    return datetime.fromtimestamp(unix).astimezone().isoformat(" ", timespec)


def duration(seconds: float) -> str:
    """Seconds in words, in the largest unit that fits at least once."""
    for unit, unit_seconds in UNITS:
        if seconds >= unit_seconds:
            return f"{seconds / unit_seconds:.1f} {unit}"
    return f"{seconds:.0f} seconds"

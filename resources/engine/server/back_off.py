"""How long to wait before a model server is asked again.

What lives here: the delay, from the number of tries and from what the server asked for. What does not:
whether it is asked again (``engine.py``).
"""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_FIRST_SECONDS: Final = 0.5
_MOST_SECONDS: Final = 30.0

MOST_ASKED_SECONDS: Final = 120.0
"""A server that asks to be left alone for longer is asked again after so long all the same."""


def back_off_seconds(tries: int, asked: float | None, *, chance: random.Random) -> float:
    """Seconds to wait after so many tries (from 1). asked: what the server said in Retry-After.

    Doubles from half a second to 30. At least what the server asked for, and then a random share on top, so
    that requests refused together do not come back together.
    """
    grown = min(_FIRST_SECONDS * 2.0 ** (tries - 1), _MOST_SECONDS)
    if asked is None:
        return grown * chance.uniform(0.5, 1.0)
    return min(asked, MOST_ASKED_SECONDS) + grown * chance.uniform(0.0, 0.5)


def asked_seconds(retry_after: str | None, *, now: datetime | None = None) -> float | None:
    """The seconds that a Retry-After header names, as a number or as a date; None where it names none."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            until = parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        seconds = (until - (now or datetime.now(UTC))).total_seconds()
    return max(seconds, 0.0) if seconds < float("inf") else None

"""How fast a model server is asked: how many requests at once, and how long to wait before a retry.

The limit hands out slots: it grows while the server keeps up, and is cut when it does not.
``property_requests.py`` decides whether a request is sent again. Term: additive increase, multiplicative
decrease, as in TCP's congestion control. Everything here belongs to one event loop; nothing is locked.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_FIRST_LIMIT: Final = 4.0
"""Requests until the server's first token, which tells how fast it is."""

_OPENED_LIMIT: Final = 32.0
"""Requests from the first token on, where the server is fast enough. Doubling from four took 5 s of each run.
Sent to a server that takes 5 s a prompt, the last 10 of 32 would be given up as silent."""

_CUT_WHEN_BUSY: Final = 0.5
_CUT_WHEN_SLOW: Final = 0.9

_SLOW: Final = 4.0
"""A request waited in the server's queue if its first token took this many times the baseline latency."""

_SLACK_SECONDS: Final = 1.0
"""A delay below this is noise and never counts as slow."""

_LATE_SHARE: Final = 1 / 3
"""A first token that takes longer than this share of the patience also waited in the server's queue."""

_LATE_AT_LEAST: Final = 2.0
"""And longer than this many times the baseline latency: some servers need as long without a queue."""

_GROWS_UP_TO: Final = 0.5
"""The limit grows while first tokens take up to this share of what counts as slow. An answer shows the effect
of the limit when it was requested, and the limit has grown since."""

_RECENT_ANSWERS: Final = 128
"""Recent answers that make the baseline. A server that became slower is the baseline after this many."""

_BASELINE_PERCENTILE: Final = 0.25
"""Baseline latency: this percentile of recent answers. Below the median, because queued requests must not
raise it; above the minimum, because some answers come from a cache."""

_FIRST_SECONDS: Final = 0.5
_MOST_SECONDS: Final = 30.0

MOST_RETRY_AFTER_SECONDS: Final = 120.0
"""Longest Retry-After that is honoured; after a longer one the retry comes after this many seconds."""


@dataclass(frozen=True)
class Slot:
    """Permission for one request. asked_at: on the limit's clock. full: it was the last free slot."""

    asked_at: float
    full: bool


class AdaptiveLimit:
    """Requests that may be under way at once: between 1 and ``most``, first come first served.

    The server's first token opens it: to 32, or to as many as would all have a first token in a third of the
    patience. From there it doubles with each round of answers until the server is first too slow, then grows
    by one a round. A refusal (429, 503) halves it; a first token that waited in the server's queue takes a
    tenth. Requests from before the last cut cut no second time. patience: seconds without a first token after
    which a request is given up.
    """

    def __init__(
        self, most: int, *, clock: Callable[[], float] = time.monotonic, patience: float = math.inf
    ) -> None:
        self._most = float(most)
        self._limit = min(_FIRST_LIMIT, self._most)
        self._clock = clock
        self._patience = patience
        self._doubling = True
        self._opened_at: float | None = None
        self._cut_at = float("-inf")
        self._seconds_an_image: deque[float] = deque(maxlen=_RECENT_ANSWERS)
        self._under_way = 0
        self._alone = False
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    @property
    def requests(self) -> int:
        """The limit now."""
        return int(self._limit)

    def first_token(self, seconds: float) -> None:
        """Open the limit, unless it was opened or cut before. seconds: from a request to its first token."""
        if self._opened_at is not None or not self._doubling:
            return
        self._opened_at = self._clock()
        in_time = self._patience * _LATE_SHARE / max(seconds, 1e-3)
        self._limit = max(self._limit, min(_OPENED_LIMIT, self._most, in_time))
        self._admit()

    def answered(self, slot: Slot, *, images: int, first_token_seconds: float | None) -> None:
        """Count an answer. first_token_seconds: None where they are no measure, as for images in a cache."""
        if self._opened_at is not None and slot.asked_at < self._opened_at:
            first_token_seconds = None  # An idle server is faster, and would make later answers look slow.
        share = 0.0
        if first_token_seconds is not None:
            share = self._share_of_slow(first_token_seconds, max(images, 1))
        if share > 1:
            self._cut(_CUT_WHEN_SLOW, slot)
        elif slot.full and share <= _GROWS_UP_TO:
            # Once an answer: over a round of `limit` answers, twice as many, or one more.
            self._limit = min(self._limit + (1.0 if self._doubling else 1.0 / self._limit), self._most)

    def refused(self, slot: Slot) -> None:
        """Count a refusal: the server has too much to do."""
        self._cut(_CUT_WHEN_BUSY, slot)

    def start_anew(self) -> None:
        """Start low again, and double from there: too many requests may have ended the last process."""
        self._limit = min(_FIRST_LIMIT, self._most)
        self._doubling = True
        self._opened_at = self._cut_at = self._clock()
        self._seconds_an_image.clear()

    def _share_of_slow(self, seconds: float, images: int) -> float:
        """The seconds to a first token, divided by the seconds above which it counts as slow."""
        recent = self._seconds_an_image
        recent.append(seconds / images)
        baseline = images * sorted(recent)[int((len(recent) - 1) * _BASELINE_PERCENTILE)]
        late = max(self._patience * _LATE_SHARE, baseline * _LATE_AT_LEAST)
        return seconds / min(baseline * _SLOW + _SLACK_SECONDS, late)

    def _cut(self, share: float, slot: Slot) -> None:
        if slot.asked_at <= self._cut_at:
            return
        self._limit = max(self._limit * share, 1.0)
        self._doubling = False
        self._cut_at = self._clock()

    @asynccontextmanager
    async def slot(self, *, alone: bool = False) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it. alone: with no other request under way, for one that may do harm."""
        await self._enter(alone)
        try:
            yield Slot(self._clock(), self._under_way >= self.requests)
        finally:
            self._under_way -= 1
            self._alone = False
            self._admit()

    async def _enter(self, alone: bool) -> None:
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((admission, alone))
        self._admit()
        try:
            await admission
        except asyncio.CancelledError:
            if admission.done() and not admission.cancelled():
                # It was admitted and cancelled in the same moment.
                self._under_way -= 1
                self._alone = False
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting:
            admission, alone = self._waiting[0]
            if not admission.done():
                if self._alone or self._under_way >= (1 if alone else self.requests):
                    return
                admission.set_result(None)
                self._under_way += 1
                self._alone = alone
            self._waiting.popleft()


def back_off_seconds(tries: int, retry_after: float | None, *, chance: random.Random) -> float:
    """Seconds to wait after so many tries (from 1). retry_after: seconds of the server's Retry-After header.

    The delay doubles from half a second to 30. It is at least Retry-After, with a random share on top, so
    that requests that were refused together do not come back together.
    """
    grown = min(_FIRST_SECONDS * 2.0 ** (tries - 1), _MOST_SECONDS)
    if retry_after is None:
        return grown * chance.uniform(0.5, 1.0)
    return min(retry_after, MOST_RETRY_AFTER_SECONDS) + grown * chance.uniform(0.0, 0.5)


def retry_after_seconds(retry_after: str | None, *, now: datetime | None = None) -> float | None:
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

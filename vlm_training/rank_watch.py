"""Ranks that stand still or lag behind: what each rank does, how long a step may take, which rank is slow.

A rank writes into a file what it does; times are judged here. Ranks are ended in ``rank_processes.py``, and
the work itself is in ``loop.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

_INTERVALS: Final = 20
_WINDOW: Final = 64
_WINDOW_AT_LEAST: Final = 16
_SHOWN: Final = 5
_BESIDE: Final = ("warning", "slow", "keeps pace")


class Activity(StrEnum):
    """What a rank does, as words of a sentence."""

    STARTING = "starting"
    LOADING = "loading the images of"
    COMPUTING = "computing"
    WAITING = "waiting for the others after"
    FINISHING = "finishing the step after"
    MEASURING = "measuring the epoch after"
    UNKNOWN = "where nobody can read"


@dataclass(frozen=True)
class Position:
    """What a rank does. round: how many microbatches it has begun. ids: the properties of the last one."""

    round: int = 0
    activity: Activity = Activity.STARTING
    ids: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """The position that a rank wrote last; that of a start if it has written nothing."""
        for _ in range(2):  # The rank may be writing at this moment: a torn file is read a second time.
            try:
                if not (content := path.read_bytes()):
                    return cls()
                position: dict[str, Any] = json.loads(content.partition(b"\n")[0])
                return cls(position["round"], Activity(position["activity"]), position["ids"])
            except FileNotFoundError:
                return cls()
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return cls(activity=Activity.UNKNOWN)

    def sentence(self) -> str:
        """What the rank does, as the second half of a sentence."""
        if not self.ids:
            return self.activity.value
        more = f" and {len(self.ids) - _SHOWN} more" if len(self.ids) > _SHOWN else ""
        return f"{self.activity} {', '.join(self.ids[:_SHOWN])}{more}"


class PositionFile:
    """The file of a rank's position. Without a sync: it matters only while the process lives."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._round, self._ids = 0, list[str]()

    def begin(self, ids: Sequence[str]) -> None:
        """Write that a microbatch of these properties comes next."""
        self._round, self._ids = self._round + 1, list(ids)
        self.enter(Activity.LOADING)

    def enter(self, activity: Activity) -> None:
        """Write what comes next."""
        position = {"round": self._round, "activity": activity, "ids": self._ids}
        with contextlib.suppress(OSError):  # A full disk is reported when a checkpoint is written.
            os.pwrite(self._file, json.dumps(position).encode() + b"\n", 0)


def blocking_ranks(positions: Sequence[Position], stopped: Sequence[bool]) -> list[int]:
    """The ranks that the others wait for. stopped: for each rank, whether the system keeps it from running.

    A rank with an unknown position is named only if all positions are unknown.
    """
    readable = [
        number for number, position in enumerate(positions) if position.activity is not Activity.UNKNOWN
    ]
    first_round = min((positions[number].round for number in readable), default=0)
    behind = [
        number for number in readable or range(len(positions)) if positions[number].round == first_round
    ]
    at_work = [number for number in behind if positions[number].activity is not Activity.WAITING]
    suspects = at_work or behind
    return [number for number in suspects if stopped[number]] or suspects


@dataclass(frozen=True)
class StepLimits:
    """How long a step may take, in seconds.

    A step may take ``learned_times`` the longest of the last steps, at least ``least`` and at most ``most``.
    ``most`` also holds before two steps are timed, and between two signs of life while an epoch is measured.
    loading: to start, to write or read a checkpoint that the steps wait for, and to evaluate the finished
    model. All are shorter than the health sensor's limits, which would end the whole run and name no rank.
    """

    learned_times: float = 1.5
    least: float = 20.0
    most: float = 400.0
    loading: float = 1800.0


@dataclass
class StepWatch:
    """Times the steps of one start, by the events of its first rank."""

    limits: StepLimits
    _at: float = field(default_factory=time.monotonic)
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))
    _last_event: str = ""

    def note(self, event: str, now: float) -> None:
        """Count an event as a sign of life. Events beside the steps, such as warnings, are none."""
        if event in _BESIDE:
            return
        if event == "step" and self._last_event == "step":
            self._intervals.append(now - self._at)
        self._at, self._last_event = now, event

    @property
    def allowed(self) -> float:
        """Seconds until the next event must have come."""
        if self._last_event in ("restored", "step", "epoch"):
            learned = self.limits.learned_times * max(self._intervals, default=self.limits.most)
            return min(max(learned, self.limits.least), self.limits.most)
        return self.limits.most if self._last_event == "measuring" else self.limits.loading

    def overdue(self, now: float) -> float | None:
        """Seconds without an event if they are more than allowed, else None."""
        return now - self._at if now - self._at > self.allowed else None


class SlowRanks:
    """Finds ranks that need longer for a microbatch than the others, by the medians of the last steps.

    share: a slow rank's rate is lower than the others' by this share. seconds: it is slow for so long without
    a break.
    """

    def __init__(self, *, share: float = 0.3, seconds: float = 600.0) -> None:
        self._share, self._seconds = share, seconds
        self._steps: deque[tuple[Sequence[float], Sequence[str]]] = deque(maxlen=_WINDOW)
        self._since: dict[int, float] = {}
        self._reported: set[int] = set()

    def note(self, seconds: Sequence[float], ids: Sequence[str], now: float) -> list[tuple[str, int, str]]:
        """Note a step. seconds: of each rank, for a microbatch. ids: the properties of the step's batch.

        Returns the events to report: ``slow`` or ``keeps pace``, the rank, and a sentence.
        """
        self._steps.append((seconds, ids))
        if len(seconds) < 2 or len(self._steps) < _WINDOW_AT_LEAST:
            return []
        medians = [statistics.median(step[rank] for step, _ in self._steps) for rank in range(len(seconds))]
        events = []
        for rank, own in enumerate(medians):
            others = statistics.median(medians[:rank] + medians[rank + 1 :])
            if own * (1.0 - self._share) <= others:
                self._since.pop(rank, None)
                if rank in self._reported:
                    self._reported.remove(rank)
                    events.append(("keeps pace", rank, f"Rank {rank} keeps pace with the others again."))
            elif now - self._since.setdefault(rank, now) >= self._seconds and rank not in self._reported:
                self._reported.add(rank)
                _, slowest = max(self._steps, key=lambda step: step[0][rank])
                events.append(
                    (
                        "slow",
                        rank,
                        f"Rank {rank} is slow: it needs {own:.2f} s for a microbatch and the others"
                        f" {others:.2f} s (median of {len(self._steps)} steps), for"
                        f" {self._seconds / 60:.0f} minutes. It was slowest in the batch of"
                        f" {', '.join(slowest[:_SHOWN])}. Every step waits for it: look at its device's"
                        " temperature, clocks and other users. It goes on.",
                    )
                )
        return events

"""Ranks that stand still or lag behind: what each rank does, how long a step may take, which rank is slow.

A rank writes into a file what it does. Times are judged by ``sensors/progress_judge.py``. Ranks are ended in
``rank_processes.py``, and the work itself is in ``loop.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from sensors.progress_judge import (
    SLOW_SECONDS,
    ProgressLimits,
    Reading,
    Standstill,
    slow_among,
    slow_since,
    standstill,
)

_INTERVALS: Final = 20
_WINDOW: Final = 64
_WINDOW_AT_LEAST: Final = 16
_SHOWN: Final = 5
_SHORTEST_SECONDS: Final = 1e-9
_BESIDE: Final = ("warning", "slow", "keeps pace")
_PACED: Final = ("restored", "step", "epoch", "measuring")
"""Events after which the next one comes soon. All others begin work that may take as long as loading."""


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


def rank_limits(of_run: ProgressLimits) -> ProgressLimits:
    """The limits of a step: shorter than those of its run, which the health sensor ends without a name."""
    return replace(of_run, least=of_run.least * 2 / 3, most=of_run.most * 2 / 3, learned_times=1.5)


@dataclass
class StepWatch:
    """Times the steps of one start, by the events of its first rank."""

    limits: ProgressLimits
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
    def reading(self) -> Reading:
        """The reading of the steps. The signs of life while an epoch is measured have no learned time."""
        learned_seconds = 0.0 if self._last_event == "measuring" else max(self._intervals, default=0.0)
        return Reading(self._at, self._last_event in _PACED, learned_seconds)

    def overdue(self, now: float) -> Standstill | None:
        """The verdict if the next event should have come, else None."""
        return standstill(self.reading, self.limits, now=now)


class SlowRanks:
    """Finds ranks that need longer for a microbatch than the others, by the medians of the last steps.

    seconds: a rank is named when it is slow for so long without a break.
    """

    def __init__(self, *, seconds: float = SLOW_SECONDS) -> None:
        self._seconds = seconds
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
        rates = {
            rank: 1.0 / max(statistics.median(step[rank] for step, _ in self._steps), _SHORTEST_SECONDS)
            for rank in range(len(seconds))
        }
        slow = slow_among(rates)
        self._since = slow_since(self._since, slow, now=now)
        keep_pace = sorted(self._reported - slow.keys())
        late = [rank for rank in slow if now - self._since[rank] >= self._seconds]
        news = sorted(set(late) - self._reported)
        self._reported = self._reported & slow.keys() | set(late)
        return [
            *(("keeps pace", rank, f"Rank {rank} keeps pace with the others again.") for rank in keep_pace),
            *(("slow", rank, self._sentence(rank, rates[rank], slow[rank])) for rank in news),
        ]

    def _sentence(self, rank: int, rate: float, peer_rate: float) -> str:
        _, slowest = max(self._steps, key=lambda step: step[0][rank])
        return (
            f"Rank {rank} is slow: it needs {1.0 / rate:.2f} s for a microbatch and the others"
            f" {1.0 / peer_rate:.2f} s (median of {len(self._steps)} steps), for"
            f" {self._seconds / 60:.0f} minutes. It was slowest in the batch of"
            f" {', '.join(slowest[:_SHOWN])}. Every step waits for it: look at its device's"
            " temperature, clocks and other users. It goes on."
        )

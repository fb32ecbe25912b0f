"""Ranks that stand still or lag behind: where each one is, how long a step may take, who is slower.

What lives here: the file in which a rank says what it does, and the judgement of times alone. What does not:
ending a rank (``rank_processes.py``) and the work itself (``loop.py``).
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


class Doing(StrEnum):
    """What a rank is at."""

    STARTING = "starting"
    LOADING = "loading the images of"
    COMPUTING = "computing"
    WAITING = "waiting for the others after"
    FINISHING = "finishing the step after"
    MEASURING = "measuring the epoch after"
    UNKNOWN = "where nobody can read"


@dataclass(frozen=True)
class Position:
    """Where a rank is. round: how many microbatches it has begun. ids: properties of the last one."""

    round: int = 0
    doing: Doing = Doing.STARTING
    ids: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """What a rank said last; that it starts where it has said nothing."""
        for _ in range(2):  # It may just be writing: a torn word is read once more.
            try:
                if not (said := path.read_bytes()):
                    return cls()
                found: dict[str, Any] = json.loads(said.partition(b"\n")[0])
                return cls(found["round"], Doing(found["doing"]), found["ids"])
            except FileNotFoundError:
                return cls()
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return cls(doing=Doing.UNKNOWN)

    def sentence(self) -> str:
        """What it does, as the second half of a sentence."""
        if not self.ids:
            return self.doing.value
        more = f" and {len(self.ids) - _SHOWN} more" if len(self.ids) > _SHOWN else ""
        return f"{self.doing} {', '.join(self.ids[:_SHOWN])}{more}"


class PositionFile:
    """A rank's word of where it is. No sync: it tells of a living process alone."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._round, self._ids = 0, list[str]()

    def begin(self, ids: Sequence[str]) -> None:
        """A microbatch of these properties comes next."""
        self._round, self._ids = self._round + 1, list(ids)
        self.enter(Doing.LOADING)

    def enter(self, doing: Doing) -> None:
        """Say what comes next."""
        said = {"round": self._round, "doing": doing, "ids": self._ids}
        with contextlib.suppress(OSError):  # A full disk is the checkpoints' to tell of.
            os.pwrite(self._file, json.dumps(said).encode() + b"\n", 0)


def held_up_by(positions: Sequence[Position], stopped: Sequence[bool]) -> list[int]:
    """Which ranks the others wait for. stopped: whether the system does not let a rank run.

    One of which nothing is known is named only where nothing is known of any.
    """
    known = [number for number, one in enumerate(positions) if one.doing is not Doing.UNKNOWN]
    last = min((positions[number].round for number in known), default=0)
    behind = [number for number in known or range(len(positions)) if positions[number].round == last]
    at_work = [number for number in behind if positions[number].doing is not Doing.WAITING]
    suspects = at_work or behind
    return [number for number in suspects if stopped[number]] or suspects


@dataclass(frozen=True)
class StepLimits:
    """How long a step may take, in seconds.

    ``learned_times`` the longest of the last steps, but not less than ``least`` nor more than ``most``, which
    also holds before a rhythm is known, and between two signs of life while an epoch is measured. loading: to
    start, to write or read a checkpoint that the steps wait for, and to evaluate the finished model. All are
    shorter than the health sensor's, which would end the whole run and name no rank.
    """

    learned_times: float = 1.5
    least: float = 20.0
    most: float = 400.0
    loading: float = 1800.0


@dataclass
class StepWatch:
    """The rhythm of the steps of one start, from the events of its first rank."""

    limits: StepLimits
    _at: float = field(default_factory=time.monotonic)
    _intervals: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))
    _doing: str = ""

    def take(self, event: str, now: float) -> None:
        """An event has come. What is said beside the steps, by another thread too, is no sign of life."""
        if event in _BESIDE:
            return
        if event == "step" and self._doing == "step":
            self._intervals.append(now - self._at)
        self._at, self._doing = now, event

    @property
    def allowed(self) -> float:
        """Seconds until the next event must have come."""
        if self._doing in ("restored", "step", "epoch"):
            learned = self.limits.learned_times * max(self._intervals, default=self.limits.most)
            return min(max(learned, self.limits.least), self.limits.most)
        return self.limits.most if self._doing == "measuring" else self.limits.loading

    def still(self, now: float) -> float | None:
        """Seconds without an event, where they are more than are allowed."""
        return now - self._at if now - self._at > self.allowed else None


class SlowRanks:
    """Which rank needs longer for a microbatch than the others, by the medians of the last steps.

    share: its rate is lower than the others' by so much. seconds: for so long without a break.
    """

    def __init__(self, *, share: float = 0.3, seconds: float = 600.0) -> None:
        self._share, self._seconds = share, seconds
        self._steps: deque[tuple[Sequence[float], Sequence[str]]] = deque(maxlen=_WINDOW)
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def take(self, seconds: Sequence[float], ids: Sequence[str], now: float) -> list[tuple[str, int, str]]:
        """Of each rank the seconds a microbatch of a step. ids: of the step's batch.

        Returns what is to be told now: ``slow`` or ``keeps pace``, the rank, and a sentence.
        """
        self._steps.append((seconds, ids))
        if len(seconds) < 2 or len(self._steps) < _WINDOW_AT_LEAST:
            return []
        usual = [statistics.median(step[rank] for step, _ in self._steps) for rank in range(len(seconds))]
        told = []
        for rank, own in enumerate(usual):
            others = statistics.median(usual[:rank] + usual[rank + 1 :])
            if own * (1.0 - self._share) <= others:
                self._since.pop(rank, None)
                if rank in self._told:
                    self._told.remove(rank)
                    told.append(("keeps pace", rank, f"Rank {rank} keeps pace with the others again."))
            elif now - self._since.setdefault(rank, now) >= self._seconds and rank not in self._told:
                self._told.add(rank)
                _, slowest = max(self._steps, key=lambda one: one[0][rank])
                told.append(
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
        return told

"""The faults of a rehearsal: what happens when, drawn from a seed before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What goes wrong."""

    KILL = "process killed"
    DEVICE = "device fails"
    HANG = "worker hangs"
    NODE = "node goes down"
    DISK = "disk full"
    STORE = "images away"
    IMAGES = "bad images"
    POISON = "poison partition"
    FILE = "published file damaged"
    DAEMON = "daemon down"
    POWER = "power cut"


_SHARES = {
    FaultKind.KILL: 22,
    FaultKind.DEVICE: 20,
    FaultKind.HANG: 8,
    FaultKind.NODE: 8,
    FaultKind.DISK: 6,
    FaultKind.STORE: 7,
    FaultKind.IMAGES: 10,
    FaultKind.POISON: 3,
    FaultKind.FILE: 4,
    FaultKind.DAEMON: 8,
    FaultKind.POWER: 4,
}
"""Of a hundred. What people report most comes most: killed processes and failing devices."""

_HOURS: dict[FaultKind, tuple[float, float]] = {
    FaultKind.DEVICE: (0.3, 6.0),
    FaultKind.NODE: (0.5, 12.0),
    FaultKind.DISK: (0.5, 4.0),
    FaultKind.STORE: (0.05, 6.0),
    FaultKind.DAEMON: (0.1, 8.0),
    FaultKind.POWER: (0.5, 8.0),
}
"""How long it lasts, at least and at most, in a run of weeks; in a shorter one, less."""

_LONG_RUN_SECONDS = 5 * 24 * 3600.0


@dataclass(frozen=True, order=True)
class Fault:
    """at: seconds after the start. seconds: how long it lasts. where: which one it hits, as 0 to 1 of all."""

    at: float
    kind: FaultKind
    seconds: float
    where: float


def draw_faults(chance: random.Random, *, count: int, seconds: float) -> list[Fault]:
    """So many faults within so many seconds, oldest first."""
    kinds = chance.choices(list(_SHARES), list(_SHARES.values()), k=count)
    faults, scale = [], min(1.0, seconds / _LONG_RUN_SECONDS)
    for kind in kinds:
        least, most = _HOURS.get(kind, (0.0, 0.0))
        lasts = chance.uniform(least, most) * 3600.0 * scale
        faults.append(Fault(chance.uniform(0.0, seconds), kind, lasts, chance.random()))
    return sorted(faults)

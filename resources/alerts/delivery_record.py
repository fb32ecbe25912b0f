"""The record of delivery, ``delivery.json``: what every target has still to be told.

What lives here: one tray a target, and its form on disk. What does not: sending, and the order of sending and
recording (``delivery.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from resources.alerts.alert_log import Position
from resources.alerts.messages import BURST, BURST_SECONDS, Group, Message, Sender, compose, group_of
from resources.storage.sealed_json import seal, unseal

_ABOUT = (
    "Truth: what every alert target was told. Without it, what is in alerts.jsonl is told again, in groups."
)


PATIENT_TRIES = 3
"""Failures up to which a target, or a message, is thought to be all right in a moment."""

_MOST_FLYING = 10


@dataclass
class Tray:
    """What one target has still to be told.

    waiting: by event and kind, not yet worded. told: when how many of a kind were, in the last minutes.
    flying: messages on their way. refused: how often each of them was not taken, by id. tries, next_at:
    failures in a row, and the unix second of the next try.
    """

    waiting: list[Group] = field(default_factory=list)
    told: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    flying: list[Message] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    tries: int = 0
    next_at: float = 0.0

    def take(self, entry: dict[str, Any]) -> None:
        """Put one line of the log with what waits."""
        found = group_of(entry)
        if found is None:
            return
        for group in self.waiting:
            if (group.event, group.kind) == found:
                break
        else:
            group = Group(*found)
            self.waiting.append(group)
        group.add(entry)

    def word(self, now: float, sender: Sender) -> bool:
        """Make messages of what waits, but of a kind that was told too often lately. True: it made some."""
        self.told = {
            name: recent
            for name, times in self.told.items()
            if (recent := [(at, count) for at, count in times if abs(now - at) < BURST_SECONDS])
        }
        held = []
        for group in self.waiting:
            told = self.told.setdefault(f"{group.event} {group.kind}", [])
            if sum(count for _, count in told) >= BURST:
                held.append(group)
            else:
                told.append((now, group.count))
                self.flying += compose(group, sender)
        changed = len(held) < len(self.waiting)
        self.waiting = held
        return changed

    def in_order(self) -> list[Message]:
        """What is on its way, oldest first, but what was refused often last: it holds no other up."""
        return sorted(self.flying, key=lambda one: self.refused.get(one.id, 0) > PATIENT_TRIES)

    def strike_off(self, message: Message) -> None:
        """Forget a message that was taken."""
        self.flying.remove(message)
        self.refused.pop(message.id, None)

    def note_refused(self, messages: Iterable[Message]) -> None:
        """Count messages that were not taken."""
        for one in messages:
            self.refused[one.id] = self.refused.get(one.id, 0) + 1

    def is_due(self, now: float, longest_wait: float) -> bool:
        """Whether it is to be tried. Times too far ahead are those of a clock that was put back: past."""
        return not now < self.next_at <= now + longest_wait

    @property
    def has_room(self) -> bool:
        """Whether more should be worded: what waits for a target that stays down is told in groups then."""
        return self.tries < PATIENT_TRIES or len(self.flying) < _MOST_FLYING

    @property
    def untold(self) -> int:
        """How many alerts and recoveries are left to tell."""
        return sum(group.count for group in self.waiting) + sum(message.tells for message in self.flying)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to tell."""
        return not self.waiting and not self.flying


@dataclass
class Record:
    """What stands in ``delivery.json``."""

    salt: str
    position: Position | None = None
    trays: dict[str, Tray] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        """Sealed JSON."""
        return seal(json.dumps({"about": _ABOUT, **asdict(self)}, ensure_ascii=False).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """What ``as_bytes`` gave. Raises BrokenSealError, KeyError or TypeError."""
        found = unseal(data)
        trays = {}
        for key, tray in found["trays"].items():
            groups = [Group(**group) for group in tray.pop("waiting")]
            flying = [Message(**message) for message in tray.pop("flying")]
            told = {name: [(at, n) for at, n in times] for name, times in tray.pop("told").items()}
            trays[key] = Tray(waiting=groups, flying=flying, told=told, **tray)
        position = found["position"]
        return cls(found["salt"], Position(**position) if position else None, trays)

"""What a person is told: an alert, and the notice that what it was about is right again.

What lives here: the two values, their stable ids, and the forms in which they are written down. What does
not: where they are kept (``outbox.py``), how they are grouped and worded (``messages.py``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

LONGEST_TEXT = 2000
"""Characters that any one text of an alert may have: an alert names the trouble, the page shows it all."""

Severity = Literal["warning", "error"]


@dataclass(frozen=True)
class Alert:
    """Something that a person must know of.

    kind: one of the kinds in docs/operations.md, e.g. ``check_failed``. subject: what is wrong, the same
    while it stays wrong, e.g. ``property_descriptions/KEY/row_count``. occurrence: tells one time from
    another, e.g. a run's id; the same kind, subject and occurrence are told once. next_step: what to do.
    page: path below the address of the pages, e.g. ``runs/ID``. at: unix seconds.
    """

    kind: str
    subject: str
    occurrence: str
    severity: Severity
    title: str
    next_step: str
    partition: str | None = None
    expected: str | None = None
    found: str | None = None
    page: str | None = None
    at: float = 0.0

    @property
    def id(self) -> str:
        """Stable over processes and repetitions: a digest of kind, subject and occurrence, in hex."""
        return _digest("raised", self.kind, self.subject, self.occurrence)

    def as_json(self) -> dict[str, Any]:
        """The fields that say something, long texts cut to LONGEST_TEXT."""
        cut = {name: _cut(getattr(self, name)) for name in ("title", "next_step", "expected", "found")}
        return {name: value for name, value in (asdict(self) | cut).items() if value is not None}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Alert:
        """What ``as_json`` gave; other names are left alone. Raises TypeError where one is missing."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in names})


@dataclass(frozen=True)
class Recovery:
    """What an alert was about is right again. sentence: what was seen. at: unix seconds.

    since: unix seconds since when it had been wrong; the alert is the latest of those times. by_hand: a
    person closed it, and nobody saw whether it is right.
    """

    alert: Alert
    occurrence: str
    sentence: str
    at: float
    since: float
    by_hand: bool = False

    @property
    def id(self) -> str:
        """Stable like an alert's: the same recovery of the same alert has the same one."""
        return _digest("recovered", self.alert.id, self.occurrence)

    def as_json(self) -> dict[str, Any]:
        """The alert it ends, and what was seen."""
        return {
            "alert": self.alert.as_json(),
            "occurrence": self.occurrence,
            "sentence": _cut(self.sentence),
            "at": self.at,
            "since": self.since,
            **({"by_hand": True} if self.by_hand else {}),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Recovery:
        """What ``as_json`` gave. Raises TypeError or KeyError where something is missing."""
        alert = Alert.from_json(found["alert"])
        since = found.get("since", alert.at)
        by_hand = found.get("by_hand", False)
        return cls(alert, found["occurrence"], found["sentence"], found["at"], since, by_hand)


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _cut(text: str | None) -> str | None:
    # What the id is made of is never cut.
    return text[: LONGEST_TEXT - 2] + " …" if text and len(text) > LONGEST_TEXT else text

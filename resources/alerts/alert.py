"""An alert, what happens to it, their stable ids, and the forms in which they are written down.

What does not live here: where they are kept (``outbox.py``), how they are grouped and worded
(``messages.py``).
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


Happening = Literal["raised", "again", "recovered", "closed"]
"""What happens to an alert. ``again``: another occurrence while it is open. ``closed``: by a person."""


@dataclass(frozen=True)
class AlertEvent:
    """One line of the history: what happened to an alert.

    since: unix seconds since when the subject is, or was, wrong; the alert is its latest occurrence.
    sentence: what was seen when it was right again, or the reason that a person gave.
    """

    what: Happening
    alert: Alert
    at: float
    since: float
    sentence: str = ""

    @property
    def id(self) -> str:
        """An alert's own id where it was raised; its end has one of its own, stable too."""
        if self.what in ("raised", "again"):
            return self.alert.id
        return _digest(self.what, self.alert.id, str(self.at))

    def as_json(self) -> dict[str, Any]:
        """All of it, and the id."""
        return {
            "what": self.what,
            "id": self.id,
            "at": self.at,
            "since": self.since,
            "sentence": _cut(self.sentence),
            "alert": self.alert.as_json(),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> AlertEvent:
        """What ``as_json`` gave."""
        alert = Alert.from_json(found["alert"])
        return cls(found["what"], alert, found["at"], found["since"], found["sentence"])


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _cut(text: str | None) -> str | None:
    # What the id is made of is never cut.
    return text[: LONGEST_TEXT - 2] + " …" if text and len(text) > LONGEST_TEXT else text

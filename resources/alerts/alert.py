"""An alert, what happens to it, its stable ids, and the words in which it reaches a person.

What does not live here: where alerts are kept (``outbox.py``), what was told already (``delivery.py``), and
sending (``targets.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal

DAY_SECONDS = 24 * 3600.0

LONGEST_TEXT = 2000
"""Characters that any one text of an alert may have: an alert names the trouble, the page shows it all."""

SINGLY = 3
"""Alerts of a kind that wait at once and are still told one by one; more become one message."""

SHOWN = 5
"""How many of a group its message shows."""


Severity = Literal["warning", "error"]


@dataclass(frozen=True)
class Alert:
    """Something that a person must know of.

    kind: one of the kinds in docs/operations.md, e.g. ``check_failed``. subject: what is wrong, the same
    while it stays wrong, e.g. ``property_descriptions/KEY/row_count``. occurrence: tells one time from
    another, e.g. a run's id; the same kind, subject and occurrence are told once. next_step: what to do.
    page: path below the address of the pages, e.g. ``runs/ID``. at: unix seconds. lasts: seconds after which
    it is over by itself, of what asks somebody to look and cannot become right again.
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
    lasts: float | None = None

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


@dataclass(frozen=True)
class Message:
    """What is sent. type: apprise's ``info``, ``success``, ``warning`` or ``failure``.

    id: the same when it is sent again. tells: how many alerts or recoveries it is about.
    """

    id: str
    title: str
    body: str
    type: str
    tells: int = 1


@dataclass(frozen=True)
class Sender:
    """Who speaks. home: the folder of this data set. address: of the pages; None: not known."""

    home: str
    host: str
    address: str | None

    def link(self, alert: Alert) -> str | None:
        """Where an alert's page is."""
        if alert.page is None:
            return None
        if self.address is None:
            return f"/{alert.page} in the Dagster UI"
        return f"{self.address.rstrip('/')}/{alert.page}"


def alerts_cannot_be_written(why: str) -> Message:
    """What is sent, unrecorded, where no alert can be written down any more."""
    body = f"{why}\nUntil then nothing else is told. Look: `vlm-assets status`."
    return Message("alerts-cannot-be-written", "Alerts cannot be written down", body, "failure")


def trial(sender: Sender) -> Message:
    """What ``vlm-assets alerts test`` sends."""
    pages = sender.address or "not up"
    body = f"Alerts of {sender.home} on {sender.host} reach you here. Pages: {pages}"
    return Message("test", "This is a test", body, "info")


def message_of_one(event: AlertEvent, sender: Sender) -> Message:
    """What is said of one alert, or of its end."""
    alert = event.alert
    title, type_ = alert.title, "failure" if alert.severity == "error" else "warning"
    said = [
        ("Expected", alert.expected),
        ("Found", alert.found),
        ("Next step", alert.next_step),
        ("Look", sender.link(alert)),
        ("Since", _clock(alert.at)),
    ]
    if event.what != "raised":
        title, type_ = f"{_ENDS[event.what]}: {alert.title}", "success"
        said = [
            ("Was", f"{alert.title}, since {_clock(event.since)}"),
            ("Now", event.sentence),
            ("Look", sender.link(alert)),
            ("At", _clock(event.at)),
        ]
    lines = [f"{name}: {text}" for name, text in [("Partition", alert.partition), *said] if text]
    return Message(event.id, column(title), _body(lines, alert.kind, event.id, sender), type_)


def message_of_many(first: Sequence[AlertEvent], ids: Iterable[str], sender: Sender) -> Message:
    """What is said of more than SINGLY events of a kind. first: SHOWN of them; ids: of all."""
    every = list(ids)
    id_ = hashlib.sha256(" ".join(every).encode()).hexdigest()[:24]
    alerts = [event.alert for event in first]
    lines = [f"The first {len(alerts)} of {len(every)}:"]
    for alert in alerts:
        found = f": expected {alert.expected}, found {alert.found}" if alert.expected or alert.found else ""
        lines.append(f"- {alert.title}{found}. {sender.link(alert) or ''}".rstrip())
    lines.append("All of them: `vlm-assets alerts`.")
    title = f"{len(every)} alerts of the kind {alerts[0].kind}"
    type_ = "failure" if any(alert.severity == "error" for alert in alerts) else "warning"
    if first[0].what == "raised":
        lines.append(f"Next step (of the first): {alerts[0].next_step}")
    else:
        title, type_ = f"{_ENDS[first[0].what]}: {title}", "success"
    return Message(id_, column(title), _body(lines, alerts[0].kind, id_, sender), type_, tells=len(every))


_ENDS = {"recovered": "Right again", "closed": "Closed by a person"}


def _body(lines: list[str], kind: str, id_: str, sender: Sender) -> str:
    said = [*lines, f"From: {sender.home} on {sender.host}", f"Kind: {kind}", f"Id: {id_}"]
    return column("\n".join(said))


def column(text: str) -> str:
    """A text as a database and a message may hold it: the name of a file may be no Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _clock(at: float) -> str | None:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else None


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _cut(text: str | None) -> str | None:
    # What the id is made of is never cut.
    return text[: LONGEST_TEXT - 2] + " …" if text and len(text) > LONGEST_TEXT else text

"""Messages: the words in which alerts and recoveries reach a person, and when many become one.

What does not live here: what was told already (``delivery.py``), and sending (``targets.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from resources.alerts.alert import Alert, AlertEvent

SINGLY = 3
"""Alerts of a kind that wait at once and are still told one by one; more become one message."""

SHOWN = 5
"""How many of a group its message shows."""


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

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


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
    return Message(event.id, title, _body(lines, alert.kind, event.id, sender), type_)


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
    return Message(id_, title, _body(lines, alerts[0].kind, id_, sender), type_, tells=len(every))


_ENDS = {"recovered": "Right again", "closed": "Closed by a person"}


def _body(lines: list[str], kind: str, id_: str, sender: Sender) -> str:
    return "\n".join([*lines, f"From: {sender.home} on {sender.host}", f"Kind: {kind}", f"Id: {id_}"])


def _clock(at: float) -> str | None:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else None

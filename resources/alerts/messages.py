"""Messages: the words in which alerts and recoveries reach a person, and when many become one.

What lives here: gathering what waits by kind, the limit on a kind, the text. What does not: posting
(``outbox.py``), and sending (``delivery.py``). A storm is told once, with a count and the first few; what
else of that kind comes within the next minutes waits and is counted in one message more.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from resources.alerts.alert import Alert, Recovery
from resources.alerts.outbox import RAISED, RECOVERED

SINGLY = 3
"""Alerts of a kind that wait at once and are still told one by one; more become one message."""

SHOWN = 5
"""How many of a group its message shows."""

BURST = 10
"""Alerts of a kind that are told within BURST_SECONDS before the kind has to wait."""

BURST_SECONDS = 600.0


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


@dataclass
class Group:
    """What waits of one kind: how many, the first of them as lines of the log, and a digest of all ids."""

    event: str
    kind: str
    count: int = 0
    digest: str = ""
    first: list[dict[str, Any]] = field(default_factory=list)

    def add(self, entry: dict[str, Any]) -> None:
        """Take one more, in order."""
        self.count += 1
        self.digest = hashlib.sha256(f"{self.digest} {entry['id']}".encode()).hexdigest()[:24]
        if len(self.first) < SHOWN:
            self.first.append(entry)


def group_of(entry: dict[str, Any]) -> tuple[str, str] | None:
    """Event and kind that a line of the log is gathered under; None where it tells nothing new."""
    if entry["event"] == RAISED:
        return RAISED, entry["kind"]
    if entry["event"] == RECOVERED:
        return RECOVERED, entry["alert"]["kind"]
    return None


@dataclass(frozen=True)
class Sender:
    """Who speaks. home: the folder of this data set. address: of the pages; None: not known."""

    home: str
    host: str
    address: str | None


def alerts_cannot_be_written(why: str) -> Message:
    """What is sent, unrecorded, where no alert can be written down any more."""
    return Message(
        id="alerts-cannot-be-written",
        title="Alerts cannot be written down",
        body=f"{why}\nUntil then nothing else is told. Look: `vlm-assets status`.",
        type="failure",
    )


def trial(sender: Sender) -> Message:
    """What ``vlm-assets alerts test`` sends."""
    return Message(
        id="test",
        title="This is a test",
        body=f"Alerts of {sender.home} on {sender.host} reach you here. Pages: {sender.address or 'not up'}",
        type="info",
    )


def compose(group: Group, sender: Sender) -> list[Message]:
    """The messages of a group: one each of a few, one for all of many."""
    if group.count <= SINGLY:
        make = _of_alert if group.event == RAISED else _of_recovery
        return [make(entry, sender) for entry in group.first]
    return [_of_many(group, sender)]


def _of_alert(entry: dict[str, Any], sender: Sender) -> Message:
    alert = Alert.from_json(entry)
    lines = [
        ("Partition", alert.partition),
        ("Expected", alert.expected),
        ("Found", alert.found),
        ("Next step", alert.next_step),
        ("Look", _link(alert, sender)),
        ("Since", _clock(alert.at)),
    ]
    return Message(
        id=alert.id,
        title=alert.title,
        body=_body([f"{name}: {text}" for name, text in lines if text], alert.kind, alert.id, sender),
        type="failure" if alert.severity == "error" else "warning",
    )


def _of_recovery(entry: dict[str, Any], sender: Sender) -> Message:
    recovery = Recovery.from_json(entry)
    alert = recovery.alert
    lines = [
        ("Partition", alert.partition),
        ("Was", f"{alert.title}, since {_clock(recovery.since)}"),
        ("Now", recovery.sentence),
        ("Look", _link(alert, sender)),
        ("At", _clock(recovery.at)),
    ]
    return Message(
        id=recovery.id,
        title=f"{'Closed by a person' if recovery.by_hand else 'Right again'}: {alert.title}",
        body=_body([f"{name}: {text}" for name, text in lines if text], alert.kind, recovery.id, sender),
        type="success",
    )


def _of_many(group: Group, sender: Sender) -> Message:
    raised = group.event == RAISED
    entries = group.first if raised else [entry["alert"] for entry in group.first]
    alerts = [Alert.from_json(entry) for entry in entries]
    lines = [f"The first {len(alerts)} of {group.count}:"]
    for alert in alerts:
        found = f": expected {alert.expected}, found {alert.found}" if alert.expected or alert.found else ""
        lines.append(f"- {alert.title}{found}. {_link(alert, sender) or ''}".rstrip())
    lines.append("All of them: `vlm-assets alerts`.")
    if raised:
        lines.append(f"Next step (of the first): {alerts[0].next_step}")
    worst = "failure" if any(alert.severity == "error" for alert in alerts) else "warning"
    title = f"{group.count} alerts of the kind {group.kind}"
    if not raised:
        by_hand = any(entry.get("by_hand") for entry in group.first)
        title = f"{'Right again, or closed by a person' if by_hand else 'Right again'}: {title}"
    return Message(
        id=group.digest,
        title=title,
        body=_body(lines, group.kind, group.digest, sender),
        type=worst if raised else "success",
        tells=group.count,
    )


def _body(lines: list[str], kind: str, id_: str, sender: Sender) -> str:
    return "\n".join([*lines, f"From: {sender.home} on {sender.host}", f"Kind: {kind}", f"Id: {id_}"])


def _link(alert: Alert, sender: Sender) -> str | None:
    if alert.page is None:
        return None
    if sender.address is None:
        return f"/{alert.page} in the Dagster UI"
    return f"{sender.address.rstrip('/')}/{alert.page}"


def _clock(at: float) -> str | None:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else None

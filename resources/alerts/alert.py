"""An alert, the events of its life, its stable ids, and the text of the messages about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from vlm_durable.commands import command

DAY_SECONDS = 24 * 3600.0

LONGEST_TEXT = 2000
"""Longest text of an alert, in characters: an alert names the trouble, the page shows it all."""

_KEYS = {"actual": "found"}
"""Keys of an alert in JSON that are not the names of its fields."""

Severity = Literal["warning", "error"]


@dataclass(frozen=True)
class Alert:
    """Something that a person must know of.

    kind: one of the kinds in docs/operations.md, e.g. ``check_failed``. subject: what is wrong, the same
    while it stays wrong, e.g. ``property_descriptions/KEY/row_count``. occurrence: tells two occurrences
    apart, e.g. a run's id; the same kind, subject and occurrence are told once. next_step: what to do.
    finding: the ``FindingKind`` of what is wrong on disk, where that is the trouble. page: path below the
    address of the pages, e.g. ``runs/ID``. at: unix seconds. lasts: seconds after which the alert closes by
    itself, for trouble that nothing can put right again.
    """

    kind: str
    subject: str
    occurrence: str
    severity: Severity
    title: str
    next_step: str
    partition: str | None = None
    finding: str | None = None
    expected: str | None = None
    actual: str | None = None
    page: str | None = None
    at: float = 0.0
    lasts: float | None = None

    @property
    def id(self) -> str:
        """Stable over processes and repetitions: a digest of kind, subject and occurrence, in hex."""
        return digest("raised", self.kind, self.subject, self.occurrence)

    def as_json(self) -> dict[str, Any]:
        """The fields that are set, long texts cut to LONGEST_TEXT."""
        cut = {name: _cut(getattr(self, name)) for name in ("title", "next_step", "expected", "actual")}
        fields = asdict(self) | cut
        return {_KEYS.get(name, name): value for name, value in fields.items() if value is not None}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Alert:
        """The alert that ``as_json`` gave."""
        names = {key: name for name, key in _KEYS.items()}
        return cls(**{names.get(key, key): value for key, value in fields.items()})


Happening = Literal["raised", "again", "recovered", "closed"]
"""What happens to an alert. ``again``: another occurrence while it is open. ``closed``: by a person."""


@dataclass(frozen=True)
class AlertEvent:
    """One line of the history: what happened to an alert.

    alert: the latest occurrence of its subject. at: when it happened; since: since when the subject is, or
    was, wrong; both in unix seconds. sentence: of a recovery, what was seen; of a close, the person's reason.
    """

    happening: Happening
    alert: Alert
    at: float
    since: float
    sentence: str = ""

    @property
    def id(self) -> str:
        """The alert's own id for a raised alert; the end of an alert has its own id, which is stable too."""
        if self.happening in ("raised", "again"):
            return self.alert.id
        return digest(self.happening, self.alert.id, str(self.at))

    def as_json(self) -> dict[str, Any]:
        """All fields, a long sentence cut to LONGEST_TEXT."""
        return {
            "what": self.happening,
            "alert": self.alert.as_json(),
            "at": self.at,
            "since": self.since,
            "sentence": _cut(self.sentence),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> AlertEvent:
        """The event of such a dict. Earlier versions wrote the event's id too, which is not read."""
        alert = Alert.from_json(fields["alert"])
        return cls(fields["what"], alert, fields["at"], fields["since"], fields["sentence"])


@dataclass(frozen=True)
class Message:
    """A message to a target. type: apprise's ``info``, ``success``, ``warning`` or ``failure``.

    id: the same when it is sent again.
    """

    id: str
    title: str
    body: str
    type: str


_ENDS = {"recovered": "right again", "closed": "closed by a person"}


def message_about(
    groups: Sequence[tuple[int, AlertEvent]], id_: str, *, origin: str, address: str | None
) -> Message:
    """One message about events. groups: for each kind of event, how many there are and the first of them.

    origin: the home and machine that send it. address: of the pages; None: not known.
    """
    if len(groups) == 1 and groups[0][0] == 1:
        first = groups[0][1]
        prefix = f"{_ENDS[first.happening].capitalize()}: " if first.happening in _ENDS else ""
        title, lines = f"{prefix}{first.alert.title}", _details(first, address)
    else:
        # What is wrong comes before what is right again, errors before warnings.
        groups = sorted(groups, key=lambda group: (group[1].happening in _ENDS, group[1].alert.severity))
        kinds = [
            f"{count} {event.alert.kind} {_ENDS.get(event.happening, '')}".strip() for count, event in groups
        ]
        title, lines = f"Alerts: {', '.join(kinds)}", list[str]()
        for kind, (_, event) in zip(kinds, groups, strict=True):
            lines += [f"{kind}, the first: {event.alert.title}", *_details(event, address), ""]
        lines.append(f"All of them: {command('alerts')}.")
    lines += [f"From: {origin}", f"Id: {id_}"]
    severities = {event.alert.severity for _, event in groups if event.happening not in _ENDS}
    type_ = "failure" if "error" in severities else "warning" if severities else "success"
    return Message(id_, storable_text(title), storable_text("\n".join(lines)), type_)


def _details(event: AlertEvent, address: str | None) -> list[str]:
    alert = event.alert
    page = None
    if alert.page is not None:
        page = f"{address.rstrip('/')}/{alert.page}" if address else f"/{alert.page} in the Dagster UI"
    texts = {"Kind": alert.kind, "Finding": alert.finding, "Partition": alert.partition}
    if event.happening in _ENDS:
        texts |= {"Was": f"{alert.title}, since {_clock(event.since)}", "Now": event.sentence}
        texts |= {"Look": page, "At": _clock(event.at)}
    else:
        texts |= {"Expected": alert.expected, "Found": alert.actual, "Next step": alert.next_step}
        texts |= {"Look": page, "Since": _clock(alert.at)}
    return [f"{name}: {text}" for name, text in texts.items() if text]


def storable_text(text: str) -> str:
    """A text as a database and a message can hold it: the name of a file may be no valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def digest(*parts: str) -> str:
    """A stable id, in hex."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _clock(at: float) -> str | None:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else None


def _cut(text: str | None) -> str | None:
    # Texts that are part of the id are never cut.
    return text[: LONGEST_TEXT - 2] + " …" if text and len(text) > LONGEST_TEXT else text

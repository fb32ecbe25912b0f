"""The outbox: any process posts the trouble that it sees here. It is durable before ``post`` returns.

The table ``alert_events`` is outbox and history in one. A subject is open while its latest event is no
recovery. ``delivery.py`` tells people.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from resources.alerts.alert import DAY_SECONDS, Alert, AlertEvent, Happening, storable_text
from vlm_durable.commands import command
from vlm_durable.state.database import ControlState
from vlm_durable.state.tables import alert_events as _events
from vlm_durable.state.tables import alert_targets as _targets

HISTORY_SECONDS = 90 * DAY_SECONDS
LONGEST_HISTORY = 20_000
"""Events of closed alerts are kept for this long, and up to this many, told or not."""

IS_TOLD = _events.c.what != "again"
"""People are told of the beginning and the end of a trouble, not of its repetitions."""

_IDS_AT_ONCE = 500
"""Up to so many ids are queried by name, as a database takes some thousand parameters; else all are read."""

_log = logging.getLogger(__name__)


class NotOpenError(LookupError):
    """No alert of that name is open; the message names those that are."""


class Outbox:
    """The events to be told, in one control state. Safe for any number of processes and threads at once.

    Every method raises ControlStateError if the database cannot be used; nothing was written then.
    """

    def __init__(self, state: ControlState) -> None:
        self.state = state
        self._cached: tuple[object, dict[str, AlertEvent]] = None, {}
        self._pruned_at = 0.0

    def post(self, alert: Alert) -> bool:
        """Note an alert, durably. False: this occurrence is known already."""
        return bool(self.post_all([alert]))

    def post_all(self, alerts: Iterable[Alert], *, once_while_open: bool = False) -> list[Alert]:
        """Note many in one transaction. Returns those that are told.

        once_while_open: if an alert of the same kind and subject is open, another occurrence is noted and not
        told. A partition that is tried again by itself would ring the phone at each try otherwise.
        """
        by_id = {alert.id: alert for alert in alerts}

        def write(connection: sa.Connection) -> list[Alert]:
            opened = dict(self._open(connection)) if once_while_open else {}
            events = []
            for alert in _unknown(connection, by_id):
                event = AlertEvent("raised", alert, alert.at, alert.at)
                before = opened.get(alert.subject)
                if once_while_open and before is not None and before.alert.kind == alert.kind:
                    event = AlertEvent("again", alert, alert.at, before.since)
                opened[alert.subject] = event
                events.append(event)
            _insert(connection, events)
            return [event.alert for event in events if event.happening == "raised"]

        # A post without a new alert writes nothing.
        if not by_id or not self.state.read(lambda connection: _unknown(connection, by_id)):
            return []
        return self.state.write(write)

    def note_recovery(self, subject: str, *, sentence: str, at: float) -> bool:
        """Note, durably, that a subject is right again. False if no alert of it is open."""
        return bool(self.note_recoveries({subject: sentence}, at=at))

    def note_recoveries(
        self, sentences: Mapping[str, str], *, at: float, happening: Happening = "recovered"
    ) -> list[AlertEvent]:
        """Note many recoveries in one transaction: sentences by subject. Returns those that were open."""

        def write(connection: sa.Connection) -> list[AlertEvent]:
            opened = self._open(connection)
            recoveries = [
                AlertEvent(happening, event.alert, at, event.since, sentences[subject])
                for subject, event in opened.items()
                if subject in sentences
            ]
            _insert(connection, recoveries)
            return recoveries

        return self.state.write(write) if sentences.keys() & self.open_subjects().keys() else []

    def close(self, name: str, *, sentence: str, at: float) -> Alert:
        """Note, durably, that a person closed an alert; it is told like a recovery.

        name: its subject, or its id as messages have it. After that only another occurrence of it is told.
        Raises NotOpenError.
        """
        opened = self.open_subjects()
        named = {subject: sentence for subject, alert in opened.items() if name in (subject, alert.id)}
        for event in self.note_recoveries(named, at=at, happening="closed"):
            return event.alert
        open_names = ", ".join(opened) or "none"
        raise NotOpenError(f"No alert with the subject or id {name} is open. Open are: {open_names}.")

    def open_subjects(self) -> dict[str, Alert]:
        """What is wrong and not right again: each subject's latest alert, oldest first."""
        return {subject: event.alert for subject, event in self.state.read(self._open).items()}

    def _open(self, connection: sa.Connection) -> dict[str, AlertEvent]:
        """The latest event of each open subject, oldest first; it is only read again after a new event."""
        # Read only once: another thread may put an older value in its place meanwhile.
        cached = self._cached
        newest = connection.execute(
            sa.select(_events.c.seq, _events.c.id).order_by(_events.c.seq.desc()).limit(1)
        ).first()
        if newest != cached[0]:
            query = sa.select(_events.c.event).where(_events.c.seq.in_(_latest_open()))
            events = map(AlertEvent.from_json, connection.scalars(query.order_by(_events.c.seq)))
            self._cached = cached = newest, {event.alert.subject: event for event in events}
        return cached[1]

    def recent(self, count: int) -> list[AlertEvent]:
        """The last events that were told, oldest first."""
        query = sa.select(_events.c.event).where(IS_TOLD).order_by(_events.c.seq.desc()).limit(count)
        rows = self.state.read(lambda connection: connection.scalars(query).all())
        return [AlertEvent.from_json(row) for row in reversed(rows)]

    def prune(self, now: float) -> None:
        """Delete old events of closed alerts, once a day.

        Events that some target never got are deleted too, because it may be down for good: the log says so.
        """
        if abs(now - self._pruned_at) < DAY_SECONDS:
            return
        newest = sa.select(sa.func.max(_events.c.seq)).scalar_subquery()
        is_old = (_events.c.at < now - HISTORY_SECONDS) | (_events.c.seq <= newest - LONGEST_HISTORY)
        is_over = is_old & _events.c.seq.not_in(_latest_open())
        told_to_all = sa.select(sa.func.min(_targets.c.told)).scalar_subquery()
        untold_count = sa.func.count().filter(IS_TOLD, _events.c.seq > told_to_all)
        counts = sa.select(sa.func.count(), untold_count).where(is_over)
        old, untold = self.state.read(lambda connection: connection.execute(counts).one())
        if untold:
            text = "%d alerts and recoveries, over by now, are deleted before every target was told"
            _log.error(f"{text}. See the targets in {command('alerts')}.", untold)
        if old:
            self.state.write(lambda connection: connection.execute(_events.delete().where(is_over)).rowcount)
        self._pruned_at = now


def _unknown(connection: sa.Connection, by_id: Mapping[str, Alert]) -> list[Alert]:
    query = sa.select(_events.c.id)
    if len(by_id) <= _IDS_AT_ONCE:
        query = query.where(_events.c.id.in_(by_id))
    known_ids = set(connection.scalars(query))
    return [alert for id_, alert in by_id.items() if id_ not in known_ids]


def _latest_open() -> sa.Select[tuple[int]]:
    latest = sa.select(sa.func.max(_events.c.seq)).group_by(_events.c.subject)
    return sa.select(_events.c.seq).where(_events.c.seq.in_(latest), _events.c.what.in_(("raised", "again")))


def _insert(connection: sa.Connection, events: Sequence[AlertEvent]) -> None:
    rows = [
        {
            "id": event.id,
            "what": event.happening,
            "kind": event.alert.kind,
            "subject": storable_text(event.alert.subject),
            "at": float(event.at),
            "event": event.as_json(),
        }
        for event in events
    ]
    if rows:
        connection.execute(_events.insert(), rows)

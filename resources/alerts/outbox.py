"""The outbox: whoever sees trouble posts it here, from any process, and it is durable before that returns.

What lives here: the table ``alert_events``, which is outbox and history in one; what is known, and what is
open: the subjects whose latest event is no recovery. An event is written together with a row of
``alert_deliveries`` for each target that is to be told. What does not: telling people (``delivery.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import sqlalchemy as sa

from resources.alerts.alert import DAY_SECONDS, Alert, AlertEvent, Happening, column
from resources.state.database import ControlState
from resources.state.tables import alert_deliveries as _deliveries
from resources.state.tables import alert_events as _events
from resources.state.tables import alert_targets as _targets

HISTORY_SECONDS = 90 * DAY_SECONDS
LONGEST_HISTORY = 20_000
"""Events that are over are kept for this long, and up to this many, told or not."""

IS_TOLD = _events.c.what != "again"
"""People are told of the beginning and the end of a trouble, not of its repetitions."""

_PRUNE_SECONDS = DAY_SECONDS
_IS_OPEN = _events.c.what.in_(("raised", "again"))
_AT_ONCE = 500

Item = TypeVar("Item")

_log = logging.getLogger(__name__)


class NotOpenError(LookupError):
    """No alert of that name is open; the message names those that are."""


class Outbox:
    """What is to be told, in one control state. Safe for any number of processes and threads at once.

    Every method raises ControlStateError where the database cannot be used; nothing was written then.
    """

    def __init__(self, state: ControlState) -> None:
        self.state = state
        self._opened: tuple[object, dict[str, Alert]] = None, {}
        self._pruned_at = 0.0

    def post(self, alert: Alert) -> bool:
        """Note an alert, durably. False: this occurrence is known already."""
        return bool(self.post_all([alert]))

    def post_all(self, alerts: Iterable[Alert], *, once_while_open: bool = False) -> list[Alert]:
        """Note many in one transaction. Returns those that are told.

        once_while_open: another occurrence of what is open, by an alert of the same kind, is noted and not
        told: whoever tries again by itself would ring the phone at each try.
        """
        parts = list(_in_parts({alert.id: alert for alert in alerts}.values()))

        def write(connection: sa.Connection) -> list[Alert]:
            return [one for part in parts for one in _post(connection, part, once_while_open)]

        # A look that finds nothing new writes nothing.
        if self.state.read(lambda connection: all(not _unknown(connection, part) for part in parts)):
            return []
        return self.state.write(write)

    def recovered(self, subject: str, *, sentence: str, at: float) -> bool:
        """Note, durably, that something is right again. False where nothing of it is open."""
        return bool(self.recovered_all({subject: sentence}, at=at))

    def recovered_all(
        self, seen: Mapping[str, str], *, at: float, what: Happening = "recovered"
    ) -> list[AlertEvent]:
        """Note many recoveries in one transaction: sentences by subject. Returns those that were open."""
        parts = list(_in_parts(seen.keys() & self.open_subjects().keys()))

        def write(connection: sa.Connection) -> list[AlertEvent]:
            opened = [event for part in parts for event in _open(connection, part)]
            over = [AlertEvent(what, one.alert, at, one.since, seen[one.alert.subject]) for one in opened]
            _insert(connection, over)
            return over

        return self.state.write(write) if parts else []

    def close(self, name: str, *, sentence: str, at: float) -> Alert:
        """A person says that an alert is over: noted as that, durably, and told as a recovery is.

        name: its subject, or its id as messages have it. Only another occurrence of it is told after that.
        Raises NotOpenError.
        """
        opened = self.open_subjects()
        named = {subject: sentence for subject, alert in opened.items() if name in (subject, alert.id)}
        for event in self.recovered_all(named, at=at, what="closed"):
            return event.alert
        there = ", ".join(opened) or "none"
        raise NotOpenError(f"No alert with the subject or id {name} is open. Open are: {there}.")

    def open_subjects(self) -> dict[str, Alert]:
        """What is wrong and not right again: each subject's latest alert, oldest first."""
        newest = sa.select(_events.c.seq, _events.c.id).order_by(_events.c.seq.desc()).limit(1)
        # Looked at once: another thread may put an older look in its place.
        before = self._opened

        def read(connection: sa.Connection) -> tuple[object, dict[str, Alert]]:
            row = connection.execute(newest).first()
            # Whatever changes what is open adds an event.
            if row is None or row == before[0]:
                return row, before[1] if row else {}
            return row, {event.alert.subject: event.alert for event in _open(connection)}

        self._opened = opened = self.state.read(read)
        return dict(opened[1])

    def recent(self, count: int) -> list[AlertEvent]:
        """The last events that were told, oldest first."""
        query = sa.select(_events.c.event).where(IS_TOLD).order_by(_events.c.seq.desc()).limit(count)
        rows = self.state.read(lambda connection: connection.scalars(query).all())
        return [AlertEvent.from_json(row) for row in reversed(rows)]

    def prune(self, now: float) -> None:
        """Delete old events of closed alerts, once a day.

        Old ones that some target was never told go too, for it may be down for good: an alert says how many.
        """
        if abs(now - self._pruned_at) < _PRUNE_SECONDS:
            return
        newest = sa.select(sa.func.max(_events.c.seq)).scalar_subquery()
        is_old = (_events.c.at < now - HISTORY_SECONDS) | (_events.c.seq <= newest - LONGEST_HISTORY)
        old = sa.select(_events.c.seq).where(is_old, _events.c.seq.not_in(_latest_open()))
        untold = _deliveries.c.seq.in_(old) & _deliveries.c.told_at.is_(None)
        lost = sa.select(sa.func.count(_deliveries.c.seq.distinct())).where(untold)

        def delete(connection: sa.Connection) -> None:
            connection.execute(_deliveries.delete().where(_deliveries.c.seq.in_(old)))
            connection.execute(_events.delete().where(_events.c.seq.in_(old)))

        rows, count = self.state.read(lambda connection: (connection.scalar(old), connection.scalar(lost)))
        if count:
            # Told first: a kill in between tells it twice, not never.
            self.post_all([_never_told(count, now)], once_while_open=True)
        if rows is not None:
            self.state.write(delete)
        self._pruned_at = now


def _never_told(count: int, now: float) -> Alert:
    said = f"{count} alerts and recoveries, over by now, were deleted before every target was told of them"
    _log.error("%s. See the targets in `vlm-assets alerts`.", said)
    return Alert(
        kind="alerts_not_told",
        subject="alerts/not told",
        occurrence=f"{now:.0f}",
        severity="error",
        title=said,
        next_step=(
            "`vlm-assets alerts` says which target is down, `vlm-assets alerts test` what it answers. Put it"
            " right, or take it out of VLM_ASSETS_ALERT_TARGETS."
        ),
        lasts=DAY_SECONDS,
        at=now,
    )


def _post(connection: sa.Connection, alerts: Sequence[Alert], once_while_open: bool) -> list[Alert]:
    """Note those that are not known. Returns those that are told."""
    new = _unknown(connection, alerts)
    opened = {event.alert.subject: event for event in _open(connection, [one.subject for one in new])}
    events = []
    for alert in new:
        standing = opened.get(alert.subject)
        event = AlertEvent("raised", alert, alert.at, alert.at)
        if once_while_open and standing is not None and standing.alert.kind == alert.kind:
            event = AlertEvent("again", alert, alert.at, standing.since)
        opened[alert.subject] = event
        events.append(event)
    _insert(connection, events)
    return [event.alert for event in events if event.what == "raised"]


def _unknown(connection: sa.Connection, alerts: Sequence[Alert]) -> list[Alert]:
    known = sa.select(_events.c.id).where(_events.c.id.in_([alert.id for alert in alerts]))
    found = set(connection.scalars(known))
    return [alert for alert in alerts if alert.id not in found]


def _open(connection: sa.Connection, subjects: Iterable[str] | None = None) -> list[AlertEvent]:
    """The latest event of each open subject, or of those of ``subjects`` that are open, oldest first."""
    query = sa.select(_events.c.event).where(_events.c.seq.in_(_latest_open(subjects)))
    return [AlertEvent.from_json(row) for row in connection.scalars(query.order_by(_events.c.seq))]


def _latest_open(subjects: Iterable[str] | None = None) -> sa.Select[tuple[int]]:
    latest = sa.select(sa.func.max(_events.c.seq)).group_by(_events.c.subject)
    if subjects is not None:
        latest = latest.where(_events.c.subject.in_([column(one) for one in subjects]))
    return sa.select(_events.c.seq).where(_events.c.seq.in_(latest), _IS_OPEN)


def _insert(connection: sa.Connection, events: Sequence[AlertEvent]) -> None:
    """Write events, and for each target a row of each that it is to be told."""
    if not events:
        return
    newest = connection.scalar(sa.select(sa.func.max(_events.c.seq))) or 0
    rows = [
        {
            "id": event.id,
            "what": event.what,
            "kind": event.alert.kind,
            "subject": column(event.alert.subject),
            "at": float(event.at),
            "event": event.as_json(),
        }
        for event in events
    ]
    connection.execute(_events.insert(), rows)
    told = sa.select(_targets.c.key, _events.c.seq).join_from(_targets, _events, sa.true())
    told = told.where(_events.c.seq > newest, IS_TOLD)
    connection.execute(_deliveries.insert().from_select(["target", "seq"], told))


def _in_parts(values: Iterable[Item]) -> Iterator[list[Item]]:
    """Databases take some thousand parameters in one statement."""
    every = list(values)
    for start in range(0, len(every), _AT_ONCE):
        yield every[start : start + _AT_ONCE]

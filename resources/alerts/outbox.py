"""The outbox: whoever sees trouble posts it here, from any process, and it is durable before that returns.

What lives here: the table ``alert_events``, which is outbox and history in one; what is known, and what is
open: the subjects whose latest event is no recovery. What does not: telling people (``delivery.py``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from resources.alerts.alert import DAY_SECONDS, Alert, AlertEvent, Happening, column
from resources.state.database import ControlState
from resources.state.tables import alert_events as _events

TOLD: tuple[Happening, ...] = ("raised", "recovered", "closed")
"""People are told of the beginning and the end of a trouble, not of its repetitions."""

HISTORY_SECONDS = 90 * DAY_SECONDS
LONGEST_HISTORY = 20_000
"""Events that are over are kept for this long, and up to this many, told or not."""

_PRUNE_SECONDS = DAY_SECONDS
_OPEN: tuple[Happening, ...] = ("raised", "again")
_AT_ONCE = 500

_log = logging.getLogger(__name__)


class NotOpenError(LookupError):
    """No alert of that name is open; the message names those that are."""


class Outbox:
    """What is to be told, in one control state. Safe for any number of processes and threads at once.

    Every method raises ControlStateError where the database cannot be used; nothing was written then.
    """

    def __init__(self, state: ControlState) -> None:
        self.state = state
        self._guard = threading.Lock()
        self._newest: Sequence[object] | None = None
        self._open: dict[str, AlertEvent] = {}
        self._pruned_at = 0.0

    def post(self, alert: Alert) -> bool:
        """Note an alert, durably. False: this occurrence is known already."""
        return bool(self.post_all([alert]))

    def post_all(self, alerts: Iterable[Alert], *, once_while_open: bool = False) -> list[Alert]:
        """Note many in one transaction. Returns those that are told.

        once_while_open: another occurrence of what is open, by an alert of the same kind, is noted and not
        told: whoever tries again by itself would ring the phone at each try.
        """
        wanted = {alert.id: alert for alert in alerts}
        # A look that finds nothing new writes nothing.
        known = self.state.read(lambda connection: _known(connection, wanted)) if wanted else set()
        if wanted.keys() == known:
            return []

        def write(connection: sa.Connection) -> list[AlertEvent]:
            known = _known(connection, wanted)
            new = [alert for id_, alert in wanted.items() if id_ not in known]
            opened = _open_events(connection, {column(alert.subject) for alert in new})
            events = []
            for alert in new:
                standing = opened.get(alert.subject)
                is_again = once_while_open and standing is not None and standing.alert.kind == alert.kind
                since = standing.since if is_again and standing is not None else alert.at
                event = AlertEvent("again" if is_again else "raised", alert, alert.at, since)
                opened[alert.subject] = event
                events.append(event)
            _insert(connection, events)
            return events

        return [event.alert for event in self.state.write(write) if event.what == "raised"]

    def recovered(self, subject: str, *, sentence: str, at: float) -> bool:
        """Note, durably, that something is right again. False where nothing of it is open."""
        return bool(self.recovered_all({subject: sentence}, at=at))

    def recovered_all(
        self, seen: Mapping[str, str], *, at: float, what: Happening = "recovered"
    ) -> list[AlertEvent]:
        """Note many recoveries in one transaction: sentences by subject. Returns those that were open."""
        wanted = seen.keys() & self.open_subjects().keys()
        if not wanted:
            return []

        def write(connection: sa.Connection) -> list[AlertEvent]:
            opened = _open_events(connection, {column(subject) for subject in wanted})
            events = [
                AlertEvent(what, event.alert, at, event.since, seen[subject])
                for subject, event in opened.items()
                if subject in wanted
            ]
            _insert(connection, events)
            return events

        return self.state.write(write)

    def close(self, name: str, *, sentence: str, at: float) -> Alert:
        """A person says that an alert is over: noted as that, durably, and told as a recovery is.

        name: its subject, or its id as messages have it. Only another occurrence of it is told after that.
        Raises NotOpenError.
        """
        opened = self.open_subjects()
        for subject, alert in opened.items():
            if name in (subject, alert.id):
                if self.recovered_all({subject: sentence}, at=at, what="closed"):
                    return alert
                break
        there = ", ".join(opened) or "none"
        raise NotOpenError(f"No alert with the subject or id {name} is open. Open are: {there}.")

    def open_subjects(self) -> dict[str, Alert]:
        """What is wrong and not right again: each subject's latest alert, oldest first."""
        newest = sa.select(_events.c.seq, _events.c.id).order_by(_events.c.seq.desc()).limit(1)

        def read(connection: sa.Connection) -> tuple[Sequence[object] | None, dict[str, AlertEvent] | None]:
            row = connection.execute(newest).first()
            found = None if row is None else tuple(row)
            # Whatever changes what is open adds an event.
            return found, None if found == self._newest else _open_events(connection)

        with self._guard:
            found, opened = self.state.read(read)
            if opened is not None:
                self._newest, self._open = found, opened
            return {subject: event.alert for subject, event in self._open.items()}

    def recent(self, count: int) -> list[AlertEvent]:
        """The last events that were told, oldest first."""
        query = sa.select(_events.c.event).where(_events.c.what.in_(TOLD))
        query = query.order_by(_events.c.seq.desc()).limit(count)
        rows = self.state.read(lambda connection: connection.scalars(query).all())
        return [AlertEvent.from_json(row) for row in reversed(rows)]

    def prune(self, now: float, *, told_up_to: int) -> None:
        """Delete old events of closed alerts, once a day. told_up_to: the last that every target was told.

        Old ones that some target was never told go too, for it may be down for good: an alert says how many.
        """
        if abs(now - self._pruned_at) < _PRUNE_SECONDS:
            return
        newest = sa.select(sa.func.max(_events.c.seq)).scalar_subquery()
        is_old = (_events.c.at < now - HISTORY_SECONDS) | (_events.c.seq <= newest - LONGEST_HISTORY)
        old = is_old & _events.c.seq.not_in(_still_open())
        untold = (_events.c.seq > told_up_to) & _events.c.what.in_(TOLD)
        count = sa.select(sa.func.count(), sa.func.count().filter(untold)).where(old)
        rows, lost = self.state.read(lambda connection: connection.execute(count).one())
        if lost:
            # Told first: a kill in between tells it twice, not never.
            self.post_all([_never_told(lost, now)], once_while_open=True)
        if rows:
            self.state.write(lambda connection: connection.execute(_events.delete().where(old)))
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
        expected="targets that take what they are sent",
        found=f"one that is down for {HISTORY_SECONDS / DAY_SECONDS:.0f} days, or {LONGEST_HISTORY:,} events",
        next_step=(
            "`vlm-assets alerts` says which target is down, `vlm-assets alerts test` what it answers. Put it"
            " right, or take it out of VLM_ASSETS_ALERT_TARGETS."
        ),
        lasts=DAY_SECONDS,
        at=now,
    )


def _still_open() -> sa.Select[tuple[int]]:
    """The numbers of the latest events of all subjects that are open."""
    latest = sa.select(sa.func.max(_events.c.seq)).group_by(_events.c.subject)
    return sa.select(_events.c.seq).where(_events.c.seq.in_(latest), _events.c.what.in_(_OPEN))


def _open_events(connection: sa.Connection, subjects: Iterable[str] | None = None) -> dict[str, AlertEvent]:
    """The latest event of each open subject, or of those of ``subjects`` that are open, oldest first."""
    query = sa.select(_events.c.seq, _events.c.event).where(_events.c.seq.in_(_still_open()))
    rows: list[sa.Row[Any]] = []
    if subjects is None:
        rows += connection.execute(query)
    else:
        for some in _in_parts(subjects):
            latest = sa.select(sa.func.max(_events.c.seq)).where(_events.c.subject.in_(some))
            latest = latest.group_by(_events.c.subject)
            query = sa.select(_events.c.seq, _events.c.event)
            rows += connection.execute(query.where(_events.c.seq.in_(latest), _events.c.what.in_(_OPEN)))
    events = [AlertEvent.from_json(row.event) for row in sorted(rows, key=lambda row: row.seq)]
    return {event.alert.subject: event for event in events}


def _known(connection: sa.Connection, ids: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for some in _in_parts(ids):
        found.update(connection.scalars(sa.select(_events.c.id).where(_events.c.id.in_(some))))
    return found


def _insert(connection: sa.Connection, events: Sequence[AlertEvent]) -> None:
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
    if rows:
        connection.execute(_events.insert(), rows)


def _in_parts(values: Iterable[str]) -> list[list[str]]:
    """Databases take some thousand parameters in one statement."""
    every = list(values)
    return [every[start : start + _AT_ONCE] for start in range(0, len(every), _AT_ONCE)]

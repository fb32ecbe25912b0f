"""Delivery: what was posted reaches every target, once, whatever dies or is down.

What lives here: which message a target gets next, storms, and back-off. What does not: the words
(``alert.py``), the sending (``targets.py``). The outbox writes a row of ``alert_deliveries`` for each event
and target. Two notes are written of each message. Before it is sent: its id, and until when its target is
left alone. After the target took it: the time. So two processes never send the same message at once, after a
kill in between it is sent again with the same id, and a failure needs no note: the target is due again later.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from resources.alerts.alert import DAY_SECONDS, SHOWN, AlertEvent, Message, Sender, digest
from resources.alerts.outbox import IS_TOLD, Outbox
from resources.alerts.targets import Target, sending
from resources.state.tables import alert_deliveries as _deliveries
from resources.state.tables import alert_events as _events
from resources.state.tables import alert_receivers as _receivers

FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 1800.0
"""How long a target is left alone with a message: twice as long at each try of it, up to this."""

GRACE_SECONDS = 10.0
"""Added to the time that a process may take with a message. Before, no other process sends to its target."""

SINGLY = 3
"""Alerts of a kind that wait at once and are still told one by one; more become one message."""

BURST = 10
"""Alerts of a kind that are told within BURST_SECONDS before the kind has to wait."""

BURST_SECONDS = 600.0

PATIENT_TRIES = 3
"""Up to so many tries of a message its target counts as down; after more the message counts as bad."""

_TIME_FOR_ONE = 1.0
_MOST_DOUBLINGS = 10
"""Of the wait: the longest one is reached before, and a larger power of two would overflow some day."""

_BOTH = sa.join(_deliveries, _events, _deliveries.c.seq == _events.c.seq)
_KIND = _events.c.what, _events.c.kind
_UNTOLD = _deliveries.c.told_at.is_(None)


@dataclass(frozen=True)
class Delivered:
    """What one look did. told: messages that targets took. troubles: one sentence for each refusal.

    waiting: alerts and recoveries that targets have still to be told, each counted once for each target.
    """

    told: int
    troubles: tuple[str, ...]
    waiting: int

    @property
    def sentence(self) -> str:
        """For people."""
        told = f"{self.told} messages delivered, {self.waiting} alerts waiting, counted for each target."
        return " ".join((told, *self.troubles))


class Delivery:
    """Brings an outbox to its targets. home: the folder of this data set, named in every message."""

    def __init__(self, outbox: Outbox, targets: Sequence[Target], *, home: Path) -> None:
        self.outbox = outbox
        self.targets = targets
        self._state = outbox.state
        self._home = home
        # Taken, but perhaps not noted: on a full disk, where nothing can be noted, nothing is repeated.
        self._taken: set[tuple[str, str]] = set()

    def deliver(self, *, now: float, seconds: float, address: str | None) -> Delivered:
        """Tell every target what is new and what is due again.

        now: unix seconds, by which back-off and storms are judged. seconds: after which what hangs is ended.
        address: of the pages, for links. Raises ControlStateError where nothing can be written down.
        """
        sender = Sender(str(self._home), socket.gethostname(), address)
        # A look that finds nothing to tell writes nothing.
        if self._keys and self._state.read(_known_targets) != self._keys.keys():
            self._state.write(lambda connection: _settle_targets(connection, self._keys.keys(), now))
        due = self._state.read(lambda connection: [key for key in self._keys if _next(connection, key, now)])
        with ThreadPoolExecutor(len(due) or 1) as pool:
            done = list(pool.map(lambda key: self._tell(key, sender, now, seconds), due))
        self.outbox.prune(now)
        waiting = sum(untold for untold, _ in self.backlog().values())
        return Delivered(sum(told for told, _ in done), tuple(said for _, said in done if said), waiting)

    def _tell(self, key: str, sender: Sender, now: float, seconds: float) -> tuple[int, str]:
        """Send a target what is due, message by message. Returns how many it took, and the trouble."""
        told, target, deadline = 0, self._keys[key], time.monotonic() + seconds
        busy_until = now + seconds + GRACE_SECONDS
        with sending(target, seconds=seconds) as send:
            while time.monotonic() < deadline - _TIME_FOR_ONE:
                claimed = self._state.write(
                    lambda connection: _claim(connection, key, sender, now, busy_until)
                )
                if claimed is None:
                    break
                message, due = claimed
                if (key, message.id) not in self._taken:
                    answer = send(message)
                    if answer is not None:
                        return told, f"{target.name} did not take a message: {answer}"
                    told += 1
                    self._taken.add((key, message.id))
                self._state.write(partial(_mark_told, key=key, id_=message.id, due=due, now=now))
                self._taken.discard((key, message.id))
        return told, ""

    def send_at_once(self, message: Message, *, seconds: float) -> list[tuple[Target, str | None]]:
        """Send a message to every target, unrecorded. What each said: None of one that took it."""

        def send(target: Target) -> str | None:
            with sending(target, seconds=seconds) as send:
                return send(message)

        with ThreadPoolExecutor(len(self.targets) or 1) as pool:
            return list(zip(self.targets, pool.map(send, self.targets), strict=True))

    def send_trial(self, address: str | None, *, seconds: float) -> list[tuple[Target, str | None]]:
        """Send every target a test message. What each said: None of one that took it."""
        said = (
            f"Alerts of {self._home} on {socket.gethostname()} reach you here. Pages: {address or 'not up'}"
        )
        return self.send_at_once(Message("test", "This is a test", said, "info"), seconds=seconds)

    def backlog(self) -> dict[str, tuple[int, int]]:
        """For each target by name: what it has still to be told, and the most tries of any of it."""
        columns = _deliveries.c.target, sa.func.count(), sa.func.max(_deliveries.c.tries)
        query = sa.select(*columns).where(_UNTOLD).group_by(_deliveries.c.target)
        rows = self._state.read(lambda connection: connection.execute(query).all())
        untold = {key: (count, tries) for key, count, tries in rows}
        return {target.name: untold.get(key, (0, 0)) for key, target in self._keys.items()}

    @cached_property
    def _keys(self) -> dict[str, Target]:
        """The targets, by what they are called in the database."""
        return {target.key(str(self._home).encode()): target for target in self.targets}


def _next(connection: sa.Connection, key: str, now: float) -> sa.Row[Any] | None:
    """What a target is to be told next, if anything is due.

    A row stands for the events of one message, or for those of one kind that are in no message yet (message
    None). A message that was tried often may never be taken: it comes last, and holds no new one up.
    """
    seq, message, tries = _deliveries.c.seq, _deliveries.c.message, sa.func.max(_deliveries.c.tries)
    first, last, size = sa.func.min(seq), sa.func.max(seq), sa.func.count()
    columns = first.label("first"), last.label("last"), size.label("size"), tries.label("tries")
    query = sa.select(*_KIND, message, *columns).select_from(_BOTH).group_by(*_KIND, message)
    waiting = connection.execute(query.where(_deliveries.c.target == key, _UNTOLD).order_by(first)).all()
    if not waiting:
        return None
    stormy = _stormy(connection, key, now)
    waiting = [one for one in waiting if one.message or (one.what, one.kind) not in stormy]
    due = connection.scalar(sa.select(_receivers.c.due).where(_receivers.c.target == key)) or 0.0
    # A time too far ahead is of a clock that was put back: it is past.
    if now < due <= now + LONGEST_WAIT_SECONDS:
        if any(0 < one.tries <= PATIENT_TRIES for one in waiting):
            return None
        waiting = [one for one in waiting if not one.tries]
    return min(waiting, key=lambda one: one.tries if one.tries > PATIENT_TRIES else 0, default=None)


def _stormy(connection: sa.Connection, key: str, now: float) -> set[tuple[str, str]]:
    """The kinds that must wait: a target was told of BURST alerts of each within BURST_SECONDS."""
    is_lately = _deliveries.c.told_at.between(now - BURST_SECONDS + 1, now + BURST_SECONDS - 1)
    query = sa.select(*_KIND).select_from(_BOTH).where(_deliveries.c.target == key, is_lately)
    rows = connection.execute(query.group_by(*_KIND).having(sa.func.count() >= BURST))
    return {(row.what, row.kind) for row in rows}


def _claim(
    connection: sa.Connection, key: str, sender: Sender, now: float, busy_until: float
) -> tuple[Message, float] | None:
    """Write down which message a target gets next. Returns it, and until when the target is left alone."""
    found = _next(connection, key, now)
    if found is None:
        return None
    count, last = found.size, found.last
    if found.message is None and count <= SINGLY:
        count, last = 1, found.first
    its = (
        _deliveries.c.target == key,
        _deliveries.c.message == found.message,
        _deliveries.c.seq.in_(
            sa.select(_events.c.seq).where(
                _events.c.what == found.what, _events.c.kind == found.kind, _events.c.seq <= last
            )
        ),
        _UNTOLD,
    )
    query = sa.select(_events.c.event).select_from(_BOTH).where(*its).order_by(_events.c.seq).limit(SHOWN)
    events = [AlertEvent.from_json(row) for row in connection.scalars(query)]
    id_ = found.message or (events[0].id if count == 1 else digest("many", events[0].id, str(count)))
    connection.execute(_deliveries.update().where(*its).values(message=id_, tries=found.tries + 1))
    wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(found.tries, _MOST_DOUBLINGS))
    due = max(now + wait, busy_until)
    connection.execute(_receivers.update().where(_receivers.c.target == key).values(due=due))
    return sender.message(id_, events, count), due


def _mark_told(connection: sa.Connection, *, key: str, id_: str, due: float, now: float) -> None:
    its = _deliveries.c.target == key, _deliveries.c.message == id_
    connection.execute(_deliveries.update().where(*its).values(told_at=now))
    # Where another process has claimed a message since, the target is left alone with that one.
    its = _receivers.c.target == key, _receivers.c.due == due
    connection.execute(_receivers.update().where(*its).values(due=0.0))


def _settle_targets(connection: sa.Connection, wanted: Collection[str], now: float) -> None:
    """Bring the targets in line with the settings; a new one is told what removed ones were not.

    Beside others a new one is told from now on; the first one of a home what was posted within a day.
    """
    known = _known_targets(connection)
    gone = known.difference(wanted)
    untold = sa.select(_deliveries.c.seq).where(_deliveries.c.target.in_(gone), _UNTOLD).distinct()
    if not known:
        untold = sa.select(_events.c.seq).where(IS_TOLD, _events.c.at >= now - DAY_SECONDS)
    seqs = connection.scalars(untold).all()
    connection.execute(_deliveries.delete().where(_deliveries.c.target.in_(gone)))
    connection.execute(_receivers.delete().where(_receivers.c.target.in_(gone)))
    for key in set(wanted) - known:
        connection.execute(_receivers.insert().values(target=key))
        if seqs:
            connection.execute(_deliveries.insert(), [{"target": key, "seq": seq} for seq in seqs])


def _known_targets(connection: sa.Connection) -> set[str]:
    return set(connection.scalars(sa.select(_receivers.c.target)))

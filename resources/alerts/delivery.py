"""Delivery: what was posted reaches every target, once, whatever dies or is down.

What lives here: which message a target gets next, storms, and back-off. What does not: the words
(``alert.py``), the sending (``targets.py``). The outbox writes a row of ``alert_deliveries`` for each event
and target. The id of a message is written into the rows of its events before it is sent, and the time after
the target took it: a kill in between sends the same id again, and nothing else can repeat or lose one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from resources.alerts.alert import DAY_SECONDS, SHOWN, AlertEvent, Message, Sender, digest
from resources.alerts.outbox import IS_TOLD, Outbox
from resources.alerts.targets import Target, sending
from resources.processes import ProcessIdentity, boot_id
from resources.state.tables import alert_deliveries as _deliveries
from resources.state.tables import alert_events as _events
from resources.state.tables import alert_targets as _targets
from resources.state.tables import meta as _meta

FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 1800.0
"""How long a target that is down is left alone: twice as long each time, up to this."""

SINGLY = 3
"""Alerts of a kind that wait at once and are still told one by one; more become one message."""

BURST = 10
"""Alerts of a kind that are told within BURST_SECONDS before the kind has to wait."""

BURST_SECONDS = 600.0

GRACE_SECONDS = 10.0
"""After its time a delivery has ended, or stands still: then another process tells its targets."""

PATIENT_TRIES = 3
"""Failures up to which a target, or a message, is thought to be all right in a moment."""

_TIME_FOR_ONE = 1.0

_MOST_TRIES = 10
"""Counted no further: the longest wait is reached long before."""

_BOTH = sa.join(_deliveries, _events, _deliveries.c.seq == _events.c.seq)
_KIND = _events.c.what, _events.c.kind
_UNTOLD = _deliveries.c.told_at.is_(None)


@dataclass(frozen=True)
class Delivered:
    """What one look did. told: messages that targets took. troubles: what those that did not said.

    waiting: alerts and recoveries that some target has still to be told, and is not being told for now.
    """

    told: int = 0
    troubles: tuple[str, ...] = ()
    waiting: int = 0

    @property
    def sentence(self) -> str:
        """For people."""
        told = f"{self.told} messages delivered, {self.waiting} alerts waiting."
        return " ".join((told, *self.troubles))


class Delivery:
    """Brings an outbox to its targets; one process at a time tells a target.

    home: the folder of this data set, named in every message.
    """

    def __init__(self, outbox: Outbox, targets: Sequence[Target], *, home: Path) -> None:
        self.outbox = outbox
        self.targets = targets
        self._state = outbox.state
        self._home = home
        # Taken, but perhaps not noted: on a full disk, where nothing can be noted, nothing is repeated.
        self._taken: defaultdict[str, set[str]] = defaultdict(set)

    def deliver(self, *, now: float, seconds: float, address: str | None) -> Delivered | None:
        """Tell every target what is new and what is due again; None where another process is at it.

        now: unix seconds, by which back-off and storms are judged. seconds: after which what hangs is ended.
        address: of the pages, for links. Raises ControlStateError where nothing can be written down.
        """
        deadline = time.monotonic() + seconds
        sender = Sender(str(self._home), socket.gethostname(), address)
        # A look that finds nothing to tell writes nothing.
        if self._keys and self._state.read(_known_targets).keys() != self._keys.keys():
            self._state.write(lambda connection: _settle_targets(connection, self._keys, now))
        due = self._state.read(lambda connection: [key for key in self._keys if _next(connection, key, now)])
        until = now + seconds + GRACE_SECONDS
        mine = self._state.write(lambda connection: _take(connection, due, now, until)) if due else []
        if due and not mine:
            return None
        with ThreadPoolExecutor(len(mine) or 1) as pool:
            done = list(pool.map(lambda key: self._tell(key, sender, now, deadline), mine))
        self.outbox.prune(now)
        waiting = sum(self._state.read(_untold).values())
        return Delivered(sum(told for told, _ in done), tuple(said for _, said in done if said), waiting)

    def send_at_once(self, message: Message, *, seconds: float) -> list[tuple[Target, str | None]]:
        """Send a message to every target, unrecorded. What each said: None of one that took it."""

        def send(target: Target) -> str | None:
            with sending(target, seconds=seconds) as send:
                return send(message)

        with ThreadPoolExecutor(max(1, len(self.targets))) as pool:
            return list(zip(self.targets, pool.map(send, self.targets), strict=True))

    def send_trial(self, address: str | None, *, seconds: float) -> list[tuple[Target, str | None]]:
        """Send every target a test message. What each said: None of one that took it."""
        said = (
            f"Alerts of {self._home} on {socket.gethostname()} reach you here. Pages: {address or 'not up'}"
        )
        return self.send_at_once(Message("test", "This is a test", said, "info"), seconds=seconds)

    def backlog(self) -> dict[str, tuple[int, int]]:
        """For each target by name: how much it has still to be told, and how often in a row it was down."""
        untold, tries = self._state.read(lambda connection: (_untold(connection), _known_targets(connection)))
        return {one.name: (untold.get(key, 0), tries.get(key, 0)) for key, one in self._keys.items()}

    @cached_property
    def _keys(self) -> dict[str, Target]:
        """The targets, by what they are called in the database."""
        return {target.key(str(self._home).encode()): target for target in self.targets}

    def _tell(self, key: str, sender: Sender, now: float, deadline: float) -> tuple[int, str]:
        """Send a target what is due, one by one. Returns how many messages it took, and the trouble."""
        told, said = 0, ""
        refused: list[str] = []

        def claim(connection: sa.Connection) -> Message | None:
            # What an earlier look could not note is not sent again.
            _mark_told(connection, key, self._taken[key], now)
            return _claim(connection, key, sender, now, refused)

        with sending(self._keys[key], seconds=deadline - time.monotonic()) as send:
            # One message may be to blame itself; where a second is refused too, the target is.
            while len(refused) < 2 and time.monotonic() < deadline - _TIME_FOR_ONE:
                message = self._state.write(claim)
                if message is None:
                    break
                answer = send(message)
                if answer is None:
                    told += 1
                    self._taken[key].add(message.id)
                    self._state.write(lambda connection: _mark_told(connection, key, self._taken[key], now))
                    self._taken[key].clear()
                else:
                    refused.append(message.id)
                    said = answer
        wait = self._state.write(lambda connection: _leave(connection, key, refused, told > 0, now))
        if not refused:
            return told, ""
        name = self._keys[key].name
        return told, f"{name} did not take {len(refused)} messages; next try in {wait:.0f} s. {said}"


def _next(
    connection: sa.Connection, key: str, now: float, refused: Collection[str] = ()
) -> sa.Row[Any] | None:
    """What a target is to be told next, if anything is due. refused: ids that it did not take at this look.

    A row stands for the events of a message, or for those of a kind of which none was made (message None).
    First come messages that were made, then new events, then what was refused often: it may never be taken.
    """
    seq, message, tries = _deliveries.c.seq, _deliveries.c.message, sa.func.max(_deliveries.c.tries)
    first, last, size = sa.func.min(seq), sa.func.max(seq), sa.func.count()
    columns = first.label("first"), last.label("last"), size.label("size"), tries.label("tries")
    query = sa.select(*_KIND, message, *columns).select_from(_BOTH).group_by(*_KIND, message)
    query = query.where(_deliveries.c.target == key, _UNTOLD).order_by(first)
    waiting = connection.execute(query).all()
    patient = [one for one in waiting if one.message and one.tries <= PATIENT_TRIES]
    stubborn = sorted((one for one in waiting if one.tries > PATIENT_TRIES), key=lambda one: one.tries)
    new = [one for one in waiting if not one.message]
    if new:
        stormy = _stormy(connection, key, now)
        new = [one for one in new if (one.what, one.kind) not in stormy]
    due = connection.scalar(sa.select(_targets.c.due).where(_targets.c.key == key)) or 0.0
    if _is_ahead(due, now):
        if any(one.tries for one in patient):
            return None
        # It waits for messages alone that it never takes, so it may be up for a new one.
        stubborn = []
    return next((one for one in [*patient, *new, *stubborn] if one.message not in refused), None)


def _stormy(connection: sa.Connection, key: str, now: float) -> set[tuple[str, str]]:
    """The kinds that must wait: a target was told of BURST alerts of each within BURST_SECONDS."""
    is_lately = _deliveries.c.told_at.between(now - BURST_SECONDS + 1, now + BURST_SECONDS - 1)
    query = sa.select(*_KIND).select_from(_BOTH).where(_deliveries.c.target == key, is_lately)
    rows = connection.execute(query.group_by(*_KIND).having(sa.func.count() >= BURST))
    return {(row.what, row.kind) for row in rows}


def _claim(
    connection: sa.Connection, key: str, sender: Sender, now: float, refused: Collection[str]
) -> Message | None:
    """Write down which message a target gets next."""
    found = _next(connection, key, now, refused)
    if found is None:
        return None
    count, last = found.size, found.last
    if found.message is None and count <= SINGLY:
        count, last = 1, found.first
    group = sa.and_(_events.c.what == found.what, _events.c.kind == found.kind, _events.c.seq <= last)
    its = sa.and_(_deliveries.c.target == key, _UNTOLD, _deliveries.c.message == found.message)
    query = sa.select(_events.c.event).select_from(_BOTH).where(its, group).order_by(_events.c.seq)
    events = [AlertEvent.from_json(row) for row in connection.scalars(query.limit(SHOWN))]
    id_ = found.message or (events[0].id if count == 1 else digest("many", events[0].id, str(count)))
    its = sa.and_(its, _deliveries.c.seq.in_(sa.select(_events.c.seq).where(group)))
    connection.execute(_deliveries.update().where(its).values(message=id_))
    return sender.message(id_, events, count)


def _mark_told(connection: sa.Connection, key: str, ids: Collection[str], now: float) -> None:
    its = _deliveries.c.target == key, _UNTOLD, _deliveries.c.message.in_(ids)
    if ids:
        connection.execute(_deliveries.update().where(*its).values(told_at=now))


def _leave(connection: sa.Connection, key: str, refused: Collection[str], is_up: bool, now: float) -> float:
    """Free a target for other processes. Returns the seconds for which one that refused is left alone."""
    its = _deliveries.c.target == key, _deliveries.c.message.in_(refused)
    connection.execute(_deliveries.update().where(*its).values(tries=_deliveries.c.tries + 1))
    tries = 0 if is_up else _known_targets(connection).get(key, 0)
    tries = min(tries + 1, _MOST_TRIES) if refused else 0
    wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (tries - 1)) if refused else 0.0
    this = _targets.update().where(_targets.c.key == key)
    connection.execute(this.values(tries=tries, due=now + wait, busy_until=0.0))
    return wait


def _take(connection: sa.Connection, keys: Sequence[str], now: float, until: float) -> list[str]:
    """Take those targets for this process that no other one tells now."""
    rows = connection.execute(sa.select(_targets).where(_targets.c.key.in_(keys)))
    free = [row.key for row in rows if not _is_busy(row, now)]
    process = ProcessIdentity.of(os.getpid())
    busy = asdict(process) if process is not None else None
    connection.execute(_targets.update().where(_targets.c.key.in_(free)).values(busy_until=until, busy=busy))
    return free


def _is_busy(target: sa.Row[Any], now: float) -> bool:
    """Whether a process tells it at this moment; one that is dead, or out of its time, does not."""
    process = ProcessIdentity(**target.busy) if target.busy else None
    is_dead = process is not None and process.boot_id == boot_id() and not process.lives()
    return _is_ahead(target.busy_until, now) and not is_dead


def _is_ahead(at: float, now: float) -> bool:
    # A time too far ahead is of a clock that was put back: it is past.
    return now < at <= now + LONGEST_WAIT_SECONDS


def _settle_targets(connection: sa.Connection, wanted: Collection[str], now: float) -> None:
    """Bring the targets in line with the settings; a new one is told what removed ones were not.

    Beside others a new one is told from now on; the first one of a home what was posted within a day.
    """
    if not _known_targets(connection):
        _take_over(connection)
    known = _known_targets(connection).keys()
    gone = known - wanted
    untold = sa.select(_deliveries.c.seq).where(_deliveries.c.target.in_(gone), _UNTOLD).distinct()
    if not known:
        untold = sa.select(_events.c.seq).where(IS_TOLD, _events.c.at >= now - DAY_SECONDS)
    seqs = [{"seq": seq} for seq in connection.scalars(untold)]
    connection.execute(_deliveries.delete().where(_deliveries.c.target.in_(gone)))
    connection.execute(_targets.delete().where(_targets.c.key.in_(gone)))
    for key in wanted - known:
        connection.execute(_targets.insert().values(key=key))
        if seqs:
            connection.execute(_deliveries.insert().values(target=key), seqs)


def _take_over(connection: sa.Connection) -> None:
    """Bring over what version 1 of the tables noted of its targets: a row of ``meta``, in JSON.

    A target was told all up to ``told_up_to``, or ``held`` for a kind, except messages that it did not take.
    The key "" stands for a home without targets.
    """
    this = _meta.c.name == "alerts_told"
    noted = json.loads(connection.scalar(sa.select(_meta.c.value).where(this)) or "{}")
    rows = connection.execute(sa.select(_events.c.seq, *_KIND).where(IS_TOLD).order_by(_events.c.seq)).all()
    for key, one in noted.items():
        untold: dict[int, str | None] = {
            row.seq: None
            for row in rows
            if row.seq > one["held"].get(f"{row.what} {row.kind}", one["told_up_to"])
        }
        for made in one["messages"]:
            its = [row.seq for row in rows if f"{row.what} {row.kind}" == made["group"]]
            its = [seq for seq in its if seq >= made["first"]][: made["message"]["tells"]]
            untold |= {} if made["taken"] else dict.fromkeys(its, made["message"]["id"])
        connection.execute(_targets.insert().values(key=key))
        if untold:
            left = [{"seq": seq, "message": id_} for seq, id_ in untold.items()]
            connection.execute(_deliveries.insert().values(target=key), left)
    connection.execute(_meta.delete().where(this))


def _known_targets(connection: sa.Connection) -> dict[str, int]:
    """The keys of the targets, and how often in a row each was down."""
    rows = connection.execute(sa.select(_targets.c.key, _targets.c.tries))
    return {row.key: row.tries for row in rows}


def _untold(connection: sa.Connection) -> dict[str, int]:
    """How many alerts and recoveries each target has still to be told, by its key."""
    query = sa.select(_deliveries.c.target, sa.func.count()).where(_UNTOLD).group_by(_deliveries.c.target)
    return {row[0]: row[1] for row in connection.execute(query)}

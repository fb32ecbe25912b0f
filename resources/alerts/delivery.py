"""Delivery: what was posted reaches every target, once, whatever dies or is down.

What lives here: what each target was told (a row of ``meta``), storms, and back-off. What does not: the words
(``alert.py``), the sending (``targets.py``). A message is written down before it is sent and marked after the
target took it: a kill in between sends the same id again, and nothing else can repeat or lose one.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import sqlalchemy as sa
from pydantic import BaseModel, Field, TypeAdapter

from resources.alerts.alert import (
    DAY_SECONDS,
    SHOWN,
    SINGLY,
    AlertEvent,
    Message,
    Sender,
    message_of_many,
    message_of_one,
)
from resources.alerts.outbox import TOLD, Outbox
from resources.alerts.targets import Target, sending
from resources.processes import ProcessIdentity, boot_id
from resources.state import tables
from resources.state.tables import alert_events as _events

FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 1800.0
"""How long a target that is down is left alone: twice as long each time, up to this."""

BURST = 10
"""Alerts of a kind that are told within BURST_SECONDS before the kind has to wait."""

BURST_SECONDS = 600.0

GRACE_SECONDS = 10.0
"""After its time a delivery has ended, or stands still: then another process tells its targets."""

PATIENT_TRIES = 3
"""Failures up to which a target, or a message, is thought to be all right in a moment."""

_NOBODY = ""
"""Stands for the targets of a home that has none."""

_MOST_CLAIMED = 10
_TIME_FOR_ONE = 1.0


@dataclass(frozen=True)
class Delivered:
    """What one look did. told: messages that targets took. troubles: what those that did not said.

    waiting: alerts and recoveries that some target has still to be told, and is not being told for now.
    """

    told: int = 0
    troubles: tuple[str, ...] = ()
    waiting: int = 0


class _Claimed(BaseModel):
    """A message that was written down for one target. first: the first event that it tells. at: when."""

    message: Message
    group: str
    first: int
    at: float
    refused: int = 0
    taken: bool = False


class _Progress(BaseModel):
    """How far one target is. told_up_to: the last event up to which messages were made, and of the groups in
    ``held``, of which too many were told lately, up to which.

    messages: those not taken yet, and those of the last BURST_SECONDS. tries: how often in a row it was down.
    busy_until: unix seconds until which the process ``busy`` has it. waiting: numbers and ids of events
    without a message, by group; not kept.
    """

    told_up_to: int = 0
    held: dict[str, int] = {}
    messages: list[_Claimed] = []
    tries: int = 0
    next_at: float = 0.0
    busy_until: float = 0.0
    busy: ProcessIdentity | None = None
    waiting: dict[str, list[tuple[int, str]]] = Field(default={}, exclude=True)

    @property
    def left(self) -> list[_Claimed]:
        """What it has not taken, the next first: what was refused often is last, and in turns."""
        left = [one for one in self.messages if not one.taken]
        return sorted(left, key=lambda one: one.refused if one.refused > PATIENT_TRIES else 0)

    @property
    def untold(self) -> int:
        """Alerts and recoveries that it was not told."""
        return sum(map(len, self.waiting.values())) + sum(one.message.tells for one in self.left)

    @property
    def floor(self) -> int:
        """The last event up to which messages were made of all."""
        return min([self.told_up_to, *self.held.values()])

    @property
    def has_room(self) -> bool:
        """Whether more is claimed: what waits for a target that stays down is told in groups then."""
        return self.tries < PATIENT_TRIES or len(self.left) < _MOST_CLAIMED

    def is_busy(self, now: float) -> bool:
        """Whether a process tells it at this moment; one that is dead, or out of its time, does not."""
        is_dead = self.busy is not None and self.busy.boot_id == boot_id() and not self.busy.lives()
        return now < self.busy_until <= now + LONGEST_WAIT_SECONDS and not is_dead

    def is_due(self, now: float) -> bool:
        """Whether it is to be told now. Times too far ahead are those of a clock that was put back: past."""
        if not self.untold or self.is_busy(now):
            return False
        if not now < self.next_at <= now + LONGEST_WAIT_SECONDS:
            return True
        # Where it waits for messages alone that it never takes, it may be up for a new one.
        refused = [one.refused for one in self.left if one.refused]
        is_new = len(refused) < len(self.left) or (self.has_room and bool(self.waiting.keys() - self.held))
        return min(refused, default=0) > PATIENT_TRIES and is_new

    def not_told(self, group: str) -> int:
        """The last event of a group before the first that it was not told."""
        first = [one.first - 1 for one in self.left if one.group == group]
        return min([self.held.get(group, self.told_up_to), *first])

    def take(self, id_: str) -> None:
        """Note that it took a message, so that it is up."""
        for one in self.messages:
            one.taken |= one.message.id == id_
        self.tries, self.next_at = 0, 0.0

    def end(self, refused: Sequence[str], *, told: int, now: float) -> None:
        """Note what it did not take, and that nobody tells it any more."""
        self.busy_until = 0.0
        for one in self.messages:
            one.refused += one.message.id in refused
        if refused:
            self.tries = 1 if told else self.tries + 1
            self.next_at = now + self.wait

    @property
    def wait(self) -> float:
        """Seconds for which it is left alone after its last failure."""
        return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (self.tries - 1))


_KEPT = TypeAdapter(dict[str, _Progress])


class Delivery:
    """Brings an outbox to its targets; one process at a time tells a target.

    home: the folder of this data set, named in every message.
    """

    def __init__(self, outbox: Outbox, targets: Sequence[Target], *, home: Path) -> None:
        self.outbox = outbox
        self.targets = targets
        self._state = outbox.state
        self._home = home
        # Taken, but perhaps not marked: on a full disk, where nothing can be marked, nothing is repeated.
        self._taken: set[tuple[str, str]] = set()

    def deliver(self, *, now: float, seconds: float, address: str | None) -> Delivered | None:
        """Tell every target what is new and what is due again; None where another process is at it.

        now: unix seconds, by which back-off and storms are judged. seconds: after which what hangs is ended.
        address: of the pages, for links. Raises ControlStateError where nothing can be written down.
        """
        deadline = time.monotonic() + seconds
        standing = self._state.read(_standing)
        claimed: dict[str, list[_Claimed]] = {}
        if not self.targets:
            standing = self._tell_nobody(standing)
        elif self._keys.keys() != standing.keys() or any(one.is_due(now) for one in standing.values()):
            # A look that finds nothing to tell writes nothing.
            sender = Sender(str(self._home), socket.gethostname(), address)
            busy_until = now + seconds + GRACE_SECONDS
            claimed = self._state.write(
                lambda connection: self._claim(connection, now, sender, busy_until=busy_until)
            )
            standing = self._state.read(_standing)
        if not claimed and any(one.is_busy(now) for one in standing.values()):
            return None
        done: list[tuple[int, str]] = []
        if claimed:
            with ThreadPoolExecutor(len(claimed)) as pool:
                done = list(pool.map(lambda key: self._send(key, claimed[key], now, deadline), claimed))
            standing = self._state.read(_standing)
        self.outbox.prune(now, told_up_to=min((one.floor for one in standing.values()), default=0))
        troubles = tuple(trouble for _, trouble in done if trouble)
        return Delivered(
            sum(told for told, _ in done), troubles, sum(one.untold for one in standing.values())
        )

    def send_at_once(self, message: Message, *, seconds: float) -> list[tuple[Target, str | None]]:
        """Send a message to every target, unrecorded. What each said: None of one that took it."""

        def send(target: Target) -> str | None:
            with sending(target, seconds=seconds) as send:
                return send(message)

        with ThreadPoolExecutor(max(1, len(self.targets))) as pool:
            return list(zip(self.targets, pool.map(send, self.targets), strict=True))

    def backlog(self) -> dict[str, tuple[int, int]]:
        """For each target by name: how much it has still to be told, and how often in a row it was down."""
        standing = self._state.read(_standing)
        found = {target.name: standing.get(key, _Progress()) for key, target in self._keys.items()}
        return {name: (one.untold, one.tries) for name, one in found.items()}

    @cached_property
    def _keys(self) -> dict[str, Target]:
        """The targets, by what they are called in the database."""
        return {target.key(str(self._home).encode()): target for target in self.targets}

    def _claim(
        self, connection: sa.Connection, now: float, sender: Sender, *, busy_until: float
    ) -> dict[str, list[_Claimed]]:
        """Make messages of what waits for targets that are due. Returns what this process is to send."""
        newest = _newest(connection)
        first = _newest(connection, before=now - DAY_SECONDS)
        standing = _matched(_standing(connection), self._keys, newest, first=first)
        for key, id_ in self._taken:
            if key in standing:
                standing[key].take(id_)
        self._taken.clear()
        _look_for_waiting(connection, standing)
        claimed = {}
        for key, one in standing.items():
            if not one.is_due(now):
                continue
            if one.has_room:
                _make_messages(connection, one, newest, now, sender)
            if one.left:
                claimed[key] = one.left
                one.busy_until, one.busy = busy_until, ProcessIdentity.of(os.getpid())
        _keep(connection, standing)
        return claimed

    def _tell_nobody(self, standing: dict[str, _Progress]) -> dict[str, _Progress]:
        """Pass over the events so far: there is no target, and the first one hears of later events.

        What targets that were removed have still to be told waits for the next one.
        """
        if standing.keys() - {_NOBODY} or (standing and not standing[_NOBODY].untold):
            return standing

        def write(connection: sa.Connection) -> dict[str, _Progress]:
            passed = {_NOBODY: _Progress(told_up_to=_newest(connection))}
            _keep(connection, passed)
            return passed

        return self._state.write(write)

    def _send(self, key: str, claimed: Sequence[_Claimed], now: float, deadline: float) -> tuple[int, str]:
        """Send a target's messages. Returns how many it took, and the trouble with it, if any."""
        told, said = 0, ""
        refused: list[str] = []
        with sending(self._keys[key], seconds=deadline - time.monotonic()) as send:
            for one in claimed:
                # One may be to blame itself; where a second is refused too, the target is.
                is_late = deadline - time.monotonic() < _TIME_FOR_ONE
                if len(refused) > 1 or (is_late and (told or refused)):
                    break
                answer = send(one.message)
                if answer is None:
                    told += 1
                    self._taken.add((key, one.message.id))
                    self._change(key, partial(_Progress.take, id_=one.message.id))
                    self._taken.discard((key, one.message.id))
                else:
                    refused.append(one.message.id)
                    said = answer
        after = self._change(key, lambda progress: progress.end(refused, told=told, now=now))
        if not refused:
            return told, ""
        name, count = self._keys[key].name, len(claimed) - told
        return told, f"{name} did not take {count} messages; next try in {after.wait:.0f} s. {said}"

    def _change(self, key: str, change: Callable[[_Progress], None]) -> _Progress:
        def write(connection: sa.Connection) -> _Progress:
            standing = _kept(connection)
            one = standing.get(key, _Progress())  # another process with other targets may have removed it
            change(one)
            _keep(connection, standing)
            return one

        return self._state.write(write)


def _kept(connection: sa.Connection) -> dict[str, _Progress]:
    query = sa.select(tables.meta.c.value).where(tables.meta.c.name == tables.ALERTS_TOLD)
    return _KEPT.validate_json(connection.execute(query).scalar() or "{}")


def _keep(connection: sa.Connection, standing: dict[str, _Progress]) -> None:
    this = tables.meta.c.name == tables.ALERTS_TOLD
    value = _KEPT.dump_json(standing).decode()
    if not connection.execute(tables.meta.update().where(this).values(value=value)).rowcount:
        connection.execute(tables.meta.insert().values(name=tables.ALERTS_TOLD, value=value))


def _standing(connection: sa.Connection) -> dict[str, _Progress]:
    """How far each target is, by its key, with what waits for it."""
    standing = _kept(connection)
    _look_for_waiting(connection, standing)
    return standing


def _look_for_waiting(connection: sa.Connection, standing: Mapping[str, _Progress]) -> None:
    since = min((one.floor for one in standing.values()), default=0)
    query = sa.select(_events.c.seq, _events.c.id, _events.c.what, _events.c.kind)
    query = query.where(_events.c.seq > since, _events.c.what.in_(TOLD)).order_by(_events.c.seq)
    events = connection.execute(query).all() if standing else []
    for one in standing.values():
        one.waiting = {}
        for event in events:
            group = f"{event.what} {event.kind}"
            if event.seq > one.held.get(group, one.told_up_to):
                one.waiting.setdefault(group, []).append((event.seq, event.id))


def _make_messages(
    connection: sa.Connection, one: _Progress, newest: int, now: float, sender: Sender
) -> None:
    """Make messages of what waits for a target. A group that was told too often lately waits on."""
    one.messages = [kept for kept in one.messages if not kept.taken or abs(kept.at - now) < BURST_SECONDS]
    told: Counter[str] = Counter()
    for recent in one.messages:
        told[recent.group] += recent.message.tells if abs(recent.at - now) < BURST_SECONDS else 0
    held = {group: one.held.get(group, one.told_up_to) for group in one.waiting if told[group] >= BURST}
    for group in one.waiting.keys() - held.keys():
        for first, message in _worded(connection, one.waiting[group], sender):
            one.messages.append(_Claimed(message=message, group=group, first=first, at=now))
    one.messages.sort(key=lambda message: message.first)
    one.told_up_to, one.held = newest, held


def _worded(
    connection: sa.Connection, waiting: Sequence[tuple[int, str]], sender: Sender
) -> list[tuple[int, Message]]:
    """The messages of a group, each with the number of its first event: one each of a few, one of many."""
    shown = [seq for seq, _ in waiting[:SHOWN]]
    query = sa.select(_events.c.event).where(_events.c.seq.in_(shown)).order_by(_events.c.seq)
    events = [AlertEvent.from_json(event) for event in connection.scalars(query)]
    if len(waiting) > SINGLY:
        return [(shown[0], message_of_many(events, (id_ for _, id_ in waiting), sender))]
    return [(seq, message_of_one(event, sender)) for seq, event in zip(shown, events, strict=True)]


def _matched(
    standing: dict[str, _Progress], targets: Mapping[str, Target], newest: int, *, first: int
) -> dict[str, _Progress]:
    """A progress for each target of the settings; a new one is told what removed ones were not.

    Beside others a new one is told from now on; the first one of a home what came after ``first``.
    """
    gone = [one for key, one in standing.items() if key not in targets]
    if gone:
        groups = {group for one in gone for group in [*one.held, *(left.group for left in one.left)]}
        new = _Progress(
            told_up_to=min(one.told_up_to for one in gone),
            held={group: min(one.not_told(group) for one in gone) for group in groups},
        )
    else:
        new = _Progress(told_up_to=newest if standing else first)
    return {key: standing.get(key) or new.model_copy(deep=True) for key in targets}


def _newest(connection: sa.Connection, *, before: float = float("inf")) -> int:
    """The number of the last event, or of the last one before a time in unix seconds; 0 without any."""
    query = sa.select(sa.func.max(_events.c.seq)).where(_events.c.at < before)
    return connection.execute(query).scalar() or 0

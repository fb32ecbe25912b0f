"""Delivery: every posted event reaches every target, in order, whatever dies or is down.

A row of ``alert_targets`` holds the last event that a target has. Before a message is sent, the row notes the
last event of that message, and until when no process sends to that target. After the target took it, the row
moves on. So two processes never send the same message at once. After a kill in between, the message is sent
again with the same id. A failure needs no note: the target is due again later.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from resources.alerts.alert import DAY_SECONDS, AlertEvent, Message, digest, message_about
from resources.alerts.outbox import IS_TOLD, Outbox
from resources.alerts.targets import Target, send
from vlm_durable.commands import command
from vlm_durable.state.tables import alert_events as _events
from vlm_durable.state.tables import alert_targets as _targets
from vlm_durable.wording import counted

FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 600.0
"""The wait after a refused message: twice as long each time, up to this."""

GRACE_SECONDS = 10.0
"""Added to the time that a process may take for a message. No other process sends to its target before."""

SINGLY = 3
"""Up to so many waiting events are sent one by one; more become one message."""

BURST = 8
"""Messages that a target gets without a pause. Later ones are spaced, until nothing came for long."""

PATIENT_TRIES = 3
"""Up to so many tries of a message its target counts as down; after more the message counts as bad."""

_SECONDS_FOR_MESSAGE = 1.0
_MOST_DOUBLINGS = 10
"""The wait is doubled this often at most: by then it is the longest, and it could overflow some day."""


@dataclass(frozen=True)
class Delivered:
    """What one delivery did. sent: messages that targets took. troubles: one sentence for each refusal.

    waiting: alerts and recoveries that were not sent yet, each counted once for each target.
    """

    sent: int
    troubles: tuple[str, ...]
    waiting: int

    @property
    def sentence(self) -> str:
        """What was delivered, as a sentence for people."""
        counts = (
            f"{counted(self.sent, 'messages')} delivered, {counted(self.waiting, 'alerts')} waiting,"
            " counted for each target."
        )
        return " ".join((counts, *self.troubles))


@dataclass(frozen=True)
class _Next:
    """What a target gets next: the events after ``after`` up to ``last``, for the ``tries``-th time.

    burst: messages that it gets without a pause, this one included.
    """

    after: int
    last: int
    tries: int
    burst: int


class Delivery:
    """Brings an outbox to its targets. home: the folder of this data set, named in every message."""

    def __init__(self, outbox: Outbox, targets: Sequence[Target], *, home: Path) -> None:
        self.outbox = outbox
        self.targets = targets
        self.origin = f"{home} on {socket.gethostname()}"
        self._state = outbox.state

    def deliver(self, *, now: float, seconds: float, address: str | None) -> Delivered:
        """Send every target what is new and what is due again.

        now: unix seconds, for back-off and storms. seconds: after which a sending that hangs is ended.
        address: of the pages, for links. Raises ControlStateError if nothing can be written down.
        """
        numbers = {target.number for target in self.targets}
        query = sa.select(_targets.c.target)
        recorded_numbers = self._state.read(lambda connection: set(connection.scalars(query)))
        # A delivery that has nothing to send writes nothing.
        if numbers and numbers != recorded_numbers:
            self._state.write(lambda connection: _settle(connection, numbers, now))
        due = self._state.read(
            lambda connection: [target for target in self.targets if _next(connection, target.number, now)]
        )
        with ThreadPoolExecutor(len(due) or 1) as pool:
            outcomes = list(pool.map(lambda target: self._send_due(target, now, seconds, address), due))
        self.outbox.prune(now)
        waiting = sum(count for count, _ in self.backlog().values())
        sent = sum(count for count, _ in outcomes)
        return Delivered(sent, tuple(trouble for _, trouble in outcomes if trouble), waiting)

    def _send_due(self, target: Target, now: float, seconds: float, address: str | None) -> tuple[int, str]:
        """Send a target what is due, message by message. Returns how many it took, and the trouble."""
        sent, seconds_left = 0, seconds
        deadline = time.monotonic() + seconds

        def claim(connection: sa.Connection) -> tuple[_Next, Message] | None:
            claimed = _claim(connection, target.number, now, now + seconds + GRACE_SECONDS)
            return None if claimed is None else (claimed, self._message(connection, claimed, address))

        while (
            seconds_left > _SECONDS_FOR_MESSAGE
            and (claim_and_message := self._state.write(claim)) is not None
        ):
            claimed, message = claim_and_message
            is_bad = claimed.tries > PATIENT_TRIES
            # A target may hang at a bad text: half of the time is kept for the short one.
            answer = send(target, message, seconds=seconds_left / 2 if is_bad else seconds_left)
            seconds_left = deadline - time.monotonic()
            if answer is not None and is_bad and seconds_left > _SECONDS_FOR_MESSAGE:
                answer = send(target, self._in_short(message), seconds=seconds_left)
                seconds_left = deadline - time.monotonic()
            if answer is not None:
                return sent, f"{target.name} did not take a message: {answer}"
            sent += 1
            self._state.write(partial(_mark_told, target=target.number, claimed=claimed, now=now))
        return sent, ""

    def _message(self, connection: sa.Connection, claimed: _Next, address: str | None) -> Message:
        is_claimed = IS_TOLD, _events.c.seq > claimed.after, _events.c.seq <= claimed.last
        first, count = sa.func.min(_events.c.seq), sa.func.count()
        kinds = sa.select(first, count).where(*is_claimed).group_by(_events.c.what, _events.c.kind)
        groups = []
        for seq, size in connection.execute(kinds.order_by(first)).all():
            event = connection.scalars(sa.select(_events.c.event).where(_events.c.seq == seq)).one()
            groups.append((size, AlertEvent.from_json(event)))
        id_ = groups[0][1].id
        if sum(size for size, _ in groups) > 1:
            id_ = digest("many", id_, str(claimed.last))
        return message_about(groups, id_, origin=self.origin, address=address)

    def _in_short(self, message: Message) -> Message:
        """A message that replaces one that the target never takes, so that later ones get through.

        It quotes nothing of the alert.
        """
        body = f"Read its text with {command('alerts')}.\nFrom: {self.origin}\nId: {message.id}"
        return Message(message.id, "An alert that could not be sent here whole", body, message.type)

    def send_at_once(
        self, title: str, body: str, *, type_: str, seconds: float
    ) -> list[tuple[Target, str | None]]:
        """Send every target a message, unrecorded. Returns each target's answer: None if it took it."""
        message = Message("", title, f"{body}\nFrom: {self.origin}", type_)
        with ThreadPoolExecutor(len(self.targets) or 1) as pool:
            answers = pool.map(lambda target: send(target, message, seconds=seconds), self.targets)
            return list(zip(self.targets, answers, strict=True))

    def backlog(self) -> dict[str, tuple[int, int]]:
        """The events that wait for each target, by its name, and how often its current message was tried."""

        def count(connection: sa.Connection) -> dict[int, tuple[int, int]]:
            return {
                row.target: (_waiting(connection, row.told)[0], row.tries)
                for row in connection.execute(sa.select(_targets))
            }

        counts = self._state.read(count)
        return {target.name: counts.get(target.number, (0, 0)) for target in self.targets}


def _waiting(connection: sa.Connection, after: int) -> tuple[int, int, int]:
    """How many events come after event ``after``, and the numbers of the first and the last of them.

    Writers of the control state take turns, so no event can appear later with a number below these.
    """
    seq = _events.c.seq
    query = sa.select(sa.func.count(), sa.func.min(seq), sa.func.max(seq)).where(IS_TOLD, seq > after)
    count, first, last = connection.execute(query).one()
    return count, first or after, last or after


def _next(connection: sa.Connection, target: int, now: float) -> _Next | None:
    """What a target gets next, if anything is due."""
    row = connection.execute(sa.select(_targets).where(_targets.c.target == target)).first()
    if row is None:
        return None  # A process with fewer targets in its settings took it out.
    # A time too far ahead comes from a clock that was put back: it counts as past. The clock of the process
    # that claimed the message may be a little ahead.
    if now < row.due <= now + LONGEST_WAIT_SECONDS + GRACE_SECONDS:
        return None
    burst = row.burst if 0 <= now - row.due < LONGEST_WAIT_SECONDS else 0
    count, first, last = _waiting(connection, row.told)
    if not count:
        return None
    # A message that was not taken comes again unchanged, with the same id.
    if row.message is not None and first <= row.message:
        return _Next(row.told, row.message, row.tries + 1, burst)
    return _Next(row.told, first if count <= SINGLY else last, 1, burst + 1)


def _claim(connection: sa.Connection, target: int, now: float, busy_until: float) -> _Next | None:
    """Write down what a target gets next, and until when no other process sends to it."""
    claimed = _next(connection, target, now)
    if claimed is not None:
        due = max(now + _wait(claimed.tries - 1), busy_until)
        values = {"message": claimed.last, "tries": claimed.tries, "burst": claimed.burst, "due": due}
        connection.execute(_targets.update().where(_targets.c.target == target).values(values))
    return claimed


def _mark_told(connection: sa.Connection, *, target: int, claimed: _Next, now: float) -> None:
    # If another process has claimed the message since, that process moves the row on.
    is_same_claim = sa.and_(
        _targets.c.target == target, _targets.c.told == claimed.after, _targets.c.tries == claimed.tries
    )
    due = now if claimed.burst < BURST else now + _wait(claimed.burst - BURST)
    connection.execute(
        _targets.update().where(is_same_claim).values(told=claimed.last, message=None, tries=0, due=due)
    )


def _wait(times: int) -> float:
    return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(times, _MOST_DOUBLINGS))


def _settle(connection: sa.Connection, numbers: set[int], now: float) -> None:
    """Bring the rows in line with the settings.

    A new target beside others gets what is posted from now on. The first target of a home also gets what was
    posted within a day. If targets were removed, the first one gets what they had not got.
    """
    rows = connection.execute(sa.select(_targets.c.target, _targets.c.told))
    last_events: dict[int, int] = {row.target: row.told for row in rows}
    start = connection.scalar(sa.select(sa.func.max(_events.c.seq))) or 0
    if not last_events:
        lately = sa.select(sa.func.min(_events.c.seq)).where(IS_TOLD, _events.c.at >= now - DAY_SECONDS)
        start = (connection.scalar(lately) or start + 1) - 1
    for target in numbers - last_events.keys():
        connection.execute(_targets.insert().values(target=target, told=start))
    removed = last_events.keys() - numbers
    if removed:
        least = min(last_events.values())
        connection.execute(_targets.delete().where(_targets.c.target.in_(removed)))
        connection.execute(_targets.update().where(_targets.c.target == 1).values(told=least))

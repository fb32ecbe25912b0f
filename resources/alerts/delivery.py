"""Delivery: what was posted reaches every target, in its order, whatever dies or is down.

What lives here: how far each target was told, what it gets next, storms, and back-off. What does not: the
words (``alert.py``), the sending (``targets.py``). A row of ``alert_targets`` says how far a target was told.
Before a message is sent, the row notes where it ends, and until when the target is left alone. After the
target took it, the row moves on. So two processes never send the same message at once, after a kill in
between it is sent again with the same id, and a failure needs no note: the target is due again later.
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
"""How long a target is left alone: twice as long each time, up to this."""

GRACE_SECONDS = 10.0
"""Added to the time that a process may take with a message. Before, no other process sends to its target."""

SINGLY = 3
"""Events that wait at once and are still told one by one; more become one message."""

BURST = 8
"""Messages that a target gets at once before it is left alone between them, until it was quiet for long."""

PATIENT_TRIES = 3
"""Up to so many tries of a message its target counts as down; after more the message counts as bad."""

_TIME_FOR_ONE = 1.0
_MOST_DOUBLINGS = 10
"""Of the wait: the longest one is reached before, and a larger power of two would overflow some day."""


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
        told = (
            f"{counted(self.told, 'messages')} delivered, {counted(self.waiting, 'alerts')} waiting,"
            " counted for each target."
        )
        return " ".join((told, *self.troubles))


@dataclass(frozen=True)
class _Next:
    """What a target is told next: the events after ``after`` up to ``last``, for the ``tries``-th time."""

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
        """Tell every target what is new and what is due again.

        now: unix seconds, by which back-off and storms are judged. seconds: after which what hangs is ended.
        address: of the pages, for links. Raises ControlStateError where nothing can be written down.
        """
        numbers = {target.number for target in self.targets}
        known = self._state.read(lambda connection: set(connection.scalars(sa.select(_targets.c.target))))
        # A look that finds nothing to tell writes nothing.
        if numbers and numbers != known:
            self._state.write(lambda connection: _settle(connection, numbers, now))
        due = self._state.read(
            lambda connection: [one for one in self.targets if _next(connection, one.number, now)]
        )
        with ThreadPoolExecutor(len(due) or 1) as pool:
            done = list(pool.map(lambda target: self._tell(target, now, seconds, address), due))
        self.outbox.prune(now)
        waiting = sum(untold for untold, _ in self.backlog().values())
        return Delivered(sum(told for told, _ in done), tuple(said for _, said in done if said), waiting)

    def _tell(self, target: Target, now: float, seconds: float, address: str | None) -> tuple[int, str]:
        """Send a target what is due, message by message. Returns how many it took, and the trouble."""
        told, left = 0, seconds
        deadline = time.monotonic() + seconds

        def claim(connection: sa.Connection) -> tuple[_Next, Message] | None:
            claimed = _claim(connection, target.number, now, now + seconds + GRACE_SECONDS)
            return None if claimed is None else (claimed, self._message(connection, claimed, address))

        while left > _TIME_FOR_ONE and (found := self._state.write(claim)) is not None:
            claimed, message = found
            is_bad = claimed.tries > PATIENT_TRIES
            # A target may hang at a bad text: half of the time is left for the short one.
            answer = send(target, message, seconds=left / 2 if is_bad else left)
            left = deadline - time.monotonic()
            if answer is not None and is_bad and left > _TIME_FOR_ONE:
                answer = send(target, self._in_short(message), seconds=left)
                left = deadline - time.monotonic()
            if answer is not None:
                return told, f"{target.name} did not take a message: {answer}"
            told += 1
            self._state.write(partial(_mark_told, target=target.number, claimed=claimed, now=now))
        return told, ""

    def _message(self, connection: sa.Connection, claimed: _Next, address: str | None) -> Message:
        its = IS_TOLD, _events.c.seq > claimed.after, _events.c.seq <= claimed.last
        first, count = sa.func.min(_events.c.seq), sa.func.count()
        kinds = sa.select(first, count).where(*its).group_by(_events.c.what, _events.c.kind).order_by(first)
        groups = []
        for seq, size in connection.execute(kinds).all():
            event = connection.scalars(sa.select(_events.c.event).where(_events.c.seq == seq)).one()
            groups.append((size, AlertEvent.from_json(event)))
        id_ = groups[0][1].id
        if sum(size for size, _ in groups) > 1:
            id_ = digest("many", id_, str(claimed.last))
        return message_about(groups, id_, origin=self.origin, address=address)

    def _in_short(self, message: Message) -> Message:
        """In place of a message that is never taken, so that it holds no later one up: our words alone."""
        said = f"What it says is in {command('alerts')}.\nFrom: {self.origin}\nId: {message.id}"
        return Message(message.id, "An alert that could not be sent here whole", said, message.type)

    def send_at_once(
        self, title: str, body: str, *, type_: str, seconds: float
    ) -> list[tuple[Target, str | None]]:
        """Send every target a message, unrecorded. What each said: None of one that took it."""
        message = Message("", title, f"{body}\nFrom: {self.origin}", type_)
        with ThreadPoolExecutor(len(self.targets) or 1) as pool:
            said = pool.map(lambda target: send(target, message, seconds=seconds), self.targets)
            return list(zip(self.targets, said, strict=True))

    def backlog(self) -> dict[str, tuple[int, int]]:
        """For each target by name: what it has still to be told, and the tries of what it is being told."""

        def count(connection: sa.Connection) -> dict[int, tuple[int, int]]:
            return {
                row.target: (_waiting(connection, row.told)[0], row.tries)
                for row in connection.execute(sa.select(_targets))
            }

        counted = self._state.read(count)
        return {target.name: counted.get(target.number, (0, 0)) for target in self.targets}


def _waiting(connection: sa.Connection, told: int) -> tuple[int, int, int]:
    """How many events come after one, and the numbers of the first and the last of them.

    Writers of the control state take turns, so none can appear later behind one that is there already.
    """
    seq = _events.c.seq
    query = sa.select(sa.func.count(), sa.func.min(seq), sa.func.max(seq)).where(IS_TOLD, seq > told)
    count, first, last = connection.execute(query).one()
    return count, first or told, last or told


def _next(connection: sa.Connection, target: int, now: float) -> _Next | None:
    """What a target is to be told next, if anything is due."""
    row = connection.execute(sa.select(_targets).where(_targets.c.target == target)).first()
    if row is None:
        return None  # A process with fewer targets in its settings took it out.
    # A time too far ahead is of a clock that was put back: it is past. The clock of who claimed it may be a
    # little ahead of this one.
    if now < row.due <= now + LONGEST_WAIT_SECONDS + GRACE_SECONDS:
        return None
    burst = row.burst if 0 <= now - row.due < LONGEST_WAIT_SECONDS else 0
    count, first, last = _waiting(connection, row.told)
    if not count:
        return None
    # What was not taken comes again as it was, with the same id.
    if row.message is not None and first <= row.message:
        return _Next(row.told, row.message, row.tries + 1, burst)
    return _Next(row.told, first if count <= SINGLY else last, 1, burst + 1)


def _claim(connection: sa.Connection, target: int, now: float, busy_until: float) -> _Next | None:
    """Write down what a target gets next, and that it is left alone meanwhile."""
    found = _next(connection, target, now)
    if found is not None:
        due = max(now + _wait(found.tries - 1), busy_until)
        values = {"message": found.last, "tries": found.tries, "burst": found.burst, "due": due}
        connection.execute(_targets.update().where(_targets.c.target == target).values(values))
    return found


def _mark_told(connection: sa.Connection, *, target: int, claimed: _Next, now: float) -> None:
    its = _targets.c.target == target, _targets.c.told == claimed.after, _targets.c.tries == claimed.tries
    due = now if claimed.burst < BURST else now + _wait(claimed.burst - BURST)
    # Where another process has claimed it since, that one moves on.
    connection.execute(
        _targets.update().where(*its).values(told=claimed.last, message=None, tries=0, due=due)
    )


def _wait(times: int) -> float:
    return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(times, _MOST_DOUBLINGS))


def _settle(connection: sa.Connection, numbers: set[int], now: float) -> None:
    """Bring the rows in line with the settings.

    A new target beside others is told from now on, the first one of a home what was posted within a day.
    What removed ones were not told the first one is told.
    """
    told: dict[int, int] = {
        row.target: row.told for row in connection.execute(sa.select(_targets.c.target, _targets.c.told))
    }
    start = connection.scalar(sa.select(sa.func.max(_events.c.seq))) or 0
    if not told:
        lately = sa.select(sa.func.min(_events.c.seq)).where(IS_TOLD, _events.c.at >= now - DAY_SECONDS)
        start = (connection.scalar(lately) or start + 1) - 1
    for target in numbers - told.keys():
        connection.execute(_targets.insert().values(target=target, told=start))
    gone = told.keys() - numbers
    if gone:
        least = min(told.values())
        connection.execute(_targets.delete().where(_targets.c.target.in_(gone)))
        connection.execute(_targets.update().where(_targets.c.target == 1).values(told=least))

"""Delivery: what was posted reaches every target, once, whatever dies or is down.

What lives here: the tables ``alert_targets`` and ``alert_messages``, storms, and back-off. What does not: the
words (``alert.py``), the sending (``targets.py``). A message is claimed, which writes it down with the
events that it tells, before it is sent, and marked after the target took it: a kill in between sends the same
id again, and nothing else can repeat or lose one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from resources.alerts.alert import (
    DAY_SECONDS,
    SHOWN,
    SINGLY,
    Alert,
    AlertEvent,
    Message,
    Sender,
    message_of_many,
    message_of_one,
)
from resources.alerts.outbox import TOLD, Outbox
from resources.alerts.targets import Target, TargetProcess
from resources.state import tables
from resources.state.tables import alert_events as _events
from resources.state.tables import alert_messages as _messages
from resources.state.tables import alert_targets as _targets
from resources.storage.files import make_directory
from resources.storage.lock_files import LockFile, taken

FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 1800.0
"""How long a target that is down is left alone: twice as long each time, up to this."""

BURST = 10
"""Alerts of a kind that are told within BURST_SECONDS before the kind has to wait."""

BURST_SECONDS = 600.0

STANDSTILL_SECONDS = 600.0
"""A delivery ends by itself within a minute: one that takes so long has stopped, and another one delivers."""

PATIENT_TRIES = 3
"""Failures up to which a target, or a message, is thought to be all right in a moment."""

_NOBODY = ""
"""Stands for the targets of a home that has none."""

_MOST_CLAIMED = 10
_MOMENT_SECONDS = 1.0


@dataclass(frozen=True)
class Delivered:
    """What one look did. told: messages that targets took. troubles: what those that did not said.

    waiting: alerts and recoveries that some target has still to be told, and is not being told for now.
    """

    told: int = 0
    troubles: tuple[str, ...] = ()
    waiting: int = 0


@dataclass(frozen=True)
class _Backlog:
    """What one target has still to be told. waiting: numbers and ids of events without a message, by group.

    claimed: messages that were not taken yet, the next first, with the number of their first event. refused:
    how often each of these was.
    """

    told_up_to: int
    held: Mapping[str, int]
    tries: int
    next_at: float
    waiting: Mapping[str, Sequence[tuple[int, str]]]
    claimed: Sequence[tuple[int, Message]]
    refused: Sequence[int]

    @property
    def untold(self) -> int:
        return sum(map(len, self.waiting.values())) + sum(message.tells for _, message in self.claimed)

    def is_due(self, now: float) -> bool:
        """Whether it is to be tried. Times too far ahead are those of a clock that was put back: past."""
        is_left_alone = now < self.next_at <= now + LONGEST_WAIT_SECONDS
        return self.untold > 0 and (not is_left_alone or self._has_new_beside_unwanted)

    @property
    def _has_new_beside_unwanted(self) -> bool:
        """Whether it waits for messages alone that it never takes, and may be up for a new one."""
        tried = [times for times in self.refused if times]
        if not tried or min(tried) <= PATIENT_TRIES:
            return False
        return len(tried) < len(self.refused) or (self.has_room and bool(self.waiting.keys() - self.held))

    @property
    def has_room(self) -> bool:
        """Whether more is claimed: what waits for a target that stays down is told in groups then."""
        return self.tries < PATIENT_TRIES or len(self.claimed) < _MOST_CLAIMED

    def cursor(self, group: str) -> int:
        """The last event of a group that a message was made of."""
        return self.held.get(group, self.told_up_to)

    @property
    def floor(self) -> int:
        """The last event up to which messages were made of all."""
        return min([self.told_up_to, *self.held.values()])


class Delivery:
    """Brings an outbox to its targets; one process at a time, and who comes second leaves it to the first.

    home: the folder of this data set, named in every message.
    """

    def __init__(self, outbox: Outbox, targets: Sequence[Target], *, home: Path) -> None:
        self.outbox = outbox
        self.targets = targets
        self._state = outbox.state
        self._home = home
        self._keys: dict[tuple[Target, str], str] = {}
        # Taken, but perhaps not marked: on a full disk, where nothing can be marked, nothing is repeated.
        self._taken: set[tuple[str, int]] = set()

    def deliver(self, *, now: float, seconds: float, address: str | None) -> Delivered | None:
        """Tell every target what is new and what is due again; None where another process is at it.

        now: unix seconds, by which back-off and storms are judged. seconds: after which what hangs is ended.
        address: of the pages, for links. Raises ControlStateError where nothing can be written down.
        """
        deadline = time.monotonic() + seconds
        with self._only(now) as lock:
            if lock is None:
                return None
            salt = self._salt() if self.targets else ""
            targets = {self._key(target, salt): target for target in self.targets}
            standing = self._state.read(_backlogs)
            is_due = any(key in targets and one.is_due(now) for key, one in standing.items())
            # A look that finds nothing to tell writes nothing.
            if is_due or (targets and targets.keys() != standing.keys()):
                sender = Sender(str(self._home), socket.gethostname(), address)
                standing = self._state.write(lambda connection: self._claim(connection, targets, now, sender))
                self._taken.clear()
            elif standing.keys() <= {_NOBODY} and not targets:
                standing = self._tell_nobody(standing)
            due = {
                target: key
                for key, target in targets.items()
                if standing[key].is_due(now) and standing[key].claimed
            }
            done = self._send_all(due, standing, now, deadline, lock)
            if done:
                standing = self._state.read(_backlogs)
            self.outbox.prune(now, told_up_to=min((one.floor for one in standing.values()), default=0))
        troubles = tuple(trouble for _, trouble in done if trouble)
        return Delivered(
            sum(told for told, _ in done), troubles, sum(one.untold for one in standing.values())
        )

    def send_at_once(self, message: Message, *, seconds: float) -> list[tuple[Target, str | None]]:
        """Send a message to every target, unrecorded. What each said: None of one that took it."""
        deadline = time.monotonic() + seconds

        def send(target: Target) -> tuple[Target, str | None]:
            with (
                Path(os.devnull).open() as nothing,
                TargetProcess(target, deadline=deadline, keep_open=nothing.fileno()) as process,
            ):
                answer = process.send(message)
            return target, None if answer.took else answer.said or "it was refused"

        with ThreadPoolExecutor(max(1, len(self.targets))) as pool:
            return list(pool.map(send, self.targets))

    def backlog(self) -> dict[str, tuple[int, int]]:
        """For each target by name: how much it has still to be told, and how often in a row it was down."""
        standing = self._state.read(_backlogs)
        salt = self._state.read(_salt_of) if standing else None
        found = {}
        for target in self.targets:
            one = standing.get(self._key(target, salt)) if salt else None
            found[target.name] = (one.untold, one.tries) if one else (0, 0)
        return found

    @contextlib.contextmanager
    def _only(self, now: float) -> Iterator[LockFile | None]:
        """The lock; None where another process delivers. One that stands still is told of and left behind."""
        directory = self._state.directory
        if not directory.is_dir():
            make_directory(directory)
        path = directory / "alert_delivery.lock"
        lock = taken(path)
        try:
            if lock is None and _is_old(path, now):
                # Who took it this moment says so in the next.
                lock = taken(path, seconds=_MOMENT_SECONDS)
            if lock is None and _is_old(path, now):
                lock = _taken_over(path, now)
                if lock is not None:
                    self.outbox.post(_standstill(now))
            if lock is not None:
                with contextlib.suppress(PermissionError):  # another user's file
                    os.utime(lock.fileno(), (now, now))
            yield lock
        finally:
            if lock is not None:
                lock.close()

    def _salt(self) -> str:
        def write(connection: sa.Connection) -> str:
            found = _salt_of(connection)
            if found is None:
                found = secrets.token_hex(16)
                connection.execute(tables.meta.insert().values(name=tables.TARGET_SALT, value=found))
            return found

        return self._state.read(_salt_of) or self._state.write(write)

    def _key(self, target: Target, salt: str) -> str:
        known = (target, salt)
        if known not in self._keys:
            self._keys[known] = target.key(bytes.fromhex(salt))
        return self._keys[known]

    def _claim(
        self, connection: sa.Connection, keys: Collection[str], now: float, sender: Sender
    ) -> dict[str, _Backlog]:
        """Make messages of what waits for targets that are due, but of kinds told too often lately."""
        for key, seq in self._taken:
            _mark(connection, key=key, seq=seq, now=now)
        _match_targets(connection, keys)
        is_recent = sa.func.abs(_messages.c.claimed_at - now) < BURST_SECONDS
        connection.execute(_messages.delete().where(_messages.c.taken_at.is_not(None), sa.not_(is_recent)))
        recent = sa.select(_messages.c.target, _messages.c.group, sa.func.sum(_messages.c.tells))
        recent = recent.where(is_recent).group_by(_messages.c.target, _messages.c.group)
        told = {(row[0], row[1]): row[2] for row in connection.execute(recent)}
        newest = _newest(connection)
        for key, one in _backlogs(connection).items():
            if key not in keys or not one.is_due(now) or not one.has_room:
                continue
            held = {group: one.cursor(group) for group in one.waiting if told.get((key, group), 0) >= BURST}
            for group in one.waiting.keys() - held.keys():
                rows = [
                    {
                        "target": key,
                        "seq": seq,
                        "group": group,
                        "tells": message.tells,
                        "message": asdict(message),
                        "claimed_at": now,
                        "refused": 0,
                    }
                    for seq, message in _worded(connection, one.waiting[group], sender)
                ]
                connection.execute(_messages.insert(), rows)
            row = {"told_up_to": newest, "held": held}
            connection.execute(_targets.update().where(_targets.c.target == key).values(row))
        return _backlogs(connection)

    def _tell_nobody(self, standing: Mapping[str, _Backlog]) -> dict[str, _Backlog]:
        """Pass over the events so far: there is no target, and the first one hears of later events."""
        if standing and not standing[_NOBODY].untold:
            return dict(standing)

        def write(connection: sa.Connection) -> dict[str, _Backlog]:
            row = {"told_up_to": _newest(connection), "held": {}, "tries": 0, "next_at": 0.0}
            connection.execute(_targets.delete())
            connection.execute(_targets.insert().values(target=_NOBODY, **row))
            return _backlogs(connection)

        return self._state.write(write)

    def _send_all(
        self,
        due: Mapping[Target, str],
        standing: Mapping[str, _Backlog],
        now: float,
        deadline: float,
        lock: LockFile,
    ) -> list[tuple[int, str]]:
        def send(target: Target, key: str) -> tuple[int, str]:
            # The process holds the lock too: killed, we leave none behind that sends beside the next one.
            with TargetProcess(target, deadline=deadline, keep_open=lock.fileno()) as process:
                return self._send(key, standing[key], process, now)

        if not due:
            return []
        with ThreadPoolExecutor(len(due)) as pool:
            return list(pool.map(send, due.keys(), due.values()))

    def _send(self, key: str, backlog: _Backlog, process: TargetProcess, now: float) -> tuple[int, str]:
        """Send a target's messages. Returns how many it took, and the trouble with it, if any."""
        told, said = 0, ""
        refused: list[int] = []
        for seq, message in backlog.claimed:
            if told and process.out_of_time:
                break
            answer = process.send(message)
            if answer.took:
                told += 1
                self._taken.add((key, seq))
                self._state.write(partial(_mark, key=key, seq=seq, now=now))
                self._taken.discard((key, seq))
                continue
            refused.append(seq)
            said = answer.said
            if len(refused) > 1:
                # One may be to blame itself; where a second is refused too, the target is.
                break
        if not refused:
            return told, ""
        tries = 1 if told else backlog.tries + 1
        wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (tries - 1))

        def note(connection: sa.Connection) -> None:
            of_these = (_messages.c.target == key) & _messages.c.seq.in_(refused)
            connection.execute(_messages.update().where(of_these).values(refused=_messages.c.refused + 1))
            later = _targets.update().where(_targets.c.target == key)
            connection.execute(later.values(tries=tries, next_at=now + wait))

        self._state.write(note)
        left = len(backlog.claimed) - told
        return told, f"{process.target.name} did not take {left} messages; next try in {wait:.0f} s. {said}"


def _backlogs(connection: sa.Connection) -> dict[str, _Backlog]:
    """What each target has still to be told, by its key."""
    found = {}
    for row in connection.execute(sa.select(_targets)):
        claimed = sa.select(_messages.c.seq, _messages.c.message, _messages.c.refused)
        claimed = claimed.where(_messages.c.target == row.target, _messages.c.taken_at.is_(None))
        # What was refused often comes last, and in turns: it holds no other up.
        turn = sa.case((_messages.c.refused > PATIENT_TRIES, _messages.c.refused), else_=0)
        claimed = claimed.order_by(turn, _messages.c.seq)
        query = sa.select(_events.c.seq, _events.c.id, _events.c.what, _events.c.kind)
        since = min([row.told_up_to, *row.held.values()])
        query = query.where(_events.c.seq > since, _events.c.what.in_(TOLD)).order_by(_events.c.seq)
        waiting: dict[str, list[tuple[int, str]]] = {}
        for event in connection.execute(query):
            group = f"{event.what} {event.kind}"
            if event.seq > row.held.get(group, row.told_up_to):
                waiting.setdefault(group, []).append((event.seq, event.id))
        of_claimed = connection.execute(claimed).all()
        messages = [(one.seq, Message(**one.message)) for one in of_claimed]
        refused = [one.refused for one in of_claimed]
        found[row.target] = _Backlog(
            row.told_up_to, row.held, row.tries, row.next_at, waiting, messages, refused
        )
    return found


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


def _match_targets(connection: sa.Connection, keys: Collection[str]) -> None:
    """A row for each target of the settings; a new one takes over what a removed one was not told.

    Beside others a new one is told from now on; the first one of a home is told all.
    """
    standing = _backlogs(connection)
    gone = {key: one for key, one in standing.items() if key not in keys}
    of_gone = _messages.c.target.in_(gone)
    for key in (key for key in keys if key not in standing):
        from_now = _newest(connection) if standing else 0
        told_up_to = min((one.told_up_to for one in gone.values()), default=from_now)
        groups = {group for one in gone.values() for group in one.held}
        held = {group: min(one.cursor(group) for one in gone.values()) for group in groups}
        row = {"target": key, "told_up_to": told_up_to, "held": held, "tries": 0, "next_at": 0.0}
        connection.execute(_targets.insert().values(row))
        claimed = sa.select(_messages).where(of_gone, _messages.c.taken_at.is_(None))
        # Of several that are gone, one may not have been told yet what another was: that is told anew. Of two
        # messages that begin with the same event the longer one stays, by which none is left out.
        found = connection.execute(claimed.order_by(_messages.c.tells)).mappings()
        for seq, one in {one["seq"]: one for one in found}.items():
            if seq <= held.get(one["group"], told_up_to):
                row = {**one, "target": key, "seal": None}
                connection.execute(_messages.insert().values(row))
    connection.execute(_messages.delete().where(of_gone))
    connection.execute(_targets.delete().where(_targets.c.target.in_(gone)))


def _mark(connection: sa.Connection, *, key: str, seq: int, now: float) -> None:
    """Note that a target took a message, so that it is up."""
    this = (_messages.c.target == key) & (_messages.c.seq == seq)
    connection.execute(_messages.update().where(this).values(taken_at=now))
    connection.execute(_targets.update().where(_targets.c.target == key).values(tries=0, next_at=0.0))


def _is_old(lock: Path, now: float) -> bool:
    """Whether a lock was taken so long ago that who holds it stands still."""
    with contextlib.suppress(FileNotFoundError):
        return abs(now - lock.stat().st_mtime) > STANDSTILL_SECONDS
    return False


def _taken_over(path: Path, now: float) -> LockFile | None:
    """A new lock in place of an old one, one process at a time: a second would remove the first one's.

    Who stands still keeps the file that it locked. Should it go on, a message comes twice, with the same id.
    """
    with contextlib.closing(LockFile(path.parent, create=False)) as turn:
        if not turn.take() or not _is_old(path, now):
            return None
        path.unlink(missing_ok=True)
        return taken(path)


def _standstill(now: float) -> Alert:
    return Alert(
        kind="delivery_stands",
        subject="alerts/delivery",
        occurrence=f"{now:.0f}",
        severity="error",
        title="A process that was delivering alerts stands still",
        expected="a delivery that ends within a minute",
        found=f"one that has not ended for {STANDSTILL_SECONDS / 60:.0f} minutes",
        next_step=(
            "Nothing is lost: another process delivers now. Look for a stopped process (state T in `ps -eo"
            " pid,stat,args`) and end it with `kill -9 PID`. If it is Dagster's, start Dagster again."
        ),
        at=now,
        lasts=DAY_SECONDS,
    )


def _newest(connection: sa.Connection) -> int:
    return connection.execute(sa.select(sa.func.max(_events.c.seq))).scalar() or 0


def _salt_of(connection: sa.Connection) -> str | None:
    query = sa.select(tables.meta.c.value).where(tables.meta.c.name == tables.TARGET_SALT)
    return connection.execute(query).scalar()

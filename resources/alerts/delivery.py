"""Delivery: what was posted reaches every target, once, whatever dies or is down.

What lives here: the order of reading, recording and sending, and back-off. What does not: the words
(``messages.py``), the record (``delivery_record.py``), the sending (``targets.py``). A message is written
down with its id before it is sent and struck off after the target took it, so a kill in between sends the
same id again, and nothing else can repeat or lose one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resources.alerts.alert import Alert
from resources.alerts.alert_log import Read, make_directory_once
from resources.alerts.delivery_record import Record, Tray
from resources.alerts.messages import Group, Message, Sender
from resources.alerts.outbox import RAISED, Outbox
from resources.alerts.targets import Target, TargetProcess
from resources.storage.files import set_aside, write_replacing
from resources.storage.sealed_json import BrokenSealError

RECORD = "delivery.json"
FIRST_WAIT_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 1800.0
"""How long a target that is down is left alone: twice as long each time, up to this."""

_LOCK = "delivery.lock"


@dataclass(frozen=True)
class Delivered:
    """What one look did. told: messages that targets took. troubles: what those that did not said.

    waiting: alerts and recoveries that some target has still to be told, and is not being told for now.
    """

    told: int = 0
    troubles: tuple[str, ...] = ()
    waiting: int = 0


class Delivery:
    """Brings an outbox to its targets; one process at a time, and who comes second leaves it to the first.

    home: the folder of this data set, named in every message.
    """

    def __init__(self, outbox: Outbox, targets: Sequence[Target], *, home: Path) -> None:
        self.outbox = outbox
        self.directory = outbox.log.directory
        self.targets = targets
        self._home = home
        self._keys: dict[tuple[Target, str], str] = {}
        # Taken, but perhaps not struck off: a full disk, where no record can be written, repeats nothing.
        self._taken: set[tuple[Target, str]] = set()
        self._guard = threading.Lock()

    def deliver(self, *, now: float, seconds: float, address: str | None) -> Delivered | None:
        """Tell every target what is new and what is due again; None where another process is at it.

        now: unix seconds, by which back-off and storms are judged. seconds: after which what hangs is ended.
        address: of the pages, for links. Raises OSError where the record cannot be written.
        """
        deadline = time.monotonic() + seconds
        with self._only() as lock:
            if lock is None:
                return None
            sender = Sender(str(self._home), socket.gethostname(), address)
            record = self._load()
            if self._read_on(record):
                self._save(record)
            self._strike_off_taken(record)
            due = []
            for target in self.targets:
                tray = record.trays[self._key(target, record)]
                if tray.is_due(now, LONGEST_WAIT_SECONDS) and not tray.idle:
                    due.append((target, tray, tray.has_room and tray.word(now, sender)))
            if any(worded for _, _, worded in due):
                self._save(record)
            sending = [(target, tray) for target, tray, _ in due if tray.flying]
            found = self._send_all(record, sending, now=now, deadline=deadline, lock=lock)
            if record.position is not None:
                # Every line was gathered for every target, so a long file may be put aside.
                self.outbox.begin_new_file_where_long(record.position)
        return found

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
        record = self._load()
        found = {}
        for target in self.targets:
            tray = record.trays.get(self._key(target, record), Tray())
            found[target.name] = (tray.untold, tray.tries)
        return found

    @contextlib.contextmanager
    def _only(self) -> Iterator[int | None]:
        make_directory_once(self.directory)
        descriptor = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield descriptor
        finally:
            os.close(descriptor)

    def _load(self) -> Record:
        path = self.directory / RECORD
        try:
            return Record.from_bytes(path.read_bytes())
        except FileNotFoundError:
            pass
        except (BrokenSealError, KeyError, TypeError, ValueError):
            set_aside(path, self.directory / "unreadable")
        return Record(secrets.token_hex(16))

    def _save(self, record: Record) -> None:
        write_replacing(self.directory / RECORD, record.as_bytes())

    def _key(self, target: Target, record: Record) -> str:
        known = (target, record.salt)
        if known not in self._keys:
            self._keys[known] = target.key(bytes.fromhex(record.salt))
        return self._keys[known]

    def _read_on(self, record: Record) -> bool:
        """Put what is new in the log with what waits for each target. True: the record has changed."""
        changed = self._match_targets(record)
        with self.outbox.log.locked():
            found = self.outbox.log.read(record.position)
        if found.end == record.position or not found.end.file:
            return changed
        entries = found.entries + ([_unreadable(found)] if found.damaged else [])
        for tray in record.trays.values():
            for entry in entries:
                tray.take(entry)
        record.position = found.end
        return True

    def _match_targets(self, record: Record) -> bool:
        """A tray for each target of the settings; a new one takes over what a removed one was not told."""
        keys = [self._key(target, record) for target in self.targets]
        newcomers = [key for key in keys if key not in record.trays]
        gone = [key for key in record.trays if key not in keys]
        for key in newcomers:
            record.trays[key] = Tray()
        if newcomers:
            for key in newcomers:
                for old in (record.trays[one] for one in gone):
                    record.trays[key].waiting += [Group(**asdict(group)) for group in old.waiting]
                    record.trays[key].flying += old.flying
        if keys:
            # With no target at all, what was not told waits for the first one that comes.
            for key in gone:
                del record.trays[key]
        return bool(newcomers or (keys and gone))

    def _strike_off_taken(self, record: Record) -> None:
        for target in self.targets:
            tray = record.trays[self._key(target, record)]
            tray.flying = [one for one in tray.flying if (target, one.id) not in self._taken]

    def _send_all(
        self,
        record: Record,
        due: Sequence[tuple[Target, Tray]],
        *,
        now: float,
        deadline: float,
        lock: int,
    ) -> Delivered:
        told, troubles = 0, []

        def send(target: Target, tray: Tray) -> tuple[int, list[str]]:
            with TargetProcess(target, deadline=deadline, keep_open=lock) as process:
                return self._send(record, tray, process, now=now)

        if due:
            with ThreadPoolExecutor(len(due)) as pool:
                for took, said in pool.map(lambda pair: send(*pair), due):
                    told += took
                    troubles += said
        return Delivered(told, tuple(troubles), sum(tray.untold for tray in record.trays.values()))

    def _send(
        self, record: Record, tray: Tray, process: TargetProcess, *, now: float
    ) -> tuple[int, list[str]]:
        told, said = 0, ""
        refused: list[Message] = []
        for message in tray.in_order():
            if told and process.out_of_time:
                break
            answer = process.send(message)
            with self._guard:
                if answer.took:
                    told += 1
                    tray.strike_off(message)
                    tray.tries, tray.next_at = 0, 0.0
                    self._taken.add((process.target, message.id))
                    self._save(record)
                    self._taken.discard((process.target, message.id))
                    continue
            refused.append(message)
            said = answer.said
            if len(refused) > 1:
                # One may be to blame itself; where a second is refused too, the target is.
                break
        if not refused:
            return told, []
        with self._guard:
            tray.tries += 1
            tray.note_refused(refused)
            wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (tray.tries - 1))
            tray.next_at = now + wait
            self._save(record)
        name = process.target.name
        return told, [f"{name} did not take {len(tray.flying)} messages; next try in {wait:.0f} s. {said}"]


def _unreadable(found: Read) -> dict[str, Any]:
    alert = Alert(
        kind="alerts_unreadable",
        subject="alerts/alerts.jsonl",
        occurrence=f"{found.end.file} {found.end.offset}",
        severity="error",
        title=f"{found.damaged} alerts on disk were damaged before they were told",
        next_step="Look through `vlm-assets status` and the pages for what is wrong, and check the disk.",
    )
    return {"event": RAISED, "id": alert.id, **alert.as_json()}

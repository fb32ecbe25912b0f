"""The outbox: whoever sees trouble posts it here, from any process, and it is durable before that returns.

What lives here: what is posted, what is known already, what is open. What does not: the file's bytes
(``alert_log.py``), and telling people (``delivery.py``). Everything is derived from the lines of
``alerts.jsonl``; in memory stands only what they add up to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from resources.alerts.alert import Alert, Recovery
from resources.alerts.alert_log import AlertLog, Position

LONGEST_FILE = 8 << 20
"""Bytes of ``alerts.jsonl`` from which a new file is begun: some ten thousand alerts."""

RAISED, AGAIN, RECOVERED = "raised", "again", "recovered"
"""What a line is. Of trouble that begins and of its end a person is told; of what comes again in it, not."""

CARRIED, KNOWN = "carried", "known"
"""Lines at the head of a new file, of what is open and of what was noted."""

_REMEMBERED = 5000


class NotOpenError(LookupError):
    """No alert of that name is open; the message names those that are."""


class Outbox:
    """What is to be told, in one folder. Safe for any number of processes and threads at once."""

    def __init__(self, directory: Path) -> None:
        self.log = AlertLog(directory)
        self._guard = threading.Lock()
        self._position: Position | None = None
        self._open: dict[str, Alert] = {}
        self._since: dict[str, float] = {}
        self._known: dict[str, None] = {}
        self._damaged = 0
        self._began_with = 0

    def post(self, alert: Alert) -> bool:
        """Note an alert, durably. False: this occurrence is known already. Raises AlertLogError."""
        return bool(self.post_all([alert]))

    def post_all(self, alerts: Iterable[Alert], *, once_while_open: bool = False) -> list[Alert]:
        """Note many at once, durably, for the price of one. Returns those that are told.

        once_while_open: another occurrence of what is open, by an alert of the same kind, is noted and not
        told: whoever tries again by itself would ring the phone at each try. Raises AlertLogError, and then
        none of them is noted.
        """
        wanted = {alert.id: alert for alert in alerts}
        if not wanted:
            return []
        with self._guard, self.log.locked():
            self._read_on()
            new = [alert for id_, alert in wanted.items() if id_ not in self._known]
            again = self._again(new) if once_while_open else set()
            self._append([{**_raised(one), "event": AGAIN if one.id in again else RAISED} for one in new])
        return [one for one in new if one.id not in again]

    def _again(self, new: Sequence[Alert]) -> set[str]:
        """The ids of those whose subject is open, when they come, with the same kind."""
        again = set()
        kinds: dict[str, str] = {}
        for one in new:
            standing = self._open.get(one.subject)
            if one.kind == kinds.get(one.subject, standing.kind if standing is not None else None):
                again.add(one.id)
            kinds[one.subject] = one.kind
        return again

    def recovered(self, subject: str, *, occurrence: str, sentence: str, at: float) -> bool:
        """Note, durably, that something is right again. False where nothing of it is open.

        Raises AlertLogError.
        """
        return bool(self.recovered_all([(subject, occurrence, sentence)], at=at))

    def close(self, name: str, *, sentence: str, at: float) -> Alert:
        """A person says that an alert is over: noted as that, durably, and told as a recovery is.

        name: its subject, or its id as messages have it. Only another occurrence of it is told after that.
        Raises NotOpenError, AlertLogError.
        """
        opened = self.open_subjects()
        for alert in opened.values():
            if name in (alert.subject, alert.id):
                seen = [(alert.subject, f"closed at {at}", sentence)]
                if self.recovered_all(seen, at=at, by_hand=True):
                    return alert
                break
        there = ", ".join(opened) or "none"
        raise NotOpenError(f"No alert with the subject or id {name} is open. Open are: {there}.")

    def recovered_all(
        self, seen: Iterable[tuple[str, str, str]], *, at: float, by_hand: bool = False
    ) -> list[Recovery]:
        """Note many recoveries, (subject, occurrence, sentence) each, for the price of one. Returns the new.

        Raises AlertLogError, and then none of them is noted.
        """
        wanted = list(seen)
        if not wanted:
            return []
        with self._guard, self.log.locked():
            self._read_on()
            new = [
                Recovery(self._open[subject], occurrence, sentence, at, self._since[subject], by_hand)
                for subject, occurrence, sentence in wanted
                if subject in self._open
            ]
            new = list({one.alert.subject: one for one in new}.values())
            self._append([_recovered(one) for one in new])
        return new

    def open_subjects(self) -> dict[str, Alert]:
        """What is wrong and not right again: each subject's latest alert, oldest first. Raises OSError."""
        if not self.log.path.exists():
            return {}
        with self._guard, self.log.locked():
            self._read_on()
            return dict(self._open)

    def recent(self, count: int) -> list[dict[str, Any]]:
        """The last lines that told something, as they stand in the file, oldest first. Raises OSError."""
        if not self.log.path.exists():
            return []
        with self.log.locked():
            told = [one for one in self.log.read().entries if one["event"] in (RAISED, RECOVERED)]
        return told[-count:]

    def damaged_lines(self) -> int:
        """How many whole lines of the file do not verify: alerts that cannot be read any more."""
        if not self.log.path.exists():
            return 0
        with self._guard, self.log.locked():
            self._read_on()
            return self._damaged

    def begin_new_file_where_long(self, told: Position) -> bool:
        """Put a long file aside and begin a new one with what is open; only where ``told`` is its end.

        Raises OSError.
        """
        if told.offset <= LONGEST_FILE:
            return False
        with self._guard, self.log.locked():
            self._read_on()
            if self._position != told or told.offset - self._began_with <= LONGEST_FILE:
                return False
            carried = [
                {**_raised(alert), "event": CARRIED, "since": self._since[subject]}
                for subject, alert in self._open.items()
            ]
            known = {"event": KNOWN, "ids": list(self._known)[-_REMEMBERED:]}
            self.log.start_anew([known, *carried])
        return True

    def _append(self, entries: Sequence[dict[str, Any]]) -> None:
        if entries:
            self.log.append(entries)
            self._read_on()
        else:
            # Known from lines whose writer may have died before syncing them: a promise all the same.
            self.log.sync()

    def _read_on(self) -> None:
        found = self.log.read(self._position)
        if self._position is None or found.end.file != self._position.file:
            self._open, self._since, self._known, self._damaged = {}, {}, {}, 0
        self._position = found.end
        self._damaged += found.damaged
        self._began_with = found.began_with
        for entry in found.entries:
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        if event in (RAISED, AGAIN, CARRIED):
            alert = Alert.from_json(entry)
            self._known[alert.id] = None
            # The newest last: what is said again counts from now.
            self._open.pop(alert.subject, None)
            self._open[alert.subject] = alert
            if event != AGAIN or alert.subject not in self._since:
                self._since[alert.subject] = entry.get("since", alert.at)
        elif event == RECOVERED:
            subject = Recovery.from_json(entry).alert.subject
            self._open.pop(subject, None)
            self._since.pop(subject, None)
        elif event == KNOWN:
            self._known |= dict.fromkeys(entry["ids"])


def _raised(alert: Alert) -> dict[str, Any]:
    return {"event": RAISED, "id": alert.id, **alert.as_json()}


def _recovered(recovery: Recovery) -> dict[str, Any]:
    return {"event": RECOVERED, "id": recovery.id, **recovery.as_json()}

"""What the retries know of each partition, for ``status``: tried again, done since, given up, cancelled.

What lives here: reading that and saying it. What does not: writing it, which is the schedule's alone
(``retry_ledger.py`` and ``cancels.py`` of ``sensors``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from resources.state.database import ControlState
from resources.state.sqlite_file import ControlStateError
from sensors.cancels import Cancel, Cancels
from sensors.retry_ledger import Attempts, DoneAgain, Entry, done_again_since
from vlm_assets.assets.partition_state import State

_UNFINISHED = frozenset({State.INTERRUPTED, State.NOT_STARTED, State.REFUSED, State.DAMAGED})


class RetryNotes:
    """What stands in the control state. ``warnings``: why it cannot be read now, where it cannot."""

    def __init__(self, state: ControlState) -> None:
        self._state = state
        self.warnings: list[str] = []
        self._entries: Mapping[str, Entry] = {}
        self._cancelled: Mapping[str, Cancel] = {}
        try:
            self._entries = Attempts(state).read()
            self._cancelled = Cancels(state).read()
        except ControlStateError as error:
            self.warnings.append(str(error))

    def of(self, asset: str, key: str, state: State) -> tuple[State, str | None]:
        """The state of an unfinished partition with what the retries know of it, and a sentence of that."""
        if state not in _UNFINISHED:
            return state, None
        entry = self._entries.get(key, Entry(key))
        if key in self._cancelled:
            return State.CANCELLED, "a person cancelled it: it is launched by hand only"
        if entry.given_up:
            return State.GIVEN_UP, _given_up(entry.attempts)
        if entry.attempts:
            return State.FAILED, _tried(entry.attempts, entry.not_before)
        return state, None

    def done_again(self, since: float) -> tuple[DoneAgain, ...]:
        """What was completed by a retry since (unix seconds), the oldest first."""
        try:
            return tuple(done_again_since(self._state, since))
        except ControlStateError as error:
            if str(error) not in self.warnings:
                self.warnings.append(str(error))
            return ()


def _given_up(attempts: int) -> str:
    return f"failed {_times(attempts)} in a row without progress: it is not tried again by itself"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _tried(attempts: int, not_before: float) -> str:
    when = datetime.fromtimestamp(not_before).astimezone().isoformat(" ", "minutes") if not_before else None
    return f"failed {_times(attempts)} in a row without progress" + (
        f"; tried again after {when}" if when else ""
    )

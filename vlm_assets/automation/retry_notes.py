"""What the retries wrote of each partition: tried again, done since, given up, cancelled; for the triage.

What lives here: reading their files and saying them in a sentence. What does not: writing or mending them,
which is the schedule's alone (``attempts.py``, ``done_again.py``, ``cancels.py`` of ``sensors``,
``resources/state/row_retries.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from resources.state.row_retries import RowRetriesFile, RowRetriesUnreadableError
from resources.storage.sealed_json import BrokenSealError, read_sealed
from sensors.attempts import Attempts
from sensors.done_again import DoneAgain, DoneAgainMemory
from vlm_assets.assets.partition_states import State

_UNFINISHED = frozenset({State.INTERRUPTED, State.NOT_STARTED, State.REFUSED, State.DAMAGED})


class RetryNotes:
    """The files as they stand. ``warnings``: sentences about those that do not read; they are left alone."""

    def __init__(self, state_directory: Path) -> None:
        self._state_directory = state_directory
        self.warnings: list[str] = []
        self._entries = self._read(Attempts(state_directory).path, "entries")
        self._cancelled = self._read(state_directory / "cancels" / "cancels.json", "partitions")

    def of(self, asset: str, key: str, state: State) -> tuple[State, str | None]:
        """The state of an unfinished partition with what the retries know of it, and a sentence of that."""
        if state not in _UNFINISHED:
            return state, None
        entry = self._entries.get(key, {})
        if key in self._cancelled:
            return State.CANCELLED, "a person cancelled it: it is launched by hand only"
        if entry.get("given_up"):
            return State.GIVEN_UP, _given_up(entry.get("attempts", 0))
        if state is State.REFUSED:
            return state, self._refusal(asset, key)
        if entry.get("attempts"):
            return State.FAILED, _tried(entry["attempts"], entry.get("not_before", 0.0))
        return state, None

    def done_again(self, since: float) -> tuple[DoneAgain, ...]:
        """What was tried again by itself and came right since (unix seconds), the oldest first."""
        memory = DoneAgainMemory(self._state_directory)
        try:
            found = memory.look().values()
        except (OSError, BrokenSealError, KeyError, TypeError, AttributeError) as error:
            self.warnings.append(_unread(memory.path, error))
            return ()
        return tuple(sorted((one for one in found if one.at >= since), key=lambda one: one.at))

    def _refusal(self, asset: str, key: str) -> str | None:
        try:
            retries = RowRetriesFile(self._state_directory, asset, key).read()
        except (RowRetriesUnreadableError, OSError) as error:
            self.warnings.append(str(error))
            return None
        return retries.refusal.sentence() if retries and retries.refusal else None

    def _read(self, path: Path, name: str) -> Mapping[str, Any]:
        try:
            found = read_sealed(path)[name]
        except FileNotFoundError:
            return {}
        except (OSError, BrokenSealError, KeyError) as error:
            self.warnings.append(_unread(path, error))
            return {}
        return found if isinstance(found, dict) else {}


def _unread(path: Path, error: Exception) -> str:
    return f"{path} does not read ({error}); the next tick of the retries mends it."


def _given_up(attempts: int) -> str:
    return f"failed {_times(attempts)} in a row without progress: it is not tried again by itself"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _tried(attempts: int, not_before: float) -> str:
    when = datetime.fromtimestamp(not_before).astimezone().isoformat(" ", "minutes") if not_before else None
    return f"failed {_times(attempts)} in a row without progress" + (
        f"; tried again after {when}" if when else ""
    )

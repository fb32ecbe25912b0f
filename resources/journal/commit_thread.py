"""When a group of submitted rows is committed: a thread beside the caller, who never waits for the disk.

What lives here: the queue, the deadline, handing errors back. What does not: the commit itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Waiting:
    table: Any
    since: float


class CommitThread:
    """Groups submitted tables until ``commit_rows`` rows wait or the oldest waits ``commit_seconds``.

    After an error nothing more is committed; the error is raised by every later call. The thread is a
    daemon: a caller that dies without closing is not held up by it.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Any]], None],
        *,
        commit_seconds: float,
        commit_rows: int,
        clock: Callable[[], float],
    ) -> None:
        self._commit = commit
        self._commit_seconds = commit_seconds
        self._commit_rows = commit_rows
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._submitted = 0
        self._done = 0
        self._flush_to = 0
        self._stopping = False
        self._error: BaseException | None = None
        self.wait_seconds = 0.0
        """Seconds that callers spent inside submit, flush and stop."""
        self._thread = threading.Thread(target=self._run, name="journal-commits", daemon=True)
        self._thread.start()

    def submit(self, table: Any) -> None:
        """Queue a table. Raises the error of an earlier commit."""
        started = time.monotonic()
        with self._changed:
            self._raise_error()
            self._waiting.append(_Waiting(table, self._clock()))
            self._submitted += 1
            self._changed.notify_all()
        self.wait_seconds += time.monotonic() - started

    def flush(self) -> None:
        """Wait until everything submitted before is committed. Raises the error where it is not."""
        started = time.monotonic()
        with self._changed:
            goal = self._flush_to = self._submitted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= goal or self._error is not None)
            self.wait_seconds += time.monotonic() - started
            self._raise_error()

    def stop(self) -> None:
        """Commit what waits, then end the thread. Does not raise: flush first to learn of errors."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``condition`` holds; it is looked at after every commit. False where time ran out."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while group := self._next_group():
            try:
                self._commit([waiting.table for waiting in group])
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._done += len(group)
                self._changed.notify_all()

    def _next_group(self) -> list[_Waiting]:
        """The tables of the next commit, when it is due; empty when there is nothing left to do."""
        with self._changed:
            while not self._is_due():
                if self._stopping and not self._waiting:
                    return []
                self._changed.wait(self._seconds_left())
            group = self._waiting
            self._waiting = []
            return group

    def _is_due(self) -> bool:
        if not self._waiting:
            return False
        rows = sum(waiting.table.num_rows for waiting in self._waiting)
        asked = self._stopping or self._flush_to > self._done
        return asked or rows >= self._commit_rows or (self._seconds_left() or 0.0) <= 0.0

    def _seconds_left(self) -> float | None:
        """Seconds until the oldest waiting table is due; None where none waits."""
        if not self._waiting:
            return None
        return self._waiting[0].since + self._commit_seconds - self._clock()

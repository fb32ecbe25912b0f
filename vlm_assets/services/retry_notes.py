"""What the retries know of partitions: attempts, cancels, what came right. ``status`` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from sensors.cancels import Cancel, Cancels
from sensors.retry_ledger import Attempts, DoneAgain, Entry, done_again_since
from vlm_assets.assets.partition_state import PartitionState, State
from vlm_durable.commands import command
from vlm_durable.state.database import ControlState
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.wording import counted

_UNFINISHED = frozenset({State.INTERRUPTED, State.NOT_STARTED, State.REFUSED, State.DAMAGED})
"""States in which a partition's retries and cancels count."""


@dataclass(frozen=True)
class RetryNotes:
    """What the retries know: attempts, cancels, what came right. unread: why that cannot be read."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    cancelled: Mapping[str, Cancel] = field(default_factory=dict)
    done_again: tuple[DoneAgain, ...] = ()
    unread: tuple[str, ...] = ()

    @classmethod
    def read(cls, state: ControlState, *, since: float) -> RetryNotes:
        """What stands in the control state. since: unix seconds, from which on it tells what came right."""
        try:
            return cls(Attempts(state).read(), Cancels(state).read(), tuple(done_again_since(state, since)))
        except ControlStateError as error:
            return cls(unread=(str(error),))

    def beside(self, partition: PartitionState) -> PartitionState:
        """The state of an unfinished partition with what the retries know of it."""
        entry = self.entries.get(partition.key, Entry(partition.key))
        if partition.state not in _UNFINISHED:
            return partition
        if partition.key in self.cancelled:
            note = "a person cancelled it: it is launched by hand only"
            return replace(partition, state=State.CANCELLED, note=note)
        times = "once" if entry.attempts == 1 else counted(entry.attempts, "times")
        failed = f"failed {times} in a row without progress" if entry.attempts else "its last run failed"
        because = f", because {entry.why}" if entry.why else ""
        if entry.given_up or entry.told == f"person: {entry.reckoned}":
            next_step = (
                f"It is not tried again by itself: put that right, then {command('run', partition.key)}"
            )
            return replace(partition, state=State.GIVEN_UP, note=f"needs you: {failed}{because}. {next_step}")
        if not entry.attempts and (entry.reckoned is None or entry.requested is not None):
            return partition
        if entry.not_before:
            again = datetime.fromtimestamp(entry.not_before).astimezone().isoformat(" ", "minutes")
            failed = f"{failed}; tried again after {again}"
            if entry.interruptions and not entry.attempts:
                # No failure of the partition: its state stays.
                return replace(
                    partition, note=f"its last run was interrupted; tried again after {again}{because}"
                )
        return replace(partition, state=State.FAILED, note=f"{failed}{because}")

"""What was tried again by itself and is done: what a person who slept asks first in the morning.

What lives here: the memory of it, ``.state/attempts/done_again.json``: the latest time of each partition.
What does not: what is still being tried (``attempts.py``), which is forgotten there once it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from resources.storage.files import set_aside
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed

KEPT_SECONDS = 31 * 24 * 3600.0
MOST_KEPT = 10_000
"""Partitions remembered, the latest of them: about a megabyte."""

_ABOUT = "May be deleted: partitions that were tried again and are done, for people; nothing follows from it."
_LONGEST_WHY = 200


class DoneAgainUnreadableError(ValueError):
    """The memory does not verify. It was moved aside; the message says what follows."""


@dataclass(frozen=True)
class DoneAgain:
    """A partition that came right without a person.

    at: when that was seen (unix seconds). runs: more of them than its first. why: what had been wrong.
    """

    key: str
    at: float
    runs: int
    why: str


class DoneAgainMemory:
    """The memory of one home. Written with the ledger's lock held (``Attempts.locked``)."""

    def __init__(self, state_directory: Path) -> None:
        self.path = state_directory / "attempts" / "done_again.json"

    def look(self) -> dict[str, DoneAgain]:
        """By partition key; changes nothing. Raises BrokenSealError, KeyError, TypeError or OSError."""
        try:
            found = read_sealed(self.path)["partitions"]
        except FileNotFoundError:
            return {}
        return {key: DoneAgain(key, **fields) for key, fields in found.items()}

    def read(self) -> dict[str, DoneAgain]:
        """By partition key. Raises DoneAgainUnreadableError, once: the file is then moved aside."""
        try:
            return self.look()
        except (BrokenSealError, KeyError, TypeError, AttributeError) as error:
            aside = set_aside(self.path, self.path.parent / "set_aside")
            raise DoneAgainUnreadableError(
                f"{self.path} does not read ({error}) and was moved to {aside}. What was tried again before"
                " is not listed any more; nothing else follows from it."
            ) from error

    def write(self, done: Mapping[str, DoneAgain], *, now: float) -> None:
        """Replace the memory, durably when it returns; what is too old is dropped. Raises OSError."""
        kept = sorted((one for one in done.values() if now - one.at < KEPT_SECONDS), key=lambda one: one.at)
        partitions = {one.key: {**asdict(one), "why": one.why[:_LONGEST_WHY]} for one in kept[-MOST_KEPT:]}
        for fields in partitions.values():
            del fields["key"]
        write_sealed(self.path, {"about": _ABOUT, "partitions": partitions})

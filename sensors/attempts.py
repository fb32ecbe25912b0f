"""The ledger of what was tried again: attempts a partition, what was launched, what was given up.

What lives here: the entries and their file ``.state/attempts/attempts.json``. What does not: what is decided
from them (``retry_decision.py``). An entry is written before anything is launched, with the run key that the
run will carry, so that a tick that was killed finds out whether its run came to be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from resources.storage.files import make_directory, set_aside
from resources.storage.lock_files import locked
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed

_ABOUT = (
    "Truth about how often partitions were tried again. Deleted, each has all its attempts once more; it"
    " also says which launches are under way, so delete it only while Dagster is down."
)


class AttemptsUnreadableError(ValueError):
    """The ledger does not verify. It was moved aside; the message says what follows."""


@dataclass(frozen=True)
class Request:
    """A launch that was written down before it was made. tick: which tick made it; at: unix seconds."""

    run_key: str
    tick: str
    at: float


@dataclass(frozen=True)
class Entry:
    """One partition that was tried again, or left to a person.

    launches: of all time, so that a run key is never used twice. attempts: in a row without a new row
    committed. interruptions: runs in a row that were ended from outside, without a new row. rows: committed
    when last reckoned. not_before: unix seconds. reckoned: the run whose end was last taken into account.
    told: what a person was last told of it. alerted: whether anything was told that is to be called off.
    why: it was last launched.
    """

    key: str
    launches: int = 0
    attempts: int = 0
    interruptions: int = 0
    rows: int = 0
    not_before: float = 0.0
    reckoned: str | None = None
    requested: Request | None = None
    given_up: bool = False
    told: str | None = None
    alerted: bool = False
    why: str = ""


class Attempts:
    """The ledger of one home. Hold ``locked`` from reading to writing: schedule and button are two."""

    def __init__(self, state_directory: Path) -> None:
        self.directory = state_directory / "attempts"
        self.path = self.directory / "attempts.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One at a time, over processes and threads; any death frees it."""
        make_directory(self.directory)
        with locked(self.directory / "attempts.lock"):
            yield

    def read(self) -> dict[str, Entry]:
        """Entries by partition key. Raises AttemptsUnreadableError, once: the file is then moved aside."""
        try:
            found = read_sealed(self.path)["entries"]
            return {key: _entry(key, fields) for key, fields in found.items()}
        except FileNotFoundError:
            return {}
        except (BrokenSealError, KeyError, TypeError, ValueError, AttributeError) as error:
            aside = set_aside(self.path, self.directory / "set_aside")
            raise AttemptsUnreadableError(
                f"{self.path} does not read ({error}) and was moved to {aside}. Every partition has all its"
                " attempts once more; launches that were under way are known from their runs alone."
            ) from error

    def write(self, entries: Mapping[str, Entry]) -> None:
        """Replace the ledger, durably when it returns. Raises OSError."""
        content = {
            "about": _ABOUT,
            "entries": {
                key: {name: value for name, value in asdict(entry).items() if name != "key" and value}
                for key, entry in sorted(entries.items())
            },
        }
        write_sealed(self.path, content)


def _entry(key: str, fields: Mapping[str, object]) -> Entry:
    requested = fields.get("requested")
    known = {**fields, "requested": Request(**requested) if isinstance(requested, dict) else None}
    return Entry(key=key, **known)  # type: ignore[arg-type]  # sealed: what was written is what is read

"""Which failed rows of a refused partition are tried again, and how often each was: a file a partition.

What lives here: the refusal (all rows are there, a check kept them from being published), the rounds in which
its rows of a transient kind are computed again, and the count of each row. What does not: which kinds are
transient (``resources/engine/failure_kinds.py``), the computing (``vlm_assets/assets/materialize.py``),
when a
round is launched (``sensors/retry_decision.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from resources.storage.files import set_aside, sync_directory
from resources.storage.sealed_json import BrokenSealError, read_sealed, write_sealed

TRIES = 3
"""How often a row is tried again by itself."""

_ABOUT = (
    "Truth about how often rows were tried again. Deleted, they may be tried three times more, and a"
    " round under way begins anew."
)
_ASIDE = "set_aside"


class RowRetriesUnreadableError(ValueError):
    """The file does not verify. The message names it and says what to do."""


@dataclass(frozen=True)
class Refusal:
    """A check kept a partition from being published. at: unix seconds.

    curable: failed rows of a transient kind that may be tried again. left: the other failed rows by kind,
    those that were tried often enough too.
    """

    run_id: str
    at: float
    checks: tuple[str, ...]
    curable: int
    left: Mapping[str, int] = field(default_factory=dict)

    def sentence(self) -> str:
        """What failed and what is left, for people."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.left.items())
        rows = f"; failed rows that no further try cures: {kinds}" if kinds else ""
        return f"{', '.join(self.checks)} failed{rows}"


@dataclass(frozen=True)
class RowRetries:
    """The rounds of one partition under one fingerprint.

    generation: that of the latest round, or of the first computation. root_run: which run began the round;
    its own retries resume it. source, again: the round computes the rows ``again`` anew and takes all others
    from the generation ``source``; None before the first round. tries: of each row, by its id.
    """

    fingerprint: str
    generation: str
    root_run: str
    source: str | None = None
    again: tuple[str, ...] = ()
    tries: Mapping[str, int] = field(default_factory=dict)
    refusal: Refusal | None = None

    def next_round(self, generation: str, root_run: str, curable: Collection[str]) -> RowRetries:
        """The round that computes these rows anew, each counted before it is."""
        tries = {**self.tries, **{one: self.tries.get(one, 0) + 1 for one in curable}}
        again = tuple(sorted(curable))
        return RowRetries(self.fingerprint, generation, root_run, self.generation, again, tries)

    def refused(
        self, failed: Iterable[tuple[str, str | None]], transient: Collection[str], **told: Any
    ) -> RowRetries:
        """With the refusal of these failed rows (id and kind). told: the other fields of Refusal."""
        rows = list(failed)
        curable = set(self.curable(rows, transient))
        left = Counter(str(kind) for one, kind in rows if one not in curable)
        refusal = Refusal(curable=len(curable), left=dict(left.most_common()), **told)
        return replace(self, refusal=refusal)

    def curable(self, failed: Iterable[tuple[str, str | None]], transient: Collection[str]) -> list[str]:
        """The ids of failed rows (id and kind) that are of a transient kind and have a try left."""
        return [one for one, kind in failed if kind in transient and self.tries.get(one, 0) < TRIES]


class RowRetriesFile:
    """The file of one partition of an asset under ``.state/attempts/rows``."""

    def __init__(self, state_directory: Path, asset: str, key: str) -> None:
        self.path = state_directory / "attempts" / "rows" / asset / f"{key}.json"
        self._aside = state_directory / "attempts" / _ASIDE

    def read(self) -> RowRetries | None:
        """What stands there. Raises RowRetriesUnreadableError, OSError."""
        try:
            found = read_sealed(self.path)
            found.pop("about")
            refusal = found.pop("refusal")
            told = Refusal(**{**refusal, "checks": tuple(refusal["checks"])}) if refusal else None
            return RowRetries(**{**found, "again": tuple(found["again"]), "refusal": told})
        except FileNotFoundError:
            return None
        except (BrokenSealError, KeyError, TypeError, ValueError) as error:
            raise RowRetriesUnreadableError(
                f"{self.path} does not read ({error}), so it is not known how often its rows were tried."
                " Materialize the partition by hand: the file is set aside and the count begins anew."
            ) from error

    def read_or_set_aside(self) -> tuple[RowRetries | None, str | None]:
        """What stands there; one that does not read is moved aside, and the sentence about it is given."""
        try:
            return self.read(), None
        except RowRetriesUnreadableError as error:
            aside = set_aside(self.path, self._aside)
            return None, f"{error} It is kept as {aside}."

    def write(self, retries: RowRetries) -> None:
        """Replace what stands there, durably. Raises OSError."""
        write_sealed(self.path, {"about": _ABOUT, **asdict(retries)})

    def clear(self) -> None:
        """The partition is published: nothing is to be tried again. Durable."""
        if self.path.exists():
            self.path.unlink(missing_ok=True)
            sync_directory(self.path.parent)

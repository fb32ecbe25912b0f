"""Copies to the store what a run that died had committed and not copied, whether or not it runs again.

A cluster needs no such copies: its partitions go on at once on any machine from what the store has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from sensors.sensor_definition import Decided, build_sensor
from sensors.ticks import Ticks
from vlm_durable.files.layout import AssetFolders, PartitionPaths
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.journal import commits
from vlm_durable.journal.journal_errors import JournalError
from vlm_durable.mirror.bucket import StoreAwayError, StoreError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.mirror.stored_journal import StoredJournal

NAME = "left_copies"
INTERVAL_SECONDS = 60

_COPY_SECONDS = 20.0
"""How long a tick begins new copies: the rest follows at the next ticks."""

_AWAY_SECONDS = 300.0
"""A store that was away is tried again after so long: each try holds up the other sensors."""


@dataclass
class LeftCopies:
    """Copies waiting journals, tick by tick, and remembers what was copied. assets: whose journals.

    working: asset and partition of each living run: such a run copies its commits itself.
    """

    assets: Sequence[AssetFolders]
    store: Mirror
    working: Callable[[], Collection[tuple[str, str]]]
    clock: Callable[[], float] = time.monotonic
    _tried: dict[Path, int] = field(default_factory=dict, init=False)
    _not_before: float = field(default=float("-inf"), init=False)

    def copy_waiting(self) -> list[str]:
        """Copy the waiting journals that no run works on. Returns sentences. Raises OSError."""
        began = self.clock()
        if began < self._not_before:
            return ["The store was away a moment ago."]
        sentences: list[str] = []
        working = self.working()
        for asset in self.assets:
            for key in asset.journal_keys():
                if (asset.name, key) in working:
                    continue
                paths = asset.partition(key)
                for journal in sorted(paths.journals.glob("*")):
                    if self.clock() - began > _COPY_SECONDS:
                        return [*sentences, "The rest follows."]
                    try:
                        if self._copies(paths, journal):
                            sentences.append(f"What was committed of {asset.name} {key} is in the store now.")
                    except StoreAwayError as error:
                        del self._tried[journal]
                        self._not_before = self.clock() + _AWAY_SECONDS
                        return [*sentences, f"Committed rows of {asset.name} {key} wait here: {error}"]
                    except (StoreError, JournalError, FormatVersionError, OSError) as error:
                        # The partition's next start reports it too, and decides. It is not tried again here
                        # before the journal has a new manifest.
                        sentences.append(f"{asset.name} {key} cannot be copied: {error}")
        return sentences

    def _copies(self, paths: PartitionPaths, journal: Path) -> bool:
        """Copy one journal if it has changed since the last time. Returns whether the store was behind."""
        newest = max(commits.sequences(journal), default=0) if journal.is_dir() else 0
        if self._tried.get(journal, 0) == newest:
            return False
        self._tried[journal] = newest
        return StoredJournal(paths, journal.name, self.store).copy_leftovers()


def build_left_copies_sensor(left_copies: LeftCopies, *, ticks: Ticks) -> dg.SensorDefinition:
    """The sensor of a machine that works alone over a store."""
    return build_sensor(
        NAME,
        lambda _: Decided(" ".join(left_copies.copy_waiting()) or "No committed row waits for its copy."),
        interval_seconds=INTERVAL_SECONDS,
        description="Copies to the store what a run that died had committed. It starts nothing.",
        ticks=ticks,
    )

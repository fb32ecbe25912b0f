"""One partition of an asset: which rows are to come out, and opening the journal of its work under way.

What does not live here: where its files lie (``resources/storage/layout.py``), the order of a materialization
(``materialize.py``), what a row is (``property_descriptions.py``, ``property_embeddings.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from resources.journal.journal import Journal
from resources.state.database import ControlState
from vlm_assets.control_state import control_state

if TYPE_CHECKING:
    import pyarrow as pa

    from resources.storage.layout import PartitionPaths
    from vlm_assets.assets.fingerprint import Fingerprint
    from vlm_assets.settings import Settings


@dataclass(frozen=True)
class Partition:
    """What is to come out: one row for each expected id, in the order of the catalogue."""

    paths: PartitionPaths
    expected_ids: tuple[str, ...]
    fingerprint: Fingerprint
    state: ControlState
    commit_seconds: float
    commit_rows: int

    @classmethod
    def at_home(
        cls, settings: Settings, asset: str, key: str, expected_ids: tuple[str, ...], fingerprint: Fingerprint
    ) -> Self:
        """A partition of an asset in the home of these settings."""
        return cls(
            paths=settings.layout.asset(asset).partition(key),
            expected_ids=expected_ids,
            fingerprint=fingerprint,
            state=control_state(settings),
            commit_seconds=settings.commit_seconds,
            commit_rows=settings.commit_rows,
        )

    @property
    def asset(self) -> str:
        """The asset's key in Dagster."""
        return self.paths.asset.name

    @property
    def key(self) -> str:
        """The partition key."""
        return self.paths.key

    @property
    def state_directory(self) -> Path:
        """The control state of the home."""
        return self.paths.asset.home.state

    def open_journal(self, generation: str, schema: pa.Schema, *, accept_loss: str | None = None) -> Journal:
        """Open a generation's journal: recover and verify it. Raises JournalError.

        accept_loss: what a person said who gives up rows that cannot be restored.
        """
        return Journal.open(
            self.paths.journal(generation),
            key=self.key,
            generation=generation,
            fingerprints=dict(self.fingerprint.parts),
            schema=schema,
            expected_ids=self.expected_ids,
            high_water_mark=self.paths.high_water_mark(generation),
            quarantine=self.paths.quarantine,
            accept_loss=accept_loss,
            commit_seconds=self.commit_seconds,
            commit_rows=self.commit_rows,
        )

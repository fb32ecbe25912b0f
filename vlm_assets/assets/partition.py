"""One partition of an asset: which rows are to come out, and where its journal and its marks lie.

What lives here: names of files and the opening of a journal. What does not: the order of a materialization
(``materialization.py``), and what a row is (``descriptions.py``, ``embeddings.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from resources.journal.journal import Journal
from resources.state.row_retries import RowRetriesFile

if TYPE_CHECKING:
    import pyarrow as pa

    from vlm_assets.assets.fingerprint import Fingerprint
    from vlm_assets.settings import Settings


class Work(Protocol):
    """What fills a partition, as far as its place on disk depends on it."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the range, in the order of the catalogue."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What decides the meaning of its rows."""


@dataclass(frozen=True)
class Partition:
    """What is to come out: one row for each expected id, in the order of the catalogue.

    directory: the asset's folder. state_directory: where high-water marks are kept, apart from it.
    """

    asset: str
    key: str
    expected_ids: tuple[str, ...]
    fingerprint: Fingerprint
    directory: Path
    state_directory: Path
    commit_seconds: float
    commit_rows: int

    @classmethod
    def at_home(cls, settings: Settings, asset: str, key: str, work: Work) -> Self:
        """A partition of an asset in the home of these settings."""
        return cls(
            asset=asset,
            key=key,
            expected_ids=work.ids,
            fingerprint=work.fingerprint,
            directory=settings.home / asset,
            state_directory=settings.state_directory,
            commit_seconds=settings.commit_seconds,
            commit_rows=settings.commit_rows,
        )

    def journal_directory(self, generation: str) -> Path:
        """Where the work under way of a generation lies."""
        return self.directory / ".journal" / self.key / generation

    @property
    def row_retries(self) -> RowRetriesFile:
        """Which of its rows are tried again."""
        return RowRetriesFile(self.state_directory, self.asset, self.key)

    def high_water_mark(self, generation: str) -> Path:
        """The file of a generation's high-water mark."""
        return self.state_directory / "high_water_marks" / self.asset / self.key / f"{generation}.json"

    def open_journal(self, generation: str, schema: pa.Schema, *, accept_loss: str | None = None) -> Journal:
        """Open a generation's journal: recover and verify it. Raises JournalError.

        accept_loss: what a person said who gives up rows that cannot be restored.
        """
        return Journal.open(
            self.journal_directory(generation),
            key=self.key,
            generation=generation,
            fingerprints=dict(self.fingerprint.parts),
            schema=schema,
            expected_ids=self.expected_ids,
            high_water_mark=self.high_water_mark(generation),
            quarantine=self.directory / ".quarantine",
            accept_loss=accept_loss,
            commit_seconds=self.commit_seconds,
            commit_rows=self.commit_rows,
        )

"""Small journals for the unit tests: one home each, rows made from their ordinal."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from vlm_durable.journal.journal import Journal
from vlm_durable.journal.recovery import survey_journal
from vlm_durable.journal.segments import JournalIdentity

SCHEMA = pa.schema(
    [
        pa.field("ordinal", pa.int64()),
        pa.field("property_id", pa.string()),
        pa.field("description", pa.struct([("rooms", pa.int32()), ("tags", pa.list_(pa.string()))])),
        pa.field("embedding", pa.list_(pa.float32(), 4)),
    ]
)


@dataclass(frozen=True)
class Home:
    """One journal's place on disk, and what it is opened with."""

    root: Path
    total: int = 12

    @property
    def directory(self) -> Path:
        """The journal's own folder."""
        return self.root / "property_descriptions" / ".journal" / "KEY" / "generation"

    @property
    def mark(self) -> Path:
        """The high-water mark, kept apart."""
        return self.root / ".state" / "high_water_marks" / "KEY.generation.json"

    def rows(self, *ordinals: int) -> pa.Table:
        """Rows of these ordinals, in this order."""
        described = [{"rooms": n % 5, "tags": ["a"] * (n % 3)} if n % 4 else None for n in ordinals]
        return pa.table(
            {
                "ordinal": list(ordinals),
                "property_id": [f"p{n}" for n in ordinals],
                "description": described,
                "embedding": [[float(n)] * 4 if n % 4 else None for n in ordinals],
            },
            schema=SCHEMA,
        )

    def settings(self, **changes):
        """The keyword arguments of ``Journal.open``."""
        return {
            "key": "KEY",
            "generation": "generation",
            "fingerprints": {"catalogue": "c1", "model": "m1"},
            "schema": SCHEMA,
            "expected_ids": [f"p{n}" for n in range(self.total)],
            "high_water_mark": self.mark,
            **changes,
        }

    def open(self, **changes) -> Journal:
        """Open the journal, with other settings where named."""
        return Journal.open(self.directory, **self.settings(**changes))

    def commit(self, *groups: tuple[int, ...]) -> None:
        """Commit groups of ordinals, one segment each, and close."""
        with self.open() as journal:
            for group in groups:
                journal.submit(self.rows(*group))
                journal.flush()

    def identity(self, schema: pa.Schema = SCHEMA) -> JournalIdentity:
        """What ``open`` makes of the settings."""
        given = self.settings()
        return JournalIdentity(
            given["key"],
            given["generation"],
            given["fingerprints"],
            schema,
            frozenset(given["expected_ids"]),
        )

    def survey(self):
        """What a recovery would find, nothing changed."""
        return survey_journal(self.directory, self.identity(), self.mark)

    def segments(self) -> list[Path]:
        """Segments on disk, oldest first."""
        return sorted(self.directory.glob("segment-*.parquet"))

    def manifests(self) -> list[Path]:
        """Manifests on disk, oldest first."""
        return sorted(self.directory.glob("manifest-*.json"))

    def quarantined(self) -> list[str]:
        """Names of quarantined files."""
        return sorted(path.name for path in (self.directory / "quarantine").glob("*"))

    def restored(self, **changes) -> list[int]:
        """Ordinals that an open restores, in the order they are read; every value is compared."""
        with self.open(**changes) as journal:
            found = pa.Table.from_batches(journal.read_ordered(5), schema=SCHEMA)
        ordinals = found.column("ordinal").to_pylist()
        assert found.to_pylist() == self.rows(*ordinals).to_pylist()
        return ordinals


@pytest.fixture
def home(tmp_path) -> Home:
    """A home with no journal in it yet."""
    return Home(tmp_path)


@pytest.fixture
def committed(home) -> Home:
    """A home whose journal holds ordinals 0 to 8 in three segments, closed."""
    home.commit((0, 1, 2), (3, 4, 5), (6, 7, 8))
    return home

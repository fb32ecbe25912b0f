"""Small journals for the unit tests: one home each, rows made from their ordinal."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.journals import open_journal
from vlm_durable.files import layout
from vlm_durable.files.layout import PartitionPaths
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

FINGERPRINTS = {"catalogue": "c1", "model": "m1"}


@dataclass(frozen=True)
class Home:
    """One journal's place on disk, and what it is opened with."""

    root: Path
    total: int = 12

    @property
    def paths(self) -> PartitionPaths:
        """The partition's files."""
        return layout.Home(self.root).asset("property_descriptions").partition("KEY")

    @property
    def directory(self) -> Path:
        """The journal's own folder."""
        return self.paths.journal("generation")

    @property
    def mark(self) -> Path:
        """The high-water mark, kept apart."""
        return self.paths.high_water_mark("generation")

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

    @property
    def ids(self) -> list[str]:
        """The properties of the partition."""
        return [f"p{n}" for n in range(self.total)]

    def open(self, **changes) -> Journal:
        """Open the journal, with other settings where named."""
        given = {"schema": SCHEMA, "fingerprints": FINGERPRINTS, "quarantine": None, **changes}
        return open_journal(self.paths, "generation", self.ids, **given)

    def commit(self, *groups: tuple[int, ...]) -> None:
        """Commit groups of ordinals, one segment each, and close."""
        with self.open() as journal:
            for group in groups:
                journal.submit(self.rows(*group))
                journal.flush()

    def identity(self, schema: pa.Schema = SCHEMA) -> JournalIdentity:
        """What ``open`` makes of the settings."""
        return JournalIdentity("KEY", "generation", FINGERPRINTS, schema, frozenset(self.ids))

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

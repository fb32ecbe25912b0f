"""Machines with a home of their own over one S3 store, whose journals hold rows of three columns."""

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tests.support.journals import open_journal
from vlm_durable.files.layout import Home, PartitionPaths
from vlm_durable.journal.journal import Journal
from vlm_durable.mirror.bucket import S3Folder
from vlm_durable.mirror.stored_journal import Copying, StoredJournal

ROUNDS = int(os.environ.get("FAULTS_ROUNDS", "1"))
KEY, GENERATION, TOTAL = "000000000-000000011", "generation", 12 + 2 * ROUNDS
SCHEMA = pa.schema([("ordinal", pa.int64()), ("property_id", pa.string()), ("text", pa.string())])


@dataclass
class Machine:
    """A home of its own over the same store."""

    root: Path
    store: S3Folder
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> PartitionPaths:
        return Home(self.root).asset("property_descriptions").partition(KEY)

    @property
    def folder(self) -> Path:
        return self.paths.journal(GENERATION)

    @property
    def stored(self) -> StoredJournal:
        return StoredJournal(self.paths, GENERATION, self.store)

    def journal(self, **options) -> Journal:
        ids = [f"p{n}" for n in range(TOTAL)]
        return open_journal(
            self.paths, GENERATION, ids, schema=SCHEMA, fingerprints={"model": "m"}, **options
        )

    @contextmanager
    def at_work(self, **options):
        """Fetch, open, claim, and copy beside the work, as a run does."""
        stored = self.stored
        self.notes = stored.pull()
        with ExitStack() as stack:
            copying = stack.enter_context(Copying(stored, **{"most_bytes": 1 << 20, **options}))
            journal = stack.enter_context(self.journal())
            copying.begin(journal)
            yield journal, copying

    def commit(self, *ordinals: int, text: str = "text"):
        """Commit these rows, one segment each, and have them in the store."""
        with self.at_work() as (journal, copying):
            commit(journal, *ordinals, text=text)
            copying.flush()

    def rows(self) -> list[int]:
        """What is restored here from what this machine and the store have."""
        with self.at_work() as (journal, _):
            return [n for batch in journal.read_ordered() for n in batch["ordinal"].to_pylist()]

    def aside(self) -> list[str]:
        return sorted(path.name for path in self.paths.quarantine.glob("segment-*"))


def commit(journal, *ordinals, text="text"):
    for n in ordinals:
        journal.submit(pa.table({"ordinal": [n], "property_id": [f"p{n}"], "text": [text]}, schema=SCHEMA))
        journal.flush()


def away(passing):
    return passing.answer(503, "SlowDown")

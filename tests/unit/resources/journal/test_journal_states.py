"""Any sequence of commits, crashes, restarts and damage, against a plain set of ids as the model."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resources.journal.errors import JournalLossError
from resources.journal.journal import Journal
from resources.journal.manifests import newest_manifest

SCHEMA = pa.schema([("ordinal", pa.int64()), ("property_id", pa.string())])
TOTAL = 40
IDS = frozenset(f"p{n}" for n in range(TOTAL))
OPERATIONS = ("write", "fsync", "link", "unlink", "rename", "replace", "mkdir")
SHARED_MEMORY = Path("/dev/shm")
ROOM = str(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else None


class JournalStates(RuleBasedStateMachine):
    """The journal is right when it holds every promised id, no other than submitted, each once."""

    @initialize()
    def begin(self):
        """An empty home."""
        self.root = Path(tempfile.mkdtemp(prefix="journal-states-", dir=ROOM))
        self.home = self.root / "home"
        self.model: set[str] = set()
        self.journal = self.open()

    def open(self, **more) -> Journal:
        """Open the journal as any start does."""
        return Journal.open(
            self.home / "journal",
            key="KEY",
            generation="g",
            fingerprints={},
            schema=SCHEMA,
            expected_ids=IDS,
            high_water_mark=self.home / "state" / "mark.json",
            **more,
        )

    def next_rows(self, count: int, jumbled: bool) -> pa.Table:
        """Rows that are not done yet, in or out of order."""
        todo = sorted(int(i[1:]) for i in IDS - self.model)[: count + 3 * jumbled]
        numbers = todo[::-1][:count] if jumbled else todo
        return pa.table({"ordinal": numbers, "property_id": [f"p{n}" for n in numbers]}, schema=SCHEMA)

    @rule(count=st.integers(1, 5), jumbled=st.booleans())
    def commit(self, count, jumbled):
        """A promised commit."""
        rows = self.next_rows(count, jumbled)
        self.journal.submit(rows)
        self.journal.flush()
        self.model |= set(rows.column("property_id").to_pylist())

    @rule()
    def restart(self):
        """A clean end and a start."""
        self.journal.close()
        self.journal = self.open()

    @rule(count=st.integers(1, 5), jumbled=st.booleans(), at=st.integers(1, 24))
    def crash_in_a_commit(self, count, jumbled, at):
        """The process dies before the commit's ``at``-th operation; what it had not promised is open."""
        rows = self.next_rows(count, jumbled)
        with self.crash(at) as crashed:
            self.journal.submit(rows)
            self.journal.flush()
        self.journal.close()
        submitted = set(rows.column("property_id").to_pylist())
        self.resume(promised=self.model if crashed() else self.model | submitted, possible=submitted)

    @rule(at=st.integers(1, 24))
    def crash_in_recovery(self, at):
        """The process dies before the ``at``-th operation of an open."""
        self.journal.close()
        with self.crash(at):
            self.open().close()
        self.resume(promised=self.model, possible=set())

    @rule(size=st.integers(0, 200))
    def truncate_the_newest_manifest(self, size):
        """A torn manifest costs nothing."""
        self.journal.close()
        newest = max((self.home / "journal").glob("manifest-*"))
        newest.write_bytes(newest.read_bytes()[:size])
        self.resume(promised=self.model, possible=set())

    @precondition(lambda self: self.model)
    @rule(choice=st.randoms(use_true_random=False))
    def damage_a_segment_and_accept_the_loss(self, choice):
        """A damaged segment is refused; after a person's yes exactly its ids are open again."""
        self.journal.close()
        listed = newest_manifest(self.home / "journal").segments
        path = self.home / "journal" / choice.choice(listed).name
        lost = set(pq.read_table(path, columns=["property_id"]).column(0).to_pylist())
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(JournalLossError):
            self.open()
        self.journal = self.open(accept_loss="test")
        self.model -= lost

    @contextlib.contextmanager
    def crash(self, at: int):
        """Keep the disk as it is before the ``at``-th operation, and put that back at the end."""
        kept = self.root / "kept"
        calls = 0

        def wrap(real):
            def call(*arguments, **named):
                nonlocal calls
                calls += 1
                if calls == at:
                    put_back()
                    shutil.copytree(self.home, kept)
                    patch()
                return real(*arguments, **named)

            return call

        real = {name: getattr(os, name) for name in OPERATIONS}

        def patch():
            for name in OPERATIONS:
                setattr(os, name, wrap(real[name]))

        def put_back():
            for name in OPERATIONS:
                setattr(os, name, real[name])

        patch()
        try:
            yield kept.exists
        finally:
            put_back()
        self.kept = kept if kept.exists() else None

    def resume(self, *, promised: set[str], possible: set[str]):
        """Start on what the crash left; unpromised rows may be there, whole, or not."""
        if getattr(self, "kept", None) is not None:
            shutil.rmtree(self.home)
            self.kept.rename(self.home)
            self.kept = None
        self.journal = self.open()
        assert promised <= self.journal.done_ids <= promised | possible
        self.model = set(self.journal.done_ids)

    @invariant()
    def holds_exactly_the_model(self):
        """Read back in order: the model's ids, each once."""
        if not hasattr(self, "journal"):
            return
        found = [row for batch in self.journal.read_ordered(7) for row in batch.to_pylist()]
        assert [row["ordinal"] for row in found] == sorted(int(i[1:]) for i in self.model)
        assert all(row["property_id"] == f"p{row['ordinal']}" for row in found)
        assert self.journal.done_ids == self.model
        assert self.journal.missing_ids == IDS - self.model

    def teardown(self):
        """Remove the home."""
        if hasattr(self, "journal"):
            self.journal.close()
            shutil.rmtree(self.root)


TestJournalStates = JournalStates.TestCase
TestJournalStates.settings = settings(
    max_examples=int(os.environ.get("FAULTS_ROUNDS", "1")) * 25,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

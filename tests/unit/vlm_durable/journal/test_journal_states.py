"""Any sequence of commits, tries, crashes, restarts and damage, against a plain mapping as the model.

The model has the rows of each id in the order of their commits, each as the number of its try: negative
where that failed. The last one counts.
"""

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

from faults.file_operations import FileOperations, Operation
from tests.support.journals import open_journal
from vlm_durable.files.layout import Home
from vlm_durable.journal.commits import newest_manifest
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.journal_errors import JournalLossError, RowsRefusedError

SCHEMA = pa.schema(
    [("ordinal", pa.int64()), ("property_id", pa.string()), ("status", pa.string()), ("tries", pa.int32())]
)
TOTAL = 40
IDS = frozenset(f"p{n}" for n in range(TOTAL))
SHARED_MEMORY = Path("/dev/shm")
ROOM = str(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else None


def failed_tries(model: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The number of the try of each id whose row that counts failed."""
    return {i: -rows[-1] for i, rows in model.items() if rows[-1] < 0}


class JournalStates(RuleBasedStateMachine):
    """The journal is right when it holds every promised id, no other than submitted, each once."""

    @initialize()
    def begin(self):
        """An empty home."""
        self.root = Path(tempfile.mkdtemp(prefix="journal-states-", dir=ROOM))
        self.home = self.root / "home"
        self.paths = Home(self.home).asset("property_descriptions").partition("KEY")
        self.model: dict[str, tuple[int, ...]] = {}
        self.journal = self.open()

    def open(self, **more) -> Journal:
        """Open the journal as any start does."""
        return open_journal(self.paths, "g", IDS, schema=SCHEMA, **more)

    def next_rows(self, count: int, jumbled: bool, again: bool) -> dict[str, int]:
        """Rows that are not done yet, in or out of order; or another try of those that failed.

        Every third row fails at each try.
        """
        todo = failed_tries(self.model) if again else IDS - self.model.keys()
        numbers = sorted(int(i[1:]) for i in todo)[: count + 3 * jumbled]
        numbers = numbers[::-1][:count] if jumbled else numbers
        tries = {f"p{n}": 1 - self.model.get(f"p{n}", (0,))[-1] for n in numbers}
        return {i: number if (int(i[1:]) + number) % 3 else -number for i, number in tries.items()}

    def table(self, rows: dict[str, int]) -> pa.Table:
        """Rows by their id with the number of their try, negative where it failed."""
        return pa.Table.from_pylist(
            [
                {
                    "ordinal": int(i[1:]),
                    "property_id": i,
                    "status": "ok" if tries > 0 else "failed",
                    "tries": abs(tries),
                }
                for i, tries in rows.items()
            ],
            schema=SCHEMA,
        )

    @rule(count=st.integers(1, 5), jumbled=st.booleans(), again=st.booleans())
    def commit(self, count, jumbled, again):
        """A promised commit."""
        rows = self.next_rows(count, jumbled, again)
        self.journal.submit(self.table(rows))
        self.journal.flush()
        self.model = self.model_with(rows)

    def model_with(self, rows: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """The model once these rows are committed."""
        return self.model | {i: (*self.model.get(i, ()), tries) for i, tries in rows.items()}

    @precondition(lambda self: any(rows[-1] > 0 for rows in self.model.values()))
    @rule(choice=st.randoms(use_true_random=False), tries=st.integers(1, 9))
    def supersede_an_ok_row(self, choice, tries):
        """Refused, whatever the try and its outcome."""
        done = choice.choice([i for i, rows in self.model.items() if rows[-1] > 0])
        with pytest.raises(RowsRefusedError):
            self.journal.submit(self.table({done: choice.choice([tries, -tries])}))

    @rule()
    def restart(self):
        """A clean end and a start."""
        self.journal.close()
        self.journal = self.open()

    @rule(count=st.integers(1, 5), jumbled=st.booleans(), again=st.booleans(), at=st.integers(1, 40))
    def crash_in_a_commit(self, count, jumbled, again, at):
        """The process dies before the commit's ``at``-th operation; what it had not promised is open."""
        rows = self.next_rows(count, jumbled, again)
        with self.crash(at) as crashed:
            self.journal.submit(self.table(rows))
            self.journal.flush()
        self.journal.close()
        whole = self.model_with(rows)
        self.resume(*([self.model, whole] if crashed() else [whole]))

    @rule(at=st.integers(1, 60), size=st.none() | st.integers(0, 200))
    def crash_in_recovery(self, at, size):
        """The process dies before the ``at``-th operation of an open; a torn manifest costs nothing."""
        self.journal.close()
        if size is not None:
            newest = max(self.paths.journal("g").glob("manifest-*"))
            newest.write_bytes(newest.read_bytes()[:size])
        with self.crash(at):
            self.open().close()
        self.resume(self.model)

    @precondition(lambda self: self.model)
    @rule(choice=st.randoms(use_true_random=False))
    def damage_a_segment_and_accept_the_loss(self, choice):
        """A damaged segment is refused; after a person's yes exactly its rows are open again."""
        self.journal.close()
        listed = newest_manifest(self.paths.journal("g")).segments
        path = self.paths.journal("g") / choice.choice(listed).name
        lost = pq.read_table(path, columns=["property_id", "tries"]).to_pylist()
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(JournalLossError):
            self.open()
        self.journal = self.open(accept_loss="test")
        for row in lost:
            left = tuple(one for one in self.model.pop(row["property_id"]) if abs(one) != row["tries"])
            self.model |= {row["property_id"]: left} if left else {}

    @contextlib.contextmanager
    def crash(self, at: int):
        """Keep the disk as it is before the ``at``-th operation, and put that back at the end."""
        kept = self.root / "kept"

        def keep(operation: Operation, operations: FileOperations) -> None:
            if operations.count == at:
                shutil.copytree(self.home, kept)

        with FileOperations(self.home, keep).watched():
            yield kept.exists
        self.kept = kept if kept.exists() else None

    def resume(self, *possible: dict[str, tuple[int, ...]]):
        """Start on what the crash left: one of these states, whole."""
        if getattr(self, "kept", None) is not None:
            shutil.rmtree(self.home)
            self.kept.rename(self.home)
            self.kept = None
        self.journal = self.open()
        found = self.journal.done_ids, self.journal.failed_tries
        (self.model,) = [one for one in possible if (one.keys(), failed_tries(one)) == found][:1]

    @invariant()
    def holds_exactly_the_model(self):
        """Read back in order: the model's ids, each once."""
        if not hasattr(self, "journal"):
            return
        found = [row for batch in self.journal.read_ordered(7) for row in batch.to_pylist()]
        assert [row["ordinal"] for row in found] == sorted(int(i[1:]) for i in self.model)
        assert all(row["property_id"] == f"p{row['ordinal']}" for row in found)
        assert failed_tries(self.model) == self.journal.failed_tries
        tries = {row["property_id"]: row["tries"] * (1 if row["status"] == "ok" else -1) for row in found}
        assert tries == {i: rows[-1] for i, rows in self.model.items()}
        assert self.journal.done_ids == self.model.keys()
        assert self.journal.missing_ids == IDS - self.model.keys()

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

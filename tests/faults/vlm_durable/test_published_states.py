"""Any sequence of publications, stops, damage and repairs, against a model that is a list of versions."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from faults.file_operations import FileOperations
from tests.support.damage import flip_bit
from vlm_durable.files.layout import Home
from vlm_durable.versions.partition_files import PartitionFiles
from vlm_durable.versions.published import PublishedPartitions

KEY = "000-001"
SCHEMA = pa.schema([("property_id", pa.string()), ("text", pa.string())])
IDS = ["x", "y"]
TEXTS = st.sampled_from("abcde")


class Stopped(BaseException):
    """The process ends here: nothing that follows reaches the disk."""


class PublishedStates(RuleBasedStateMachine):
    """``versions`` is what must be there, newest first; one file at most is damaged at a time."""

    happened: ClassVar[Counter[str]] = Counter()
    """What was done to all of them."""

    def __init__(self) -> None:
        super().__init__()
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(dir=place))
        self.partitions = PublishedPartitions(Home(self.folder).asset("a"), lock_seconds=0)
        self.files = PartitionFiles(Home(self.folder).asset("a"), KEY)
        self.versions: list[str] = []
        self.damaged = False

    def teardown(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder)

    def text_at(self, path: Path) -> str | None:
        """The text of a file's rows."""
        if not path.exists():
            return None
        table = pq.ParquetFile(path).read(use_threads=False)
        text: str = table.column("text")[0].as_py()
        return text

    def publish_rows(self, text: str) -> None:
        """Stage and publish rows that all say ``text``."""
        batch = pa.record_batch([IDS, [text, text]], schema=SCHEMA)
        staged = self.partitions.stage(KEY, [batch], SCHEMA, expected_ids=IDS, fingerprint=text)
        self.partitions.publish(staged)

    def expect(self, text: str) -> None:
        """What publishing ``text`` makes of the versions."""
        if text not in self.versions[:1]:
            self.versions = [text, *self.versions[:2]]

    @rule(text=TEXTS)
    def publish(self, text: str) -> None:
        """A publication heals what is damaged; the same text again rotates nothing."""
        self.publish_rows(text)
        self.expect(text)
        self.damaged = False

    @precondition(lambda self: not self.damaged)
    @rule(text=TEXTS, at=st.integers(0, 55), again=st.integers(0, 40))
    def stop(self, text: str, at: int, again: int) -> None:
        """A publication stops anywhere, and so does the recovery from it."""
        operations = FileOperations(self.folder)
        limit = at

        def before(operation: Any, operations: Any) -> None:
            if operation.name != "close" and len(operations.log) >= limit:
                raise Stopped

        operations.before = before
        with operations.watched():
            for action in (lambda: self.publish_rows(text), lambda: self.partitions.verify(KEY)):
                try:
                    action()
                except Stopped:
                    self.happened["stopped"] += 1
                    limit = len(operations.log) + again
        record = self.partitions.record(KEY)
        if record and record.fingerprint == text:
            self.expect(text)

    @precondition(lambda self: self.versions and not self.damaged)
    @rule(which=st.integers(0, 3), at=st.floats(0, 1, exclude_max=True), delete=st.booleans())
    def damage(self, which: int, at: float, delete: bool) -> None:
        """One file is deleted, or one of its bits flips."""
        self.partitions.verify(KEY)
        path = [self.files.published, self.files.slot(0), *self.files.record_paths][which]
        if delete:
            path.unlink()
        else:
            flip_bit(path, int(at * path.stat().st_size))
        self.happened["deleted" if delete else "flipped"] += 1
        self.damaged = which < 2
        found = self.partitions.verify(KEY)
        assert found.ok is not self.damaged
        assert bool(found.repairs) is not self.damaged

    @precondition(lambda self: self.versions)
    @rule()
    def restore(self) -> None:
        """Restoring puts right what is damaged, and nothing else."""
        assert self.partitions.restore(KEY).changed is self.damaged
        self.happened["restored"] += self.damaged
        self.damaged = False

    @invariant()
    def holds(self) -> None:
        """Readers see the newest version, and the backups are the versions, once all is settled."""
        record = self.partitions.record(KEY)
        assert (record.fingerprint if record else None) == next(iter(self.versions), None)
        if not self.damaged:
            found = self.partitions.verify(KEY)
            assert found.ok is bool(self.versions)
            assert self.text_at(self.files.published) == next(iter(self.versions), None)
            backups = [self.text_at(self.files.slot(number)) for number in (0, 1, 2)]
            assert [one for one in backups if one] == self.versions
        assert {path.name for path in self.folder.glob("a/*")} <= {f"{KEY}.parquet"}


def test_any_sequence() -> None:
    """Whatever happens in whatever order, the versions are those that were published, and each is whole."""
    PublishedStates.happened.clear()
    run_state_machine_as_test(
        PublishedStates,
        settings=settings(
            max_examples=25,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    happened = PublishedStates.happened
    assert all(happened[one] for one in ("stopped", "deleted", "flipped", "restored")), happened

"""A process that commits rows of a partition with the real journal, and how it dies.

``simulation.py`` says when it dies. A child is forked: it lives for a moment, and its parent holds no lock
then.

The n-th change of a file is told from the others by Python's audit events (https://docs.python.org/3/
library/audit_events.html), so that a rehearsal dies at the same point each time it is run.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa

from vlm_assets.assets.fingerprint import CATALOGUE_SLICE, Fingerprint
from vlm_assets.assets.partition import Partition
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.journal.segments import OK, STATUS, TRIES
from vlm_durable.versions.published import PublishedPartitions

ASSET = "property_descriptions"

SCHEMA = pa.schema(
    [
        pa.field("ordinal", pa.int64()),
        pa.field("property_id", pa.string()),
        pa.field(STATUS, pa.string()),
        pa.field(TRIES, pa.int64()),
    ]
)

_CHANGES = frozenset({"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Strike(StrEnum):
    """What happens at a change of a file."""

    NOTHING = "nothing"
    KILL = "kill"
    FULL = "disk full"


@dataclass(frozen=True)
class PartitionLife:
    """One partition of the rehearsal's home. failing: ordinals of properties that come out as failed rows."""

    settings: Settings
    range: PropertyRange
    ids: tuple[str, ...] = field(repr=False)
    partition: Partition = field(repr=False)
    failing: frozenset[int] = frozenset()

    @classmethod
    def for_key(
        cls, settings: Settings, catalog: Catalog, key: str, failing: frozenset[int] = frozenset()
    ) -> PartitionLife:
        """The partition as its catalogue has it."""
        property_range = PropertyRange.from_key(key)
        ids = tuple(catalog.slice(property_range)["property_id"].to_pylist())
        fingerprint = Fingerprint({CATALOGUE_SLICE: catalog.slice_digest(property_range)})
        return cls(settings, property_range, ids, Partition(settings, ASSET, key, ids, fingerprint), failing)

    @property
    def generation(self) -> str:
        """The name of its only generation."""
        return self.partition.fingerprint.generation()

    @property
    def has_journal(self) -> bool:
        """Whether work on it was begun and is not published."""
        return self.partition.paths.journal(self.generation).is_dir()

    def restored(self) -> list[int]:
        """The ordinals that a start of the real journal finds committed. Raises JournalError."""
        with self.partition.open_journal(self.generation, SCHEMA) as journal:
            return [ordinal for batch in journal.read_ordered() for ordinal in batch["ordinal"].to_pylist()]

    def publish(self) -> int:
        """Commit what is missing, publish the file, retire the journal. Returns the number of rows."""
        published = PublishedPartitions(self.partition.paths.asset)
        if not self.has_journal:
            self._publish(published, self.rows(range(self.range.start, self.range.stop)).to_batches())
            return len(self.range)
        with self.partition.open_journal(self.generation, SCHEMA) as journal:
            missing = journal.missing_ids
            remaining = [
                self.range.start + number
                for number, property_id in enumerate(self.ids)
                if property_id in missing
            ]
            journal.submit(self.rows(remaining))
            journal.flush()
            self._publish(published, journal.read_ordered())
            journal.retire()
        return len(self.range)

    def _publish(self, published: PublishedPartitions, batches: Any) -> None:
        staged = published.stage(
            self.partition.key,
            batches,
            SCHEMA,
            expected_ids=self.ids,
            fingerprint=self.partition.fingerprint.digest,
            metadata={"generation": self.generation, "parts": dict(self.partition.fingerprint.parts)},
        )
        with staged:
            published.publish(staged)

    def rows(self, ordinals: Sequence[int]) -> pa.Table:
        """The rows of these ordinals."""
        return pa.table(
            {
                "ordinal": list(ordinals),
                "property_id": [self.ids[ordinal - self.range.start] for ordinal in ordinals],
                STATUS: ["failed" if ordinal in self.failing else OK for ordinal in ordinals],
                TRIES: [1 if ordinal in self.failing else None for ordinal in ordinals],
            },
            schema=SCHEMA,
        )

    def live(
        self,
        committed: Sequence[int],
        groups: Sequence[Sequence[int]],
        *,
        strike: Strike = Strike.NOTHING,
        at: int = 0,
        publishes: bool = False,
        dies: bool = True,
    ) -> tuple[int, str | None]:
        """Live in a process of its own: commit rows, then group after group, and be struck.

        Returns the rows that it said were committed, and the name of the error that it ended with, if that
        was not its death.

        committed: ordinals that are committed undisturbed, in one commit. groups: each is one commit more.
        at: the change of a file, from 1 and counted after ``committed``, at which ``strike`` happens.
        publishes: goes on until the file is published. dies: is killed at the end, if it gets there.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child != 0:
            os.close(writing)
            with os.fdopen(reading, encoding="utf-8") as heard:
                words = heard.read().split()
            os.waitpid(child, 0)
            rows = [int(word) for word in words if word.isdigit()]
            return sum(rows), words[-1] if len(words) > len(rows) else None
        os.close(reading)
        gc.disable()
        pa.set_memory_pool(pa.system_memory_pool())
        try:
            with self.partition.open_journal(self.generation, SCHEMA) as journal:

                def commit(group: Sequence[int]) -> None:
                    journal.submit(self.rows(group))
                    journal.flush()
                    os.write(writing, f"{len(group)}\n".encode())

                if committed:
                    commit(committed)
                _strike(str(self.settings.home), strike, at)
                for group in groups:
                    commit(group)
                if publishes:
                    published = PublishedPartitions(self.partition.paths.asset)
                    self._publish(published, journal.read_ordered())
                    journal.retire()
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
        except Exception as error:  # whatever it is, the rehearsal tells it by its name
            os.write(writing, f"{type(error).__name__}\n".encode())
        finally:
            os._exit(0)


def _strike(root: str, strike: Strike, at: int) -> None:
    """Strike at the ``at``-th change of a file below ``root``; a full disk stays full. For a child alone."""
    seen = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in _CHANGES or not str(arguments[0]).startswith(root):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        seen += 1
        if seen < at:
            return
        if strike is Strike.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif event in ("open", "os.mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    if strike is not Strike.NOTHING:
        # It cannot be taken away again, and need not: the child ends.
        sys.addaudithook(audit)

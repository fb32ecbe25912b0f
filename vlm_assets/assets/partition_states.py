"""Where each partition stands: done, running, interrupted, refused, damaged or not started, from disk alone.

What lives here: reading records, high-water marks and sizes, and what they mean. What does not: what the
retries add (``retry_notes.py``), time and order (``status.py``), Dagster, which need not be running, and
reading every byte (``audit.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from resources.publishing.errors import RecordDamagedError
from resources.publishing.published import PublishedPartitions
from resources.publishing.record import PublishedRecord
from resources.storage.layout import AssetFolders
from vlm_assets.catalog.ranges import PropertyRange
from vlm_assets.operate.expected_cost import committed_rows


class State(StrEnum):
    """Where a partition stands."""

    DONE = "done"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    GIVEN_UP = "given up"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    DAMAGED = "damaged"
    NOT_STARTED = "not started"


MEANING: Mapping[State, str] = {
    State.DONE: "published",
    State.RUNNING: "a process works on it now",
    State.INTERRUPTED: "resumes from what is committed when it is materialized again",
    State.FAILED: "its last run failed; it is tried again by itself",
    State.GIVEN_UP: "it was tried too often without progress: look at it in the UI",
    State.CANCELLED: "a person cancelled it: launched by hand, it goes on",
    State.REFUSED: "all rows are there, but a check kept them from being published: look at it in the UI",
    State.DAMAGED: "its file or record is not what was published: materialize it, that restores it",
    State.NOT_STARTED: "nothing is committed yet",
}


@dataclass(frozen=True)
class PartitionState:
    """One partition of one asset. rows: published, or else committed; expected: of the catalogue.

    record: of what is published; None where nothing is, or it does not read. note: a sentence more.
    """

    asset: str
    key: str
    state: State
    rows: int
    expected: int
    record: PublishedRecord | None = None
    note: str | None = None

    @property
    def percent(self) -> float:
        """How much of it is done."""
        return 100.0 * self.rows / self.expected


def partition_states(
    asset: AssetFolders, ranges: Collection[PropertyRange], running: Collection[str]
) -> list[PartitionState]:
    """The state of each range of an asset. Changes nothing.

    running: keys that a living process works on.
    """
    published = PublishedPartitions(asset)
    # Two looks at folders instead of several at files for each of ten thousand partitions.
    work = frozenset(asset.journal_keys())
    marked = frozenset(asset.marked_keys())
    return [_state(published, one, one.key in running, one.key in work, one.key in marked) for one in ranges]


def _state(
    published: PublishedPartitions,
    wanted: PropertyRange,
    runs: bool,
    has_work: bool,
    is_marked: bool,
) -> PartitionState:
    asset, key, expected = published.asset.name, wanted.key, len(wanted)
    paths = published.asset.partition(key)
    record, damaged = None, False
    try:
        record = published.record(key)
    except RecordDamagedError:
        damaged = True
    # A published partition keeps its marks for ever; without a journal none of them speaks of work.
    committed = committed_rows(paths) if is_marked and (has_work or record is None) else 0
    if runs:
        return PartitionState(asset, key, State.RUNNING, committed, expected, record)
    if damaged:
        return PartitionState(asset, key, State.DAMAGED, 0, expected)
    if record is not None:
        whole = _size(paths.published) == record.bytes
        return PartitionState(
            asset, key, State.DONE if whole else State.DAMAGED, record.rows, expected, record
        )
    if not committed:
        return PartitionState(asset, key, State.NOT_STARTED, 0, expected)
    state = State.REFUSED if committed == expected else State.INTERRUPTED
    return PartitionState(asset, key, state, committed, expected)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None

"""The triage: what is done, running, interrupted, refused or not started, from what is on disk alone.

What lives here: reading the catalogue, the published records, the high-water marks and the leases, and
saying what they mean. What does not: Dagster, which need not be running; and reading every byte.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import duckdb

from resources.gpu.resource import GpuResource
from resources.published import PublishedPartitions
from resources.published_errors import RecordDamagedError
from vlm_assets import descriptions, embeddings
from vlm_assets.audit_files import read_marks
from vlm_assets.catalog import Catalog
from vlm_assets.property_ranges import PropertyRange
from vlm_assets.settings import Settings


class State(StrEnum):
    """Where a partition stands."""

    DONE = "done"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"
    DAMAGED = "damaged"
    NOT_STARTED = "not started"


MEANING: Mapping[State, str] = {
    State.DONE: "published",
    State.RUNNING: "a process works on it now",
    State.INTERRUPTED: "resumes from what is committed when it is materialized again",
    State.REFUSED: "all rows are there, but a check kept them from being published: look at it in the UI",
    State.DAMAGED: "its file or record is not what was published: materialize it, that restores it",
    State.NOT_STARTED: "nothing is committed yet",
}


@dataclass(frozen=True)
class PartitionStatus:
    """One partition of one asset. rows: published, or else committed; expected: of the catalogue."""

    asset: str
    key: str
    state: State
    rows: int
    expected: int

    @property
    def percent(self) -> float:
        """How much of it is done."""
        return 100.0 * self.rows / self.expected


@dataclass(frozen=True)
class Status:
    """The whole dataset. failed_by_kind: published rows of properties that could not be described."""

    home: str
    properties: int
    partitions: tuple[PartitionStatus, ...]
    ok: int
    failed_by_kind: Mapping[str, int]

    def counts(self, asset: str) -> Counter[State]:
        """Partitions of an asset in each state."""
        return Counter(one.state for one in self.partitions if one.asset == asset)

    def to_json(self) -> str:
        """Everything, for machines."""
        return json.dumps(asdict(self), indent=2)


def read_status(settings: Settings, catalog: Catalog, gpu: GpuResource) -> Status:
    """Read the status of a home; changes nothing. Raises CatalogError, DeviceError."""
    running = {
        (held.record.holder.step, held.record.holder.partition)
        for held in gpu.leases().holders()
        if held.record is not None
    }
    partitions = tuple(
        _partition(settings, asset, PublishedPartitions(directory), wanted, running)
        for asset, directory in (
            (descriptions.ASSET, settings.descriptions_directory),
            (embeddings.ASSET, settings.embeddings_directory),
        )
        for wanted in catalog.ranges
    )
    published = (one.key for one in partitions if one.asset == descriptions.ASSET and one.state is State.DONE)
    ok, failed = _described(settings.descriptions_directory, published)
    return Status(str(settings.home), catalog.rows, partitions, ok, failed)


def _partition(
    settings: Settings,
    asset: str,
    published: PublishedPartitions,
    wanted: PropertyRange,
    running: set[tuple[str, str]],
) -> PartitionStatus:
    key, expected = wanted.key, len(wanted)
    try:
        record = published.record(key)
    except RecordDamagedError:
        return PartitionStatus(asset, key, State.DAMAGED, 0, expected)
    marks = settings.state_directory / "high_water_marks" / asset / key
    committed = max((mark.rows for mark in read_marks(marks, key) if not mark.retired), default=0)
    if (asset, key) in running:
        return PartitionStatus(asset, key, State.RUNNING, committed, expected)
    if record is not None:
        path = published.path(key)
        whole = path.is_file() and path.stat().st_size == record.bytes
        return PartitionStatus(asset, key, State.DONE if whole else State.DAMAGED, record.rows, expected)
    state = State.REFUSED if committed == expected else State.INTERRUPTED
    return PartitionStatus(asset, key, state if committed else State.NOT_STARTED, committed, expected)


def _described(directory: Path, keys: Iterable[str]) -> tuple[int, dict[str, int]]:
    """Rows that are ok, and failed ones by kind, over the files that read; a damaged one counts as none."""
    kinds: Counter[str] = Counter()
    with duckdb.connect() as connection:
        for key in keys:
            with contextlib.suppress(duckdb.Error):  # Its state says so; the audit says what is wrong.
                kinds.update(
                    dict(
                        connection.execute(
                            "SELECT coalesce(error_kind, 'ok'), count(*) FROM read_parquet(?) GROUP BY 1",
                            [str(directory / f"{key}.parquet")],
                        ).fetchall()
                    )
                )
    return kinds.pop("ok", 0), dict(kinds.most_common())

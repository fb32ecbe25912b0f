"""Which partitions a start asks Dagster for, and whether it is done with them.

What lives here: what is incomplete, what an unfinished backfill still covers, one new backfill of the rest.
What does not: how it is shown (``terminal.py``) and who keeps Dagster running (``supervisor.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlm_assets.operate.dagster_server.api import DagsterApi

ASSETS = ("property_descriptions", "property_embeddings")

TAG = "vlm-assets/launched-by"


@dataclass(frozen=True)
class Snapshot:
    """Partitions by what they are, over all the assets: done means done in each of them.

    under_way: launched, most of them waiting for their turn. runs: those that work at this moment.
    """

    done: frozenset[str]
    under_way: frozenset[str]
    failed: frozenset[str]
    runs: int


@dataclass
class Backfilling:
    """The partitions of a catalogue on their way to complete."""

    api: DagsterApi
    home: Path
    keys: Sequence[str]
    followed: list[str] = field(default_factory=list)
    """Ids of the backfills that this start goes on with or has launched."""

    def begin(self) -> str:
        """Go on with unfinished backfills and launch one for what they do not cover; says what it did."""
        incomplete = set(self.keys) - self.complete_keys()
        if not incomplete:
            return f"Nothing to do: all {len(self.keys)} partitions are complete."
        said = []
        for backfill in self.api.unfinished_backfills(ASSETS[0]):
            under_way = backfill.keys & incomplete
            if under_way:
                self.followed.append(backfill.id)
                incomplete -= under_way
                said.append(f"Going on with backfill {backfill.id}: {len(under_way)} partitions are left.")
        if incomplete:
            said.append(self.launch(incomplete))
        return " ".join(said)

    def launch(self, keys: Collection[str]) -> str:
        """Launch one backfill of these partitions of all the assets together; says what it did."""
        new = self.api.launch_backfill(
            ASSETS, sorted(keys), title=f"{len(keys)} partitions", tags={TAG: "demo"}
        )
        self.followed.append(new)
        return f"Launched backfill {new} of {len(keys)} of {len(self.keys)} partitions."

    def snapshot(self) -> Snapshot:
        """How the partitions stand now."""
        of_each = [self.api.partition_keys(asset) for asset in ASSETS]
        return Snapshot(
            done=frozenset.intersection(*(keys.materialized for keys in of_each)),
            under_way=frozenset.union(*(keys.running for keys in of_each)),
            failed=frozenset.union(*(keys.failed for keys in of_each)),
            runs=self.api.started_runs(),
        )

    def complete_keys(self) -> frozenset[str]:
        """Partitions that Dagster shows as done in each asset and whose files are there."""
        on_disk = [{file.stem for file in (self.home / asset).glob("*.parquet")} for asset in ASSETS]
        return self.snapshot().done.intersection(*on_disk, self.keys)

    def ended(self, now: Snapshot) -> bool:
        """Whether nothing more will happen: all partitions done, or Dagster is done with the backfills."""
        if now.done.issuperset(self.keys):
            return True
        # A failed run may be retried: only the backfill knows, and it is asked only when all is quiet.
        return not now.under_way and not any(
            self.api.backfill(backfill, ASSETS[0]).unfinished for backfill in self.followed
        )

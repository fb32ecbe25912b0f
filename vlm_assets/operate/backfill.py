"""The backfill that a terminal launches and follows: which partitions it asks Dagster for, how they stand.

``backfill_view.py`` shows it; ``run.py`` keeps Dagster running meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlm_assets.assets.partition_state import PartitionStates, VerifiedFiles
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.dagster_server.api import DagsterApi
from vlm_assets.operate.rate import Rate, read_rate
from vlm_assets.settings import load_settings

ASSETS = ("property_descriptions", "property_embeddings")

TAG = "vlm-assets/launched-by"


@dataclass(frozen=True)
class BackfillProgress:
    """The keys of a backfill by state, over all the assets: done means done in each of them.

    under_way: launched, most of them waiting for their turn. runs: runs that work at this moment.
    """

    done: frozenset[str]
    under_way: frozenset[str]
    failed: frozenset[str]
    runs: int


@dataclass
class Backfill:
    """The backfill of some partitions (``keys``), launched and followed from a terminal."""

    api: DagsterApi
    home: Path
    keys: Sequence[str]
    run_config: Mapping[str, object] = field(default_factory=dict)
    """Of each run that it launches."""
    followed: list[str] = field(default_factory=list)
    """Ids of the Dagster backfills that this one continues or has launched."""

    def begin(self) -> str:
        """Continue unfinished backfills; launch one for the partitions that they lack. Says what it did."""
        incomplete = set(self.keys) - self.complete_keys()
        if not self.keys:
            return "Nothing to do: there is no such partition."
        if not incomplete:
            return f"Nothing to do: {len(self.keys)} of {len(self.keys)} partitions are complete."
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
        """Launch one backfill of these partitions, all assets together; says what it did."""
        new = self.api.launch_backfill(
            ASSETS,
            sorted(keys),
            title=f"{len(keys)} partitions",
            tags={TAG: "terminal"},
            run_config=self.run_config,
        )
        self.followed.append(new)
        return f"Launched backfill {new} of {len(keys)} of {len(self.keys)} partitions."

    def progress(self) -> BackfillProgress:
        """How the partitions stand now."""
        of_each = [self.api.partition_keys(asset) for asset in ASSETS]
        return BackfillProgress(
            done=frozenset.intersection(*(keys.materialized for keys in of_each)).intersection(self.keys),
            under_way=frozenset.union(*(keys.running for keys in of_each)).intersection(self.keys),
            failed=frozenset.union(*(keys.failed for keys in of_each)).intersection(self.keys),
            runs=self.api.started_runs(),
        )

    def complete_keys(self) -> frozenset[str]:
        """Partitions that are complete in each asset, as ``vlm-assets status`` says."""
        settings = load_settings(home=self.home)
        verified = VerifiedFiles(settings.state_directory)
        states = PartitionStates(settings, Catalog.open(self.home), verified=verified).all()
        verified.save()
        return frozenset(self.keys).difference(one.key for one in states if not one.is_complete)

    def rate(self) -> Rate:
        """The rate of the data set, as ``vlm-assets status`` says it."""
        return read_rate(load_settings(home=self.home), Catalog.open(self.home))

    def ended(self, now: BackfillProgress) -> bool:
        """Whether nothing more will happen: Dagster ended the backfills.

        A partition that is made again was done before, so what Dagster shows as done does not tell.
        """
        # A failed run may be retried: only the backfill knows, and it is asked only when all is quiet.
        return not now.under_way and not any(
            self.api.backfill(backfill, ASSETS[0]).unfinished for backfill in self.followed
        )

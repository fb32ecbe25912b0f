"""What unfinished backfills have still to launch: queued as much as any run, though no run is there yet.

What does not live here: launching a backfill.

Checked with dagster 1.13.27. Not public: ``get_backfills`` and the fields of ``asset_backfill_data``. If
they go: GraphQL's ``partitionBackfillsOrError`` with ``assetBackfillData``; without either, return an empty
set: then a partition that a backfill will launch may be launched by the retry schedule too, and its second
run waits for the first one's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster import AssetKey, DagsterInstance


def awaited_partitions(instance: DagsterInstance, assets: Sequence[str]) -> set[str]:
    """Partitions of these assets for which an unfinished backfill will launch a run."""
    from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus

    awaited: set[str] = set()
    unfinished = BulkActionsFilter(statuses=[BulkActionStatus.REQUESTED])
    for backfill in instance.get_backfills(filters=unfinished):
        data = backfill.asset_backfill_data
        if data is None:
            continue
        for asset in assets:
            of = [
                subset.partitions_subsets_by_asset_key.get(AssetKey(asset))
                for subset in (data.target_subset, data.requested_subset, data.failed_and_downstream_subset)
            ]
            targeted, *over = (frozenset(one.get_partition_keys()) if one else frozenset() for one in of)
            awaited |= targeted.difference(*over)
    return awaited

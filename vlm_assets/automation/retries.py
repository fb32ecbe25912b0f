"""What the scheduled re-materialization must know of our assets: keys, files, journals, settings, order.

The answers come from what is on disk. The schedule itself is in ``sensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import dagster as dg

from resources.gpu import GpuResource
from sensors.failed_partitions import FailedPartitions, Watched
from sensors.retry_decision import ATTEMPTS, Policy
from sensors.retry_schedule import Retrying, build_retrying
from sensors.ticks import Ticks
from vlm_assets.assets.fingerprint import KEEP, LOOKED_AT, OF_THE_PARTITION, OF_UPSTREAM, Meanings
from vlm_assets.assets.partition_state import PartitionStates, State
from vlm_assets.config.question_sets import config_of_runs, options_of, with_downstream
from vlm_assets.config.resource_settings import build_gpu, control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import heaviest_first
from vlm_catalog.catalog import Catalog, CatalogError
from vlm_durable.files.layout import PartitionPaths
from vlm_durable.journal.high_water_mark import read_marks
from vlm_durable.mirror.bucket import StoreAwayError, StoreError
from vlm_durable.mirror.stored_journal import StoredJournal, stored_generations
from vlm_durable.state.workers import Workers
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_engine.devices.find import DeviceError

RETRY_RUNS = 10
"""Partitions tried again that are queued or running at once, at most: enough for the devices of a machine,
and few where all fail for the same reason."""

_UNFINISHED = (State.INTERRUPTED, State.REFUSED, State.LOST, State.DAMAGED)


def build_failed_partitions(settings: Settings, keys: Collection[str]) -> FailedPartitions:
    """The re-materialization of this home. keys: the partitions of the catalogue."""
    files = _Files(settings)
    watched = Watched(
        assets=settings.computed_assets,
        keys=frozenset(keys),
        interrupted=files.interrupted,
        missing=files.missing,
        rows=files.rows,
        is_stale=files.is_stale,
        decides_on_stale=partial(decides_on_stale, settings),
        working=lambda: {worker.partition for worker in Workers(control_state(settings)).living()},
        heaviest_first=heaviest_first(settings),
        with_downstream=partial(with_downstream, settings),
    )
    return FailedPartitions(
        watched,
        control_state(settings),
        policy=Policy(ATTEMPTS, settings.retry_minutes * 60.0),
        cap=RETRY_RUNS,
        no_device=_no_device(build_gpu(settings)),
    )


def _no_device(gpu: GpuResource) -> Callable[[], str | None]:
    def no_device() -> str | None:
        try:
            return gpu.why_all_left_out()
        except DeviceError:
            return None  # The health sensor tells a person of a driver that does not answer.

    return no_device


def build_retries(settings: Settings, partitions: dg.PartitionsDefinition[str]) -> Retrying:
    """Schedule and button over the assets that runs make."""
    return build_retrying(
        build_failed_partitions(settings, partitions.get_partition_keys()),
        every_minutes=settings.retry_every_minutes,
        run_config=partial(retry_config, settings),
        ticks=Ticks(control_state(settings), settings.names),
    )


def retry_config(
    settings: Settings, key: str, assets: Sequence[str], before: Mapping[str, Any]
) -> tuple[Mapping[str, Any], bool]:
    """The run config of a new attempt, and whether it repeats what a person had asked of the attempt before.

    key, assets: the partition of the attempt, and what it makes: what is wrong first. Finished rows are kept.
    A recomputation that was cut short or refused is asked for again: otherwise the old file would be verified
    and the request forgotten. So is the decision on stale partitions. Without one, a stale question set that
    is only beside what is wrong stays as it is.
    """
    options = {asset: dict(options_of(settings, before, asset)) for asset in assets}
    goes_on = any(given.get("recompute") or given.get("retry_failed") for given in options.values())
    if not goes_on:
        options = {
            asset: {name: value for name, value in given.items() if name == "stale"}
            for asset, given in options.items()
        }
    beside = [asset for asset in assets[1:] if asset != settings.embeddings.name]
    if undecided := [asset for asset in beside if "stale" not in options[asset]]:
        files = _Files(settings)
        for asset in undecided:
            if files.is_stale(asset, key):
                options[asset]["stale"] = KEEP
    return (config_of_runs(settings, options) if any(options.values()) else {}), goes_on


def decides_on_stale(settings: Settings, asset: str, run_config: Mapping[str, Any]) -> bool:
    """Whether the run config says what the run does with a stale partition of an asset."""
    return "stale" in options_of(settings, run_config, asset)


class _Files:
    """Partitions as they are on disk. A folder is listed once, even for ten thousand partitions."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._meanings = Meanings.from_settings(settings)

    def interrupted(self, asset: str) -> list[str]:
        """Partitions with unfinished work that were never published."""
        folders = self._settings.layout.asset(asset)
        keys = [key for key in folders.journal_keys() if not folders.partition(key).published.exists()]
        states = self._states() if keys else None
        return [key for key in keys if states is not None and states.read(asset, key).state in _UNFINISHED]

    def missing(self, asset: str, published: Collection[str]) -> list[str]:
        """Those of the published partitions whose file is missing."""
        if not published:
            return []
        existing = frozenset(self._settings.layout.asset(asset).published_keys())
        return [key for key in published if key not in existing]

    def rows(self, key: str) -> int | None:
        """Rows ever committed for a partition, over all assets and generations: it grows with every one.

        Where a store is set, also those of other machines; None where it cannot be asked.
        """
        partitions = [asset.partition(key) for asset in self._settings.partitioned_assets]
        try:
            return sum(self._rows(paths) for paths in partitions)
        except StoreAwayError:
            return None

    def _rows(self, paths: PartitionPaths) -> int:
        rows = {mark.generation: mark.rows for mark in read_marks(paths.high_water_marks, paths.key)}
        store = self._settings.mirror
        for generation in stored_generations(paths, store):
            try:
                manifest = StoredJournal(paths, generation, store).read_manifest()
            except StoreAwayError:
                raise
            except StoreError:
                continue  # A head that cannot be read: its rows here count, and its run says what to do.
            if manifest is not None:
                rows[generation] = max(rows.get(generation, 0), manifest.rows)
        return sum(rows.values())

    def is_stale(self, asset: str, key: str) -> bool:
        """Whether what is published was made under other settings, or that is unknown.

        False where work under the current settings has begun: a person asked for that.
        """
        try:
            states = self._states()
        except CatalogError:
            return True
        state = states.read(asset, key)
        journals = self._settings.layout.asset(asset).partition(key).journals
        if state.fingerprint_now and any(journals.glob(f"{state.fingerprint_now}*/")):
            return False
        # What other assets published does not count as other settings: it is followed.
        followed = OF_THE_PARTITION if LOOKED_AT in state.changed else OF_UPSTREAM
        return not followed.issuperset(state.changed) or (
            state.record is not None and states.meanings.of_asset(asset).trouble is not None
        )

    def _states(self) -> PartitionStates:
        catalog = Catalog.open(self._settings.home)
        trusted = VerifiedFiles(self._settings.state_directory, seconds=0.0)
        return PartitionStates(self._settings, catalog, meanings=self._meanings, verified=trusted)

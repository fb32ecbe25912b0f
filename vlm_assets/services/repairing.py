"""Doing the repairs that ``services/repairs.py`` lists.

What needs no device is done here. What must be computed again is launched in the running Dagster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_assets.assets.fingerprint import KEEP
from vlm_assets.catalog.catalog_file import CatalogError
from vlm_assets.catalog.stored_catalog import put_back_catalog
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.progress import doing_each
from vlm_assets.services.repairs import COMPUTING, Remedy, Repair
from vlm_assets.services.store_looks import store_looks
from vlm_assets.webserver.api import LAUNCHED_BY, DagsterApi
from vlm_assets.webserver.home import running_address
from vlm_durable.commands import command
from vlm_durable.files import files
from vlm_durable.journal.journal_errors import sample
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.state.workers import Workers
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted

if TYPE_CHECKING:
    pass

_RUN_OPTIONS = {Remedy.COMPUTE: "recompute", Remedy.RETRY_FAILED: "retry_failed"}


def carry_out(
    settings: Settings, repairs: Sequence[Repair], tell: Callable[[str], None], *, newest_here: bool
) -> bool:
    """Do the repairs; returns whether all are done.

    tell: called with each sentence about what was done, and what was not. newest_here: as in ``put_right``.
    Raises DagsterApiError.
    """
    # Also those that wait for a device: they hold their journals.
    running = {worker.partition for worker in Workers(control_state(settings)).living()}
    for key in sorted({repair.key for repair in repairs if repair.key in running}):
        tell(f"{key} is left to the run that works on it now; look again when it has ended.")
    free = [repair for repair in repairs if repair.key not in running]
    at_once = [repair for repair in free if repair.remedy not in COMPUTING or repair.forgets]
    all_put_right = _put_all_right(settings, at_once, tell, newest_here)
    all_launched = _launch(settings, [repair for repair in free if repair.remedy in COMPUTING], tell)
    return all_put_right and all_launched and len(free) == len(repairs)


def _put_all_right(
    settings: Settings, repairs: Sequence[Repair], tell: Callable[[str], None], newest_here: bool
) -> bool:
    all_done = True
    for repair in doing_each("putting right", repairs):
        try:
            for sentence in put_right(settings, repair, newest_here=newest_here):
                tell(sentence)
        except (PublishedError, CatalogError, StoreError, OSError) as error:
            all_done = False
            tell(f"Not repaired: {repair.asset} {repair.key or repair.path}: {error}")
        if repair.remedy is Remedy.BY_HAND:
            all_done = False
    return all_done


def _launch(settings: Settings, repairs: Sequence[Repair], tell: Callable[[str], None]) -> bool:
    """Have the running Dagster compute what must be computed; returns whether it does."""
    if not repairs:
        return True
    groups = recomputations(repairs, settings.computed_assets)
    address = running_address(settings.dagster_home)
    if address is None:
        keys = sample({key for group in groups for key in group.keys})
        tell(
            f"Not computed, for no Dagster runs on this home: {keys}. {command('serve')}, then repair again."
        )
        return False
    for group in groups:
        backfill = DagsterApi(address, settings.dagster_home).launch_backfill(
            group.assets,
            group.keys,
            title=f"repair: {counted(len(group.keys), 'partitions')}",
            tags={LAUNCHED_BY: "repair"},
            run_config=group.run_config,
        )
        tell(
            f"Launched backfill {backfill} of {counted(len(group.keys), 'partitions')}"
            f" ({', '.join(group.assets)}):"
            f" {address}/runs/b/{backfill}"
        )
    return True


def put_right(settings: Settings, repair: Repair, *, newest_here: bool = False) -> list[str]:
    """Do the part of a repair that needs no device; says what was done.

    Nothing is deleted: what is damaged or foreign goes into the quarantine. newest_here: a person says that
    no other machine has anything newer than what a store lost. Raises PublishedError, OSError, CatalogError,
    StoreError.
    """
    asset = settings.layout.asset(repair.asset)
    stored = StoredPartitions(asset, settings.mirror)
    if repair.remedy is Remedy.FILL_STORE:
        if repair.key is None:
            return put_back_catalog(settings.home, settings.mirror, newest_here=newest_here)
        done = stored.put_back(repair.key, newest_here=newest_here)
        store_looks(settings)[repair.asset].forget(repair.key)
        return [*done] or [f"Partition {repair.key} of {repair.asset} is whole in {settings.mirror}."]
    if repair.remedy is Remedy.SET_ASIDE and repair.path is not None:
        return [f"{repair.path} was moved to {files.set_aside(repair.path, asset.quarantine)}."]
    if repair.key is None:
        return []
    published = PublishedPartitions(asset)
    if repair.forgets:
        return list(published.set_aside(repair.key))
    if repair.remedy is Remedy.RESTORE:
        restoration = published.restore(repair.key, stored.content_of)
        return [*restoration.notes] or [f"Partition {repair.key} of {repair.asset} is whole."]
    return []


@dataclass(frozen=True)
class Recomputation:
    """Partitions that are materialized alike. remedies: by asset, upstream first."""

    remedies: Mapping[str, Remedy]
    keys: tuple[str, ...]

    @property
    def assets(self) -> tuple[str, ...]:
        """The assets that are materialized together."""
        return tuple(self.remedies)

    @property
    def run_config(self) -> dict[str, object]:
        """The run config of each partition's run; empty where finished work is kept as always."""
        options = {
            asset: _RUN_OPTIONS[remedy] for asset, remedy in self.remedies.items() if remedy in _RUN_OPTIONS
        }
        if not options:
            return {}
        # Settings may change until the run begins: then its partition waits for a person.
        kept: dict[str, object] = {} if Remedy.COMPUTE in self.remedies.values() else {"stale": KEEP}
        return {"ops": {asset: {"config": {option: True, **kept}} for asset, option in options.items()}}


def recomputations(repairs: Iterable[Repair], assets: Sequence[str]) -> list[Recomputation]:
    """Group repairs that compute by what is done to each partition.

    assets: those that runs make. New descriptions always take their embeddings with them.
    """
    of_key: dict[str, dict[str, Remedy]] = defaultdict(dict)
    for repair in repairs:
        if repair.remedy in COMPUTING and repair.key is not None:
            of_key[repair.key][repair.asset] = repair.remedy
    groups: dict[tuple[tuple[str, Remedy], ...], list[str]] = defaultdict(list)
    for key, remedies in sorted(of_key.items()):
        if assets[0] in remedies:
            remedies = dict.fromkeys(assets, Remedy.RESUME) | remedies
        if chosen := tuple((asset, remedies[asset]) for asset in assets if asset in remedies):
            groups[chosen].append(key)
    return [Recomputation(dict(remedies), tuple(keys)) for remedies, keys in groups.items()]

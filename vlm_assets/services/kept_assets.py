"""The assets whose files are looked after: those of the settings, and of question sets that no settings name.

A set that leaves the questions file keeps its files. The settings' assets come first, in their order.
"""

from __future__ import annotations

from vlm_assets.config.settings import PREFIX, Settings
from vlm_catalog.ranges import SET_PREFIX, range_assets, stored_sets
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.mirror.mirror import NO_MIRROR, Mirror
from vlm_durable.versions.findings import Finding, FindingKind


def kept_assets(settings: Settings, store: Mirror = NO_MIRROR) -> tuple[AssetFolders, ...]:
    """The assets of the settings, and the question sets of which the home or ``store`` has something.

    Raises OSError, StoreError.
    """
    return tuple(dict.fromkeys((*settings.partitioned_assets, *range_assets(settings.layout, store))))


def assets_in_store(settings: Settings) -> tuple[AssetFolders, ...]:
    """The assets of the settings, and the question sets of which the store has something: what no settings
    name is not put there. Raises StoreError."""
    sets = map(settings.layout.asset, sorted(stored_sets(settings.layout, settings.mirror)))
    return tuple(dict.fromkeys((*settings.partitioned_assets, *sets)))


def removed_set_finding(asset: AssetFolders) -> Finding:
    """A warning about the files of a question set that no settings name."""
    name = asset.name.removeprefix(SET_PREFIX)
    sentence = (
        f"Files of the question set {name} are kept, and no settings name it: its rows stay as they are, and"
        " no new ones are computed."
    )
    step = (
        f"Put {name} back into the file of {PREFIX}QUESTIONS to go on with it, or delete them:"
        f" {command('prune', '--set', name)}."
    )
    return Finding(FindingKind.REMOVED_SET, asset.name, None, sentence, step, str(asset.published))

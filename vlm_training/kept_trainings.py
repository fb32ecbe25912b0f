"""Files of trainings that may or must be removed: copies in the store, and trainings on withdrawn properties.

Here is which copied checkpoints may go, which trainings learn from withdrawn properties, and their removal. A
training's copies themselves are made in ``training_store.py``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from vlm_assets.assets.learned_labels import LEARNED_LABELS, forget_learned
from vlm_assets.config.extensions import StoredLeftover
from vlm_assets.config.settings import Settings
from vlm_durable.files.layout import AssetFolders
from vlm_durable.files.sealed_json import FormatVersionError
from vlm_durable.mirror.bucket import ListedObject
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.mirror.stored_journal import stored_journals
from vlm_durable.state.workers import Phase, Worker
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_training.published_model import ASSET, PublishedModel
from vlm_training.rank import PLAN
from vlm_training.training_plan import SAMPLES, TrainingError, TrainingPlan, is_import_name, remove_training
from vlm_training.training_store import StoredModel

_LOCK_SECONDS: Final = 10.0


def stored_leftovers(settings: Settings) -> list[StoredLeftover]:
    """Copied checkpoints of superseded trainings, in the store. Raises StoreError."""
    store = settings.mirror
    trainings = settings.layout.asset(ASSET)
    leftovers = []
    for key, generation in stored_journals(trainings, store):
        if copies := _superseded(trainings, store, key, generation):
            size = sum(copy.size for copy in copies)
            leftovers.append(StoredLeftover(ASSET, key, generation, len(copies), size))
    return leftovers


def remove_leftover(settings: Settings, leftover: StoredLeftover) -> str:
    """Remove the copies of a training, if it is still superseded. Raises StoreError."""
    store = settings.mirror
    trainings = settings.layout.asset(ASSET)
    copies = _superseded(trainings, store, leftover.key, leftover.generation)
    for copy in copies:
        store.delete(copy.name)
    return f"Removed {counted(len(copies), 'objects')} of an earlier training of {leftover.key} from {store}."


def busy_with(settings: Settings, ids: Collection[str], workers: Sequence[Worker]) -> set[str]:
    """The variants that learn from these properties now, or may."""
    trained = {folder.parent.name for folder in _trainings_with(settings, ids)}
    return {
        worker.partition or worker.asset
        for worker in workers
        if worker.partition in trained
        # It has not written its list of samples yet.
        or (worker.asset == ASSET and worker.phase in (Phase.PREPARING, Phase.WAITING))
    }


def _superseded(trainings: AssetFolders, store: Mirror, key: str, generation: str) -> list[ListedObject]:
    """The copied checkpoints of a training, if a later training of its variant was published after them.

    The published training's own checkpoint stays: it can make the model again.
    """
    try:
        published, fenced = StoredModel(store, PublishedModel(trainings, key)).record()
    except (TrainingError, FormatVersionError, PublishedError):
        return []
    stored = fenced.record
    if published is None or stored is None or published.get("pending"):
        return []
    if published["fingerprint"] == generation:
        return []
    copies = list(
        store.listed(f"{trainings.partition(key).journal(generation).relative_to(trainings.home.root)}/")
    )
    return copies if all(copy.modified < stored.modified for copy in copies) else []


def _trainings_with(settings: Settings, ids: Collection[str]) -> list[Path]:
    """The folders of trainings that learn from these properties, or may."""
    folders = sorted(settings.layout.asset(ASSET).journals.glob("*/*/"))
    return [folder for folder in folders if _may_learn_from(folder, ids)]


def _may_learn_from(folder: Path, ids: Collection[str]) -> bool:
    try:
        with (folder / SAMPLES).open(encoding="utf-8") as lines:
            return any(json.loads(line)["property_id"] in ids for line in lines)
    except FileNotFoundError:
        # A function makes its samples, or the training was killed before it wrote the list or while it was
        # removed.
        with contextlib.suppress(OSError, ValueError, TypeError):
            if is_import_name(TrainingPlan.read(folder / PLAN).samples):
                return False
        return any(folder.iterdir())
    except (OSError, ValueError, KeyError, TypeError):
        return True


def forget_labels(settings: Settings, ids: Collection[str]) -> Iterator[str]:
    """Take properties out of what the models of this home, and theirs in the store, say that they learned.

    Raises TrainingError with the rest still to do, StoreError, OSError, SettingsError.
    """
    asset = settings.layout.asset(ASSET)
    for folders in (asset.versions, asset.staging, asset.quarantine):
        for path in sorted(folders.glob(f"**/{LEARNED_LABELS}")):
            if forget_learned(path, ids):
                yield f"Removed them from what a model learned in {path}."
    for path in sorted(asset.published.glob(f"*/{LEARNED_LABELS}")):
        model = PublishedModel(asset, path.parent.name)
        lock = model.lock(_LOCK_SECONDS)
        if lock is None:
            raise TrainingError(f"Variant {model.key} is being trained. Wait for it, or end it.")
        with contextlib.closing(lock):
            if forget_learned(path, ids):
                yield f"Removed them from what a model learned in {path}."
            # Also if a withdrawal that was cut short changed the file.
            model.record_changed(LEARNED_LABELS)
            StoredModel(settings.mirror, model).push(over=True)


def remove_trainings(settings: Settings, ids: Collection[str]) -> Iterator[Path]:
    """Remove trainings that learn from these properties, with all of their checkpoints.

    Nothing could resume them: a training without these properties has another fingerprint.
    """
    for folder in _trainings_with(settings, ids):
        for name, _ in list(settings.mirror.names(f"{folder.relative_to(settings.home)}/")):
            settings.mirror.delete(name)
        shutil.rmtree(settings.layout.asset(ASSET).partition(folder.parent.name).quarantine, True)
        remove_training(folder)
        yield folder

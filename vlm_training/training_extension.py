"""What this extension hands over to the core: the asset ``description_model``, its models, what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import dagster as dg

    from vlm_training.published_model import PublishedModel

from vlm_assets.config.extensions import Extension, StatusTable, StoredLeftover
from vlm_assets.config.settings import PREFIX, Settings, SettingsError
from vlm_durable.files.files import sha256_of
from vlm_durable.files.lock_files import acquire_lock
from vlm_durable.state.workers import Worker
from vlm_durable.versions.findings import Finding
from vlm_durable.versions.versioned_object import unfit_key
from vlm_training.training_settings import TrainingSettings


class TrainingExtension(Extension):
    """Models that are trained on descriptions."""

    package = "vlm_training"
    assets: ClassVar[tuple[str, ...]] = ("description_model",)
    model_source: ClassVar[str | None] = "variant"
    settings = TrainingSettings
    settings_title = "With models to train"

    def definitions(self, settings: Settings) -> dg.Definitions:
        """The asset, if there are variants."""
        import dagster as dg

        from vlm_training.description_model import build_description_model

        asset = build_description_model(settings)
        return dg.Definitions(assets=[] if asset is None else [asset])

    def model_folder(self, settings: Settings, name: str) -> Path:
        """The folder in which a variant's finished model is published."""
        return _model(settings, name).folder

    def model_trouble(self, settings: Settings, name: str) -> Finding | None:
        """An older model was put back, or nothing tells which one is the newest."""
        return _model(settings, name).trouble(_remembered_digest(settings))

    def findings(self, settings: Settings, *, deep: bool) -> Iterator[Finding]:
        """Models that are not the newest ones that were published here; none that is being changed now."""
        from vlm_training.published_model import ASSET, PublishedModel

        folders, digest = settings.layout.asset(ASSET), sha256_of if deep else _remembered_digest(settings)
        for name in sorted(folders.touched_keys()):
            if unfit_key(name) is not None:
                continue
            model = PublishedModel(folders, name)
            if model.trouble(digest) is not None and not _is_in_use(model):
                # A training that has ended meanwhile may have published.
                yield from filter(None, [model.trouble(digest)])

    def assets_by_hand(self, settings: Settings) -> tuple[str, ...]:
        """The asset, if there are variants."""
        return () if TrainingSettings.part_of(settings).variants is None else self.assets

    def status(self, settings: Settings) -> StatusTable | None:
        """The variants: those that run, those that wait in their order, the others."""
        from vlm_training.variant_status import variant_status

        variants = variant_status(settings)
        if not variants:
            return None
        rows = tuple(
            (str(variant.turn or ""), variant.name, variant.sentence(), variant.time_left())
            for variant in variants
        )
        return StatusTable(
            "models to train", ("turn", "model to train", "state", "time left"), rows, variants
        )

    def stored_leftovers(self, settings: Settings) -> Sequence[StoredLeftover]:
        """Copied checkpoints of trainings that a later published training of the variant replaced."""
        from vlm_training.kept_trainings import stored_leftovers

        return stored_leftovers(settings)

    def remove_leftover(self, settings: Settings, leftover: StoredLeftover) -> str:
        """Remove the copied checkpoints of a replaced training."""
        from vlm_training.kept_trainings import remove_leftover

        return remove_leftover(settings, leftover)

    def busy_with(self, settings: Settings, ids: Collection[str], workers: Sequence[Worker]) -> set[str]:
        """Trainings that learn from these properties, or may."""
        from vlm_training.kept_trainings import busy_with

        return busy_with(settings, ids, workers)

    def forget(self, settings: Settings, ids: Collection[str], keys: Sequence[str]) -> Iterator[str]:
        """Trainings that learn from these properties, and what finished models say that they learned."""
        from vlm_training.kept_trainings import forget_labels, remove_trainings

        for folder in remove_trainings(settings, ids):
            yield f"Removed the training {folder}: its variant is trained anew, without them."
        yield from forget_labels(settings, ids)


def _is_in_use(model: PublishedModel) -> bool:
    """Whether a training or a withdrawal holds the model and may be about to change it. Raises OSError."""
    path = model.paths.publication_lock
    if not path.exists():
        return False
    # Shared: another audit that asks the same is no such use.
    lock = acquire_lock(path, shared=True)
    if lock is None:
        return True
    lock.close()
    return False


def _remembered_digest(settings: Settings) -> Callable[[Path], str]:
    """Gives a file's SHA-256; that of a file which has not changed since is not computed again."""
    from vlm_engine.model_source import file_digest

    return partial(file_digest, kept_in=settings.state_directory / "models")


def _model(settings: Settings, name: str) -> PublishedModel:
    """The published model of a variant. Raises SettingsError where none can have that name."""
    from vlm_durable.versions.versioned_object import PublishedError
    from vlm_training.published_model import ASSET, PublishedModel

    try:
        return PublishedModel(settings.layout.asset(ASSET), name)
    except PublishedError as error:
        raise SettingsError(
            f"{PREFIX}MODEL=variant:{name}: {error}. A model that stands in such a folder is named by it:"
            f" {PREFIX}MODEL={settings.layout.asset(ASSET).published / name}."
        ) from error

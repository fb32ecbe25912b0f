"""Labels that a model learned in its training: that it says them again shows nothing of its other answers.

A file in the model's folder names their properties by digests, which no withdrawal has to search for. A copy
of the folder tells them too. The file decides no answer, and is no part of the model's exact revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.config.extensions import describing_model, installed
from vlm_assets.config.settings import Settings
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.protocol import ModelLoadError

_FILE: Final = "learned-labels.list"


def write_learned(folder: Path, ids: Iterable[str], base: Path) -> None:
    """Write into a model's folder whose labels it learned, and its base model before it. Raises OSError."""
    if learned := {*map(digest_of, ids), *_learned_in(base)}:
        (folder / _FILE).write_text("".join(f"{digest}\n" for digest in sorted(learned)))


def learned_labels(settings: Settings, revision: str) -> frozenset[str]:
    """Digests of the ids of the properties whose labels a model learned, as far as this home knows it.

    revision: the model's exact one. Raises OSError, SettingsError.
    """
    for folder in _model_folders(settings):
        try:
            if (folder / _FILE).exists() and revision == exact_revision(
                ModelSource(str(folder), records=settings.state_directory / "models")
            ):
                return _learned_in(folder)
        except ModelLoadError:
            continue  # Nothing can be described with it.
    return frozenset()


def _model_folders(settings: Settings) -> Iterator[Path]:
    """The folder of the describing model, and those of all models that were trained in this home."""
    if (model := describing_model(settings)) is not None:
        yield Path(model).expanduser()
    for asset in (settings.layout.asset(name) for extension in installed() for name in extension.assets):
        for folders in (asset.published, asset.versions):
            yield from sorted(folders.glob("*"))


def _learned_in(folder: Path) -> frozenset[str]:
    path = folder / _FILE
    return frozenset(path.read_text().split()) if path.is_file() else frozenset()

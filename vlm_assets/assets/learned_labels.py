"""Labels that a model learned in its training: that it says them again shows nothing of its other answers.

A file in the model's folder names their properties by digests, which no withdrawal has to search for. A copy
of the folder tells them too. The file decides no answer, and is no part of the model's exact revision. The
home keeps what it says, by the revision, when the model first describes: its answers may outlive its folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.config.extensions import describing_model, installed
from vlm_assets.config.settings import Settings, SettingsError
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, write_sealed
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.protocol import ModelLoadError

_FILE: Final = "learned-labels.list"


def write_learned(folder: Path, ids: Iterable[str], base: Path) -> None:
    """Write into a model's folder whose labels it learned, and its base model before it. Raises OSError."""
    if learned := {*map(digest_of, ids), *_learned_in(base)}:
        (folder / _FILE).write_text("".join(f"{digest}\n" for digest in sorted(learned)))


def learned_labels(settings: Settings, revision: str) -> frozenset[str]:
    """Digests of the ids of the properties whose labels a model learned, as far as this home knows it.

    revision: the model's exact one. Raises OSError, FormatVersionError, and SettingsError where what the home
    kept of it cannot be read: no label may count for that.
    """
    kept = _kept(settings, revision)
    try:
        return frozenset(read_sealed(kept)["learned"])
    except FileNotFoundError:
        folders = (*_describing_folder(settings), *_trained_folders(settings))
        return next(filter(None, (_said_by(settings, folder, revision) for folder in folders)), frozenset())
    except BrokenSealError as error:
        raise SettingsError(
            f"{kept} is damaged ({error}). It says on whose labels a model was trained whose answers are"
            " published, and without it these labels would count. Put the file back from a backup. Remove it"
            " only if the folder of that model is still there: it says the same."
        ) from error


def keep_learned(settings: Settings, revision: str) -> None:
    """Keep whose labels the describing model learned. Raises OSError, SettingsError."""
    kept = _kept(settings, revision)
    for folder in () if kept.exists() else _describing_folder(settings):
        if learned := _said_by(settings, folder, revision):
            write_sealed(kept, {"learned": sorted(learned)})


def _kept(settings: Settings, revision: str) -> Path:
    return settings.state_directory / "learned" / f"{digest_of(revision)}.json"


def _said_by(settings: Settings, folder: Path, revision: str) -> frozenset[str]:
    """What a folder says of the model of this revision; empty if it is another's."""
    source = ModelSource(str(folder), records=settings.state_directory / "models")
    try:
        is_of_it = (folder / _FILE).exists() and exact_revision(source) == revision
    except ModelLoadError:
        return frozenset()  # Nothing can be described with it.
    return _learned_in(folder) if is_of_it else frozenset()


def _describing_folder(settings: Settings) -> Iterator[Path]:
    if (model := describing_model(settings)) is not None:
        yield Path(model).expanduser()


def _trained_folders(settings: Settings) -> Iterator[Path]:
    """The folders of all models that were trained in this home."""
    for asset in (settings.layout.asset(name) for extension in installed() for name in extension.assets):
        for folders in (asset.published, asset.versions):
            yield from sorted(folders.glob("*"))


def _learned_in(folder: Path) -> frozenset[str]:
    path = folder / _FILE
    return frozenset(path.read_text().split()) if path.is_file() else frozenset()

"""Labels that a model learned in its training, which therefore prove nothing about its other answers.

A file in the model's folder names their properties by HMACs. Their key stands beside them, as in the list of
withdrawn ids, so that a copy of the folder tells them too; a withdrawal takes its properties out. The file
decides no answer, and is no part of the model's exact revision. The home keeps what it says, by the revision,
when the model first describes: its answers may outlive its folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.config.extensions import describing_model, installed
from vlm_assets.config.settings import Settings, SettingsError
from vlm_catalog.withdrawn_ids import WithdrawnIds, keyed_digest, read_withdrawn
from vlm_durable.files.files import TEMPORARY_SUFFIX, make_directory, write_replacing
from vlm_durable.files.lock_files import locked
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, sealed
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.protocol import ModelLoadError

LEARNED_LABELS: Final = "learned-labels.list"
"""The name of the file in a model's folder."""

_FORMAT: Final = 2
"""Format 1 had digests without a key: such a file cannot be read, and so no label counts."""


@dataclass(frozen=True)
class LearnedLabels:
    """The properties whose labels a model learned. digests: HMACs of their ids, by the key in hex.

    withdrawn: of the home that asks. A property that was withdrawn and taken in again counts as learned, for
    its HMAC is gone.
    """

    digests: Mapping[str, frozenset[str]] = field(default_factory=dict, repr=False)
    withdrawn: WithdrawnIds | None = None

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __contains__(self, property_id: object) -> bool:
        if not self or not isinstance(property_id, str):
            return False
        if self.withdrawn is not None and self.withdrawn.was_ever(property_id):
            return True
        return any(_digest(key, property_id) in digests for key, digests in self.digests.items())

    def joined(self, other: LearnedLabels) -> LearnedLabels:
        """What either of two models learned."""
        joined = {key: digests | other.digests.get(key, frozenset()) for key, digests in self.digests.items()}
        return LearnedLabels({**other.digests, **joined}, self.withdrawn or other.withdrawn)

    def without(self, ids: Collection[str]) -> LearnedLabels:
        """The same without these properties. The keys stay: a model that learned labels did so."""
        return replace(
            self,
            digests={
                key: digests.difference(_digest(key, property_id) for property_id in ids)
                for key, digests in self.digests.items()
            },
        )

    def to_bytes(self) -> bytes:
        """The file: sealed JSON."""
        digests = {key: sorted(digests) for key, digests in sorted(self.digests.items())}
        return sealed({"learned": digests}, format_=_FORMAT)

    @classmethod
    def read(cls, path: Path) -> LearnedLabels:
        """Read a file. Raises FileNotFoundError, OSError, FormatVersionError, and SettingsError if it cannot
        be read: it is not taken for an empty one.
        """
        try:
            learned = read_sealed(path, format_=_FORMAT)["learned"]
            if not isinstance(learned, dict):
                raise TypeError("it has digests without a key")
            return cls({key: frozenset(digests) for key, digests in learned.items()})
        except (BrokenSealError, LookupError, TypeError) as error:
            raise SettingsError(
                f"{path} cannot be read: {error}. It says on whose labels a model was trained, and without it"
                " these labels would count. Put the file back from a backup, or train the model again. In"
                " .state/learned you may remove it if the folder of that model is still there: it says the"
                " same."
            ) from error


def write_learned(folder: Path, ids: Iterable[str], base: Path, *, made_of: str) -> None:
    """Write into a model's folder whose labels it learned, and its base model before it.

    made_of: the fingerprint of the training, whose models have the same bytes. Raises OSError, SettingsError.
    """
    # Not by chance: a model that is made again from its last checkpoint is the same, to the bit.
    key = hashlib.sha256(f"learned labels\0{made_of}".encode()).hexdigest()
    digests = frozenset(_digest(key, property_id) for property_id in ids)
    if learned := LearnedLabels({key: digests} if digests else {}).joined(_learned_in(base)):
        (folder / LEARNED_LABELS).write_bytes(learned.to_bytes())


def learned_labels(settings: Settings, revision: str) -> LearnedLabels:
    """The properties whose labels a model learned, as far as this home knows it.

    revision: the model's exact one. Raises OSError, FormatVersionError, CatalogError, and SettingsError where
    what the home kept of it cannot be read: no label may count for that.
    """
    try:
        learned = LearnedLabels.read(_kept(settings, revision))
    except FileNotFoundError:
        folders = (*_describing_folder(settings), *_trained_folders(settings))
        by_folder = (_read_matching_labels(settings, folder, revision) for folder in folders)
        learned = next(filter(None, by_folder), LearnedLabels())
    return replace(learned, withdrawn=read_withdrawn(settings.home)) if learned else learned


def keep_learned(settings: Settings, revision: str) -> None:
    """Keep whose labels the describing model learned. Raises OSError, SettingsError."""
    kept = _kept(settings, revision)
    for folder in () if kept.exists() else _describing_folder(settings):
        # Under the lock it is read and kept: a withdrawal in between would miss what is not kept yet.
        with locked(_lock(settings)):
            if learned := _read_matching_labels(settings, folder, revision):
                make_directory(kept.parent)
                write_replacing(kept, learned.to_bytes())


def forget_kept(settings: Settings, ids: Collection[str]) -> Iterator[str]:
    """Take properties out of all that this home keeps of describing models. Raises OSError, SettingsError."""
    folder = settings.state_directory / "learned"
    with locked(_lock(settings)):
        for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
            leftover.unlink(missing_ok=True)
        changed = [path for path in sorted(folder.glob("*.json")) if forget_learned(path, ids)]
    for path in changed:
        yield f"Removed them from what a model learned in {path}."


def forget_learned(path: Path, ids: Collection[str]) -> bool:
    """Take properties out of such a file; whether it had any. Raises OSError, SettingsError."""
    learned = LearnedLabels.read(path)
    left = learned.without(ids)
    if left != learned:
        write_replacing(path, left.to_bytes())
    return left != learned


def _digest(key: str, property_id: str) -> str:
    return keyed_digest(bytes.fromhex(key), property_id)


def _kept(settings: Settings, revision: str) -> Path:
    return settings.state_directory / "learned" / f"{digest_of(revision)}.json"


def _lock(settings: Settings) -> Path:
    return settings.state_directory / "learned.lock"


def _read_matching_labels(settings: Settings, folder: Path, revision: str) -> LearnedLabels:
    """The labels in a model's folder; empty where the folder holds another revision of a model."""
    source = ModelSource(str(folder), records=settings.state_directory / "models")
    try:
        matches = (folder / LEARNED_LABELS).exists() and exact_revision(source) == revision
    except ModelLoadError:
        return LearnedLabels()  # Nothing can be described with it.
    return _learned_in(folder) if matches else LearnedLabels()


def _describing_folder(settings: Settings) -> Iterator[Path]:
    if (model := describing_model(settings)) is not None:
        yield Path(model).expanduser()


def _trained_folders(settings: Settings) -> Iterator[Path]:
    """The folders of all models that were trained in this home."""
    for asset in (settings.layout.asset(name) for extension in installed() for name in extension.assets):
        for folders in (asset.published, asset.versions):
            yield from sorted(folders.glob("*"))


def _learned_in(folder: Path) -> LearnedLabels:
    path = folder / LEARNED_LABELS
    return LearnedLabels.read(path) if path.is_file() else LearnedLabels()

"""Which model, and exactly which files of it: this stands in a row's provenance and decides its meaning.

This module holds a model's source, the digest of its folder or the commit of its hub repository, and the list
of its files that are loaded. ``transformers/model_loading.py`` loads them. Nothing here needs torch.

A folder's own files can point elsewhere: an index of shards names files, a configuration may name another
file of weights, an adapter names the model that it changes. transformers follows them all, and reads files
that do not end in ``.safetensors`` with ``torch.load``. Here every loaded file lies in the folder, is
safetensors or text, and is in the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vlm_durable.files.files import make_directory, sha256_of, write_new
from vlm_durable.files.sealed_json import BrokenSealError, read_sealed, sealed
from vlm_durable.files.seen_files import SeenFiles, signature_of
from vlm_engine.protocol import ModelLoadError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
MODULES = "modules.json"
"""The modules through which sentence-transformers passes a text, in order, each with a folder of its own."""

_DECIDING_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"})
"""Endings of the files of a model folder that decide its answers: weights, settings, tokenizer, code."""
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ABOUT_A_PIN = "Truth: the commit that this home's work was done with. Remove it to ask the hub again."

SMALL_BYTES = 16 << 20
"""Smaller files are hashed each time: that costs less than a note of their digest."""
_TRUSTED_SECONDS = 86_400.0
_DIGEST = "sha256"


NO_EMBEDDER = (
    "No embedding model is named, so nothing is embedded, and a search goes by words alone: set"
    " VLM_ASSETS_EMBEDDING_MODEL to the folder or hub id of a text embedder, such as BAAI/bge-small-en-v1.5."
)
"""For people, where only descriptions can be made."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a local folder, or a hub id with a revision (commit, tag or branch).

    An empty name stands for no choice: a server at an address may know its model, everything else refuses it.

    records: folder of notes: digests of a local folder's large files, and the commit of a hub's branch when
    this home first used it.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    records: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The model's folder, where it is local."""
        path = Path(self.name).expanduser()
        return path if self.name and path.is_dir() else None

    @property
    def label(self) -> str:
        """The model's name in rows: its hub id, or its folder's name. No path, for folders move."""
        return self.name if self.folder is None else self.folder.absolute().name

    @property
    def location(self) -> str:
        """The argument of ``from_pretrained``."""
        return str(self.folder or self.name)


def exact_revision(source: ModelSource) -> str:
    """The exact version of this source: ``sha256:…`` over a folder's files, or the hub's commit.

    Needs no torch. The hub is asked for a branch's commit; where it cannot be reached, the local cache knows
    the commit. With ``records`` the first commit stays. Raises ModelLoadError where the commit is not known.
    """
    if not source.name:
        raise ModelLoadError("no model is chosen: set VLM_ASSETS_MODEL to a model's folder or hub id")
    if source.folder is not None:
        return _folder_digest(source.folder, source.records)
    if source.records is None:
        return _hub_commit(source.name, source.revision)
    return pinned_commit(source.name, source.revision, source.records, _hub_commit)


def noted_revision(source: ModelSource) -> str | None:
    """The exact version, where small files and the notes of earlier runs say it; None where they do not.

    It hashes no large file and asks no hub, so that what must start fast can ask it. Raises ModelLoadError.
    """
    if not source.name or source.records is None:
        return None
    if (folder := source.folder) is not None:
        is_noted = all(_is_small_or_noted(path, source.records) for path in deciding_files(folder))
        return _folder_digest(folder, source.records) if is_noted else None
    is_commit = source.revision is not None and _COMMIT.fullmatch(source.revision)
    if not is_commit and not _pin(source.name, source.revision or "main", source.records).exists():
        return None
    return pinned_commit(source.name, source.revision, source.records, _hub_commit)


def _folder_digest(folder: Path, records: Path | None) -> str:
    digest = hashlib.sha256()
    for path in deciding_files(folder):
        digest.update(f"{path.relative_to(folder)}\0{file_digest(path, records)}\n".encode())
    return f"sha256:{digest.hexdigest()}"


@cache
def _hub_commit(name: str, revision: str | None) -> str:
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        commit = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=20).sha
        if commit:
            return str(commit)
        reason: Exception | str = "the hub names no commit"
    except (RepositoryNotFoundError, ValueError) as error:
        raise ModelLoadError(
            f"model {name}: neither a folder here nor a model on the hub; give a folder's path or "
            f"owner/name ({error})"
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, OSError) as error:
        reason = error
    cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached).parent.name
    raise ModelLoadError(
        f"model {name}: the hub cannot be reached and no copy of revision {revision or 'main'} is cached "
        f"here; download it once with `.venv/bin/hf download {name}`, or give a local folder ({reason})"
    )


def deciding_files(folder: Path) -> list[Path]:
    """The files of a model's folder that decide its answers, in a fixed order. Raises ModelLoadError."""
    refuse_other_files(str(folder), lambda name: read_object(folder, name))
    modules = (folder / part["path"] for part in embedding_modules(folder) or ())
    paths: list[Path] = []
    for part in dict.fromkeys((folder, *modules)):
        paths += [path for path in part.glob("*") if path.suffix in _DECIDING_SUFFIXES]
        paths += part.glob(_MORE_TEMPLATES)
    return sorted(path for path in paths if path.is_file())


def refuse_other_files(model: str, read: Callable[[str], Mapping[str, Any] | None]) -> None:
    """Refuse a model whose files name weights outside its folder, or in a format that can run code.

    read: the content of a JSON file of the model by its name; None where it has no such file. Raises
    ModelLoadError.
    """
    if read(ADAPTER) is not None:
        raise ModelLoadError(
            f"model {model}: it is an adapter ({ADAPTER}), which loads another model's weights. Merge it into"
            " that model, save the result, and give its folder."
        )
    index, chosen = INDEX, (read(CONFIG) or {}).get("transformers_weights")
    if chosen is not None:
        _refuse_unless_plain(model, CONFIG, chosen, (".safetensors", ".safetensors.index.json"))
        index = str(chosen)
    shards = (read(index) or {}).get("weight_map", {}) if index.endswith(".index.json") else {}
    for shard in shards.values():
        _refuse_unless_plain(model, index, shard, (".safetensors",))


def _refuse_unless_plain(model: str, named_in: str, name: object, endings: tuple[str, ...]) -> None:
    if not isinstance(name, str) or not name.endswith(endings) or "/" in name or "\\" in name:
        raise ModelLoadError(
            f"model {model}: {named_in} names the weights {name!r}. Only safetensors files that lie directly"
            " in the model's folder are loaded. Save the model again with save_pretrained, or download it"
            " again."
        )


def embedding_modules(folder: Path) -> list[dict[str, str]] | None:
    """``type`` and ``path`` of each module of a text embedder; None where its files name no modules.

    Every path is a folder inside the model's. Raises ModelLoadError.
    """
    content = _read(folder, MODULES)
    if content is None:
        return None
    modules = []
    for part in content if isinstance(content, list) else [None]:
        kind, path = (part.get("type"), part.get("path", "")) if isinstance(part, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelLoadError(f"model {folder}: {MODULES} is not a list of modules with type and path")
        # Links to files are followed: the hub's cache is made of them, and their content is in the digest.
        if "\\" in path or not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ModelLoadError(
                f"model {folder}: {MODULES} names the folder {path!r}, which is not in the model's own"
                " folder. Copy the whole model into one folder, or download it again."
            )
        modules.append({"type": kind, "path": path})
    return modules


def read_object(folder: Path, name: str) -> Mapping[str, Any] | None:
    """The content of a JSON file of a model's folder; None where there is none. Raises ModelLoadError."""
    content = _read(folder, name)
    if content is not None and not isinstance(content, dict):
        raise ModelLoadError(f"model {folder}: {name} is not a JSON object")
    return content


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {folder}: {name} cannot be read: {error}") from error


def pinned_commit(
    name: str, revision: str | None, records: Path, ask: Callable[[str, str | None], str]
) -> str:
    """The commit of a hub's branch or tag, as of its first use here; a commit stays as it is.

    records: the home's folder of such notes. ask: asks the hub. Raises ModelLoadError, OSError.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    branch = revision or "main"
    note = _pin(name, branch, records)
    if not note.exists():
        content = {"about": _ABOUT_A_PIN, "model": name, "revision": branch, "commit": ask(name, revision)}
        make_directory(records)
        # Where another run was first, its note counts for all.
        with contextlib.suppress(FileExistsError):
            write_new(note, sealed(content))
    try:
        return str(read_sealed(note)["commit"])
    except (BrokenSealError, KeyError) as error:
        raise ModelLoadError(
            f"model {name}: {note}, which says which commit of {branch} this home works with, cannot be read"
            f" ({error}). Any row of a published partition names it as model_revision: name the"
            f" model {name}@COMMIT in the settings, with that commit; or remove the file to take what the hub"
            " has now."
        ) from error


def _pin(name: str, branch: str, records: Path) -> Path:
    """The note of a branch's commit."""
    return records / f"pin-{hashlib.sha256(f'{name}@{branch}'.encode()).hexdigest()[:32]}.json"


def file_digest(path: Path, kept_in: Path | None = None) -> str:
    """SHA-256 of a file's bytes, in hex. kept_in: folder of remembered digests. Raises OSError."""
    return _digest(path.absolute(), signature_of(path.stat()), kept_in)


def _is_small_or_noted(path: Path, kept_in: Path) -> bool:
    """Whether ``file_digest`` does not hash a large file."""
    file = path.stat()
    return (
        file.st_size < SMALL_BYTES or _noted(path, kept_in).outcome(_DIGEST, signature_of(file)) is not None
    )


@cache
def _digest(path: Path, signature: str, kept_in: Path | None) -> str:
    if kept_in is None or path.stat().st_size < SMALL_BYTES:
        return sha256_of(path)
    seen = _noted(path, kept_in)
    digest = seen.outcome(_DIGEST, signature)
    if digest is None:
        digest = sha256_of(path)
        seen.keep(_DIGEST, signature, digest, path.stat())
        seen.save()
    return digest


def _noted(path: Path, kept_in: Path) -> SeenFiles:
    """The note of one file: several processes hash different ones at once."""
    note = kept_in / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]}.json"
    return SeenFiles(note, trusted_seconds=_TRUSTED_SECONDS)

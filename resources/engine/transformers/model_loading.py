"""Loading models: which model, exactly which files, and its parts through transformers' Auto classes.

What lives here: the model's name and revision, the digest that stands in a row's provenance, and the errors
of loading as sentences. What does not: generating (transformers_engine.py), embedding (embedder.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from resources.engine.file_digests import file_digest
from resources.engine.hub_pins import pinned_commit
from resources.engine.model_files import deciding_files, refuse_other_files
from resources.engine.protocol import ModelLoadError
from resources.engine.transformers.attention import avoid_attention_with_plans

_INSTALL_TORCHVISION = ".venv/bin/pip install -c constraints.txt -e '.[torchvision]'"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a local folder, or a hub id with a revision (commit, tag or branch).

    An empty name stands for no choice: a server at an address may know its model, everything else refuses it.

    records: folder that remembers what it is: digests of a local folder's large files, and the commit that a
    hub's branch stood for when this home first used it.
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
        """What ``from_pretrained`` takes."""
        return str(self.folder or self.name)


def exact_revision(source: ModelSource) -> str:
    """What exactly this source names now: ``sha256:…`` over a folder's files, or the hub's commit.

    Needs no torch. A hub branch is asked for online and, where the hub cannot be reached, taken from the
    local cache; with ``records`` it stays what it was at first. Raises ModelLoadError where nobody knows it.
    """
    if not source.name:
        raise ModelLoadError(
            "no model is chosen: set VLM_ASSETS_MODEL to a model's folder or hub id; with a server at an"
            " address, VLM_ASSETS_EMBEDDING_MODEL too"
        )
    if source.folder is not None:
        return _folder_digest(source.folder, source.records)
    if source.records is None:
        return _hub_commit(source.name, source.revision)
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


def load_processor(source: ModelSource) -> Any:
    """The processor (tokenizer, image processor, chat template) of a vision-language model.

    Images are resized by the PIL processor where the model has one, whether torchvision is installed or not:
    the two round differently, and the same folder should answer alike on every machine.
    """
    with _loading(source, "processor") as arguments:
        from transformers import AutoImageProcessor, AutoProcessor
        from transformers.utils import is_torchvision_available

        processor = AutoProcessor.from_pretrained(source.location, **arguments)
        if is_torchvision_available() and hasattr(processor, "image_processor"):
            processor.image_processor = AutoImageProcessor.from_pretrained(
                source.location, backend="pil", **arguments
            )
    for part in ("tokenizer", "image_processor"):
        if not hasattr(processor, part):
            raise ModelLoadError(
                f"model {source.name}: its processor has no {part}, so it cannot look at images"
            )
    if not getattr(processor, "chat_template", None):
        raise ModelLoadError(
            f"model {source.name}: it has no chat template, so nobody knows how to ask it; "
            "use the instruction-tuned variant, or add a chat_template.jinja to its folder"
        )
    return processor


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer of any model."""
    with _loading(source, "tokenizer") as arguments:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source.location, **arguments)


def load_config(source: ModelSource) -> Any:
    """The configuration of any model."""
    with _loading(source, "configuration") as arguments:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(source.location, **arguments)


def load_model(source: ModelSource, auto_class: Any, *, device: str) -> Any:
    """The weights, in evaluation mode on ``device``: float32 on a CPU, bfloat16 on a GPU.

    Only safetensors files of the model's own folder or repository (see ``model_files``). Raises
    ModelLoadError, also where the files lack weights that the architecture has: transformers would fill them
    with noise.
    """
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if device != "cpu":
        avoid_attention_with_plans()
    with _loading(source, "weights") as arguments, _nothing_unpickled():
        refuse_other_files(source.name, lambda name: _json_file(source, name, arguments))
        model, report = auto_class.from_pretrained(
            source.location, use_safetensors=True, dtype=dtype, output_loading_info=True, **arguments
        )
        lacking = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
        if lacking:
            raise ModelLoadError(
                f"model {source.name}: its files lack {len(lacking)} of the weights of "
                f"{type(model).__name__}, first {', '.join(lacking[:3])}; they are incomplete or another's"
            )
        return model.eval().to(device)


def _json_file(source: ModelSource, name: str, arguments: dict[str, Any]) -> Any:
    """The content of a model's JSON file, from its folder or from the hub; None where it has none."""
    from transformers.utils import cached_file

    where = {key: value for key, value in arguments.items() if key != "trust_remote_code"}
    found = cached_file(source.location, name, _raise_exceptions_for_missing_entries=False, **where)
    return None if found is None else json.loads(Path(found).read_bytes())


@contextmanager
def _nothing_unpickled() -> Iterator[None]:
    """Refuse ``torch.load`` meanwhile, whichever part of transformers comes to it: a pickle can run code."""
    import torch

    def refuse(*_: object, **__: object) -> None:
        raise ModelLoadError("weights that are not in the safetensors format are not loaded")

    allowed = torch.load
    torch.load = refuse
    try:
        yield
    finally:
        torch.load = allowed


@contextmanager
def _loading(source: ModelSource, part: str) -> Iterator[dict[str, Any]]:
    """The arguments for ``from_pretrained``; what it raises becomes a ModelLoadError."""
    import transformers

    arguments: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if source.folder is not None:
        arguments["local_files_only"] = True
    else:
        arguments["revision"] = exact_revision(source)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield arguments
    except (ModelLoadError, MemoryError):
        raise
    except Exception as error:  # transformers raises nearly anything here; the sentence is what helps
        raise ModelLoadError(_sentence(source, part, error)) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def _sentence(source: ModelSource, part: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    start = f"model {source.name}: its {part} cannot be loaded"
    if "torchvision" in " ".join(_chain(error)).lower():
        return f"{start}{_torchvision_sentence(said)}"
    if "trust_remote_code" in said:
        return (
            f"{start} without running Python code that comes with the model; read that code, and if you want "
            "it, set VLM_ASSETS_TRUST_REMOTE_CODE=true"
        )
    return f"{start}: {type(error).__name__}: {said[:500]}"


def _torchvision_sentence(said: str) -> str:
    try:
        there = version("torchvision")
    except PackageNotFoundError:
        return f" without torchvision; install it with `{_INSTALL_TORCHVISION}`"
    return (
        f"; torchvision {there} may not fit torch {version('torch')}: take it out with "
        f"`.venv/bin/pip uninstall torchvision`, and install what fits with `{_INSTALL_TORCHVISION}`"
        f" ({said[:300]})"
    )


def _chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__

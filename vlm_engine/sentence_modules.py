"""The files of a text embedder: its modules, pooling, prompt and width, and which files are refused.

This module reads and judges the layout of sentence-transformers, without importing it;
``transformers/model_loading.py`` loads the model. A folder may name any class to import and any file of
weights, so only the modules below are accepted, each with safetensors of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_engine.model_source import (
    CONFIG,
    MODULES,
    ModelSource,
    embedding_modules,
    exact_revision,
    read_object,
    refuse_other_files,
)
from vlm_engine.protocol import ModelLoadError

_KINDS = {
    **{
        f"sentence_transformers.models.{kind}": kind
        for kind in ("Transformer", "Pooling", "Dense", "Normalize")
    },
    "sentence_transformers.base.modules.transformer.Transformer": "Transformer",
    "sentence_transformers.base.modules.dense.Dense": "Dense",
    "sentence_transformers.base.modules.normalize.Normalize": "Normalize",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling": "Pooling",
}
"""The classes that modules.json may name: those of the library that make a vector of a text."""

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATION = re.compile(r"torch\.nn\.modules\.(activation\.[A-Z]\w*|linear\.Identity)")

_TRANSFORMER_CONFIGS = "sentence_*config.json"
_TRANSFORMER_KEYS = frozenset(
    {
        "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
        "processing_kwargs", "unpad_inputs", "query_length", "document_length",
    }
)  # fmt: skip
_ARGUMENTS = frozenset(
    {"model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"}
)
_PLAIN_ARGUMENTS = frozenset(
    {"dtype", "torch_dtype", "padding_side", "model_max_length", "trust_remote_code"}
)
_LAST_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}

_SETTINGS = "config_sentence_transformers.json"
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")

_WITHOUT_WEIGHTS = ["*.json"]
_WITH_WEIGHTS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]


@dataclass(frozen=True)
class SentenceModules:
    """Decides a vector, beside the weights. width: count of its numbers. prompt: stands before each text."""

    width: int
    prompt: str


def model_files(source: ModelSource, *, weights: bool) -> Path:
    """The folder of a model's files; those of a hub's model are downloaded. Raises ModelLoadError."""
    if source.folder is not None:
        return source.folder
    commit = exact_revision(source)
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            source.name,
            revision=commit,
            allow_patterns=_WITH_WEIGHTS if weights else _WITHOUT_WEIGHTS,
            ignore_patterns=["onnx/*", "openvino/*"],
        )
    except Exception as error:  # The hub's client raises nearly anything.
        raise ModelLoadError(
            f"model {source.name}: its files at {commit} cannot be downloaded and are not cached here;"
            f" download them once with `.venv/bin/hf download {source.name}`, or give a folder ({error})"
        ) from error
    return Path(folder)


def read_modules(source: ModelSource, folder: Path) -> SentenceModules:
    """Judge the files of a text embedder. Raises ModelLoadError, which names what is refused."""
    model = source.name
    modules = embedding_modules(folder)
    if modules is None:
        raise ModelLoadError(
            f"model {model}: its files do not say how its tokens become one vector (it has no {MODULES})."
            " Set VLM_ASSETS_EMBEDDING_MODEL to a model in the layout of sentence-transformers."
        )
    kinds = [_kind(model, part["type"]) for part in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Dense", "Normalize"}:
        raise ModelLoadError(
            f"model {model}: {MODULES} names {', '.join(kinds) or 'nothing'}. A Transformer, then a Pooling,"
            " then Dense and Normalize can be loaded."
        )
    width = 0
    for kind, part in zip(kinds, modules, strict=True):
        module_folder = folder / part["path"]
        if kind == "Transformer":
            _refuse_odd_transformer(model, module_folder)
        elif kind == "Pooling":
            width = _pooling_width(model, module_folder)
        elif kind == "Dense":
            width = _dense_width(model, module_folder)
        else:
            _refuse_token_outputs(model, module_folder)
    settings = read_object(folder, _SETTINGS) or {}
    if settings.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise ModelLoadError(f"model {model}: it is a {settings['model_type']}, which embeds no texts")
    shortened = settings.get("truncate_dim")
    return SentenceModules(
        width=width if shortened is None else min(width, int(shortened)), prompt=_prompt(settings)
    )


def _kind(model: str, named: str) -> str:
    if named not in _KINDS:
        raise ModelLoadError(
            f"model {model}: {MODULES} names the class {named!r}, which is not imported. Only Transformer,"
            " Pooling, Dense and Normalize of sentence-transformers are; choose another embedding model."
        )
    return _KINDS[named]


def _refuse_odd_transformer(model: str, folder: Path) -> None:
    refuse_other_files(model, lambda name: read_object(folder, name))
    if read_object(folder, CONFIG) is None:
        raise ModelLoadError(f"model {model}: it has no {CONFIG} in {folder.name}")
    _refuse_without_safetensors(model, folder)
    for path in folder.glob(_TRANSFORMER_CONFIGS):
        for option in _odd_options(read_object(folder, path.name) or {}):
            raise ModelLoadError(
                f"model {model}: {path.name} says {option}, which is not followed: it may load other files or"
                " read other states than those of the last layer. Take it out of the file if it does not"
                " matter, or choose another embedding model."
            )


def _odd_options(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if value is None:
            continue
        if key in _ARGUMENTS:
            odd = set(value) - _PLAIN_ARGUMENTS if isinstance(value, dict) else {key}
            yield from (f"{key}.{name}" for name in sorted(odd))
        elif key not in _TRANSFORMER_KEYS:
            yield key
    if options.get("transformer_task") not in (None, "feature-extraction"):
        yield f"transformer_task {options['transformer_task']!r}"
    for kind, outputs in (options.get("modality_config") or {}).items():
        # A message is a text in the model's own chat template.
        if kind not in ("text", "message") or {**outputs, "format": None} != {**_LAST_STATES, "format": None}:
            yield f"modality_config {kind}: {outputs!r}"
    if options.get("module_output_name") not in (None, "token_embeddings"):
        yield f"module_output_name {options['module_output_name']!r}"


def _refuse_without_safetensors(model: str, folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
        raise ModelLoadError(
            f"model {model}: it has no weights in the safetensors format in {folder.name}"
            f" ({', '.join(others) or 'nor any others'}), and others are not loaded, for they can run code."
            " Save it again with save_pretrained, or take a revision that has them."
        )


def _pooling_width(model: str, folder: Path) -> int:
    options = read_object(folder, CONFIG) or {}
    named = options.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else list(named or ())
    if named is None:
        chosen = [mode for key, mode in _POOLINGS.items() if options.get(key)]
    if not chosen or set(chosen) - set(_POOLINGS.values()):
        raise ModelLoadError(
            f"model {model}: {folder.name}/{CONFIG} does not say a known pooling"
            f" ({', '.join(map(str, chosen)) or 'none'}). Download the model again, or choose another."
        )
    states = options.get("embedding_dimension", options.get("word_embedding_dimension"))
    return len(chosen) * _a_width(model, folder, states)


def _dense_width(model: str, folder: Path) -> int:
    options = read_object(folder, CONFIG) or {}
    activation = options.get("activation_function")
    if not isinstance(activation, str) or not _ACTIVATION.fullmatch(activation):
        raise ModelLoadError(
            f"model {model}: {folder.name}/{CONFIG} names the activation {activation!r}, which is not"
            " imported. Only those of torch.nn are; choose another embedding model."
        )
    if not (folder / "model.safetensors").is_file():
        _refuse_without_safetensors(model, folder)
        raise ModelLoadError(f"model {model}: it has no {folder.name}/model.safetensors")
    _refuse_token_outputs(model, folder)
    return _a_width(model, folder, options.get("out_features"))


def _refuse_token_outputs(model: str, folder: Path) -> None:
    """Refuse a module that reads or changes anything but the vector of the text."""
    options = read_object(folder, CONFIG) or {}
    for key in ("module_input_name", "module_output_name"):
        if options.get(key, "sentence_embedding") != "sentence_embedding":
            raise ModelLoadError(
                f"model {model}: {folder.name}/{CONFIG} says {key} {options[key]!r}, and only the vector of a"
                " whole text is kept; choose another embedding model."
            )


def _a_width(model: str, folder: Path, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"model {model}: {folder.name}/{CONFIG} does not say how wide its vectors are")
    return value


def _prompt(settings: Mapping[str, Any]) -> str:
    """The prompt before each document: the model's prompt for documents, else its default, else none."""
    prompts = settings.get("prompts") or {}
    names = [*_DOCUMENT_PROMPTS, settings.get("default_prompt_name")]
    return next((str(prompts[name]) for name in names if prompts.get(name) is not None), "")

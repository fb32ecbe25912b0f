"""Which files of a model are loaded: all lie in its folder, are safetensors or text, and are in its digest.

A folder's own files can point elsewhere: an index of shards names files, a configuration may name another
file of weights, an adapter names the model that it changes. transformers follows them all. What does not end
in ``.safetensors`` it reads with ``torch.load``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resources.engine.protocol import ModelLoadError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"

_DECIDING_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"})
"""Endings of the files of a model folder that decide what it answers: weights, settings, tokenizer, code."""
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def deciding_files(folder: Path) -> list[Path]:
    """The files of a model's folder that decide what it answers, in a fixed order. Raises ModelLoadError."""
    refuse_other_files(str(folder), lambda name: _read(folder, name))
    own = [path for path in folder.iterdir() if path.suffix in _DECIDING_SUFFIXES]
    return sorted(path for path in (*own, *folder.glob(_MORE_TEMPLATES)) if path.is_file())


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


def _read(folder: Path, name: str) -> Mapping[str, Any] | None:
    try:
        content = json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {folder}: {name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"model {folder}: {name} is not a JSON object")
    return content

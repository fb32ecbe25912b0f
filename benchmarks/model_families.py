"""Families of vision-language models: shipped processors, and configurations of any width for random weights.

What lives here: what a family's repository has beside its weights, and saving that as a folder. The
processors' configurations are in ``shipped_processors``, whose README says where each value comes from. The
tests of all families and the benchmarks use it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

CONFIGURATIONS: Final = Path(__file__).parent / "shipped_processors"


@dataclass(frozen=True)
class Family:
    """One family. special: the tokenizer's tokens by name. ids: which of them the model's config names.

    image: what stands for an image in the chat template. vision, text, more: what all sizes of the family
    have in common in the model's configuration.
    """

    model: str
    context: int
    image: str
    special: Mapping[str, str]
    ids: Mapping[str, str]
    vision: Mapping[str, Any]
    text: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self, tokenizer: Any, *, vision: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
        """The model's configuration with the widths of ``vision`` and ``text``. tokenizer: see ``named``."""
        import transformers

        return getattr(transformers, f"{self.model}Config")(
            vision_config={**self.vision, **vision},
            text_config={"max_position_embeddings": self.context, **self.text, **text},
            **{
                name: tokenizer.convert_tokens_to_ids(self.special[token]) for name, token in self.ids.items()
            },
            **self.more,
        )

    def named(self, tokenizer: Any, **tokens: str) -> Any:
        """The tokenizer with the family's special tokens added. tokens: ``pad_token`` and ``eos_token``."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer),
            extra_special_tokens=dict(self.special),
            clean_up_tokenization_spaces=False,
            **tokens,
        )


_ROWS = {f"row_{row}_{column}": f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)}
_TILED = {"image_token": "<image>", "fake": "<fake_token_around_image>", "whole": "<global-img>", **_ROWS}
_QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
_QWEN_IDS = {name.replace("_token", "_token_id"): name for name in _QWEN}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

FAMILIES: Final = {
    "smolvlm2": Family(
        "SmolVLM", 8192, "<image>", _TILED, {"image_token_id": "image_token"},
        {"image_size": 384, "patch_size": 14}, {"model_type": "llama"}, {"scale_factor": 3},
    ),
    "idefics3": Family(
        "Idefics3", 131_072, "<image>", _TILED, {"image_token_id": "image_token"},
        {"image_size": 364, "patch_size": 14}, {"model_type": "llama"}, {"scale_factor": 2},
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VL", 128_000, _QWEN_IMAGE, _QWEN, _QWEN_IDS, {"patch_size": 14, "window_size": 112},
    ),
    "qwen3-vl": Family(
        "Qwen3VL", 262_144, _QWEN_IMAGE, _QWEN, _QWEN_IDS,
        {"patch_size": 16, "num_position_embeddings": 2304},
    ),
    "gemma3": Family(
        "Gemma3", 131_072, "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {"boi_token_index": "boi_token", "eoi_token_index": "eoi_token", "image_token_id": "image_token"},
        {"image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model"}, {},
        {"mm_tokens_per_image": 256},
    ),
    "llava-onevision": Family(
        "LlavaOnevision", 32_768, "<image>\n", {"image_token": "<image>", "video_token": "<video>"},
        {"image_token_id": "image_token", "video_token_id": "video_token"},
        {"image_size": 384, "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"model_type": "qwen2"},
    ),
    "internvl3": Family(
        "InternVL", 32_768, "<IMG_CONTEXT>\n",
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        {"image_token_id": "context_image_token"}, {"image_size": [448, 448], "patch_size": [14, 14]},
        {"model_type": "qwen2"},
    ),
}  # fmt: skip


def save_processor(name: str, folder: Path, tokenizer: Any) -> None:
    """Save the shipped processor of a family with this tokenizer. tokenizer: see ``Family.named``."""
    tokenizer.save_pretrained(folder)
    shutil.copytree(CONFIGURATIONS / name, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}"
        + json.dumps(FAMILIES[name].image).join(("{{ ", " }}"))
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

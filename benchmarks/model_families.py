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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

CONFIGURATIONS: Final = Path(__file__).parent / "shipped_processors"


@dataclass(frozen=True)
class Family:
    """One family. special: the tokenizer's tokens by name. ids: which tokens the model's config names.

    image: what stands for an image in the chat template. vision, text, more: what all sizes of the family
    have in common in the model's configuration. needs_torchvision: its processor has no other way.
    """

    model: str
    context: int
    image: str
    special: Mapping[str, str]
    ids: Mapping[str, str]
    vision: Mapping[str, Any]
    text: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    needs_torchvision: bool = False

    def is_here(self) -> bool:
        """Whether the installed packages have the family: its model, and what its processor needs."""
        import transformers

        has_model = hasattr(transformers, f"{self.model}ForConditionalGeneration")
        return has_model and not (self.needs_torchvision and find_spec("torchvision") is None)

    def config(self, tokenizer: Any, *, vision: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
        """The model's configuration with the widths of ``vision`` and ``text``. tokenizer: see ``named``."""
        import transformers

        return getattr(transformers, f"{self.model}Config")(
            vision_config={**self.vision, **vision},
            text_config={"max_position_embeddings": self.context, **self.text, **text},
            **{
                name: tokenizer.convert_tokens_to_ids(self.special.get(token, token))
                for name, token in self.ids.items()
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
_INTERNVL = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
_MINICPM = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
_LFM_ROWS = {
    f"row_{row}_{column}": f"<|img_row_{row}_col_{column}|>"
    for row in range(1, 11)
    for column in range(1, 11)
}

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
        "InternVL", 32_768, "<IMG_CONTEXT>\n", _INTERNVL, {"image_token_id": "context_image_token"},
        {"image_size": [448, 448], "patch_size": [14, 14]}, {"model_type": "qwen2"},
    ),
    "internvl3.5": Family(
        "InternVL", 40_960, "<IMG_CONTEXT>\n", _INTERNVL, {"image_token_id": "context_image_token"},
        {"image_size": [448, 448], "patch_size": [14, 14]}, {"model_type": "qwen3"},
    ),
    "qwen3.5": Family(
        "Qwen3_5", 262_144, _QWEN_IMAGE, _QWEN, _QWEN_IDS,
        {"patch_size": 16, "num_position_embeddings": 2304},
    ),
    "glm4.6v": Family(
        "Glm46V", 131_072, "<|begin_of_image|><|image|><|end_of_image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>", "image_start": "<|begin_of_image|>",
         "image_end": "<|end_of_image|>", "video_start": "<|begin_of_video|>",
         "video_end": "<|end_of_video|>"},
        {"image_token_id": "image_token", "video_token_id": "video_token",
         "image_start_token_id": "image_start", "image_end_token_id": "image_end",
         "video_start_token_id": "video_start", "video_end_token_id": "video_end"},
        {"image_size": 336, "patch_size": 14},
    ),
    "minicpm-v4.6": Family(
        "MiniCPMV4_6", 262_144, "<|image_pad|>", _MINICPM,
        {"image_token_id": "image_token", "video_token_id": "video_token"},
        {"image_size": 980, "patch_size": 14}, {"model_type": "qwen3_5_text"},
    ),
    "minicpm-v4.7": Family(
        "MiniCPMV4_7", 262_144, "<|image_pad|>", _MINICPM,
        {"image_token_id": "image_token", "video_token_id": "video_token",
         "image_start_id": "image_start_token", "image_end_id": "image_end_token",
         "slice_start_id": "slice_start_token", "slice_end_id": "slice_end_token", "newline_id": "Ċ"},
        {"image_size": 980, "patch_size": 14}, {"model_type": "qwen3_5_text"},
    ),
    "gemma4": Family(
        "Gemma4", 131_072, "<|image|>",
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
         "video_token": "<|video|>", "audio_token": "<|audio|>", "boa_token": "<|audio>",
         "eoa_token": "<audio|>"},
        {"image_token_id": "image_token", "boi_token_id": "boi_token", "eoi_token_id": "eoi_token",
         "video_token_id": "video_token"},
        {"patch_size": 16, "pooling_kernel_size": 3},
    ),
    "lfm2-vl": Family(
        "Lfm2Vl", 128_000, "<image>",
        {"image_token": "<image>", "image_start_token": "<|image_start|>",
         "image_end_token": "<|image_end|>", "image_thumbnail_token": "<|img_thumbnail|>", **_LFM_ROWS},
        {"image_token_id": "image_token"}, {"patch_size": 16, "num_patches": 256},
        {"model_type": "lfm2"}, {"downsample_factor": 2}, needs_torchvision=True,
    ),
    "molmo2": Family(
        "Molmo2", 36_864, "<|image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>", **{name: f"<{name}>" for name in (
            "im_patch", "im_col", "im_start", "low_res_im_start", "frame_start", "im_end", "frame_end",
            "im_low",
        )}},
        {"image_patch_id": "im_patch", "image_start_token_id": "im_start", "image_end_token_id": "im_end",
         "low_res_image_start_token_id": "low_res_im_start", "frame_start_token_id": "frame_start",
         "frame_end_token_id": "frame_end"},
        {"patch_size": 14, "image_size": [378, 378]}, needs_torchvision=True,
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

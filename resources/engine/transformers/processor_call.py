"""One call of a model's processor: chat template, image processor and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PIXEL_MASK: Final = "pixel_attention_mask"
"""Marks of each pixel of each tile [properties, tiles, height, width] (Idefics, SmolVLM), of which processors
make integers of 64 bits: more than the pixels themselves. Where none is given the models make booleans."""


def processed(
    processor: Any, prompt: str, images: Sequence[Sequence[npt.NDArray[np.uint8] | Image.Image]]
) -> Any:
    """A BatchFeature for the images of each property, prompts padded on the left."""
    conversations = []
    for shown in images:
        # As PIL images they need no guessing of which axis holds the channels.
        content: list[dict[str, Any]] = [
            {"type": "image", "image": one if isinstance(one, Image.Image) else Image.fromarray(one)}
            for one in shown
        ]
        content.append({"type": "text", "text": prompt})
        conversations.append([{"role": "user", "content": content}])
    tensors = processor.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    mask = tensors.get(_PIXEL_MASK)
    if mask is not None and mask.dim() == 4:
        tensors[_PIXEL_MASK] = mask.bool()
    return tensors

"""Which attention a model on a GPU computes with: flash attention where it is there, else PyTorch's own.

What lives here: that choice. What does not: decoding with a cache of fixed size, which needs masks that flash
attention does not take, and so keeps what transformers chose. Term: attn_implementation.
"""

from __future__ import annotations

import logging
from typing import Any, Final

_FLASH: Final = "flash_attention_2"
_log = logging.getLogger(__name__)


def prefer_flash_attention(model: Any) -> None:
    """Have a model use the package flash-attn where that is installed, and can stand for what it uses now.

    It needs 16 bits, and knows no mask but a causal one: a family that makes masks of its own (Gemma3's
    images look both ways) would answer otherwise. Nothing is downloaded.
    """
    import torch
    from transformers.utils import is_flash_attn_2_available

    fits = model.dtype in (torch.float16, torch.bfloat16) and getattr(model, "_supports_flash_attn", False)
    if not fits or hasattr(type(model), "create_masks_for_generate") or not is_flash_attn_2_available():
        return
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(_FLASH)
    except (ImportError, ValueError) as error:
        _log.info("The model goes on with its attention (%s): %s", before, error)
        model.set_attn_implementation(before)

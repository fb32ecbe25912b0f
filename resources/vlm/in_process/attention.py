"""Which attention a model on a GPU computes with: PyTorch's own, and flash attention for images.

What lives here: that choice. What does not: decoding with a cache of fixed size, which needs masks that flash
attention does not take, and so keeps what transformers chose. Terms: attn_implementation, SDPA backends.
"""

from __future__ import annotations

import logging
from typing import Any, Final

_FLASH: Final = "flash_attention_2"
_log = logging.getLogger(__name__)


def avoid_attention_with_plans() -> None:
    """Have PyTorch's attention leave out cuDNN's, which it tries first on an H100 or a B200.

    cuDNN plans for each shape, for tens to hundreds of milliseconds of the host, and keeps the plan for as
    long as the thread lives. With a cache that grows each token of an answer is a new shape, and so is the
    prompt of nearly each batch. For this whole process.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def prefer_flash_attention(model: Any) -> None:
    """Have the layers that look at images use the package flash-attn, where that is installed and they can.

    Where each image is a sequence of its own (Qwen-VL) it takes all at once, and not one after the other. The
    layers that answer stay as they are: for a padded batch it asks the device in each layer of each step how
    long the prompts are, and copies keys and values without their padding. It needs 16 bits. Nothing is
    downloaded.
    """
    import torch
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
    from transformers.utils import is_flash_attn_2_available

    images = getattr(model.config, "vision_config", None)
    if images is None or model.dtype not in (torch.float16, torch.bfloat16):
        return
    if not is_flash_attn_2_available():
        return
    before = images._attn_implementation
    try:
        lazy_import_flash_attention(_FLASH)  # else it would be the first image that finds it broken
        model.set_attn_implementation({"vision_config": _FLASH})
    except (ImportError, ValueError) as error:
        _log.info("The model goes on with its attention (%s): %s", before, error)
        model.set_attn_implementation({"vision_config": before})

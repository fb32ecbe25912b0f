"""Which attention a model computes with: PyTorch's own, on a GPU flash attention for images, and one of ours.

What lives here: that choice, and attention for steps of a few tokens. What does not: the layers themselves
and their masks, which are transformers'. Terms: attn_implementation, SDPA backends, grouped-query attention.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_FLASH: Final = "flash_attention_2"
_SDPA: Final = "sdpa"
_FEW_TOKENS: Final = "sdpa_few_tokens"

_FEW: Final = 64
"""Tokens of a step; those of a prompt are more, and their mask is large."""

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


def share_keys_in_steps(model: Any) -> None:
    """Have steps of a few tokens compute with keys and values that heads share as they lie in the cache.

    transformers does so for steps of one token. For more, under a mask, it copies keys and values for each of
    the heads, in each layer of each step: several times the reading of a cache.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    text = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
    shared = getattr(text, "num_key_value_heads", heads) != heads
    if not shared or not names or text._attn_implementation != _SDPA:
        return
    AttentionInterface.register(_FEW_TOKENS, partial(_attention_of_few_tokens, sdpa_attention_forward))
    AttentionMaskInterface.register(_FEW_TOKENS, sdpa_mask)
    try:
        model.set_attn_implementation({names[0]: _FEW_TOKENS})
    except (ImportError, ValueError) as error:
        _log.info("The model goes on with its attention (%s): %s", _SDPA, error)
        model.set_attn_implementation({names[0]: _SDPA})


def _attention_of_few_tokens(
    otherwise: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [rows, tokens, heads, width]. See AttentionInterface.

    query: [rows, heads, tokens, width]; the queries of the heads that share a key stand one behind the other.
    """
    import torch

    rows, heads, tokens, width = query.shape
    sharing = heads // key.shape[1]
    known = all(options.get(name) is None for name in ("softcap", "position_bias", "cache"))
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    if sharing == 1 or not 1 < tokens <= _FEW or not masked or not known or options.get("dropout"):
        result: tuple[torch.Tensor, None] = otherwise(module, query, key, value, attention_mask, **options)
        return result
    assert attention_mask is not None
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads // sharing, sharing * tokens, width),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, sharing, 1),
        scale=options.get("scaling"),
    )
    return attended.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous(), None

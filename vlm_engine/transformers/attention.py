"""Which attention a model computes with: PyTorch's own, on a GPU flash attention for images, and two of ours.

This module holds that choice, attention for long padded prompts, and attention for images that are sequences
of their own. Attention for the steps of drafts is in drafting.py, and the layers themselves are in
transformers. Terms: attn_implementation, SDPA backends, AttentionMaskInterface, cu_seqlens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

Attention = Callable[..., tuple["torch.Tensor", None]]
"""A function for transformers' AttentionInterface."""

BY_ROWS: Final = "sdpa_by_rows"
_FLASH: Final = "flash_attention_2"
_SDPA: Final = "sdpa"
_BY_LENGTH: Final = "flash_by_length"
"""transformers hands all sequences at once, and where each begins, to a name that has "flash" in it."""

_LONG: Final = 512
"""With more tokens in its prompts the mask of a batch is large, and one row is enough work for a GPU."""

_TOGETHER: Final = 1 << 16
"""Tokens of sequences that are computed at once: enough to fill any GPU, and a small part of its memory."""

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
    """Have the layers that look at images use the package flash-attn, where it is installed and they can.

    Where each image is a sequence of its own (Qwen-VL), flash-attn takes all images at once. The layers that
    answer stay as they are: for a padded batch flash-attn asks the device in each layer of each step how long
    the prompts are, and copies keys and values without their padding. It needs 16 bits. Nothing is
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
        lazy_import_flash_attention(_FLASH)  # A broken package fails here, and not at the first image.
        model.set_attn_implementation({"vision_config": _FLASH})
    except (ImportError, ValueError) as error:
        _log.info("The model goes on with its attention (%s): %s", before, error)
        model.set_attn_implementation({"vision_config": before})


def attend_by_rows(model: Any) -> None:
    """Have the layers that answer look at long prompts row by row.

    transformers masks a padded batch by a tensor [rows, 1, tokens, tokens]: 32 prompts of 13,000 tokens are
    5 GB of it, PyTorch makes as much again or more of it in each layer, and its fastest kernel takes no mask.
    A row without its padding needs none.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    text = model.config.get_text_config(decoder=True)
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
    if not names or text._attn_implementation != _SDPA:
        return
    AttentionInterface.register(BY_ROWS, attention_by_rows())
    AttentionMaskInterface.register(BY_ROWS, partial(_mask, sdpa_mask))
    try:
        model.set_attn_implementation({names[0]: BY_ROWS})
    except (ImportError, ValueError) as error:
        _log.info("The model goes on with its attention (%s): %s", _SDPA, error)
        model.set_attn_implementation({names[0]: _SDPA})


def attention_by_rows() -> Attention:
    """The function behind the name BY_ROWS."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return partial(_attention, sdpa_attention_forward)


def attend_to_images_by_length(model: Any) -> None:
    """Compute all images, or windows of images, that have one length in one call, where each is a sequence.

    transformers calls PyTorch once for each of them in each layer. Qwen2.5-VL cuts an image of a megapixel
    into 88 windows: 256 images are 600,000 calls of some microseconds each, and a GPU waits for the host.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    images = getattr(model.config, "vision_config", None)
    if images is None or images._attn_implementation != _SDPA:
        return
    layers = [module for module in model.modules() if getattr(module, "config", None) is images]
    if any("cu_seqlens" in inspect.signature(layer.forward).parameters for layer in layers):
        AttentionInterface.register(_BY_LENGTH, partial(_attention_by_length, sdpa_attention_forward))
        images._attn_implementation = _BY_LENGTH


def attend_as_shipped(model: Any) -> bool:
    """Undo both of our functions, for a family whose own code fails with them. False where none is set."""
    images: Any = getattr(model.config, "vision_config", None)
    by_length = getattr(images, "_attn_implementation", None) == _BY_LENGTH
    if by_length:
        images._attn_implementation = _SDPA
    text = model.config.get_text_config(decoder=True)
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
    if text._attn_implementation != BY_ROWS:
        return by_length
    model.set_attn_implementation({names[0]: _SDPA})
    return True


@dataclass(frozen=True)
class _LongPrompts:
    """In the place of a mask, for a batch padded on the left.

    tokens: of each row, without its padding. mask_of: makes the mask of one row without its padding
    [1, 1, tokens, tokens]; None where the mask is only causal. Each layer makes it anew.
    """

    tokens: Sequence[int]
    mask_of: Callable[[int], torch.Tensor | None]


def _mask(whole: Callable[..., Any], **options: Any) -> torch.Tensor | _LongPrompts | None:
    """The mask of a batch; for several long prompts _LongPrompts. See AttentionMaskInterface."""
    rows, tokens, padding = options["batch_size"], options["q_length"], options.get("attention_mask")
    is_prompt = (
        tokens == options["kv_length"] and not options.get("q_offset") and not options.get("kv_offset")
    )
    if rows == 1 or tokens <= _LONG or not is_prompt:
        return whole(**options)
    shown = [tokens] * rows if padding is None else padding.sum(dim=1).tolist()
    if padding is not None and not padding[:, -1].all():  # padded on the right
        return whole(**options)

    def mask_of(row: int) -> torch.Tensor | None:
        own, rule = shown[row], options["mask_function"]
        padded = tokens - own

        def shifted(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return rule(batch + row, head, query + padded, key + padded)

        alone = {"batch_size": 1, "q_length": own, "kv_length": own, "attention_mask": None}
        return whole(**{**options, **alone, "mask_function": shifted})

    if min(shown) == tokens and mask_of(0) is None:
        return None  # no padding: all rows at once
    return _LongPrompts(shown, mask_of)


def _attention(
    otherwise: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _LongPrompts | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [rows, tokens, heads, width]. See AttentionInterface. query: [rows, heads, tokens, width]."""
    rows, heads, tokens, _ = query.shape
    if isinstance(attention_mask, _LongPrompts):
        attended = query.new_zeros(rows, tokens, heads, value.shape[-1])
        for row, own in enumerate(attention_mask.tokens):
            shown = slice(row, row + 1), slice(None), slice(tokens - own, tokens)
            mask = attention_mask.mask_of(row)
            attended[row, tokens - own :] = otherwise(
                module, query[shown], key[shown], value[shown], mask, **options
            )[0][0]
        return attended, None
    attended, _ = otherwise(module, query, key, value, attention_mask, **options)
    return attended, None


def _attention_by_length(
    otherwise: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [1, tokens, heads, width] in which each sequence looks at itself. See AttentionInterface.

    query, key, value: [1, heads, tokens, width], the sequences one after another. cu_seq_lens_q: where each
    begins, and the end.
    """
    import torch

    _, heads, tokens, width = query.shape
    begins, lengths = cu_seq_lens_q[:-1], cu_seq_lens_q.diff()
    attended = query.new_empty(tokens, heads, width)
    for length in lengths.unique().tolist():
        begins_of_length = begins[lengths == length]
        for starts in begins_of_length.split(max(1, _TOGETHER // max(1, length))):
            indices = (starts[:, None] + torch.arange(length, device=starts.device)).flatten()
            sequences = (
                tensor[0].index_select(1, indices).unflatten(1, (len(starts), length)).transpose(0, 1)
                for tensor in (query, key, value)
            )
            outputs = otherwise(module, *sequences, None, scaling=scaling, is_causal=False)[0]
            attended.index_copy_(0, indices, outputs.flatten(0, 1))
    return attended[None], None

"""What a decode step costs by how it is launched: kernel by kernel, or as one recorded CUDA graph.

What lives here: the text layers stepped over a cache of fixed size, outside any engine. What does not: the
engine's own steps (gpu_meter.py clocks them).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

STEPS: Final = 16


def time_decode_steps(model: Any, *, rows: int, context: int, cuda: bool) -> dict[str, float | str]:
    """Milliseconds a step of ``rows`` sequences after ``context`` tokens, or why it could not be measured."""
    import torch

    found: dict[str, float | str] = {}
    with torch.inference_mode():
        try:
            step = _step(model, rows, context)
            found["fixed cache, launched"] = _milliseconds(step, cuda=cuda)
            if cuda:
                found["fixed cache, CUDA graph"] = _milliseconds(_recorded(step), cuda=True)
        except Exception as error:  # a model family whose cache cannot be stepped like this
            found["not measured"] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def _step(model: Any, rows: int, context: int) -> Callable[[], None]:
    """One step of all sequences: embeddings, layers, logits, the likeliest token. It can be recorded."""
    import torch
    from transformers import StaticCache

    text = model.get_decoder()
    head = model.get_output_embeddings()
    device = head.weight.device
    length = context + 5 * STEPS
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=length)
    mask = torch.ones(rows, 1, 1, length, dtype=torch.bool, device=device)
    position = torch.full((rows, 1), context, device=device)
    tokens = torch.full((rows, 1), 50, device=device)
    text(input_ids=tokens.expand(rows, context), past_key_values=cache, use_cache=True)

    def step() -> None:
        hidden = text(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        tokens.copy_(head(hidden[:, -1:]).argmax(-1))

    return step


def _recorded(step: Callable[[], None]) -> Callable[[], None]:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    return replay


def _milliseconds(step: Callable[[], None], *, cuda: bool) -> float:
    import torch

    for _ in range(2):
        step()
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    if cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / STEPS

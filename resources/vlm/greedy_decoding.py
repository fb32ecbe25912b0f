"""Greedy decoding of a batch from which finished answers leave, instead of being padded to the longest.

What lives here: a decoding loop for ``generate(custom_generate=…)``, and cutting rows out of what a model
keeps from step to step. What does not: what may be said (guided.py), and the inputs (transformers_engine.py).
Without a cut it chooses what transformers' own greedy loop chooses, token for token.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_WORTH_A_CUT: Final = 8
"""Finished answers are cut out once they are an eighth of the batch: like a step, a cut copies the cache."""

_PER_ROW: Final = frozenset(
    {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
)
"""Tensors [..., rows, tokens] that grow by a token a step."""

_OF_THE_PROMPT: Final = ("pixel_", "image_", "video_", "spatial_", "mm_encoder_")
"""How the names begin of what only the first step looks at."""

_OF_EACH_STEP: Final = frozenset({"image_attention_mask", "image_hidden_states"})
"""What is called like that and looked at in each step all the same, by the first Idefics."""


class GreedyDecoding:
    """Decodes one batch. Serves one call of ``generate`` and no second.

    limits: tokens that each answer may have. Its seconds are complete when ``generate`` returns.
    """

    def __init__(
        self,
        *,
        stop_token_ids: Collection[int],
        pad_token_id: int,
        limits: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop_token_ids = frozenset(stop_token_ids)
        self._pad_token_id = pad_token_id
        self._limits = list(limits)
        self._clock = clock
        self.prefill_seconds = 0.0
        self.generation_seconds = 0.0

    def __call__(self, model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """What ``generate`` returns: ``input_ids`` [rows, tokens] and the answers, padded on the right.

        The logits processor always sees the whole batch; what has left, it sees with scores of zero.
        """
        began = self._clock()
        process = arguments.pop("logits_processor")
        # How long an answer may be is in the limits, what ends it in the stop tokens.
        del arguments["stopping_criteria"], arguments["generation_config"]
        state: dict[str, Any] = arguments
        batch = _Batch(input_ids, self._pad_token_id)
        with contextlib.ExitStack() as decode:
            for step in range(1, max(self._limits) + 1):
                if step == 2:
                    # As transformers' own loop: on a GPU experts are computed otherwise from here on.
                    decode.enter_context(model._optimize_model_for_decode())
                if step == 1:
                    inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **state)
                else:
                    inputs = model.prepare_inputs_for_generation(
                        batch.computed, next_sequence_length=1, **state
                    )
                outputs = model(**inputs, return_dict=True)
                state = model._update_model_kwargs_for_generation(outputs, state)
                tokens = batch.choose(outputs.logits[:, -1], process)
                del outputs  # The logits of a whole prompt are large where a model computes them all.
                if step == 1:
                    self.prefill_seconds = self._clock() - began
                ended = [
                    row
                    for row, token in zip(batch.open, tokens, strict=True)
                    if token in self._stop_token_ids or step == self._limits[row]
                ]
                batch.end(ended)
                if not batch.open:
                    break
                if batch.is_worth_a_cut and _can_cut(state, len(batch.rows)):
                    _cut(state, batch.cut())
        self.generation_seconds = self._clock() - began - self.prefill_seconds
        return batch.sequences


class _Batch:
    """The answers of a batch as they grow.

    sequences: [all rows, tokens]. rows: those that the model computes, ascending. open: those that go on.
    """

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int) -> None:
        self.sequences = input_ids
        self.rows = list(range(len(input_ids)))
        self.open = list(self.rows)
        self._pad_token_id = pad_token_id

    @property
    def computed(self) -> torch.Tensor:
        """The sequences of the rows that the model computes."""
        return self.sequences if len(self.rows) == len(self.sequences) else self.sequences[self.rows]

    @property
    def is_worth_a_cut(self) -> bool:
        return (len(self.rows) - len(self.open)) * _WORTH_A_CUT >= len(self.rows)

    def choose(self, logits: torch.Tensor, process: Callable[..., torch.Tensor]) -> list[int]:
        """Append the likeliest token of each row to the sequences; those of the open rows."""
        import torch

        device = self.sequences.device
        scores = logits.to(copy=True, dtype=torch.float32, device=device)
        if len(self.rows) < len(self.sequences):
            whole = scores.new_zeros(len(self.sequences), scores.shape[-1])
            whole[self.rows] = scores
            scores = whole
        chosen = process(self.sequences, scores).argmax(dim=-1)
        if len(self.open) < len(self.sequences):
            padded = torch.full_like(chosen, self._pad_token_id)
            padded[self.open] = chosen[self.open]
            chosen = padded
        self.sequences = torch.cat([self.sequences, chosen[:, None]], dim=-1)
        tokens: list[int] = chosen.tolist()
        return [tokens[row] for row in self.open]

    def end(self, ended: Sequence[int]) -> None:
        """These rows go on no further."""
        if ended:
            self.open = [row for row in self.open if row not in ended]

    def cut(self) -> torch.Tensor:
        """Leave the open rows alone in the model's batch; where they stood in it."""
        import torch

        kept = [at for at, row in enumerate(self.rows) if row in set(self.open)]
        self.rows = list(self.open)
        return torch.tensor(kept, device=self.sequences.device)


def _can_cut(state: Mapping[str, Any], rows: int) -> bool:
    """Whether all that a model keeps from step to step is known, so that rows can be taken out of it."""
    import torch
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = state.get("past_key_values")
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    if not isinstance(cache, DynamicCache) or any(type(layer) not in plain for layer in cache.layers):
        return False
    for name, value in state.items():
        if name == "past_key_values" or value is None or isinstance(value, bool | int | float | str):
            continue
        if name in _PER_ROW and isinstance(value, torch.Tensor):
            if value.shape[-2] not in (1, rows):
                return False
        elif name in _OF_EACH_STEP or not name.startswith(_OF_THE_PROMPT):
            return False
    return True


def _cut(state: dict[str, Any], kept: torch.Tensor) -> None:
    state["past_key_values"].batch_select_indices(kept)
    for name in _PER_ROW & state.keys():
        value = state[name]
        if value is not None and value.shape[-2] > 1:
            state[name] = value.index_select(-2, kept)

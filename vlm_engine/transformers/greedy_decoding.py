"""Greedy decoding of a batch from which finished answers leave, instead of being padded to the longest.

This module holds the loop for ``generate(custom_generate=…)``, the growing answers, steps of one token each,
and a cache of keys and values with room for the tokens to come. Steps that ask the model about several tokens
are in drafting.py, the tokens that the schema allows in guided.py.

As long as no row leaves, the loop chooses what transformers' own greedy loop chooses, token for token. After
a row has left, only rounding differs, as between batches of different sizes. Scores that are no numbers end
the batch with ImpossibleScoresError.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from vlm_engine.protocol import ImpossibleScoresError

if TYPE_CHECKING:
    import torch

_WORTH_A_CUT: Final = 8
"""Finished rows leave once they are an eighth of the batch: taking rows out copies the cache."""

PER_ROW: Final = frozenset(
    {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
)
"""Tensors [..., rows, tokens] that grow by a token a step."""

_PROMPT_PREFIXES: Final = ("pixel_", "image_", "video_", "spatial_", "mm_encoder_")
"""How the names of inputs begin that only the first step reads."""

_READ_IN_EACH_STEP: Final = frozenset({"image_attention_mask", "image_hidden_states"})
"""Inputs with such a name that the first Idefics reads in each step all the same."""

_ROOM: Final = 64
"""Columns that are added to a cache at once: a batch's is copied three times for an answer of 150 tokens."""

Process = Callable[..., "torch.Tensor"]
"""A logits processor: sequences and scores of the whole batch in, scores out."""


class AnswersSoFar:
    """The sequences of a batch: prompts [rows, tokens], padded on the left, and the answers after them.

    limits: tokens that each answer may have. computed_rows: rows that the model computes, ascending.
    open_rows: those of them whose answers are not finished. longest: tokens of the longest answer.

    The sequences are also kept on the host, where a grammar reads them. To read them from the device would
    wait for the step under way, and the grammar should work beside that step.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        *,
        limits: Sequence[int],
        stop_token_ids: Collection[int],
        pad_token_id: int,
    ) -> None:

        rows, self.prompt_tokens = prompts.shape
        self.computed_sequences = prompts
        """Prompts and answers of the computed rows [rows, tokens], on the device; ``choose`` extends them."""
        self.computed_rows = list(range(rows))
        self.open_rows = list(self.computed_rows)
        self.longest = 0
        self._limits = list(limits)
        self._answers: list[list[int]] = [[] for _ in self.computed_rows]
        self._stop_token_ids = frozenset(stop_token_ids)
        self._row_indices: torch.Tensor | None = None
        """The computed rows, on the device; None for as long as these are all."""
        on_host = prompts.cpu().numpy()
        columns = self.prompt_tokens + max(limits)
        self._sequences = np.full((rows, columns), pad_token_id, dtype=on_host.dtype)
        self._sequences[:, : self.prompt_tokens] = on_host

    @property
    def sequences(self) -> torch.Tensor:
        """All rows [rows, tokens], padded on the right; on the host."""
        import torch

        return torch.from_numpy(self._sequences)[:, : self.prompt_tokens + self.longest]

    def choose(self, logits: torch.Tensor, process: Process) -> None:
        """Append the likeliest token to each open row. All open answers must have the same length.

        logits: of the computed rows [rows, vocabulary]; they may be overwritten afterwards. process: a logits
        processor, which always gets the whole batch; rows that have left get scores of zero. Raises
        ImpossibleScoresError.
        """
        import torch

        sound = are_sound(logits)
        scores = logits.to(copy=True, dtype=torch.float32, device=self.computed_sequences.device)
        if self._row_indices is not None:
            all_scores = scores.new_zeros(len(self._answers), scores.shape[-1])
            all_scores[self._row_indices] = scores
            scores = all_scores
        chosen = process(self.sequences, scores).argmax(dim=-1)
        tokens: list[int] = chosen.tolist()
        if (
            not sound
        ):  # Read only here, because reading waits for the device, and the grammar works meanwhile.
            raise ImpossibleScoresError
        computed = chosen if self._row_indices is None else chosen[self._row_indices]
        self.computed_sequences = torch.cat([self.computed_sequences, computed[:, None]], dim=-1)
        self.append({row: [tokens[row]] for row in self.open_rows})

    def append(self, new_tokens: Mapping[int, Sequence[int]]) -> None:
        """Append tokens to open rows, at least one to each and at most its room, and finish what they end."""
        for row, tokens in new_tokens.items():
            answer = self._answers[row]
            start = self.prompt_tokens + len(answer)
            self._sequences[row, start : start + len(tokens)] = tokens
            answer.extend(tokens)
            self.longest = max(self.longest, len(answer))
        self.open_rows = [
            row
            for row in self.open_rows
            if self._answers[row][-1] not in self._stop_token_ids and self.room(row) > 0
        ]

    def answer(self, row: int) -> Sequence[int]:
        """The tokens of one answer."""
        return self._answers[row]

    def room(self, row: int) -> int:
        """Tokens that an answer may still get."""
        return self._limits[row] - len(self._answers[row])

    def finished_rows_should_leave(self) -> bool:
        """Whether enough computed rows have finished to be worth a copy of the cache."""
        finished = len(self.computed_rows) - len(self.open_rows)
        return finished * _WORTH_A_CUT >= len(self.computed_rows)

    def keep_open_rows(self) -> torch.Tensor:
        """Have the model compute the open rows alone. Return their places among the rows computed so far."""
        import torch

        is_open = set(self.open_rows)
        device = self.computed_sequences.device
        places = [place for place, row in enumerate(self.computed_rows) if row in is_open]
        kept = torch.tensor(places, device=device)
        self.computed_rows = list(self.open_rows)
        self._row_indices = torch.tensor(self.computed_rows, device=device)
        self.computed_sequences = self.computed_sequences.index_select(0, kept)
        return kept


class Steps(Protocol):
    """The steps of one batch after its prompt."""

    def step(self, answers: AnswersSoFar, process: Process) -> None:
        """Append at least one token to each open answer. Finished rows may leave first.

        Raises ImpossibleScoresError.
        """


StartSteps = Callable[[Any, dict[str, Any], AnswersSoFar], Steps | None]
"""Makes steps from a model, the state that it keeps from step to step, and the answers; None if it cannot."""


PromptInputs = Callable[[Any, "torch.Tensor", dict[str, Any]], dict[str, Any]]
"""Makes a model's inputs for the end of prompts from the model, the prompts and its arguments. It may compute
the beginning before, and change the arguments."""


class GreedyDecoding:
    """Decodes one batch, in one call of ``generate``.

    limits: tokens that each answer may have. start_steps: other steps than those of one token each; where it
    is missing or returns None, steps are of one token. prompt_inputs: None: prompts are computed as a whole.
    generation_seconds: of all tokens but the first; complete when ``generate`` returns.
    """

    def __init__(
        self,
        *,
        stop_token_ids: Collection[int],
        pad_token_id: int,
        limits: Sequence[int],
        start_steps: StartSteps | None = None,
        prompt_inputs: PromptInputs | None = None,
    ) -> None:
        self._stop_token_ids = stop_token_ids
        self._pad_token_id = pad_token_id
        self._limits = limits
        self._start_steps = start_steps
        self._prompt_inputs = prompt_inputs
        self.generation_seconds = 0.0

    def __call__(self, model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return ``input_ids`` [rows, tokens] and the answers, padded on the right, as ``generate`` does."""
        process = _chained(arguments.pop("logits_processor"))
        # The limits say how long an answer may be, and the stop tokens what ends it.
        del arguments["stopping_criteria"], arguments["generation_config"]
        answers = AnswersSoFar(
            input_ids,
            limits=self._limits,
            stop_token_ids=self._stop_token_ids,
            pad_token_id=self._pad_token_id,
        )
        if self._prompt_inputs is None:
            inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **arguments)
        else:
            inputs = self._prompt_inputs(model, input_ids, arguments)
        outputs = model(**inputs, return_dict=True)
        state: dict[str, Any] = model._update_model_kwargs_for_generation(outputs, arguments)
        answers.choose(outputs.logits[:, -1], process)
        del inputs, outputs  # The logits of a whole prompt are large where a model computes them all.
        # Nobody reads the encoded images after the prompt, but ``generate`` holds this dictionary to its end.
        (state.pop("mm_encoder_outputs", None) or {}).clear()
        began = time.monotonic()
        # As transformers' own loop: on a GPU experts are computed otherwise from here on.
        with model._optimize_model_for_decode():
            if answers.open_rows:
                steps = self._steps(model, state, answers)
                while answers.open_rows:
                    steps.step(answers, process)
        self.generation_seconds = time.monotonic() - began
        return answers.sequences

    def _steps(self, model: Any, state: dict[str, Any], answers: AnswersSoFar) -> Steps:
        if rows_can_leave(state, len(answers.computed_rows)):
            make_room(state["past_key_values"])
        steps = None if self._start_steps is None else self._start_steps(model, state, answers)
        return GrowingSteps(model, state) if steps is None else steps


class GrowingSteps:
    """Steps with the cache that the prompt was computed with, which grows by a token a step."""

    def __init__(self, model: Any, state: dict[str, Any]) -> None:
        self._model = model
        self._state = state

    def step(self, answers: AnswersSoFar, process: Process) -> None:
        """Append a token to each open answer. See Steps."""
        if answers.finished_rows_should_leave() and rows_can_leave(self._state, len(answers.computed_rows)):
            kept = answers.keep_open_rows()
            self._state["past_key_values"].batch_select_indices(kept)
            _select_rows(self._state, kept)
        inputs = self._model.prepare_inputs_for_generation(
            answers.computed_sequences, next_sequence_length=1, **self._state
        )
        outputs = self._model(**inputs, return_dict=True)
        self._state = self._model._update_model_kwargs_for_generation(outputs, self._state)
        answers.choose(outputs.logits[:, -1], process)


def are_sound(scores: torch.Tensor) -> torch.Tensor:
    """Whether a softmax of scores [..., vocabulary] gives probabilities, as one boolean on their device.

    It gives none where the largest score is NaN or infinite. Single scores of minus infinity are sound:
    models and grammars exclude tokens by them.
    """
    return scores.amax(dim=-1).isfinite().all()


def rows_can_leave(state: Mapping[str, Any], rows: int) -> bool:
    """Whether every part of the state is of a kind that rows can be taken out of.

    state: what a model keeps from step to step.
    """
    import torch
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = state.get("past_key_values")
    plain = (DynamicLayer, DynamicSlidingWindowLayer, roomy_layer())
    if not isinstance(cache, DynamicCache) or any(type(layer) not in plain for layer in cache.layers):
        return False
    for name, value in state.items():
        if name == "past_key_values" or value is None or isinstance(value, bool | int | float | str):
            continue
        if name in PER_ROW and isinstance(value, torch.Tensor):
            if value.shape[-2] not in (1, rows):
                return False
        elif name in _READ_IN_EACH_STEP or not name.startswith(_PROMPT_PREFIXES):
            return False
    return True


def make_room(kept: Any) -> None:
    """Have the layers of a ``DynamicCache`` keep room, but not those that look back over a window.

    transformers appends a token by making a new tensor of all tokens: a batch of 24 prompts of 4,505 tokens
    is 21 GB of SmolVLM2's cache, read and written for each token of an answer.
    """
    from transformers.cache_utils import DynamicLayer

    for layer in kept.layers:
        if type(layer) is DynamicLayer and layer.is_initialized:
            layer.__class__ = roomy_layer()
            layer.rooms = {}


@cache
def roomy_layer() -> type[Any]:
    """The class of such a layer, made when it is first needed, because it needs transformers."""
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):  # type: ignore[misc]
        """``keys`` and ``values`` [rows, heads, columns, width] are the first columns of ``rooms``.

        Code that replaces one of them by another tensor need not know of rooms: the next token finds no room,
        and makes a new one. A crop only shortens them, and the next token overwrites the columns that it cut
        off.
        """

        keys: torch.Tensor
        values: torch.Tensor
        rooms: dict[str, torch.Tensor]

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Append columns [rows, heads, new, width]; returns all keys and values."""
            self.keys = self._appended("keys", self.keys, key_states)
            self.values = self._appended("values", self.values, value_states)
            return self.keys, self.values

        def _appended(self, name: str, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            columns = held.shape[-2]
            end = columns + new.shape[-2]
            room = self.rooms.get(name)
            if room is None or room.data_ptr() != held.data_ptr() or room.shape[-2] < end:
                room = held.new_empty(*held.shape[:-2], end + _ROOM, held.shape[-1])
                room[..., :columns, :] = held
                self.rooms[name] = room
            room[..., columns:end, :] = new
            return room[..., :end, :]

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            """Keep these rows alone, and give the memory of all rows back."""
            super().batch_select_indices(indices)
            self.rooms.clear()

    return RoomyLayer


def _chained(processors: Sequence[Process]) -> Process:
    """All processors, one after another. transformers' own list reads their signatures in each step first."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in processors:
            scores = processor(input_ids, scores)
        return scores

    return process


def _select_rows(state: dict[str, Any], kept: torch.Tensor) -> None:
    """Keep these rows alone in all of the state but the cache."""
    for name in PER_ROW & state.keys():
        value = state[name]
        if value is not None and value.shape[-2] > 1:
            state[name] = value.index_select(-2, kept)

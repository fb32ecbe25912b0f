"""Greedy decoding of a batch from which finished answers leave, instead of being padded to the longest.

What lives here: the loop for ``generate(custom_generate=…)``, the answers while they grow, and steps with a
cache that grows, out of which rows are cut. What does not: steps of several tokens (drafted_steps.py), what
may be said (guided.py). Without a cut the loop chooses what transformers' own greedy loop chooses, token for
token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch

_WORTH_A_CUT: Final = 8
"""Finished answers are cut out once they are an eighth of the batch: like a step, a cut copies the cache."""

PER_ROW: Final = frozenset(
    {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
)
"""Tensors [..., rows, tokens] that grow by a token a step."""

_OF_THE_PROMPT: Final = ("pixel_", "image_", "video_", "spatial_", "mm_encoder_")
"""How the names begin of what only the first step looks at."""

_OF_EACH_STEP: Final = frozenset({"image_attention_mask", "image_hidden_states"})
"""What is called like that and looked at in each step all the same, by the first Idefics."""


Process = Callable[..., "torch.Tensor"]
"""A logits processor: sequences and scores of the whole batch in, scores out."""


class AnswersSoFar:
    """The sequences of a batch: prompts [rows, tokens], padded on the left, and what was said since.

    limits: tokens that each answer may have. rows: those that the model computes, ascending. open: those of
    them that go on. said: tokens of the longest answer.

    Besides on the device the sequences are kept on the host, where a grammar reads them: asking the device
    for them would wait for the step that it is at, beside which the grammar is to be asked.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        *,
        limits: Sequence[int],
        stop_token_ids: Collection[int],
        pad_token_id: int,
    ) -> None:
        import torch

        rows, self.prompt_tokens = prompts.shape
        self.computed = prompts
        """The sequences of the rows that the model computes [rows, tokens], on the device."""
        self.rows = list(range(rows))
        self.open = list(self.rows)
        self.said = 0
        self._limits = list(limits)
        self._answers: list[list[int]] = [[] for _ in self.rows]
        self._stop_token_ids = frozenset(stop_token_ids)
        self._places: torch.Tensor | None = None
        self._is_open = prompts.new_ones(rows, dtype=torch.bool, device="cpu")
        whole = prompts.new_full((rows, self.prompt_tokens + max(limits)), pad_token_id, device="cpu")
        whole[:, : self.prompt_tokens] = prompts
        self._whole = whole

    @property
    def sequences(self) -> torch.Tensor:
        """All rows [rows, tokens], padded on the right; on the host."""
        return self._whole[:, : self.prompt_tokens + self.said]

    def choose(self, logits: torch.Tensor, process: Process) -> None:
        """Append the likeliest token of each row, and end what is ended by it.

        logits: of the rows that the model computes [rows, vocabulary]; they may be overwritten afterwards.
        process: a logits processor, which always sees the whole batch; what has left, with scores of zero.
        """
        import torch

        scores = logits.to(copy=True, dtype=torch.float32, device=self.computed.device)
        if self._places is not None:
            whole = scores.new_zeros(len(self._whole), scores.shape[-1])
            whole[self._places] = scores
            scores = whole
        chosen = process(self.sequences, scores).argmax(dim=-1)
        on_host = chosen.to("cpu")
        end = self._whole[:, self.prompt_tokens + self.said]
        torch.where(self._is_open, on_host, end, out=end)
        tokens: list[int] = on_host.tolist()
        self.said += 1
        computed = chosen if self._places is None else chosen[self._places]
        self.computed = torch.cat([self.computed, computed[:, None]], dim=-1)
        for row in self.open:
            self._answers[row].append(tokens[row])
        self._end_the_ended()

    def append(self, said: Mapping[int, Sequence[int]]) -> None:
        """Append to open rows what they say, one token or more within their room, and end the ended.

        Unlike by ``choose``, rows may so become longer than others; ``computed`` is not kept up.
        """
        import torch

        for row, tokens in said.items():
            at = self.prompt_tokens + len(self._answers[row])
            self._whole[row, at : at + len(tokens)] = torch.tensor(tokens)
            self._answers[row].extend(tokens)
            self.said = max(self.said, len(self._answers[row]))
        self._end_the_ended()

    def of(self, row: int) -> Sequence[int]:
        """The tokens of one answer."""
        return self._answers[row]

    def room(self, row: int) -> int:
        """Tokens by which an answer may go on."""
        return self._limits[row] - len(self._answers[row])

    def _end_the_ended(self) -> None:
        ended = [
            row for row in self.open if self._answers[row][-1] in self._stop_token_ids or self.room(row) <= 0
        ]
        if ended:
            self._is_open[ended] = False
            self.open = [row for row in self.open if row not in ended]

    def leave_the_open(self) -> torch.Tensor:
        """Have the model compute the open rows alone; where they stood among those that it computed."""
        import torch

        still = set(self.open)
        device = self.computed.device
        kept = torch.tensor([at for at, row in enumerate(self.rows) if row in still], device=device)
        self.rows = list(self.open)
        self._places = torch.tensor(self.rows, device=device)
        self.computed = self.computed.index_select(0, kept)
        return kept


class Steps(Protocol):
    """What steps a model after its prompt, all rows at a time."""

    def go_on(self, answers: AnswersSoFar, process: Process) -> None:
        """Have each open answer go on by a token or more. May make rows leave first."""


Begin = Callable[[Any, dict[str, Any], AnswersSoFar], Steps]
"""Makes the steps of a batch, of the model, what it keeps from step to step, and the answers."""


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
        begin: Begin | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop_token_ids = stop_token_ids
        self._pad_token_id = pad_token_id
        self._limits = limits
        self._begin = begin or GrowingSteps
        self._clock = clock
        self.prefill_seconds = 0.0
        self.generation_seconds = 0.0

    def __call__(self, model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """What ``generate`` returns: ``input_ids`` [rows, tokens] and the answers, padded on the right.

        The logits processor always sees the whole batch; what has left, it sees with scores of zero.
        """
        began = self._clock()
        process = _one_after_another(arguments.pop("logits_processor"))
        # How long an answer may be is in the limits, what ends it in the stop tokens.
        del arguments["stopping_criteria"], arguments["generation_config"]
        answers = AnswersSoFar(
            input_ids,
            limits=self._limits,
            stop_token_ids=self._stop_token_ids,
            pad_token_id=self._pad_token_id,
        )
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **arguments)
        outputs = model(**inputs, return_dict=True)
        state: dict[str, Any] = model._update_model_kwargs_for_generation(outputs, arguments)
        answers.choose(outputs.logits[:, -1], process)
        del inputs, outputs  # The logits of a whole prompt are large where a model computes them all.
        # What became of the images is of no use any more; ``generate`` holds the same dictionary to its end.
        (state.pop("mm_encoder_outputs", None) or {}).clear()
        self.prefill_seconds = self._clock() - began
        # As transformers' own loop: on a GPU experts are computed otherwise from here on.
        with model._optimize_model_for_decode():
            steps = self._begin(model, state, answers) if answers.open else None
            while steps is not None and answers.open:
                steps.go_on(answers, process)
        self.generation_seconds = self._clock() - began - self.prefill_seconds
        return answers.sequences


class GrowingSteps:
    """Steps with the cache that the prompt was computed with, which grows by a token a step."""

    def __init__(self, model: Any, state: dict[str, Any], answers: AnswersSoFar) -> None:
        self._model = model
        self._state = state

    def go_on(self, answers: AnswersSoFar, process: Process) -> None:
        """See Steps."""
        if worth_a_cut(answers) and can_select(self._state, len(answers.rows)):
            kept = answers.leave_the_open()
            self._state["past_key_values"].batch_select_indices(kept)
            _select_rows(self._state, kept)
        inputs = self._model.prepare_inputs_for_generation(
            answers.computed, next_sequence_length=1, **self._state
        )
        outputs = self._model(**inputs, return_dict=True)
        self._state = self._model._update_model_kwargs_for_generation(outputs, self._state)
        answers.choose(outputs.logits[:, -1], process)


def worth_a_cut(answers: AnswersSoFar) -> bool:
    """Whether so many of the rows that are computed have finished that they should leave."""
    finished = len(answers.rows) - len(answers.open)
    return finished * _WORTH_A_CUT >= len(answers.rows)


def _one_after_another(processors: Sequence[Process]) -> Process:
    """What transformers' list of them does, which in each step looks at their signatures first."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for one in processors:
            scores = one(input_ids, scores)
        return scores

    return process


def can_select(state: Mapping[str, Any], rows: int) -> bool:
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
        if name in PER_ROW and isinstance(value, torch.Tensor):
            if value.shape[-2] not in (1, rows):
                return False
        elif name in _OF_EACH_STEP or not name.startswith(_OF_THE_PROMPT):
            return False
    return True


def _select_rows(state: dict[str, Any], kept: torch.Tensor) -> None:
    """Leave these rows alone in all that a model keeps from step to step, the cache aside."""
    for name in PER_ROW & state.keys():
        value = state[name]
        if value is not None and value.shape[-2] > 1:
            state[name] = value.index_select(-2, kept)

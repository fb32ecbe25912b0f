"""Greedy decoding of a batch from which finished answers leave, instead of being padded to the longest.

What lives here: the loop for ``generate(custom_generate=…)``, the answers while they grow, and two kinds of
steps: a token at a time with a cache that grows, out of which rows are cut; and several tokens at a time, the
last one and guesses of the next. What does not: what may be said, and the guesses (guided.py). Without a cut
and without guesses the loop chooses what transformers' own greedy loop chooses, token for token; with them
only rounding differs, as between batches of different sizes. Scores that are no numbers end the batch with
ImpossibleScoresError, whichever step computes them. Terms: speculative decoding, verified greedily;
n-grams, as in prompt lookup.

Where a guess was wrong its keys and values stay in the cache as a hole, which no mask shows: rows of a batch
lie side by side, and the next step appends to all of them. Holes at the end of all rows are cut off, and
others are closed before they are many.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from vlm_engine.protocol import ImpossibleScoresError
from vlm_engine.transformers.guided import Drafts, Guide
from vlm_engine.transformers.roomy_cache import make_room, roomy_layer

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


_TOKEN_TYPES: Final = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
"""Tensors [rows, tokens] whose last value all tokens of an answer have."""

_BY_THE_FURTHEST: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rotary positions whose frequencies depend on the largest position of a step, be it a guess's."""

_FEW_HOLES: Final = 32
"""Columns of the cache, or an eighth of them, that may be seen by no row before holes are closed."""

_log = logging.getLogger(__name__)

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
        Raises ImpossibleScoresError.
        """
        import torch

        sound = are_sound(logits)
        scores = logits.to(copy=True, dtype=torch.float32, device=self.computed.device)
        if self._places is not None:
            whole = scores.new_zeros(len(self._whole), scores.shape[-1])
            whole[self._places] = scores
            scores = whole
        chosen = process(self.sequences, scores).argmax(dim=-1)
        on_host = chosen.to("cpu")
        if not sound:  # Asked only now: the answer waits for the device, beside which the grammar works.
            raise ImpossibleScoresError
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


class GreedyDecoding:
    """Decodes one batch. Serves one call of ``generate`` and no second.

    limits: tokens that each answer may have. guide: where it alone decides about a token, what holds the
    answers to their form; with ``drafts`` the model is then asked about several tokens at once.
    generation_seconds: of all tokens but the first; complete when ``generate`` returns.
    """

    def __init__(
        self,
        *,
        stop_token_ids: Collection[int],
        pad_token_id: int,
        limits: Sequence[int],
        guide: Guide | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self._stop_token_ids = stop_token_ids
        self._pad_token_id = pad_token_id
        self._limits = limits
        self._guide = guide
        self._drafts = drafts
        self.generation_seconds = 0.0

    def __call__(self, model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """What ``generate`` returns: ``input_ids`` [rows, tokens] and the answers, padded on the right.

        The logits processor always sees the whole batch; what has left, it sees with scores of zero.
        """
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
        began = time.monotonic()
        # As transformers' own loop: on a GPU experts are computed otherwise from here on.
        with model._optimize_model_for_decode():
            steps = self._steps(model, state, answers) if answers.open else None
            while steps is not None and answers.open:
                steps.go_on(answers, process)
        self.generation_seconds = time.monotonic() - began
        return answers.sequences

    def _steps(self, model: Any, state: dict[str, Any], answers: AnswersSoFar) -> GrowingSteps | DraftedSteps:
        """The steps after the prompt, by guesses where the model can be asked about them."""
        if _can_select(state, len(answers.rows)):
            make_room(state["past_key_values"])
        if self._guide is not None and self._drafts is not None:
            refusal = _refusal(model, state, answers)
            if refusal is None:
                return DraftedSteps(model, state, answers, self._guide, self._drafts)
            _log.debug("Answers are decoded token by token: %s.", refusal)
        return GrowingSteps(model, state)


class GrowingSteps:
    """Steps with the cache that the prompt was computed with, which grows by a token a step."""

    def __init__(self, model: Any, state: dict[str, Any]) -> None:
        self._model = model
        self._state = state

    def go_on(self, answers: AnswersSoFar, process: Process) -> None:
        """Have each open answer go on by a token. May make rows leave first."""
        if _worth_a_cut(answers) and _can_select(self._state, len(answers.rows)):
            kept = answers.leave_the_open()
            self._state["past_key_values"].batch_select_indices(kept)
            _select_rows(self._state, kept)
        inputs = self._model.prepare_inputs_for_generation(
            answers.computed, next_sequence_length=1, **self._state
        )
        outputs = self._model(**inputs, return_dict=True)
        self._state = self._model._update_model_kwargs_for_generation(outputs, self._state)
        answers.choose(outputs.logits[:, -1], process)


class DraftedSteps:
    """Steps with guesses: each open answer goes on by a token or more.

    Besides the cache a model keeps, for each row that is computed: which columns of the cache it sees [rows,
    columns], and the position of the token that it is asked about next [..., rows, 1].
    """

    def __init__(
        self, model: Any, state: dict[str, Any], answers: AnswersSoFar, guide: Guide, drafts: Drafts
    ) -> None:
        self._model = model
        self._guide = guide
        self._drafts = drafts
        self._cache = state["past_key_values"]
        positions = state["position_ids"][..., -1:]
        self._seen = _seen(state, answers)
        self._needed: list[int] = self._seen.sum(dim=1).tolist()
        """How many columns each row sees: on the host, which then need not ask the device."""
        self._positions: torch.Tensor = positions.expand(*positions.shape[:-2], len(answers.rows), 1).clone()
        self._types: dict[str, torch.Tensor] = {
            name: state[name][:, -1:] for name in _TOKEN_TYPES & state.keys() if state[name] is not None
        }
        self._state = {
            name: value
            for name, value in state.items()
            if name not in {"past_key_values", "attention_mask", "position_ids", *self._types}
        }
        guide.take(answers.sequences[:, -1].tolist())
        for row in answers.rows:
            drafts.learn(answers.of(row), 1)

    def go_on(self, answers: AnswersSoFar, process: Process) -> None:
        """Have each open answer go on. The guide does what ``process`` would do.

        Raises ImpossibleScoresError, for scores after a wrong guess too: a sound device computes no such.
        """
        if _worth_a_cut(answers):
            self._leave_the_open(answers)
        still = frozenset(answers.open)
        drafts = [
            self._drafts.guess(answers.of(row), answers.room(row) - 1) if row in still else []
            for row in answers.rows
        ]
        logits = self._logits([answers.of(row)[-1] for row in answers.rows], drafts)
        at_open = [at for at, row in enumerate(answers.rows) if row in still]
        scores = logits if len(at_open) == len(logits) else logits[at_open]
        if not are_sound(scores):
            raise ImpossibleScoresError
        said = self._guide.go_on(answers.open, [drafts[at] for at in at_open], scores)
        answers.append(dict(zip(answers.open, said, strict=True)))
        kept = [0] * len(drafts)
        for at, tokens in zip(at_open, said, strict=True):
            # The last token is not in the cache yet; in its place is the one before the guess.
            kept[at] = len(tokens)
            self._drafts.learn(answers.of(answers.rows[at]), len(tokens))
        self._keep(kept, computed=logits.shape[1])

    def _logits(self, last: Sequence[int], drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Of what follows each row's last token and each of its guesses [rows, tokens, vocabulary]."""
        import torch

        width = 1 + max(map(len, drafts))
        tokens = [
            [token, *draft, *[token] * (width - 1 - len(draft))]
            for token, draft in zip(last, drafts, strict=True)
        ]
        device = self._seen.device
        seen = torch.cat([self._seen, self._columns([1 + len(draft) for draft in drafts], width)], dim=1)
        # What only fills up a row stays at its last position: there may be none beyond.
        ahead = [[min(at, len(draft)) for at in range(width)] for draft in drafts]
        state: Mapping[str, Any] = {
            **self._state,
            **{name: value.expand(-1, width) for name, value in self._types.items()},
            "past_key_values": self._cache,
            "attention_mask": seen,
            "position_ids": self._positions + torch.tensor(ahead, device=device),
        }
        if "logits_to_keep" in state:
            state = {**state, "logits_to_keep": width}
        inputs = self._model.prepare_inputs_for_generation(
            torch.tensor(tokens, device=device), next_sequence_length=width, **state
        )
        logits: torch.Tensor = self._model(**inputs, return_dict=True).logits
        return logits[:, -width:]

    def _keep(self, kept: Sequence[int], *, computed: int) -> None:
        """Have each row see so many of the columns ``computed`` last, and let go of those that none sees."""
        import torch

        width = max(kept)
        if width < computed:
            self._cache.crop(width - computed)
        self._seen = torch.cat([self._seen, self._columns(kept, width)], dim=1)
        self._positions += torch.tensor(kept, device=self._positions.device)[:, None]
        self._needed = [before + now for before, now in zip(self._needed, kept, strict=True)]
        columns = max(self._needed)
        if self._seen.shape[1] > columns + max(_FEW_HOLES, columns // 8):
            self._close_holes(columns)

    def _close_holes(self, columns: int) -> None:
        """Bring what each row sees together, at the right of so many columns. Keys keep their positions."""
        order = self._seen.argsort(dim=1, stable=True)[:, -columns:]
        for layer in self._cache.layers:
            if layer.is_initialized:
                at = order[:, None, :, None]
                layer.keys = layer.keys.take_along_dim(at, dim=-2)
                layer.values = layer.values.take_along_dim(at, dim=-2)
        self._seen = self._seen.take_along_dim(order, dim=1)

    def _columns(self, filled: Sequence[int], width: int) -> torch.Tensor:
        """Marks [rows, width] of the first so many of each row."""
        import torch

        marks = [[1] * one + [0] * (width - one) for one in filled]
        return torch.tensor(marks, dtype=self._seen.dtype, device=self._seen.device)

    def _leave_the_open(self, answers: AnswersSoFar) -> None:
        still = frozenset(answers.open)
        self._needed = [
            needed for row, needed in zip(answers.rows, self._needed, strict=True) if row in still
        ]
        kept = answers.leave_the_open()
        self._cache.batch_select_indices(kept)
        self._seen = self._seen.index_select(0, kept)
        self._positions = self._positions.index_select(-2, kept)
        self._types = {
            name: value.index_select(0, kept) if len(value) > 1 else value
            for name, value in self._types.items()
        }


def are_sound(scores: torch.Tensor) -> torch.Tensor:
    """Whether a softmax of scores [..., vocabulary] gives probabilities, as one truth on their device.

    It gives none where the largest is NaN or infinite. Not a test of each score: models and grammars exclude
    tokens by minus infinity.
    """
    return scores.amax(dim=-1).isfinite().all()


def _worth_a_cut(answers: AnswersSoFar) -> bool:
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


def _can_select(state: Mapping[str, Any], rows: int) -> bool:
    """Whether all that a model keeps from step to step is known, so that rows can be taken out of it."""
    import torch
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = state.get("past_key_values")
    plain = (DynamicLayer, DynamicSlidingWindowLayer, roomy_layer())
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


def _select_rows(state: dict[str, Any], kept: torch.Tensor) -> None:
    """Leave these rows alone in all that a model keeps from step to step, the cache aside."""
    for name in _PER_ROW & state.keys():
        value = state[name]
        if value is not None and value.shape[-2] > 1:
            state[name] = value.index_select(-2, kept)


def _refusal(model: Any, state: Mapping[str, Any], answers: AnswersSoFar) -> str | None:
    """Why a model cannot be asked about several tokens at once; None where it can."""
    import torch
    from transformers import GenerationMixin
    from transformers.cache_utils import DynamicLayer

    name = type(model).__name__
    generic = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    if any(getattr(type(model), one) is not getattr(GenerationMixin, one) for one in generic):
        return f"{name} steps in a way of its own"
    if not _can_select(state, len(answers.rows)):
        return f"{name} keeps more than keys and values from step to step"
    cache = state["past_key_values"]
    if any(type(layer) not in (DynamicLayer, roomy_layer()) for layer in cache.layers):
        return f"{name} has layers that look back over a number of columns, holes among them"
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if any(
        one.get("rope_type") in _BY_THE_FURTHEST for one in (rope, *rope.values()) if isinstance(one, Mapping)
    ):
        return f"{name} turns positions by the furthest one of a step"
    if not isinstance(state.get("position_ids"), torch.Tensor):
        return f"{name} counts positions by itself"
    columns = cache.get_seq_length()
    # Without a mask nothing tells what else is there, such as an image that is no token of the prompt (GIT).
    said = columns if state.get("attention_mask") is not None else answers.prompt_tokens
    if columns != said or _seen(state, answers).shape != (len(answers.rows), columns):
        return f"{name} does not say which of its cache each row sees"
    return None


def _seen(state: Mapping[str, Any], answers: AnswersSoFar) -> torch.Tensor:
    """Which columns of the cache each row sees after the prompt [rows, columns]."""
    seen: torch.Tensor | None = state.get("attention_mask")
    if seen is None:  # transformers leaves it out where no prompt is padded
        return answers.computed.new_ones(len(answers.rows), state["past_key_values"].get_seq_length())
    return seen[:, :-1]  # the last one is of the next step

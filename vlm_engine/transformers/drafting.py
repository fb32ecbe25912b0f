"""Drafted decoding: the model is asked about several tokens at once, those that followed in earlier answers.

``Drafting`` is the only door: the engine makes it (``speculative_tokens``) and hands what
``start_steps`` returns to GreedyDecoding. Nothing else imports this module, so drafts can be deleted with it.
Terms: speculative decoding, verified greedily; n-grams, as in prompt lookup.

A token of a draft is kept where the model and the grammar would have chosen it, so answers stay the same.
Where a draft was wrong, its keys and values stay in the cache as a hole, which no mask shows: rows of a batch
lie side by side, and the next step appends to all of them. Holes at the end of all rows are cut off, and the
others are closed before there are many.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from vlm_engine.protocol import ImpossibleScoresError
from vlm_engine.transformers.attention import BY_ROWS, Attention, attention_by_rows
from vlm_engine.transformers.greedy_decoding import (
    AnswersSoFar,
    Process,
    StartSteps,
    are_sound,
    roomy_layer,
    rows_can_leave,
)
from vlm_engine.transformers.guided import GuidedBatch, mask_scores

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_BEFORE_THE_ANSWER: Final = -1
_FIRST_TRUST: Final = 0.5
_STEADINESS: Final = 0.8
"""The share of a trust that remains after one more answer; the rest is what that answer showed, 0 or 1."""

_LEAST_TRUST: Final = 0.2
"""A draft ends where it is less likely than that, and a continuation with less trust is replaced."""

_TOKEN_TYPES: Final = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
"""Tensors [rows, tokens] whose last value all tokens of an answer have."""

_ROPE_BY_THE_FURTHEST: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rotary positions whose frequencies depend on the largest position of a step, drafts included."""

FEW_HOLES: Final = 32
"""Columns of the cache, or an eighth of them, that no row may see before holes are closed."""

FEW_TOKENS: Final = 64
"""Tokens of a step with drafts, at most."""

MASK_WORDS: Final = 1 << 16
"""Of the masks for which there is room at once, at least: most steps need no other room."""

_log = logging.getLogger(__name__)

Context = tuple[int, int]


class Drafting:
    """Drafted decoding for one model.

    most_tokens: of a draft; 0: none are made, and answers grow token by token. Used by one thread.
    """

    def __init__(self, model: Any, most_tokens: int) -> None:
        self.drafts = Drafts(most_tokens)
        _share_keys_in_short_steps(model)

    def start_steps(self, guide: Any) -> StartSteps | None:
        """For GreedyDecoding, with the logits processor that alone decides about the batch's tokens.

        Returns None where there are no drafts, or where the processor cannot check several tokens at a time.
        """
        if self.drafts.most_tokens == 0:
            return None
        if isinstance(guide, GuidedBatch):
            return partial(self._started, GrammarCheck(guide))
        return partial(self._started, guide) if isinstance(guide, DraftCheck) else None

    def _started(
        self, check: DraftCheck, model: Any, state: dict[str, Any], answers: AnswersSoFar
    ) -> DraftedSteps | None:
        refusal = _refusal(model, state, answers)
        if refusal is None:
            return DraftedSteps(model, state, answers, check, self.drafts)
        _log.debug("Answers are decoded token by token: %s.", refusal)
        return None


class Drafts:
    """The token that mostly followed each pair of tokens, in any answer of one model.

    most_tokens: of a draft. most_contexts: pairs that are kept, those longest unused being forgotten; 65,536
    are about 15 MiB.
    """

    def __init__(self, most_tokens: int, *, most_contexts: int = 1 << 16) -> None:
        self.most_tokens = most_tokens
        self._most_contexts = most_contexts
        self._followers: dict[Context, tuple[int, float]] = {}

    def draft(self, answer: Sequence[int], room: int) -> list[int]:
        """Tokens that may follow an answer, ``room`` at most; none after a pair that never occurred."""
        context, trust = _context(answer, len(answer)), 1.0
        tokens: list[int] = []
        while len(tokens) < min(self.most_tokens, room):
            follower = self._followers.get(context)
            if follower is None:
                break
            token, follower_trust = follower
            trust *= follower_trust
            if trust < _LEAST_TRUST:
                break
            tokens.append(token)
            context = (context[1], token)
        return tokens

    def learn(self, answer: Sequence[int], new: int) -> None:
        """Remember which token followed which pair in the last ``new`` tokens of an answer."""
        for index in range(len(answer) - new, len(answer)):
            context, token = _context(answer, index), answer[index]
            follower, trust = self._followers.pop(context, (token, _FIRST_TRUST))
            if follower == token:
                trust += (1 - trust) * (1 - _STEADINESS)
            else:
                trust *= _STEADINESS
                if trust < _LEAST_TRUST:
                    follower, trust = token, _FIRST_TRUST
            self._followers[context] = follower, trust  # inserted last, so forgotten last
        if len(self._followers) > self._most_contexts:
            for context in list(itertools.islice(self._followers, self._most_contexts // 2)):
                del self._followers[context]


def _context(answer: Sequence[int], index: int) -> Context:
    """The two tokens before this place of an answer."""
    return (
        answer[index - 2] if index > 1 else _BEFORE_THE_ANSWER,
        answer[index - 1] if index > 0 else _BEFORE_THE_ANSWER,
    )


@runtime_checkable
class DraftCheck(Protocol):
    """Holds the answers of one batch to their form, several tokens at a time."""

    def accept_tokens(self, tokens: Sequence[int]) -> None:
        """Accept one token of each row of the batch."""

    def next_tokens(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]], scores: torch.Tensor
    ) -> list[list[int]]:
        """The next tokens of each of ``rows``: its draft as far as that is right, and one token more.

        scores: [rows, tokens, vocabulary]; those after the first ``n`` tokens of a row's draft are at ``n``.
        """


class GrammarCheck:
    """Checks drafts against the grammar of one batch.

    Each token is the likeliest that the grammar allows. Where the grammar allows the likeliest of all, no
    mask decides.
    """

    def __init__(self, guided: GuidedBatch) -> None:
        self._guided = guided
        self._masks = guided.bitmask[:0]
        """Room for the masks of the choices of some steps [choices, words], the first ``_filled`` in use."""
        self._masks_as_array = self._masks.numpy()
        self._filled = 0
        self._tokens = 0
        """The tokens of a row in a step's scores."""
        self._rows: list[int] = []
        self._places: list[int] = []
        self._is_choice: list[bool] = []
        """The tokens that were noted: of each its row, its place in the scores, and its kind."""

    def accept_tokens(self, tokens: Sequence[int]) -> None:
        """See DraftCheck."""
        self._guided.accept_tokens(tokens)

    def next_tokens(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]], scores: torch.Tensor
    ) -> list[list[int]]:
        """See DraftCheck."""
        import xgrammar

        likeliest = scores.argmax(dim=-1).tolist()
        chosen: list[list[int]] = [[] for _ in rows]
        self._rows, self._places, self._is_choice = [], [], []
        self._tokens = scores.shape[1]
        first, most = self._filled, len(rows) * self._tokens
        if len(self._masks) < first + most:
            words = self._guided.bitmask.shape[-1]
            first = self._filled = 0
            self._masks = xgrammar.allocate_token_bitmask(max(most, MASK_WORDS // words), 32 * words)
            self._masks_as_array = self._masks.numpy()
        unfinished = list(range(len(rows)))
        while refused := [
            place
            for place in unfinished
            if not self._follow(rows[place], place, drafts[place], likeliest[place], chosen[place])
        ]:
            refused_scores = scores[refused, [len(chosen[place]) for place in refused]]
            allowed = self._likeliest_allowed([rows[place] for place in refused], refused_scores)
            unfinished = []
            for place, token in zip(refused, allowed, strict=True):
                if not self._accepts(rows[place], token):
                    self._guided.end_answer(rows[place])  # as in GuidedBatch.accept_tokens
                chosen[place].append(token)
                if self._agrees(drafts[place], chosen[place]):
                    unfinished.append(place)
        self._keep_scores(scores, chosen, self._masks_as_array[first : self._filled])
        return chosen

    def _note(self, row: int, place: int, index: int) -> None:
        """Note where the scores of the row's next token are, and make its mask, before it is accepted."""
        guided = self._guided
        if row not in guided.open_rows:
            guided.scores.add_unknown(row)
            return
        self._rows.append(row)
        self._places.append(place * self._tokens + index)
        if is_choice := not guided.is_in_text(row):
            guided.matchers[row].fill_next_token_bitmask(self._masks, self._filled)
            self._filled += 1
        self._is_choice.append(is_choice)

    def _keep_scores(
        self, scores: torch.Tensor, chosen: Sequence[Sequence[int]], masks: npt.NDArray[np.int32]
    ) -> None:
        """Keep the scores of the tokens that were noted. scores: [rows, tokens, vocabulary]."""
        if not self._places:
            return
        self._guided.scores.add(
            self._rows,
            self._is_choice,
            masks,
            scores.flatten(0, 1),
            places=self._places,
            chosen=[chosen[place // self._tokens][place % self._tokens] for place in self._places],
        )

    def _follow(
        self, row: int, place: int, draft: Sequence[int], likeliest: Sequence[int], chosen: list[int]
    ) -> bool:
        """Choose the likeliest tokens for as long as the draft has them. False before a forbidden token."""
        while True:
            self._note(row, place, len(chosen))
            token = likeliest[len(chosen)]
            if not self._accepts(row, token):
                return False
            chosen.append(token)
            if not self._agrees(draft, chosen):
                return True

    def _agrees(self, draft: Sequence[int], chosen: Sequence[int]) -> bool:
        """Whether the draft has the last chosen token, so that the scores after it are of this answer."""
        last = len(chosen) - 1
        return (
            last < len(draft) and chosen[last] == draft[last] and chosen[last] not in self._guided.stop_tokens
        )

    def _likeliest_allowed(self, rows: Sequence[int], scores: torch.Tensor) -> list[int]:
        """One token for each of ``rows``, by its scores [rows, width]."""
        import torch

        guided = self._guided
        for row in guided.open_rows.intersection(rows):
            guided.matchers[row].fill_next_token_bitmask(guided.bitmask, row)
        bitmask = (guided.bitmask[list(rows)] & guided.plain).to(scores.device)
        masked = scores.to(torch.float32)
        mask_scores(masked, bitmask)
        tokens: list[int] = masked.argmax(dim=-1).tolist()
        return tokens

    def _accepts(self, row: int, token: int) -> bool:
        """Accept a token of one row, if the grammar allows it."""
        guided = self._guided
        if row not in guided.open_rows:
            return token in guided.stop_tokens
        if token in guided.never or not guided.accepts(row, token):
            return False
        if guided.matchers[row].is_terminated():
            guided.end_answer(row)
        return True


class DraftedSteps:
    """Steps with drafts: each open answer gets a token or more. See Steps in greedy_decoding.py.

    For each computed row it keeps which columns of the cache the row sees [rows, columns], and the position
    of the token that the model is asked about next [..., rows, 1].
    """

    def __init__(
        self, model: Any, state: dict[str, Any], answers: AnswersSoFar, check: DraftCheck, drafts: Drafts
    ) -> None:
        self._model = model
        self._check = check
        self._drafts = drafts
        self._cache = state["past_key_values"]
        self._seen = _seen_columns(state, answers)
        self._seen_counts: list[int] = self._seen.sum(dim=1).tolist()
        """How many columns each row sees, on the host, so that the device need not be asked."""
        positions = state["position_ids"][..., -1:]
        rows = len(answers.computed_rows)
        self._positions: torch.Tensor = positions.expand(*positions.shape[:-2], rows, 1).clone()
        self._types: dict[str, torch.Tensor] = {
            name: state[name][:, -1:] for name in _TOKEN_TYPES & state.keys() if state[name] is not None
        }
        self._state = {
            name: value
            for name, value in state.items()
            if name not in {"past_key_values", "attention_mask", "position_ids", *self._types}
        }
        check.accept_tokens(answers.sequences[:, -1].tolist())
        for row in answers.computed_rows:
            drafts.learn(answers.answer(row), 1)

    def step(self, answers: AnswersSoFar, process: Process) -> None:
        """Append at least one token to each open answer. The check does what ``process`` would do.

        Raises ImpossibleScoresError, for scores after a wrong token too: a sound device computes no such.
        """
        if answers.finished_rows_should_leave():
            self._keep_open_rows(answers)
        is_open = frozenset(answers.open_rows)
        drafts = [
            self._drafts.draft(answers.answer(row), answers.room(row) - 1) if row in is_open else []
            for row in answers.computed_rows
        ]
        logits = self._logits([answers.answer(row)[-1] for row in answers.computed_rows], drafts)
        places = [place for place, row in enumerate(answers.computed_rows) if row in is_open]
        scores = logits if len(places) == len(logits) else logits[places]
        if not are_sound(scores):
            raise ImpossibleScoresError
        open_rows = list(answers.open_rows)
        chosen = self._check.next_tokens(open_rows, [drafts[place] for place in places], scores)
        answers.append(dict(zip(open_rows, chosen, strict=True)))
        kept = [0] * len(drafts)
        for place, row, tokens in zip(places, open_rows, chosen, strict=True):
            # The last token is not in the cache yet; in its place is the one before the draft.
            kept[place] = len(tokens)
            self._drafts.learn(answers.answer(row), len(tokens))
        self._keep_columns(kept, computed=logits.shape[1])

    def _logits(self, last_tokens: Sequence[int], drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Scores after each row's last token and after each of its draft's [rows, tokens, vocabulary]."""
        import torch

        width = 1 + max(map(len, drafts))
        tokens = [
            [token, *draft, *[token] * (width - 1 - len(draft))]
            for token, draft in zip(last_tokens, drafts, strict=True)
        ]
        device = self._seen.device
        marks = self._marks([1 + len(draft) for draft in drafts], width)
        # Tokens that only fill up a row stay at its last position: there may be none beyond.
        offsets = [[min(index, len(draft)) for index in range(width)] for draft in drafts]
        state: Mapping[str, Any] = {
            **self._state,
            **{name: value.expand(-1, width) for name, value in self._types.items()},
            "past_key_values": self._cache,
            "attention_mask": torch.cat([self._seen, marks], dim=1),
            "position_ids": self._positions + torch.tensor(offsets, device=device),
        }
        if "logits_to_keep" in state:
            state = {**state, "logits_to_keep": width}
        inputs = self._model.prepare_inputs_for_generation(
            torch.tensor(tokens, device=device), next_sequence_length=width, **state
        )
        logits: torch.Tensor = self._model(**inputs, return_dict=True).logits
        return logits[:, -width:]

    def _keep_columns(self, kept: Sequence[int], *, computed: int) -> None:
        """Have each row see so many of the last ``computed`` columns, and drop those that no row sees."""
        import torch

        width = max(kept)
        if width < computed:
            self._cache.crop(width - computed)
        self._seen = torch.cat([self._seen, self._marks(kept, width)], dim=1)
        self._positions += torch.tensor(kept, device=self._positions.device)[:, None]
        self._seen_counts = [seen + new for seen, new in zip(self._seen_counts, kept, strict=True)]
        columns = max(self._seen_counts)
        if self._seen.shape[1] > columns + max(FEW_HOLES, columns // 8):
            self._close_holes(columns)

    def _close_holes(self, columns: int) -> None:
        """Bring together what each row sees, at the right of so many columns. Keys keep their positions."""
        order = self._seen.argsort(dim=1, stable=True)[:, -columns:]
        for layer in self._cache.layers:
            if layer.is_initialized:
                indices = order[:, None, :, None]
                layer.keys = layer.keys.take_along_dim(indices, dim=-2)
                layer.values = layer.values.take_along_dim(indices, dim=-2)
        self._seen = self._seen.take_along_dim(order, dim=1)

    def _marks(self, counts: Sequence[int], width: int) -> torch.Tensor:
        """A mask [rows, width] that shows the first so many columns of each row."""
        import torch

        marks = [[1] * count + [0] * (width - count) for count in counts]
        return torch.tensor(marks, dtype=self._seen.dtype, device=self._seen.device)

    def _keep_open_rows(self, answers: AnswersSoFar) -> None:
        is_open = frozenset(answers.open_rows)
        self._seen_counts = [
            count
            for row, count in zip(answers.computed_rows, self._seen_counts, strict=True)
            if row in is_open
        ]
        kept = answers.keep_open_rows()
        self._cache.batch_select_indices(kept)
        self._seen = self._seen.index_select(0, kept)
        self._positions = self._positions.index_select(-2, kept)
        self._types = {
            name: value.index_select(0, kept) if len(value) > 1 else value
            for name, value in self._types.items()
        }


def _refusal(model: Any, state: Mapping[str, Any], answers: AnswersSoFar) -> str | None:
    """Why a model cannot be asked about several tokens at once; None where it can."""
    import torch
    from transformers import GenerationMixin
    from transformers.cache_utils import DynamicLayer

    family = type(model).__name__
    methods = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    if any(getattr(type(model), method) is not getattr(GenerationMixin, method) for method in methods):
        return f"{family} steps in a way of its own"
    if not rows_can_leave(state, len(answers.computed_rows)):
        return f"{family} keeps more than keys and values from step to step"
    cache = state["past_key_values"]
    if any(type(layer) not in (DynamicLayer, roomy_layer()) for layer in cache.layers):
        return f"{family} has layers that look back over a number of columns, holes among them"
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    if any(parameters.get("rope_type") in _ROPE_BY_THE_FURTHEST for parameters in ropes):
        return f"{family} turns positions by the furthest one of a step"
    if not isinstance(state.get("position_ids"), torch.Tensor):
        return f"{family} counts positions by itself"
    columns = cache.get_seq_length()
    # Without a mask nothing tells what else the cache holds, such as an image without tokens in the prompt
    # (GIT).
    expected = columns if state.get("attention_mask") is not None else answers.prompt_tokens
    if columns != expected or _seen_columns(state, answers).shape != (len(answers.computed_rows), columns):
        return f"{family} does not say which of its cache each row sees"
    return None


def _seen_columns(state: Mapping[str, Any], answers: AnswersSoFar) -> torch.Tensor:
    """Which columns of the cache each row sees after the prompt [rows, columns]."""
    mask: torch.Tensor | None = state.get("attention_mask")
    if mask is None:  # transformers leaves it out where no prompt is padded.
        rows, columns = len(answers.computed_rows), state["past_key_values"].get_seq_length()
        return answers.computed_sequences.new_ones(rows, columns)
    return mask[:, :-1]  # The last column is of the next step.


def _share_keys_in_short_steps(model: Any) -> None:
    """Have the layers that answer use keys as they lie in the cache, in steps of a few tokens.

    transformers copies keys and values for each of the heads that share them, in each layer: several times
    the reading of a cache. Only where these layers attend by rows (attention.py).
    """
    from transformers import AttentionInterface

    if model.config.get_text_config(decoder=True)._attn_implementation == BY_ROWS:
        AttentionInterface.register(BY_ROWS, partial(_attention, attention_by_rows()))


def _attention(
    by_rows: Attention,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [rows, tokens, heads, width]. See AttentionInterface. query: [rows, heads, tokens, width]."""
    import torch

    rows, heads, tokens, width = query.shape
    sharing = heads // key.shape[1]
    masked = isinstance(attention_mask, torch.Tensor) and attention_mask.shape[1] == 1
    plain = all(options.get(name) is None for name in ("softcap", "position_bias", "cache"))
    if sharing == 1 or not 1 < tokens <= FEW_TOKENS or not masked or not plain or options.get("dropout"):
        return by_rows(module, query, key, value, attention_mask, **options)
    # The queries of the heads that share a key stand one behind the other.
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads // sharing, sharing * tokens, width),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, sharing, 1),
        scale=options.get("scaling"),
    )
    return attended.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous(), None

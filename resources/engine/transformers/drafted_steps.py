"""Steps that ask a model about several tokens of each answer at once: the last one, and guesses of the next.

Descriptions by one schema say the same again and again: the names of the fields, and many of their values.
What lives here: guesses made of what was said after what; one step; and what a model keeps from step to step
where rows go on by different numbers of tokens. What does not: what may be said (guided.py), the prompt
(greedy_decoding.py). What is said is what a model says without guesses, for each token is the likeliest after
those before it; only rounding differs, as between batches of different sizes. Terms: speculative decoding,
verified greedily; n-grams, as in prompt lookup.

Where a guess was wrong its keys and values stay in the cache as a hole, which no mask shows: rows of a batch
lie side by side, and the next step appends to all of them. Holes at the end of all rows are cut off, and
others are closed before they are many.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from resources.engine.transformers.greedy_decoding import (
    AnswersSoFar,
    GrowingSteps,
    Process,
    Steps,
    can_select,
    worth_a_cut,
)

if TYPE_CHECKING:
    import torch


_TOKEN_TYPES: Final = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
"""Tensors [rows, tokens] whose last value all tokens of an answer have."""

_BY_THE_FURTHEST: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rotary positions whose frequencies depend on the largest position of a step, be it a guess's."""

_FEW_HOLES: Final = 32
"""Columns of the cache, or an eighth of them, that may be seen by no row before holes are closed."""

_BEFORE_THE_ANSWER: Final = -1
_TRUST_AT_FIRST: Final = 0.5
_STEADINESS: Final = 0.8
"""What is left of a trust after one more answer; the rest is what that answer showed, 0 or 1."""

_LEAST_TRUST: Final = 0.2
"""A guess ends where it is less likely than that, and a continuation in which nobody trusts is replaced."""

Context = tuple[int, int]

_log = logging.getLogger(__name__)


class Drafts:
    """What mostly followed the last two tokens, in any answer of one model.

    most: tokens of a guess. remembered: contexts that are kept, those longest unused being forgotten; 65,536
    are about 15 MiB. Used by one thread.
    """

    def __init__(self, most: int, *, remembered: int = 1 << 16) -> None:
        self.most = most
        self._remembered = remembered
        self._followed: dict[Context, tuple[int, float]] = {}

    def guess(self, said: Sequence[int], room: int) -> list[int]:
        """Tokens that may follow the answer ``said``: none where nobody knows, ``room`` at most."""
        context, trust = _context(said, len(said)), 1.0
        tokens: list[int] = []
        while len(tokens) < min(self.most, room):
            followed = self._followed.get(context)
            if followed is None:
                break
            token, trusted = followed
            trust *= trusted
            if trust < _LEAST_TRUST:
                break
            tokens.append(token)
            context = (context[1], token)
        return tokens

    def learn(self, said: Sequence[int], new: int) -> None:
        """Remember what followed what in the last ``new`` tokens of the answer ``said``."""
        for at in range(len(said) - new, len(said)):
            context, token = _context(said, at), said[at]
            guessed, trust = self._followed.pop(context, (token, _TRUST_AT_FIRST))
            if guessed == token:
                trust += (1 - trust) * (1 - _STEADINESS)
            else:
                trust *= _STEADINESS
                if trust < _LEAST_TRUST:
                    guessed, trust = token, _TRUST_AT_FIRST
            self._followed[context] = guessed, trust  # the last one of them, so the last to be forgotten
        if len(self._followed) > self._remembered:
            for context in list(itertools.islice(self._followed, self._remembered // 2)):
                del self._followed[context]


def _context(said: Sequence[int], at: int) -> Context:
    """The two tokens before place ``at`` of an answer."""
    return (
        said[at - 2] if at > 1 else _BEFORE_THE_ANSWER,
        said[at - 1] if at > 0 else _BEFORE_THE_ANSWER,
    )


@runtime_checkable
class Guide(Protocol):
    """What holds the answers of one batch to their form, several tokens at a time. See GuidedBatch."""

    def take(self, tokens: Sequence[int]) -> None:
        """Take in one token of each answer of the batch."""

    def go_on(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]], scores: torch.Tensor
    ) -> list[list[int]]:
        """What each of ``rows`` says next: its draft as far as that is right, and one token more.

        scores: [rows, tokens, vocabulary]; at ``n`` those of what follows ``n`` tokens of the row's draft.
        """


def drafted_steps(
    model: Any, state: dict[str, Any], answers: AnswersSoFar, *, guide: Guide, drafts: Drafts
) -> Steps:
    """The steps after a prompt, by guesses where the model can be asked about them. See Begin."""
    refusal = _refusal(model, state, answers)
    if refusal is None:
        return _DraftedSteps(model, state, answers, guide, drafts)
    _log.debug("Answers are decoded token by token: %s.", refusal)
    return GrowingSteps(model, state, answers)


class _DraftedSteps:
    """Steps one batch.

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
        """See Steps. The guide does what ``process`` would do."""
        if worth_a_cut(answers):
            self._leave_the_open(answers)
        still = frozenset(answers.open)
        drafts = [
            self._drafts.guess(answers.of(row), answers.room(row) - 1) if row in still else []
            for row in answers.rows
        ]
        logits = self._logits([answers.of(row)[-1] for row in answers.rows], drafts)
        at_open = [at for at, row in enumerate(answers.rows) if row in still]
        said = self._guide.go_on(
            answers.open,
            [drafts[at] for at in at_open],
            logits if len(at_open) == len(logits) else logits[at_open],
        )
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


def _refusal(model: Any, state: Mapping[str, Any], answers: AnswersSoFar) -> str | None:
    """Why a model cannot be asked about several tokens at once; None where it can."""
    import torch
    from transformers import GenerationMixin
    from transformers.cache_utils import DynamicLayer

    name = type(model).__name__
    generic = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    if any(getattr(type(model), one) is not getattr(GenerationMixin, one) for one in generic):
        return f"{name} steps in a way of its own"
    if not can_select(state, len(answers.rows)):
        return f"{name} keeps more than keys and values from step to step"
    cache = state["past_key_values"]
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
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

"""Guided decoding: at every step only tokens that keep the answer inside the JSON schema can be chosen.

What lives here: the schema compiled to a grammar over one tokenizer's vocabulary (xgrammar), the logits
processors of one batch, and guesses of what an answer says next. What does not: the model, its steps
(greedy_decoding.py), and the verdict on an answer (schema.py): a guided answer can still be cut off at the
length limit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch

_SEPARATORS = (",", ":")
_CONTROL = frozenset(range(0x20))

_BEFORE_THE_ANSWER: Final = -1
_TRUST_AT_FIRST: Final = 0.5
_STEADINESS: Final = 0.8
"""What is left of a trust after one more answer; the rest is what that answer showed, 0 or 1."""

_LEAST_TRUST: Final = 0.2
"""A guess ends where it is less likely than that, and a continuation in which nobody trusts is replaced."""

Context = tuple[int, int]


class Grammar:
    """A JSON schema compiled for one tokenizer; used by any number of batches.

    logits_width: number of columns of the model's logits, which may exceed the tokenizer's vocabulary; the
    columns beyond it are never chosen. stop_token_ids: what may end an answer. Raises SchemaError where the
    schema asks for something that the grammar cannot express.
    """

    def __init__(
        self,
        json_schema: Mapping[str, Any],
        tokenizer: Any,
        *,
        logits_width: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        import xgrammar

        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=logits_width, stop_token_ids=list(stop_token_ids)
        )
        try:
            # One thread: the grammar of a description is small, and its compilation is milliseconds.
            self._compiled = xgrammar.GrammarCompiler(vocabulary, max_threads=1).compile_json_schema(
                json.dumps(json_schema), any_whitespace=False, separators=_SEPARATORS, strict_mode=True
            )
        except RuntimeError as error:
            from vlm_engine.schema import SchemaError

            raise SchemaError(f"the description schema cannot guide decoding: {error}") from error
        special = {*tokenizer.all_special_ids}
        special.update(vocabulary.special_token_ids)  # of no text at all; asked about them, xgrammar warns
        special.update(at for at, token in tokenizer.added_tokens_decoder.items() if token.special)
        # To a grammar "<image>" is seven characters, welcome in any string; to the model it is no text.
        # And xgrammar lets control characters into strings with a maxLength, which JSON does not.
        control = {at for at, token in enumerate(vocabulary.decoded_vocab) if not _CONTROL.isdisjoint(token)}
        self._never = frozenset((special | control) - set(stop_token_ids))
        self._plain = _bit_mask(logits_width, cleared=self._never)
        self._stop_tokens = frozenset(stop_token_ids)
        self._width = logits_width

    def for_batch(self, size: int) -> GuidedBatch:
        """The logits processor of one call of ``generate`` with ``size`` sequences."""
        import xgrammar

        matchers = [xgrammar.GrammarMatcher(self._compiled) for _ in range(size)]
        bitmask = xgrammar.allocate_token_bitmask(size, self._width)
        return GuidedBatch(
            matchers, bitmask, never=self._never, plain=self._plain, stop_tokens=self._stop_tokens
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


class GuidedBatch:
    """Holds the answers of one batch to the grammar. Serves one call of ``generate`` and no second.

    A step is either a call, which masks the scores of all rows, or ``go_on``. never: tokens that are never
    said; plain: the mask without them; stop_tokens: what ends an answer.
    """

    def __init__(
        self,
        matchers: Sequence[Any],
        bitmask: torch.Tensor,
        *,
        never: Collection[int],
        plain: torch.Tensor,
        stop_tokens: Collection[int],
    ) -> None:
        self._matchers = list(matchers)
        self._bitmask = bitmask
        self._never = never
        self._plain = plain
        self._stop_tokens = stop_tokens
        self._stop = ~_bit_mask(32 * bitmask.shape[-1], cleared=stop_tokens)
        self._open = set(range(len(self._matchers)))
        self._started = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take the last tokens of ``input_ids`` [batch, tokens] in, and mask ``scores`` [batch, width].

        With ``input_ids`` on the host the grammar works beside the step that makes the scores.
        """
        if self._started:
            self.take(input_ids[:, -1].tolist())
        self._started = True
        for row in self._open:
            self._matchers[row].fill_next_token_bitmask(self._bitmask, row)
        self._bitmask &= self._plain
        if scores.is_cuda and not self._bitmask.is_pinned():
            # A copy out of other memory waits for the step under way, and what follows is launched late.
            # Nobody writes there before the chosen tokens are back on the host: after the copy.
            self._bitmask = self._bitmask.pin_memory()
        _apply(scores, self._bitmask.to(scores.device, non_blocking=True))
        return scores

    def take(self, tokens: Sequence[int]) -> None:
        """Take in one token of each row of the batch."""
        for row in sorted(self._open):
            matcher = self._matchers[row]
            # A refusal means that no token could go on (a vocabulary without some byte): end it; the
            # verdict on its text comes later, and its neighbours must not suffer.
            if not matcher.accept_token(tokens[row]) or matcher.is_terminated():
                self._end(row)

    def go_on(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]], scores: torch.Tensor
    ) -> list[list[int]]:
        """What each of ``rows`` says next: its draft as far as that is right, and one token more.

        scores: [rows, tokens, width]; those after ``n`` tokens of a row's draft are at ``n``. Each token is
        the likeliest that the grammar allows. Where it allows the likeliest of all, no mask is made.
        """
        likeliest = scores.argmax(dim=-1).tolist()
        said: list[list[int]] = [[] for _ in rows]
        asked = list(range(len(rows)))
        while refused := [
            at for at in asked if not self._follow(rows[at], drafts[at], likeliest[at], said[at])
        ]:
            places = [len(said[at]) for at in refused]
            allowed = self._likeliest_allowed([rows[at] for at in refused], scores[refused, places])
            asked = []
            for at, token in zip(refused, allowed, strict=True):
                if not self._accepts(rows[at], token):
                    self._end(rows[at])  # as in ``take``
                said[at].append(token)
                if self._goes_on(drafts[at], said[at]):
                    asked.append(at)
        return said

    def _follow(self, row: int, draft: Sequence[int], likeliest: Sequence[int], said: list[int]) -> bool:
        """Say the likeliest tokens for as long as they are the draft's; False before one not allowed."""
        while self._accepts(row, token := likeliest[len(said)]):
            said.append(token)
            if not self._goes_on(draft, said):
                return True
        return False

    def _goes_on(self, draft: Sequence[int], said: Sequence[int]) -> bool:
        """Whether the scores after what was said are there, for it is what the draft says."""
        last = len(said) - 1
        return last < len(draft) and said[last] == draft[last] and said[last] not in self._stop_tokens

    def _likeliest_allowed(self, rows: Sequence[int], scores: torch.Tensor) -> list[int]:
        """One token for each of ``rows``, of its scores [rows, width]."""
        import torch

        for row in self._open.intersection(rows):
            self._matchers[row].fill_next_token_bitmask(self._bitmask, row)
        bitmask = (self._bitmask[list(rows)] & self._plain).to(scores.device)
        masked = scores.to(torch.float32)
        _apply(masked, bitmask)
        tokens: list[int] = masked.argmax(dim=-1).tolist()
        return tokens

    def _accepts(self, row: int, token: int) -> bool:
        """Take in a token of one row, if it may be said."""
        if row not in self._open:
            return token in self._stop_tokens
        matcher = self._matchers[row]
        if token in self._never or not matcher.accept_token(token):
            return False
        if matcher.is_terminated():
            self._end(row)
        return True

    def _end(self, row: int) -> None:
        self._open.discard(row)
        self._bitmask[row] = self._stop


def _apply(scores: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Mask scores [rows, width] in place."""
    import xgrammar

    # The triton kernel that xgrammar would choose on a GPU needs a compiler on the machine.
    backend = "cpu" if scores.device.type == "cpu" else "torch_native"
    xgrammar.apply_token_bitmask_inplace(scores, bitmask, backend=backend)


class SampledBatch:
    """Logits processor that turns greedy choice into sampling, each sequence with its own seed.

    It adds Gumbel noise to ``scores / temperature``: the largest is then a sample of the softmax. What a
    property draws does not depend on its neighbours in the batch, as it would with one generator for all. A
    GPU draws other numbers than a CPU.
    """

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        self._temperature = temperature
        self._seeds = list(seeds)
        self._generators: list[torch.Generator] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Noised ``scores`` [batch, width]."""
        import torch

        if not self._generators:
            # On the scores' device: a vocabulary of numbers a row and step would be copied to it otherwise.
            self._generators = [torch.Generator(scores.device).manual_seed(seed) for seed in self._seeds]
        uniform = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
        for row, generator in zip(uniform, self._generators, strict=True):
            row.uniform_(generator=generator)
        gumbel = -torch.log(-torch.log(uniform))
        return scores / self._temperature + gumbel.to(scores.dtype)


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


def _bit_mask(width: int, *, cleared: Collection[int]) -> torch.Tensor:
    """A mask [words] of int32, a bit a token, low bits first: set but for ``cleared`` ones."""
    import torch

    bits = np.ones(-(-width // 32) * 32, dtype=np.bool_)
    bits[[at for at in cleared if at < width]] = False
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))

"""Guided decoding: at every step only tokens that keep the answer inside the JSON schema can be chosen.

This module holds the schema, compiled to a grammar over one tokenizer's vocabulary (xgrammar), and the logits
processors of one batch. The steps of the model are in greedy_decoding.py. The verdict on an answer is in
schema.py: a guided answer can still be cut off at the length limit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_engine.transformers.token_scores import BatchScores, index_on_device

if TYPE_CHECKING:
    import torch

_SEPARATORS = (",", ":")
_CONTROL = frozenset(range(0x20))
_ANY_CHARACTER = "\ue000"
"""Of private use: no value that a schema names has it, and a text may."""


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
        special.update(vocabulary.special_token_ids)  # They have no text; xgrammar warns if it is given one.
        special.update(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        # To a grammar "<image>" is seven characters, which any string may contain; to the model it is no
        # text. And xgrammar lets control characters into strings with a maxLength, which JSON does not.
        control = {
            index for index, token in enumerate(vocabulary.decoded_vocab) if not _CONTROL.isdisjoint(token)
        }
        self._never = frozenset((special | control) - set(stop_token_ids))
        self._plain = _bit_mask(logits_width, cleared=self._never)
        self._stop_tokens = frozenset(stop_token_ids)
        self._width = logits_width
        self._token_bytes = list(map(bytes, vocabulary.decoded_vocab))
        self._quotes = frozenset(index for index, token in enumerate(self._token_bytes) if b'"' in token)

    def for_batch(self, size: int) -> GuidedBatch:
        """The logits processor of one call of ``generate`` with ``size`` sequences."""
        import xgrammar

        matchers = [xgrammar.GrammarMatcher(self._compiled) for _ in range(size)]
        bitmask = xgrammar.allocate_token_bitmask(size, self._width)
        return GuidedBatch(
            matchers,
            bitmask,
            never=self._never,
            plain=self._plain,
            stop_tokens=self._stop_tokens,
            quotes=self._quotes,
            scores=BatchScores(size, self._token_bytes, self._plain.numpy()),
        )


class GuidedBatch:
    """Holds the answers of one batch to the grammar, in one call of ``generate``.

    matchers: the state of each row's answer in the grammar. bitmask: room for a mask of each row [rows,
    words]. never: tokens that are never chosen. plain: the mask of all other tokens [words]. stop_tokens:
    what ends an answer. quotes: tokens with a quotation mark. scores: of the tokens that are chosen.
    open_rows: rows whose answers the grammar has not ended.
    """

    def __init__(
        self,
        matchers: Sequence[Any],
        bitmask: torch.Tensor,
        *,
        never: Collection[int],
        plain: torch.Tensor,
        stop_tokens: Collection[int],
        quotes: Collection[int],
        scores: BatchScores,
    ) -> None:
        self.matchers = list(matchers)
        self.bitmask = bitmask
        self.never = never
        self.plain = plain
        self.stop_tokens = stop_tokens
        self.open_rows = set(range(len(self.matchers)))
        self.scores = scores
        self._quotes = quotes
        self._rows_in_texts: set[int] = set()
        self._only_stop = ~_bit_mask(32 * bitmask.shape[-1], cleared=stop_tokens)
        self._started = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Accept the last tokens of ``input_ids`` [batch, tokens], and mask ``scores`` [batch, width].

        With ``input_ids`` on the host the grammar works beside the step that makes the scores.
        """
        if self._started:
            self.accept_tokens(input_ids[:, -1].tolist())
        self._started = True
        for row in self.open_rows:
            self.matchers[row].fill_next_token_bitmask(self.bitmask, row)
        self.bitmask &= self.plain
        if scores.is_cuda and not self.bitmask.is_pinned():
            # A copy out of other memory waits for the step under way, which delays the launch of the next
            # kernels. Nobody writes to the mask before the chosen tokens are back on the host, which is after
            # the copy.
            self.bitmask = self.bitmask.pin_memory()
        self._keep_scores(scores)
        mask_scores(scores, self.bitmask.to(scores.device, non_blocking=True))
        return scores

    def _keep_scores(self, scores: torch.Tensor) -> None:
        """Keep the scores of the tokens that are chosen next."""
        rows = sorted(self.open_rows)
        for row in set(range(len(self.matchers))) - self.open_rows:
            self.scores.add_unknown(row)
        if rows:
            is_choice = [not self.is_in_text(row) for row in rows]
            masks = self.bitmask[list(itertools.compress(rows, is_choice))].numpy()
            self.scores.add(rows, is_choice, masks, scores[index_on_device(np.array(rows), scores)])

    def is_in_text(self, row: int) -> bool:
        """Whether the row's next token is one of a free text."""
        if row not in self._rows_in_texts and self.matchers[row].accept_string(_ANY_CHARACTER):
            self.matchers[row].rollback()
            self._rows_in_texts.add(row)
        return row in self._rows_in_texts

    def accepts(self, row: int, token: int) -> bool:
        """Accept a token of an open row, if the grammar allows it."""
        if not self.matchers[row].accept_token(token):
            return False
        if token in self._quotes:
            self._rows_in_texts.discard(row)  # It may have ended the text.
        return True

    def accept_tokens(self, tokens: Sequence[int]) -> None:
        """Accept one token of each row of the batch."""
        self.scores.settle(tokens)
        for row in sorted(self.open_rows):
            # A refusal means that no token could go on (a vocabulary without some byte): end the answer. The
            # verdict on its text comes later, and its neighbours must not suffer.
            if not self.accepts(row, tokens[row]) or self.matchers[row].is_terminated():
                self.end_answer(row)

    def end_answer(self, row: int) -> None:
        """Allow this row nothing but to stop."""
        self.open_rows.discard(row)
        self.bitmask[row] = self._only_stop


def mask_scores(scores: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Mask scores [rows, width] in place by a bit mask [rows, words]."""
    import xgrammar

    # The triton kernel that xgrammar would choose on a GPU needs a compiler on the machine.
    backend = "cpu" if scores.device.type == "cpu" else "torch_native"
    xgrammar.apply_token_bitmask_inplace(scores, bitmask, backend=backend)


class SampledBatch:
    """Logits processor that turns greedy choice into sampling, each sequence with its own seed.

    It adds Gumbel noise to ``scores / temperature``: the largest is then a sample of the softmax. The draws
    of a property do not depend on its neighbours in the batch, as they would with one generator for all. A
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
            # Generators on the host would have a whole vocabulary of numbers copied for each row and step.
            self._generators = [torch.Generator(scores.device).manual_seed(seed) for seed in self._seeds]
        uniform = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
        for row, generator in zip(uniform, self._generators, strict=True):
            row.uniform_(generator=generator)
        gumbel = -torch.log(-torch.log(uniform))
        return scores / self._temperature + gumbel.to(scores.dtype)


def _bit_mask(width: int, *, cleared: Collection[int]) -> torch.Tensor:
    """A mask [words] of int32 with a bit for each token, low bits first. All are set but the ``cleared``."""
    import torch

    bits = np.ones(-(-width // 32) * 32, dtype=np.bool_)
    bits[[token for token in cleared if token < width]] = False
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))

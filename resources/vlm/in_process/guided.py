"""Guided decoding: at every step only tokens that keep the answer inside the JSON schema can be chosen.

What lives here: the schema compiled to a grammar over one tokenizer's vocabulary (xgrammar), and the logits
processors of one batch. What does not: the model, and the verdict on an answer (schema.py): a guided answer
can still be cut off at the length limit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_SEPARATORS = (",", ":")
_CONTROL = frozenset(range(0x20))


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
            from resources.vlm.schema import SchemaError

            raise SchemaError(f"the description schema cannot guide decoding: {error}") from error
        special = {*tokenizer.all_special_ids}
        special.update(at for at, token in tokenizer.added_tokens_decoder.items() if token.special)
        # To a grammar "<image>" is seven characters, welcome in any string; to the model it is no text.
        # And xgrammar lets control characters into strings with a maxLength, which JSON does not.
        control = {at for at, token in enumerate(vocabulary.decoded_vocab) if not _CONTROL.isdisjoint(token)}
        self._plain = _bit_mask(logits_width, cleared=(special | control) - set(stop_token_ids))
        self._stop = ~_bit_mask(logits_width, cleared=stop_token_ids)
        self._width = logits_width

    def for_batch(self, size: int) -> GuidedBatch:
        """The logits processor of one call of ``generate`` with ``size`` sequences."""
        import xgrammar

        matchers = [xgrammar.GrammarMatcher(self._compiled) for _ in range(size)]
        bitmask = xgrammar.allocate_token_bitmask(size, self._width)
        return GuidedBatch(matchers, bitmask, plain=self._plain, stop=self._stop)


class GuidedBatch:
    """Masks the logits of one batch, step by step. Serves one call of ``generate`` and no second."""

    def __init__(
        self, matchers: Sequence[Any], bitmask: torch.Tensor, *, plain: torch.Tensor, stop: torch.Tensor
    ) -> None:
        self._matchers = list(matchers)
        self._bitmask = bitmask
        self._plain = plain
        self._stop = stop
        self._open = set(range(len(self._matchers)))
        self._started = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take the last tokens of ``input_ids`` [batch, tokens] in, and mask ``scores`` [batch, width].

        With ``input_ids`` on the host the grammar works beside the step that makes the scores.
        """
        import xgrammar

        if self._started:
            self._take(input_ids[:, -1].tolist())
        self._started = True
        for row in self._open:
            self._matchers[row].fill_next_token_bitmask(self._bitmask, row)
        self._bitmask &= self._plain
        if scores.is_cuda and not self._bitmask.is_pinned():
            # A copy out of other memory waits for the step under way, and what follows is launched late.
            # Nobody writes there before the chosen tokens are back on the host: after the copy.
            self._bitmask = self._bitmask.pin_memory()
        # The triton kernel that xgrammar would choose on a GPU needs a compiler on the machine.
        backend = "cpu" if scores.device.type == "cpu" else "torch_native"
        bitmask = self._bitmask.to(scores.device, non_blocking=True)
        xgrammar.apply_token_bitmask_inplace(scores, bitmask, backend=backend)
        return scores

    def _take(self, tokens: Sequence[int]) -> None:
        for row in sorted(self._open):
            matcher = self._matchers[row]
            # A refusal means that no token could go on (a vocabulary without some byte): end it; the
            # verdict on its text comes later, and its neighbours must not suffer.
            if not matcher.accept_token(tokens[row]) or matcher.is_terminated():
                self._open.discard(row)
                self._bitmask[row] = self._stop


class SampledBatch:
    """Logits processor that turns greedy choice into sampling, each sequence with its own seed.

    It adds Gumbel noise to ``scores / temperature``: the largest is then a sample of the softmax. What a
    property draws does not depend on its neighbours in the batch, as it would with one generator for all.
    """

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        import torch

        self._temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Noised ``scores`` [batch, width]."""
        import torch

        width = scores.shape[-1]
        uniform = torch.stack(
            [torch.rand(width, generator=generator, dtype=torch.float64) for generator in self._generators]
        )
        gumbel = -torch.log(-torch.log(uniform))
        return scores / self._temperature + gumbel.to(scores.device, scores.dtype)


def _bit_mask(width: int, *, cleared: Collection[int]) -> torch.Tensor:
    """A mask [words] of int32, a bit a token, low bits first: set but for ``cleared`` ones."""
    import torch

    bits = np.ones(-(-width // 32) * 32, dtype=np.bool_)
    bits[[at for at in cleared if at < width]] = False
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))

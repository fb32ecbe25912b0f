"""The probabilities of the tokens of a batch's answers, and of those that the grammar allowed beside them.

``confidence.py`` makes a field's confidence of them.

In a free text no mask is made: xgrammar takes milliseconds for one of a text of up to 300 characters, with
150,000 tokens, and microseconds for all else. So a token there has the probability that the model gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from vlm_engine.protocol import AnswerTokens

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

_HELD: Final = 1 << 22
"""Scores that are held back, since an operation on those of one step takes as long as on those of many."""

_CERTAIN: Final = 1.0 - 1e-7
"""The options beside a token that is as probable as this are left out."""

_IMPOSSIBLE: Final = 1e-9
"""Options that are not as probable as this are left out."""

_UNKNOWN: Final = -1


@dataclass
class _HeldScores:
    """Tokens of some rows, before or after they are chosen.

    masks: of the choices among them, in their order: the tokens that the grammar allows, as bits [choices,
    words]. scores: [tokens, vocabulary]. places: of the tokens in the scores; None: all of them, in order.
    chosen: None before the choice.
    """

    rows: Sequence[int]
    is_choice: Sequence[bool]
    masks: npt.NDArray[np.int32]
    scores: torch.Tensor
    places: Sequence[int] | None
    chosen: Sequence[int] | None

    def own(self) -> torch.Tensor:
        """The scores of these tokens alone, in their order."""
        if self.places is None:
            return self.scores
        # Half the time of indexing by a tensor.
        return self.scores.index_select(0, index_on_device(np.array(self.places), self.scores))


class BatchScores:
    """The scores of one batch's tokens. token_bytes: the text of each token of the vocabulary.

    plain: the mask of the tokens that may be chosen at all [words]. Scores stay on the model's device until
    the batch is answered, so that nothing waits for them, and so that little is computed between two steps:
    there each call of a library begins with cold caches.
    """

    def __init__(self, rows: int, token_bytes: Sequence[bytes], plain: npt.NDArray[np.int32]) -> None:
        self._token_bytes = token_bytes
        self._plain = plain
        self._numbers: list[list[int]] = [[] for _ in range(rows)]
        """The number of each token of a row, among those of all rows."""
        self._count = 0
        self._held: list[_HeldScores] = []
        self._held_scores = 0
        self._chosen: list[int] = []
        self._is_choice: list[bool] = []
        self._option_counts: list[npt.NDArray[np.int64]] = []
        self._option_ids: list[npt.NDArray[np.int64]] = []
        self._option_scores: list[torch.Tensor] = []
        self._text_logarithms: list[torch.Tensor] = []

    def add(
        self,
        rows: Sequence[int],
        is_choice: Sequence[bool],
        masks: npt.NDArray[np.int32],
        scores: torch.Tensor,
        *,
        places: Sequence[int] | None = None,
        chosen: Sequence[int] | None = None,
    ) -> None:
        """Add a token to each of ``rows``, of which one may be there several times. See _HeldScores.

        masks, scores: nobody else changes them. chosen: where it is not given, ``settle`` is called next.
        """
        if self._held_scores + scores.numel() > _HELD:
            self._reduce()
        self._held_scores += scores.numel()
        self._held.append(_HeldScores(rows, is_choice, masks, scores, places, chosen))
        for number, row in enumerate(rows, self._count):
            self._numbers[row].append(number)
        self._count += len(rows)
        if chosen is not None and self._held_scores > _HELD:
            self._reduce()  # Scores of tokens that are not among these need no room any more.

    def add_unknown(self, row: int) -> None:
        """Add a token that is outside the grammar."""
        self._numbers[row].append(_UNKNOWN)

    def settle(self, chosen: Sequence[int]) -> None:
        """The tokens that were chosen last, of each row of the batch."""
        if self._held and self._held[-1].chosen is None:
            self._held[-1].chosen = [chosen[row] for row in self._held[-1].rows]

    def of_answers(self, answers: Sequence[Sequence[int]]) -> list[AnswerTokens | None]:
        """The tokens of each row's answer; None where one of them is not known."""
        last = [
            answer[len(numbers) - 1] if 0 < len(numbers) <= len(answer) else 0
            for answer, numbers in zip(answers, self._numbers, strict=True)
        ]
        self.settle(last)
        self._reduce()
        scored = self._probabilities()
        return [
            None
            if len(numbers) < len(answer) or _UNKNOWN in numbers[: len(answer)]
            else self._tokens(answer, numbers, *scored)
            for answer, numbers in zip(answers, self._numbers, strict=True)
        ]

    def _tokens(
        self,
        answer: Sequence[int],
        numbers: Sequence[int],
        probabilities: Sequence[float],
        bounds: Sequence[int],
        option_texts: Sequence[bytes],
        option_probabilities: Sequence[float],
    ) -> AnswerTokens:
        # Not by ``AnswerTokens.add``, which takes longer: most tokens have no options.
        numbers = numbers[: len(answer)]
        tokens = AnswerTokens(
            [self._token_bytes[token] for token in answer], [probabilities[number] for number in numbers]
        )
        for number in numbers:
            if (start := bounds[number]) != (end := bounds[number + 1]):
                tokens.option_texts.extend(option_texts[start:end])
                tokens.option_probabilities.extend(option_probabilities[start:end])
            tokens.bounds.append(len(tokens.option_texts))
        return tokens

    def _reduce(self) -> None:
        """Keep of the scores that are held those of options, and of each token of a text its probability."""
        import torch

        steps, self._held, self._held_scores = self._held, [], 0
        if not steps:
            return
        scores = steps[0].own() if len(steps) == 1 else torch.cat([step.own() for step in steps])
        is_choice = np.concatenate([np.asarray(step.is_choice, np.bool_) for step in steps])
        chosen = [token for step in steps for token in step.chosen or ()]
        choice, ids = _allowed(np.concatenate([step.masks for step in steps]) & self._plain)
        choices, texts = np.flatnonzero(is_choice), np.flatnonzero(~is_choice)
        self._chosen += chosen
        self._is_choice += is_choice.tolist()
        self._option_counts.append(np.bincount(choice, minlength=len(choices)))
        self._option_ids.append(ids)
        self._option_scores.append(
            scores.take(index_on_device(choices[choice] * scores.shape[1] + ids, scores)).float()
        )
        if len(texts):
            of_texts = scores.index_select(0, index_on_device(texts, scores)).float()
            of_chosen = of_texts.gather(1, index_on_device(np.asarray(chosen)[texts], scores)[:, None])[:, 0]
            self._text_logarithms.append(of_chosen - of_texts.logsumexp(dim=-1))

    def _probabilities(self) -> tuple[list[float], list[int], list[bytes], list[float]]:
        """The probability of each token by its number; its options: their bounds, texts, probabilities."""
        if not self._count:
            return [], [0], [], []
        chosen, is_choice = np.asarray(self._chosen), np.asarray(self._is_choice)
        counts = np.concatenate(self._option_counts)
        ids, of_options = np.concatenate(self._option_ids), _softmax(_on_host(self._option_scores), counts)
        number = np.repeat(np.flatnonzero(is_choice), counts)
        probabilities = np.zeros(self._count)
        probabilities[~is_choice] = np.exp(_on_host(self._text_logarithms))
        is_chosen = ids == chosen[number]
        probabilities[number[is_chosen]] = of_options[is_chosen]
        matters = (of_options > _IMPOSSIBLE) & (probabilities[number] < _CERTAIN)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(number[matters], minlength=self._count))])
        texts = [self._token_bytes[token] for token in ids[matters].tolist()]
        return probabilities.tolist(), bounds.tolist(), texts, of_options[matters].tolist()


def _allowed(masks: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The tokens whose bits are set in masks [choices, words]: of which choice each is, and its id."""
    choice, word = np.nonzero(masks)
    bits = np.unpackbits(masks[choice, word].view(np.uint8), bitorder="little")
    place = np.flatnonzero(bits)
    return choice[place >> 5], (word[place >> 5] << 5) + (place & 31)


def _softmax(scores: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Probabilities among the options of each choice. counts: of its options, which stand together."""
    counts = counts[counts > 0]
    if not len(counts):
        return scores
    starts = np.cumsum(counts) - counts
    exponentials = np.exp(scores - np.repeat(np.maximum.reduceat(scores, starts), counts))
    sums = np.repeat(np.add.reduceat(exponentials, starts), counts)
    probabilities: npt.NDArray[np.float64] = np.nan_to_num(exponentials / sums)
    return probabilities


def _on_host(parts: Sequence[torch.Tensor]) -> npt.NDArray[np.float64]:
    import torch

    if not parts:
        return np.empty(0)
    joined: npt.NDArray[np.float64] = torch.cat(list(parts)).double().cpu().numpy()
    return joined


def index_on_device(places: npt.NDArray[np.int64], scores: torch.Tensor) -> torch.Tensor:
    """Places as an index of scores, on their device."""
    import torch

    index = torch.from_numpy(places)
    # A copy out of other memory waits for the step under way.
    return index.pin_memory().to(scores.device, non_blocking=True) if scores.is_cuda else index

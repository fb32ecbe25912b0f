"""The answers of a batch while they grow, token by token.

What lives here: choosing tokens, which answers go on, and which rows the model still computes. What does
not: how the model is stepped (greedy_decoding.py, drafted_steps.py), and what may be said (guided.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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

    def choose(self, logits: torch.Tensor, process: Callable[..., torch.Tensor]) -> None:
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

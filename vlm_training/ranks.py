"""One training on several ranks: who they are, and how their gradients become one, the same for any number.

What lives here: joining torch's process group, gathering, and adding up in a tree whose shape depends on the
number of microbatches alone. What does not: starting and watching the processes (``rank_processes.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


class RanksLostError(RuntimeError):
    """Another rank is gone: what it would have computed is not there. No step was taken."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of a training. With a world of one nothing is sent anywhere."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, rank: int, world: int, meeting: Path, *, seconds: float) -> Ranks:
        """Meet the others at a file. seconds: without an answer after which one of them counts as lost."""
        if world > 1:
            import torch.distributed as dist

            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=seconds),
            )
        return cls(rank, world)

    @property
    def is_first(self) -> bool:
        """Whether this one writes and tells."""
        return self.rank == 0

    def gather(self, tensor: Any) -> list[Any]:
        """The tensor of every rank, in their order, on the CPU. Raises RanksLostError."""
        if self.world == 1:
            return [tensor]
        import torch
        import torch.distributed as dist

        mine = tensor.cpu()
        found = [torch.empty_like(mine) for _ in range(self.world)]
        try:
            dist.all_gather(found, mine)
        except RuntimeError as error:
            raise RanksLostError(str(error)) from error
        return found

    def gather_all(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """The same of several tensors, which travel as one. Raises RanksLostError."""
        if self.world == 1:
            return [list(tensors)]
        import torch

        sizes = [one.numel() for one in tensors]
        found = self.gather(torch.cat([one.reshape(-1) for one in tensors]))
        return [
            [part.view_as(one) for part, one in zip(flat.split(sizes), tensors, strict=True)]
            for flat in found
        ]

    def mine(self, microbatches: int) -> Iterator[int | None]:
        """The microbatches that this rank computes, one a round; None where it has none in the last one."""
        for start in range(0, microbatches, self.world):
            number = start + self.rank
            yield number if number < microbatches else None


class TreeSum:
    """Adds lists of tensors in pairs, pairs of pairs and so on, in the order in which they are pushed.

    Floating-point sums depend on their order: this one depends on how many there are and on nothing else.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Any]]] = []

    def push(self, tensors: list[Any]) -> None:
        """Add the next ones. They are kept and changed: give tensors that nobody else uses."""
        level = 0
        while self._waiting and self._waiting[-1][0] == level:
            tensors = self._add_to_last(tensors)
            level += 1
        self._waiting.append((level, tensors))

    def total(self) -> list[Any]:
        """The sum of all that were pushed."""
        _, total = self._waiting.pop()
        while self._waiting:
            total = self._add_to_last(total)
        return total

    def _add_to_last(self, tensors: list[Any]) -> list[Any]:
        import torch

        _, before = self._waiting.pop()
        torch._foreach_add_(before, tensors)
        return before


def bounds(start: int, stop: int, microbatches: int) -> Sequence[range]:
    """The sample numbers of each microbatch of a global batch; some are empty where it is small."""
    size = stop - start
    return [
        range(start + size * number // microbatches, start + size * (number + 1) // microbatches)
        for number in range(microbatches)
    ]

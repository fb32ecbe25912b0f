"""Several ranks of a training: they communicate, and any number of them adds up gradients to the same bits.

Here are joining torch's process group, gathering, and a sum in a tree whose shape depends on the number of
microbatches alone. The processes are started and watched in ``rank_processes.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


class RanksLostError(RuntimeError):
    """Another rank is gone, and its part of the step is missing. No step was taken."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of a training. With a world of one, nothing is sent."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, rank: int, world: int, meeting: Path, *, seconds: float) -> Ranks:
        """Meet the others at a file. seconds: a rank that does not answer for so long counts as lost."""
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
        """Whether this rank writes files and events."""
        return self.rank == 0

    def gather(self, tensor: Any) -> list[Any]:
        """The tensor of every rank, in their order, on the CPU. Raises RanksLostError."""
        if self.world == 1:
            return [tensor]
        import torch
        import torch.distributed as dist

        own = tensor.cpu()
        gathered = [torch.empty_like(own) for _ in range(self.world)]
        try:
            dist.all_gather(gathered, own)
        except RuntimeError as error:
            raise RanksLostError(str(error)) from error
        return gathered

    def gather_all(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """The tensors of every rank. They are sent as a single tensor. Raises RanksLostError."""
        if self.world == 1:
            return [list(tensors)]
        import torch

        sizes = [tensor.numel() for tensor in tensors]
        gathered = self.gather(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        return [
            [part.view_as(tensor) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]
            for flat in gathered
        ]

    def own_microbatches(self, microbatches: int) -> Iterator[int | None]:
        """The number of this rank's microbatch in each round; None if it has none in the last round."""
        for start in range(0, microbatches, self.world):
            number = start + self.rank
            yield number if number < microbatches else None


class TreeSum:
    """Adds lists of tensors in pairs, pairs of pairs and so on, in the order in which they are pushed.

    Floating-point sums depend on their order. The order of this sum depends only on the number of lists.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Any]]] = []

    def push(self, tensors: list[Any]) -> None:
        """Add the next tensors. They are kept and changed: pass tensors that are not used elsewhere."""
        level = 0
        while self._waiting and self._waiting[-1][0] == level:
            tensors = self._add_to_last(tensors)
            level += 1
        self._waiting.append((level, tensors))

    def total(self) -> list[Any]:
        """The sum of all pushed lists."""
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
    """The sample numbers of each microbatch of a global batch. Some are empty if the batch is small."""
    size = stop - start
    return [
        range(start + size * number // microbatches, start + size * (number + 1) // microbatches)
        for number in range(microbatches)
    ]

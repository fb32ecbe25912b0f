"""Keys and values of a batch in memory of a fixed size that stays where it is, so that steps can be recorded.

What lives here: the ladder of sizes, the blocks of memory, and a cache over them for transformers. What does
not: stepping the model (static_decoding.py). Term: StaticCache; here one block serves all sizes, and where a
step writes is one tensor for all layers, set by whoever steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_ROWS: Final = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_LEAST_LENGTH: Final = 256


def rung_of_rows(rows: int) -> int:
    """The smallest size of a batch that holds so many rows: at most half as many again, from 8 on."""
    return next((rung for rung in _ROWS if rung >= rows), -(-rows // 64) * 64)


def rung_of_length(tokens: int) -> int:
    """The smallest length that holds so many tokens: at most a quarter more, from 256 on."""
    octave = max(_LEAST_LENGTH, 1 << (max(1, tokens - 1).bit_length() - 1))
    return max(_LEAST_LENGTH, -(-tokens // (octave // 4)) * (octave // 4))


@dataclass(frozen=True)
class Size:
    """Rows and tokens that a cache has room for."""

    rows: int
    length: int


class StaticMemory:
    """A block for the keys and one for the values of each layer; a cache of any size lies at their beginning.

    before_moving: called before a block is replaced by a larger one, to let go of what points into it.
    """

    def __init__(self, *, before_moving: Callable[[], None]) -> None:
        self._before_moving = before_moving
        self._blocks: list[list[torch.Tensor | None]] = []
        self._shapes: list[list[tuple[int, int]]] = []
        self._size = Size(0, 0)

    def take_over(self, cache: Any, kept: torch.Tensor, size: Size, tokens: int) -> None:
        """Move the rows ``kept`` of a dynamic cache of ``tokens`` here; its layers are let go one by one."""
        self._size = size
        while len(self._blocks) < len(cache.layers):
            self._blocks.append([None, None])
            self._shapes.append([(0, 0), (0, 0)])
        for at, layer in enumerate(cache.layers):
            for part, name in enumerate(("keys", "values")):
                self._place(at, part, getattr(layer, name).index_select(0, kept), tokens)
                setattr(layer, name, None)

    def rearrange(self, kept: torch.Tensor, size: Size, tokens: int) -> None:
        """Leave the rows ``kept`` in a cache of another size; ``tokens`` of them are there."""
        before, self._size = self._size, size
        for at in range(len(self._blocks)):
            for part in range(2):
                source = self._view(at, part, before)[:, :, :tokens].index_select(0, kept)
                self._place(at, part, source, tokens)

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [rows, heads, length, width] of each layer, in the size of now."""
        return [
            (self._view(at, 0, self._size), self._view(at, 1, self._size)) for at in range(len(self._blocks))
        ]

    def _place(self, at: int, part: int, source: torch.Tensor, tokens: int) -> None:
        """Have this as the last of the first ``tokens``, and zeros in all other places.

        Zeros, for what is masked is multiplied by 0 all the same, and left-over memory may hold a NaN.
        """
        import torch

        heads, there, width = source.shape[1:]
        self._shapes[at][part] = (heads, width)
        needed = self._size.rows * heads * self._size.length * width
        block = self._blocks[at][part]
        if block is None or block.numel() < needed:
            self._before_moving()
            self._blocks[at][part] = block = None  # given back before the larger one is asked for
            self._blocks[at][part] = torch.empty(needed, dtype=source.dtype, device=source.device)
        view = self._view(at, part, self._size)
        view.zero_()
        view[:, :, tokens - there : tokens] = source

    def _view(self, at: int, part: int, size: Size) -> torch.Tensor:
        block = self._blocks[at][part]
        assert block is not None
        heads, width = self._shapes[at][part]
        return block[: size.rows * heads * size.length * width].view(size.rows, heads, size.length, width)


def cache_over(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], place: torch.Tensor) -> Any:
    """A cache for transformers; each step writes at ``place`` [1], whatever was written before.

    So a step may be repeated, and changes nothing that it does not overwrite when it is.
    """
    from transformers.cache_utils import Cache

    return Cache(layers=[_layer_class()(keys, values, place) for keys, values in layers])


@functools.cache
def _layer_class() -> Any:
    from transformers.cache_utils import CacheLayerMixin

    class PlacedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
        is_compileable = True
        is_sliding = False  # a window is in the mask: all that was said stays where it is

        def __init__(self, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.place = keys, values, place
            self.length = place[0]
            self.batch_size: int = keys.shape[0]
            self.max_cache_len: int = keys.shape[2]
            self.is_initialized = True

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            raise NotImplementedError("it is initialized from the beginning")

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.keys.index_copy_(2, self.place, key_states)
            self.values.index_copy_(2, self.place, value_states)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.max_cache_len, 0

        def get_seq_length(self) -> torch.Tensor:
            return self.length

        def get_max_length(self) -> int:
            return self.max_cache_len

    return PlacedLayer

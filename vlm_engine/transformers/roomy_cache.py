"""A cache of keys and values with room for the tokens to come, instead of one that is copied at each step.

This module puts such layers into the cache that a prompt was computed with. The steps are in
greedy_decoding.py. transformers appends a token by making a new tensor of all tokens: a batch of 24 prompts
of 4,505 tokens is 21 GB of SmolVLM2's cache, read and written for each token of an answer.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_ROOM: Final = 64
"""Columns that are added at once: a batch's cache is copied three times for an answer of 150 tokens."""


def make_room(kept: Any) -> None:
    """Have the layers of a ``DynamicCache`` keep room, but not those that look back over a window."""
    from transformers.cache_utils import DynamicLayer

    for layer in kept.layers:
        if type(layer) is DynamicLayer and layer.is_initialized:
            layer.__class__ = roomy_layer()
            layer.rooms = {}


@cache
def roomy_layer() -> type[Any]:
    """The class of such a layer, made when it is first needed, because it needs transformers."""
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):  # type: ignore[misc]
        """``keys`` and ``values`` [rows, heads, columns, width] are the first columns of ``rooms``.

        Code that replaces one of them by another tensor need not know of rooms: the next token finds no room,
        and makes a new one. A crop only shortens them, and the next token overwrites the columns that it cut
        off.
        """

        keys: torch.Tensor
        values: torch.Tensor
        rooms: dict[str, torch.Tensor]

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Append columns [rows, heads, new, width]; returns all keys and values."""
            self.keys = self._appended("keys", self.keys, key_states)
            self.values = self._appended("values", self.values, value_states)
            return self.keys, self.values

        def _appended(self, name: str, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            columns = held.shape[-2]
            end = columns + new.shape[-2]
            room = self.rooms.get(name)
            if room is None or room.data_ptr() != held.data_ptr() or room.shape[-2] < end:
                room = held.new_empty(*held.shape[:-2], end + _ROOM, held.shape[-1])
                room[..., :columns, :] = held
                self.rooms[name] = room
            room[..., columns:end, :] = new
            return room[..., :end, :]

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            """Keep these rows alone, and give the memory of all rows back."""
            super().batch_select_indices(indices)
            self.rooms.clear()

    return RoomyLayer

"""One step of a model at one size: all that it reads and writes stays at the same addresses.

What lives here: the inputs of the step, and how they go on from token to token. What does not: when a batch
changes its size (static_decoding.py), and the memory of keys and values (static_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resources.engine.transformers.static_cache import cache_over
from resources.engine.transformers.step_recording import Step

if TYPE_CHECKING:
    import torch


class StaticStep:
    """A step that may run any number of times: it changes nothing that it does not write anew each time.

    forward: the model's. launch: what runs the step, once somebody has decided what does. compared: how often
    what that says was found to be right. window: tokens that a layer with a window looks back on.
    """

    def __init__(
        self, forward: Any, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], *, window: int | None
    ) -> None:
        import torch

        self.forward = forward
        self.launch: Step | None = None
        self.compared = 0
        self._window = window
        self._place = layers[0][0].new_zeros(1, dtype=torch.long)
        self._at = 0
        self._cache = cache_over(layers, self._place)
        self._given: dict[str, Any] = {}

    @property
    def rows(self) -> int:
        """Rows that it computes."""
        return len(self._given["input_ids"])

    def begin(self, place: int, inputs: Callable[[Any], dict[str, Any]]) -> None:
        """Step a batch from here on. inputs: those of the model's forward for a cache and its first token."""
        self._at = place
        self._place.fill_(place)
        given = inputs(self._cache)
        del given["past_key_values"]
        rows = len(given["input_ids"])
        position = given["position_ids"]
        given["position_ids"] = position.expand(*position.shape[:-2], rows, position.shape[-1])
        if _form(given) == _form(self._given):
            for (_, ours), (_, theirs) in zip(_tensors(self._given), _tensors(given), strict=True):
                ours.copy_(theirs)
        else:
            self.launch, self.compared, self._given = None, 0, _copied(given)

    def go_on(self, tokens: torch.Tensor) -> None:
        """Have these tokens follow [rows, or fewer where the others do not matter]."""
        self._at += 1
        self._place.fill_(self._at)
        self._given["input_ids"][: len(tokens), 0] = tokens
        self._given["position_ids"].add_(1)
        for name, mask in _masks(self._given["attention_mask"]):
            seen, unseen = (True, False) if not mask.is_floating_point() else (0.0, _least(mask))
            mask[..., self._at] = seen
            slides = name == "sliding_attention" or (name is None and self._window is not None)
            if slides and self._window is not None and self._at >= self._window:
                mask[..., self._at - self._window] = unseen

    def run(self, forward: Any = None) -> torch.Tensor:
        """The logits of the tokens that follow [rows, vocabulary]. forward: in place of the step's own."""
        outputs = (forward or self.forward)(**self._given, past_key_values=self._cache, return_dict=True)
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits


def _masks(mask: Any) -> Iterator[tuple[str | None, torch.Tensor]]:
    """The masks [rows, 1, 1, length], by the kind of layers where there are several."""
    if isinstance(mask, Mapping):
        yield from mask.items()
    else:
        yield None, mask


def _least(mask: torch.Tensor) -> float:
    import torch

    return float(torch.finfo(mask.dtype).min)


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, those inside masks by the kind of layers included, in a fixed order."""
    import torch

    for name in sorted(given):
        value = given[name]
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", value[inner]) for inner in sorted(value))


def _form(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """What must be the same for a recording to be true of other values: shapes, and all that is no tensor."""
    tensors = [(name, one.shape, one.dtype) for name, one in _tensors(given)]
    taken = {name.split(".")[0] for name, _, _ in tensors}
    return tensors, {name: value for name, value in given.items() if name not in taken}


def _copied(given: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone(memory_format=torch.contiguous_format)
        return {name: copied(one) for name, one in value.items()} if isinstance(value, Mapping) else value

    return {name: copied(value) for name, value in given.items()}

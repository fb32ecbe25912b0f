"""What a model is given for a batch: chat template, image processor and tokenizer, ahead of the model or not.

What lives here: joining what workers made of each property, and keeping what was prepared ahead until it is
asked for. What does not: calling the processor (image_tokens.py), when that happens (feeding.py), and the
model (transformers_engine.py).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import operator
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from vlm_engine.protocol import EngineError
from vlm_engine.transformers.collation import collated
from vlm_engine.transformers.image_tokens import processed
from vlm_engine.transformers.model_loading import empty_host_cache

if TYPE_CHECKING:
    import torch

    from vlm_engine.images.images import LoadedProperty
    from vlm_engine.prompt import Prompt
    from vlm_engine.protocol import Attempt

_MARKS: Final = "attention_mask"
"""Which tokens of a row are its prompt's [properties, tokens]."""

PINNED_BYTES: Final = 1 << 30
"""Of the host's memory that one batch may pin: nobody else can use it, and the system cannot swap it out.
Up to three batches wait prepared, so three times as much may be pinned, in blocks of powers of two."""


@dataclass(frozen=True)
class ModelInputs:
    """The tensors of a batch, prompts padded on the left, so that all answers begin side by side.

    prompt_tokens: of each property, images included and padding not. fitting: which of them the tensors are
    of: all but those that are too long. tensors: None where none fits.
    """

    tensors: Any
    prompt_tokens: list[int]
    fitting: list[bool]


class InputPreparation:
    """Turns batches into tensors, in any thread.

    Workers have made the tensors of each property, and they are only joined; where workers handed over
    pixels, the processor runs here, on the batch as a whole.

    dtype: of floating-point tensors. pinned: in memory from which a GPU copies by itself. longest: tokens of
    a prompt, at most: a property with more is left out here, so that the others are not padded to it.
    """

    def __init__(
        self,
        processor: Any,
        prompt: Prompt,
        *,
        dtype: torch.dtype,
        pinned: bool,
        longest: int | None = None,
    ) -> None:
        self._prompt = prompt
        self._longest = math.inf if longest is None else longest
        self._dtype = dtype
        self._pinned = pinned
        # A copy for each thread: a tokenizer that two use at once refuses one of them.
        self._processors: SimpleQueue[Any] = SimpleQueue()
        for _ in range(2):
            self._processors.put(copy.deepcopy(processor))
        self._guard = threading.Lock()
        # Of the batch that is asked about, perhaps in parts, of the next, and of the one being prepared.
        self._ahead: deque[list[_Prepared]] = deque(maxlen=3)

    def prepare(self, chunks: Sequence[Sequence[LoadedProperty]], attempt: Attempt) -> None:
        """Prepare the parts of a batch; each is kept until it is taken, or newer batches have come."""
        parts = [_Prepared(chunk, attempt, self._inputs(chunk, attempt)) for chunk in chunks]
        with self._guard:
            self._ahead.append(parts)

    def take(self, chunk: Sequence[LoadedProperty], attempt: Attempt) -> ModelInputs:
        """The tensors of a chunk: those prepared ahead, or else made now."""
        with self._guard:
            for parts in self._ahead:
                for part in parts:
                    if part.is_of(chunk, attempt):
                        parts.remove(part)
                        if not parts:
                            self._ahead.remove(parts)  # its place is another batch's
                        return part.inputs
        return self._inputs(chunk, attempt)

    def _inputs(self, chunk: Sequence[LoadedProperty], attempt: Attempt) -> ModelInputs:
        from transformers import BatchFeature

        if all(one.tensors for one in chunk):
            shown = [_shown(one, attempt).tensors for one in chunk]
            tokens = [int(one[_MARKS][0].sum()) for one in shown]  # an array, and how it is joined
            fitting = [one <= self._longest for one in tokens]
            made = BatchFeature(collated(list(itertools.compress(shown, fitting)))) if any(fitting) else None
        else:
            images = [one.images[: attempt.images] for one in chunk]
            with self._a_processor() as processor:
                made = processed(processor, self._prompt.text, images)
                tokens = made[_MARKS].sum(dim=1).tolist()
                fitting = [one <= self._longest for one in tokens]
                if not all(fitting):
                    rest = list(itertools.compress(images, fitting))
                    made = processed(processor, self._prompt.text, rest) if rest else None
        if made is not None:
            made = made.to("cpu", self._dtype)
            made = _pinned(made) if self._pinned else made
        return ModelInputs(made, tokens, fitting)

    @contextlib.contextmanager
    def _a_processor(self) -> Iterator[Any]:
        processor = self._processors.get()
        try:
            yield processor
        finally:
            self._processors.put(processor)


def _pinned(tensors: Any) -> Any:
    """The tensors in memory from which a GPU copies by itself, unless they are larger than PINNED_BYTES.

    torch keeps what was pinned for the next batch, a block for each power of two. What nobody uses goes back
    to the system once all of it is more than PINNED_BYTES.
    """
    import torch

    pinnable = {name: one for name, one in tensors.items() if isinstance(one, torch.Tensor)}
    if sum(one.nbytes for one in pinnable.values()) > PINNED_BYTES:
        return tensors
    if torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) > PINNED_BYTES:
        empty_host_cache()
    tensors.update({name: one.pin_memory() for name, one in pinnable.items()})
    return tensors


def _shown(one: LoadedProperty, attempt: Attempt) -> LoadedProperty:
    """The property with as many images as are shown in this attempt: loaded again where these are fewer."""
    if attempt.images is None or one.seen <= attempt.images or one.with_images is None:
        return one
    fewer = one.with_images(attempt.images)
    # The row lists the first images that could be read at first. These must be the ones that are shown.
    if not fewer.tensors or (fewer.seen, fewer.failed) != (attempt.images, one.failed):
        raise EngineError(fewer.refusal or "its images can no longer be read")
    return fewer


@dataclass(eq=False)
class _Prepared:
    """Tensors that wait for their chunk; it is held, so that no other object can be taken for one of it."""

    chunk: Sequence[LoadedProperty]
    attempt: Attempt
    inputs: ModelInputs

    def is_of(self, chunk: Sequence[LoadedProperty], attempt: Attempt) -> bool:
        """Whether it is of these very objects."""
        same = len(self.chunk) == len(chunk) and all(map(operator.is_, self.chunk, chunk))
        return same and self.attempt == attempt

"""The inputs of a model for a batch, made by chat template, image processor and tokenizer, ahead or at once.

This module joins the tensors that workers made of each property, and keeps what was prepared ahead. The
processor is called in image_tokens.py, describing.py says when, and the model is in transformers_engine.py.
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
    from vlm_engine.transformers.collation import Endings

_MARKS: Final = "attention_mask"
"""Which tokens of a row are its prompt's [properties, tokens]."""

PINNED_BYTES: Final = 1 << 30
"""What one batch may pin of the host's memory: nobody else can use it, and the system cannot swap it out.
Up to three batches wait prepared, so three times as much may be pinned, in blocks of powers of two."""


@dataclass(frozen=True)
class ModelInputs:
    """The tensors of a batch, prompts padded on the left, so that all answers begin side by side.

    prompt_tokens: of each property, with its images and without padding. fitting: for each property, whether
    the tensors include it; those that are too long are left out. tensors: None where no property fits.
    """

    tensors: Any
    prompt_tokens: list[int]
    fitting: list[bool]


class InputPreparation:
    """Turns batches into tensors, in any thread.

    Workers have made the tensors of each property, and they are only joined; where workers handed over
    pixels, the processor runs here, on the batch as a whole.

    prompt, further: of the first question and of the others. endings: of their prompts; None: workers hand
    over pixels where there are others. dtype: of floating-point tensors. pinned: in memory from which a GPU
    copies by itself. longest: tokens of each question's prompt, at most: a property with more is left out
    here, so that the others are not padded to it.
    """

    def __init__(
        self,
        processor: Any,
        prompt: Prompt,
        *,
        dtype: torch.dtype,
        pinned: bool,
        longest: Sequence[float] = (math.inf,),
        further: Sequence[Prompt] = (),
        endings: Endings | None = None,
    ) -> None:
        self._prompts = (prompt, *further)
        self._endings = endings
        self._longest = longest
        self._dtype = dtype
        self._pinned = pinned
        # A copy for each thread: a tokenizer that two use at once refuses one of them.
        self._processors: SimpleQueue[Any] = SimpleQueue()
        for _ in range(2):
            self._processors.put(copy.deepcopy(processor))
        self._guard = threading.Lock()
        # Of the batch that is described, perhaps in parts, of the next, and of the one being prepared.
        self._ahead: deque[list[_Prepared]] = deque(maxlen=3)

    def prepare(self, chunks: Sequence[Sequence[LoadedProperty]], attempt: Attempt) -> None:
        """Prepare the parts of a batch; each is kept until it is taken, or newer batches have come."""
        parts = [_Prepared(chunk, attempt, self._inputs(chunk, attempt)) for chunk in chunks]
        with self._guard:
            self._ahead.append(parts)

    def for_chunk(self, chunk: Sequence[LoadedProperty], attempt: Attempt) -> ModelInputs:
        """The tensors of a chunk: those prepared ahead, which are handed out once, or else made now."""
        with self._guard:
            for parts in self._ahead:
                for part in parts:
                    if part.is_of(chunk, attempt):
                        parts.remove(part)
                        if not parts:
                            self._ahead.remove(parts)  # Another batch needs its place.
                        return part.inputs
        return self._inputs(chunk, attempt)

    def _inputs(self, chunk: Sequence[LoadedProperty], attempt: Attempt) -> ModelInputs:
        from transformers import BatchFeature

        question = attempt.question
        longest, prompt = self._longest[question], self._prompts[question].text
        if all(loaded.tensors for loaded in chunk):
            singly = [_shown(loaded, attempt).tensors for loaded in chunk]
            marks = [tensors[_MARKS][0] for tensors in singly]
            more = self._endings.tokens(question) - self._endings.tokens(0) if self._endings else 0
            tokens = [int(array.sum()) + more for array in marks]
            fitting = [count <= longest for count in tokens]
            fitting_tensors = list(itertools.compress(singly, fitting))
            batch = BatchFeature(collated(fitting_tensors)) if fitting_tensors else None
            if batch is not None and question:
                # Workers make the prompt of the first question.
                assert self._endings is not None
                batch.update(self._endings.exchanged(batch, 0, question))
        else:
            images = [loaded.images[: attempt.images] for loaded in chunk]
            with self._a_processor() as processor:
                batch = processed(processor, prompt, images)
                tokens = batch[_MARKS].sum(dim=1).tolist()
                fitting = [count <= longest for count in tokens]
                if not all(fitting):
                    fitting_images = list(itertools.compress(images, fitting))
                    batch = processed(processor, prompt, fitting_images) if fitting_images else None
        if batch is not None:
            batch = batch.to("cpu", self._dtype)
            batch = _pinned(batch) if self._pinned else batch
        return ModelInputs(batch, tokens, fitting)

    @contextlib.contextmanager
    def _a_processor(self) -> Iterator[Any]:
        processor = self._processors.get()
        try:
            yield processor
        finally:
            self._processors.put(processor)


def _pinned(tensors: Any) -> Any:
    """The tensors in memory from which a GPU copies by itself, unless they are larger than PINNED_BYTES.

    torch keeps pinned memory for the next batch, a block for each power of two. Unused blocks go back to the
    system once all of them are more than PINNED_BYTES.
    """
    import torch

    pinnable = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    if sum(tensor.nbytes for tensor in pinnable.values()) > PINNED_BYTES:
        return tensors
    if torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) > PINNED_BYTES:
        empty_host_cache()
    tensors.update({name: tensor.pin_memory() for name, tensor in pinnable.items()})
    return tensors


def _shown(loaded: LoadedProperty, attempt: Attempt) -> LoadedProperty:
    """The property with the images that this attempt shows, loaded again where these are fewer."""
    if attempt.images is None or loaded.seen <= attempt.images or loaded.with_images is None:
        return loaded
    fewer = loaded.with_images(attempt.images)
    # The row lists the first images that could be read the first time. The model must see these.
    if not fewer.tensors or (fewer.seen, fewer.failed) != (attempt.images, loaded.failed):
        raise EngineError(fewer.refusal or "its images can no longer be read")
    return fewer


@dataclass(eq=False)
class _Prepared:
    """Tensors that wait for their chunk. They hold it, so that no new object has an old object's identity."""

    chunk: Sequence[LoadedProperty]
    attempt: Attempt
    inputs: ModelInputs

    def is_of(self, chunk: Sequence[LoadedProperty], attempt: Attempt) -> bool:
        """Whether these very objects were prepared, for this attempt."""
        same = len(self.chunk) == len(chunk) and all(map(operator.is_, self.chunk, chunk))
        return same and self.attempt == attempt

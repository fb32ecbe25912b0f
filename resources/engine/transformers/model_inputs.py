"""What a model is given for a batch: chat template, image processor and tokenizer, ahead of the model or not.

What lives here: from loaded images to the processor's tensors, and keeping what was prepared ahead until it
is asked for. What does not: when that happens (feeding.py), and the model (transformers_engine.py).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from resources.engine.transformers.preparation_process import PreparationLostError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from resources.engine.prompt import Prompt
    from resources.engine.protocol import Attempt
    from resources.engine.transformers.preparation_process import PreparationProcess
    from resources.images.images import LoadedProperty

_PIXEL_MASK: Final = "pixel_attention_mask"
"""Marks of each pixel of each tile [properties, tiles, height, width] (Idefics, SmolVLM), of which processors
make integers of 64 bits: more than the pixels themselves. Where none is given the models make booleans."""

_log = logging.getLogger(__name__)


def processed(processor: Any, prompt: str, images: Sequence[Sequence[npt.NDArray[np.uint8]]]) -> Any:
    """A BatchFeature for the images [height, width, 3] of each property, prompts padded on the left."""
    conversations = []
    for shown in images:
        # As PIL images they need no guessing of which axis holds the channels.
        content: list[dict[str, Any]] = [{"type": "image", "image": Image.fromarray(one)} for one in shown]
        content.append({"type": "text", "text": prompt})
        conversations.append([{"role": "user", "content": content}])
    tensors = processor.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    mask = tensors.get(_PIXEL_MASK)
    if mask is not None and mask.dim() == 4:
        tensors[_PIXEL_MASK] = mask.bool()
    return tensors


@dataclass(frozen=True)
class ModelInputs:
    """The tensors of a batch, prompts padded on the left, so that all answers begin side by side.

    prompt_tokens: of each property, images included and padding not.
    """

    tensors: Any
    prompt_tokens: list[int]


class InputPreparation:
    """Turns batches into tensors, ``at_once`` of them at a time, in any threads.

    Each thread has a copy of the processor: a tokenizer that two use at once refuses one of them. Most of its
    work is resizing and arithmetic, for which Pillow and NumPy let go of the interpreter's lock; but a model
    that is launched operation by operation loses the lock at each of them, and waits for it. So processes
    prepare what is ahead, where there are any.

    dtype: of floating-point tensors. pinned: in memory from which a GPU copies by itself. processes: what
    prepares ahead, each from when it is ready until it is lost; ended by ``close``.
    """

    def __init__(
        self,
        processor: Any,
        prompt: Prompt,
        *,
        at_once: int,
        dtype: torch.dtype,
        pinned: bool,
        processes: Sequence[PreparationProcess] = (),
    ) -> None:
        self._living = list(processes)
        self._idle = list(processes)
        self._closed = False
        self._prompt = prompt
        self._dtype = dtype
        self._pinned = pinned
        self._processors: SimpleQueue[Any] = SimpleQueue()
        # One more: what is asked again does not wait for what is prepared ahead.
        for _ in range(at_once + 1):
            self._processors.put(copy.deepcopy(processor))
        self._guard = threading.Lock()
        # Of the batch that is asked about, perhaps in parts, and of those ahead of it (see Feeding).
        self._ahead: deque[list[_Prepared]] = deque(maxlen=2 + at_once)

    def prepare(self, chunks: Sequence[Sequence[LoadedProperty]], attempt: Attempt) -> None:
        """Prepare the parts of a batch; each is kept until it is taken, or newer batches have come."""
        process = self._a_ready_process()
        parts = []
        try:
            for chunk in chunks:
                tensors = None
                if process is not None:
                    try:
                        tensors = self._made_by(process, chunk, attempt)
                    except PreparationLostError as error:
                        self._give_up(process, error)
                        process = None
                        if self._closed:
                            raise
                parts.append(_Prepared(chunk, attempt, self._inputs(chunk, attempt, tensors)))
        finally:
            if process is not None:
                with self._guard:
                    self._idle.append(process)
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

    def close(self) -> None:
        """End the processes, where there are any."""
        with self._guard:
            self._closed = True
            living, self._living, self._idle = self._living, [], []
        for process in living:
            process.close()

    def _a_ready_process(self) -> PreparationProcess | None:
        """One that nobody else asks; the caller gives it back to the idle ones."""
        with self._guard:
            for process in list(self._idle):
                try:
                    if process.ready():
                        self._idle.remove(process)
                        return process
                except PreparationLostError as error:
                    lost = process, error
                    self._idle.remove(process)
                    break
            else:
                return None
        self._give_up(*lost)
        return self._a_ready_process()

    def _give_up(self, process: PreparationProcess, error: PreparationLostError) -> None:
        """Do without it: what ends one process may end the next that is started."""
        with self._guard:
            closed = self._closed
            if process in self._living:
                self._living.remove(process)
            left = len(self._living)
        process.close()
        if closed:
            return
        if left:
            _log.warning("Inputs of the model are prepared by %d processes from now on: %s", left, error)
        else:
            _log.warning("Inputs of the model are prepared in the run's own process from now on: %s", error)

    def _inputs(
        self, chunk: Sequence[LoadedProperty], attempt: Attempt, tensors: Any | None = None
    ) -> ModelInputs:
        """What the model is given, of tensors that were made elsewhere or are made here."""
        if tensors is None:
            with self._a_processor() as processor:
                tensors = processed(processor, self._prompt.text, _shown(chunk, attempt))
        prompt_tokens = tensors["attention_mask"].sum(dim=1).tolist()
        tensors = tensors.to("cpu", self._dtype)
        if self._pinned:
            tensors.update(
                {name: one.pin_memory() for name, one in tensors.items() if hasattr(one, "pin_memory")}
            )
        return ModelInputs(tensors, prompt_tokens)

    def _made_by(self, process: PreparationProcess, chunk: Sequence[LoadedProperty], attempt: Attempt) -> Any:
        from transformers import BatchFeature

        return BatchFeature(process.tensors(_shown(chunk, attempt), self._dtype))

    @contextlib.contextmanager
    def _a_processor(self) -> Iterator[Any]:
        processor = self._processors.get()
        try:
            yield processor
        finally:
            self._processors.put(processor)


def _shown(chunk: Sequence[LoadedProperty], attempt: Attempt) -> Sequence[Sequence[npt.NDArray[np.uint8]]]:
    return [one.images[: attempt.images] for one in chunk]


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

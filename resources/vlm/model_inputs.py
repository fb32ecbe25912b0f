"""What a model is given for a batch: chat template, image processor and tokenizer, ahead of the model or not.

What lives here: from loaded images to the processor's tensors, and keeping what was prepared ahead until it
is asked for. What does not: when that happens (feeding.py), and the model (transformers_engine.py).
"""

from __future__ import annotations

import copy
import operator
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    import torch

    from resources.vlm.engine import Attempt
    from resources.vlm.images import LoadedProperty
    from resources.vlm.prompt import Prompt


@dataclass(frozen=True)
class ModelInputs:
    """The tensors of a batch, prompts padded on the left, so that all answers begin side by side.

    prompt_tokens: of each property, images included and padding not.
    """

    tensors: Any
    prompt_tokens: list[int]


class InputPreparation:
    """Turns batches into tensors, ``at_once`` of them at a time, in any threads.

    Most of it is resizing and arithmetic, for which Pillow and NumPy let go of the interpreter's lock. Each
    thread has a copy of the processor: a tokenizer that two use at once refuses one of them.

    dtype: of floating-point tensors. pinned: in memory from which a GPU copies by itself.
    """

    def __init__(
        self, processor: Any, prompt: Prompt, *, at_once: int, dtype: torch.dtype, pinned: bool
    ) -> None:
        self._prompt = prompt
        self._dtype = dtype
        self._pinned = pinned
        self._processors: SimpleQueue[Any] = SimpleQueue()
        for _ in range(at_once):
            self._processors.put(copy.deepcopy(processor))
        self._guard = threading.Lock()
        # Of the batch that is asked about, perhaps in parts, and of those ahead of it.
        self._ahead: deque[list[_Prepared]] = deque(maxlen=1 + at_once)

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
                        return part.inputs
        return self._inputs(chunk, attempt)

    def _inputs(self, chunk: Sequence[LoadedProperty], attempt: Attempt) -> ModelInputs:
        conversations = []
        for one in chunk:
            # As PIL images they need no guessing of which axis holds the channels.
            content: list[dict[str, Any]] = [
                {"type": "image", "image": Image.fromarray(image)} for image in one.images[: attempt.images]
            ]
            content.append({"type": "text", "text": self._prompt.text})
            conversations.append([{"role": "user", "content": content}])
        processor = self._processors.get()
        try:
            tensors = processor.apply_chat_template(
                conversations,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"padding": True, "padding_side": "left"},
            )
        finally:
            self._processors.put(processor)
        prompt_tokens = tensors["attention_mask"].sum(dim=1).tolist()
        tensors = tensors.to("cpu", self._dtype)
        if self._pinned:
            tensors.update(
                {name: one.pin_memory() for name, one in tensors.items() if hasattr(one, "pin_memory")}
            )
        return ModelInputs(tensors, prompt_tokens)


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

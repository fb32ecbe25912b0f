"""The engine in this process: any image-text-to-text model that transformers loads, greedy by default.

What lives here: from loaded images to answers, batch by batch, on one CPU or GPU, and what to do when its
memory is too small. What does not: loading (model_loading.py), guided decoding (guided.py), retries
(ladder.py).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from resources.vlm.engine import (
    Answer,
    Attempt,
    EngineLostError,
    ModelLoadError,
    RequestTooLargeError,
    sampling_seed,
)
from resources.vlm.guided import Grammar, SampledBatch
from resources.vlm.model_loading import ModelSource, exact_revision, load_model, load_processor

if TYPE_CHECKING:
    from resources.vlm.images import LoadedProperty
    from resources.vlm.prompt import Prompt
    from resources.vlm.schema import DescriptionSchema

_LOST = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "NCCL error", "device-side assert")
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")


class AnswerGrammar(Protocol):
    """What holds answers to their form: a logits processor for each batch."""

    def for_batch(self, size: int) -> Any:
        """The logits processor of one call of ``generate`` with ``size`` sequences."""


class TransformersEngine:
    """One model on one device.

    In float32 a property's answer does not depend on the others of its batch. Where a batch does not fit the
    device's memory it is halved, and no later batch is larger than what fitted.

    device: ``cpu`` or ``cuda`` (the first that is visible; the lease sees to it that it is the only one).
    Raises ModelLoadError, and SchemaError where the schema cannot guide decoding.
    """

    batches_at_once = 1

    def __init__(
        self,
        source: ModelSource,
        *,
        schema: DescriptionSchema,
        prompt: Prompt,
        device: Literal["cpu", "cuda"],
    ) -> None:
        from transformers import AutoModelForImageTextToText

        processor = load_processor(source)
        model = load_model(source, AutoModelForImageTextToText, device=device)
        grammar = Grammar(
            schema.json_schema,
            processor.tokenizer,
            logits_width=model.get_output_embeddings().weight.shape[0],
            stop_token_ids=_stop_token_ids(model, processor.tokenizer),
        )
        self.model = source.name
        self.revision = exact_revision(source)
        self._take(model, processor, grammar, prompt, device)

    @classmethod
    def around(
        cls,
        model: Any,
        processor: Any,
        *,
        grammar: AnswerGrammar,
        prompt: Prompt,
        device: Literal["cpu", "cuda"],
    ) -> Self:
        """An engine around a model that is on its device already, such as one with random weights."""
        engine = cls.__new__(cls)
        engine.model = type(model).__name__
        engine.revision = "in memory"
        engine._take(model, processor, grammar, prompt, device)
        return engine

    def _take(
        self,
        model: Any,
        processor: Any,
        grammar: AnswerGrammar,
        prompt: Prompt,
        device: Literal["cpu", "cuda"],
    ) -> None:
        from transformers import GenerationConfig

        self.largest_batch: int | None = None
        self._prompt = prompt
        self._device = device
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._model = model
        self._grammar = grammar
        self._stop_token_ids = _stop_token_ids(model, self._tokenizer)
        # A clean one: penalties and sampling that a model ships with would break JSON and repeatability.
        self._model.generation_config = GenerationConfig(
            eos_token_id=list(self._stop_token_ids),
            pad_token_id=self._tokenizer.pad_token_id
            if self._tokenizer.pad_token_id is not None
            else self._stop_token_ids[0],
            do_sample=False,
        )
        text_config = self._model.config.get_text_config()
        self._context: int | None = getattr(text_config, "max_position_embeddings", None)

    def prepare(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> None:
        """Nothing is prepared ahead yet. See Engine."""

    def describe(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> list[Answer]:
        """One answer a property, in order. See Engine; raises RequestTooLargeError for a single property."""
        answers: list[Answer] = []
        while len(answers) < len(batch):
            chunk = batch[len(answers) :][: self.largest_batch]
            answered = self._answered_or_none(chunk, attempt)
            if answered is not None:
                answers.extend(answered)
            elif len(chunk) > 1:
                self.largest_batch = len(chunk) // 2
            else:
                raise RequestTooLargeError(
                    "out_of_memory",
                    f"{len(chunk[0].images[: attempt.images])} images at once are more than the memory of "
                    f"{self._device} holds beside the model",
                )
        return answers

    def close(self) -> None:
        """Give the model's memory back."""
        import torch

        del self._model, self._grammar
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _answered_or_none(self, batch: Sequence[LoadedProperty], attempt: Attempt) -> list[Answer] | None:
        """The answers, or None where the device's memory did not hold the batch."""
        import torch

        try:
            return self._answers(batch, attempt)
        except MemoryError as error:
            raise EngineLostError("this process ran out of memory while describing; end it") from error
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                if _is_lost(error):
                    raise EngineLostError(f"the device is lost: {error}") from error
                raise
        # Only here is the exception gone, and with its traceback the tensors that filled the memory.
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()
        return None

    def _answers(self, batch: Sequence[LoadedProperty], attempt: Attempt) -> list[Answer]:
        import torch
        from transformers import LogitsProcessorList

        inputs = self._inputs(batch, attempt)
        prompt_tokens: list[int] = inputs["attention_mask"].sum(dim=1).tolist()
        room = [self._room(tokens, attempt) for tokens in prompt_tokens]
        processors: list[Any] = [self._grammar.for_batch(len(batch))]
        if attempt.temperature > 0:
            seeds = [sampling_seed(attempt.seed, one.property_id, attempt.number) for one in batch]
            processors.append(SampledBatch(attempt.temperature, seeds))
        with torch.inference_mode():
            sequences = self._model.generate(
                **inputs.to(self._device, self._model.dtype),
                max_new_tokens=max(room),
                logits_processor=LogitsProcessorList(processors),
            )
        generated = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        return [
            self._answer(tokens[:limit], prompt)
            for tokens, limit, prompt in zip(generated, room, prompt_tokens, strict=True)
        ]

    def _inputs(self, batch: Sequence[LoadedProperty], attempt: Attempt) -> Any:
        """The processor's tensors, prompts padded on the left, so that all answers begin side by side."""
        from PIL import Image

        conversations = []
        for one in batch:
            # As PIL images they need no guessing of which axis holds the channels.
            content: list[dict[str, Any]] = [
                {"type": "image", "image": Image.fromarray(image)} for image in one.images[: attempt.images]
            ]
            content.append({"type": "text", "text": self._prompt.text})
            conversations.append([{"role": "user", "content": content}])
        return self._processor.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )

    def _room(self, prompt_tokens: int, attempt: Attempt) -> int:
        """Tokens that this property's answer may have: by itself, not by the longest prompt of the batch."""
        if self._context is None:
            return attempt.max_new_tokens
        room = self._context - prompt_tokens
        if room <= 0:
            raise RequestTooLargeError(
                "prompt_too_long",
                f"images and prompt are {prompt_tokens} tokens, of {self._context} that the model takes",
            )
        return min(attempt.max_new_tokens, room)

    def _answer(self, tokens: list[int], prompt_tokens: int) -> Answer:
        ends = [at for at, token in enumerate(tokens) if token in self._stop_token_ids]
        answer = tokens[: ends[0]] if ends else tokens
        return Answer(
            text=self._tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            finish_reason="stop" if ends else "length",
            prompt_tokens=prompt_tokens,
            output_tokens=len(answer),
        )


def _stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends an answer: what the model's files name (one or several), and the tokenizer's own."""
    named = model.generation_config.eos_token_id
    ids = [named] if isinstance(named, int) else list(named or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ModelLoadError(
            "neither the model's generation_config.json nor its tokenizer names a token that ends an answer; "
            "add eos_token_id"
        )
    return tuple(dict.fromkeys(ids))


def _is_out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _is_lost(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.AcceleratorError) or any(sign in str(error) for sign in _LOST)

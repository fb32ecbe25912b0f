"""The engine in this process: any image-text-to-text model that transformers loads, greedy by default.

It takes loaded images to answers, batch by batch, on one CPU or GPU, and halves batches that its memory does
not hold. Loading is in model_loading.py, the model's inputs in model_inputs.py, the choice of tokens in
greedy_decoding.py and guided.py, retries in ladder.py.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

from vlm_durable.wording import counted
from vlm_engine.canary import (
    ATTEMPT,
    canary_properties,
    digest_of_answers,
    versions,
    weights_checksum,
)
from vlm_engine.images.images import Pixels
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.protocol import (
    Answer,
    AnswerTokens,
    Attempt,
    CanaryAnswer,
    EngineError,
    EngineLostError,
    ImageLimits,
    ImageTokens,
    ImpossibleScoresError,
    ModelLoadError,
    RequestTooLargeError,
    sampling_seed,
)
from vlm_engine.transformers.attention import (
    attend_as_shipped,
    attend_by_rows,
    attend_to_images_by_length,
    prefer_flash_attention,
)
from vlm_engine.transformers.collation import learn_endings
from vlm_engine.transformers.drafting import Drafting
from vlm_engine.transformers.greedy_decoding import GreedyDecoding, are_sound
from vlm_engine.transformers.guided import Grammar, GuidedBatch, SampledBatch
from vlm_engine.transformers.image_tokens import agree_on_images, fitted_processor, prompt_tokens
from vlm_engine.transformers.model_inputs import InputPreparation, ModelInputs
from vlm_engine.transformers.model_loading import (
    load_model,
    release_memory,
)
from vlm_engine.transformers.shared_images import SeenBatch, SharedBeginning

if TYPE_CHECKING:
    import torch

    from vlm_engine.images.images import LoadedProperty
    from vlm_engine.prompt import FurtherQuestion, Prompt
    from vlm_engine.schema import DescriptionSchema

_log = logging.getLogger(__name__)

_ALIKE: Final = {True: 1e-3, False: 0.05}
"""How far two ways of computing the same scores may differ, as a share of their spread: rounding, in 32 bits
and in 16."""

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
    limits: what images may cost; None: they are processed as the model's files say; the first question's
    prompt decides. further: questions that are asked of the same properties. Where the last first attempt was
    about the same images, and ``shares_images``, the model goes on from what it computed of them.
    speculative_tokens: tokens that are drafted from earlier answers and checked in one step, at most.
    Answers stay the same, apart from bfloat16's rounding. Raises ModelLoadError, and SchemaError where
    the schema cannot guide decoding.
    """

    batches_at_once = 1

    image_tokens: ImageTokens | None
    """What images cost; None where it is not known."""

    drafting: Drafting | None
    """What is drafted of answers to the first question; None: nothing, as for the canary."""

    def __init__(
        self,
        source: ModelSource,
        *,
        schema: DescriptionSchema,
        prompt: Prompt,
        device: Literal["cpu", "cuda"],
        speculative_tokens: int = 0,
        limits: ImageLimits | None = None,
        further: Sequence[FurtherQuestion] = (),
    ) -> None:
        processor, self.image_tokens = fitted_processor(source, prompt.text, limits)
        from transformers import AutoModelForImageTextToText

        model = load_model(source, AutoModelForImageTextToText, device=device)
        agree_on_images(model.config, processor)
        grammars = [
            Grammar(
                asked.json_schema,
                processor.tokenizer,
                logits_width=model.get_output_embeddings().weight.shape[0],
                stop_token_ids=_stop_token_ids(model, processor.tokenizer),
            )
            for asked in (schema, *(question.schema for question in further))
        ]
        prompts = (prompt, *(question.prompt for question in further))
        self.model = source.label
        self.revision = exact_revision(source)
        self._set_up(model, processor, grammars, prompts, device, speculative_tokens)

    @classmethod
    def around(
        cls,
        model: Any,
        processor: Any,
        *,
        grammar: AnswerGrammar,
        prompt: Prompt,
        device: Literal["cpu", "cuda"],
        speculative_tokens: int = 0,
        further: Sequence[tuple[AnswerGrammar, Prompt]] = (),
    ) -> Self:
        """An engine around a model that is on its device already, such as one with random weights."""
        engine = cls.__new__(cls)
        engine.model = type(model).__name__
        engine.revision = "in memory"
        engine.image_tokens = None
        grammars, prompts = zip((grammar, prompt), *further, strict=True)
        engine._set_up(model, processor, grammars, prompts, device, speculative_tokens)
        return engine

    def _set_up(
        self,
        model: Any,
        processor: Any,
        grammars: Sequence[AnswerGrammar],
        prompts: Sequence[Prompt],
        device: Literal["cpu", "cuda"],
        speculative_tokens: int,
    ) -> None:
        from transformers import GenerationConfig

        self.largest_batch: int | None = None
        self._device = device
        self._context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._text_tokens = [0] * len(prompts)
        if (cost := self.image_tokens) is not None:
            further = (prompt_tokens(processor, prompt.text, []) for prompt in prompts[1:])
            self._text_tokens = [cost.text, *further]
        self._longest = [self._longest_prompt(text) for text in self._text_tokens]
        texts = [prompt.text for prompt in prompts]
        self._endings = learn_endings(processor, texts) if len(prompts) > 1 else None
        self._seen: SeenBatch | None = None
        self._inputs = InputPreparation(
            processor,
            prompts[0],
            dtype=model.dtype,
            pinned=device == "cuda",
            longest=self._longest,
            further=prompts[1:],
            endings=self._endings,
        )
        self._tokenizer = processor.tokenizer
        self._model = model
        self._grammar = grammars[0]
        self._stop_token_ids = _stop_token_ids(model, self._tokenizer)
        padding = self._tokenizer.pad_token_id
        self._pad_token_id: int = self._stop_token_ids[0] if padding is None else padding
        # A clean one: penalties and sampling that a model ships with would break JSON and repeatability.
        self._model.generation_config = GenerationConfig(
            eos_token_id=list(self._stop_token_ids), pad_token_id=self._pad_token_id, do_sample=False
        )
        self._decodes_itself = _uses_our_decoding(model)
        if device == "cuda":
            prefer_flash_attention(model)
        attend_by_rows(model)
        attend_to_images_by_length(model)
        self.drafting = Drafting(model, speculative_tokens)
        self._further = [(grammar, Drafting(model, speculative_tokens)) for grammar in grammars[1:]]
        self._seconds = {"processor": 0.0, "prefill": 0.0, "generation": 0.0}
        self.shares_images = self._continues_alike()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds inside ``describe`` so far. See Engine."""
        return self._seconds

    def prepare(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> None:
        """Run the processor ahead. See Engine."""
        accepted = _accepted(batch)
        size = self.largest_batch or len(accepted) or 1
        chunks = [accepted[start : start + size] for start in range(0, len(accepted), size)]
        self._inputs.prepare(chunks, attempt)

    def describe(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> list[Answer | EngineError]:
        """One answer a property, in order. See Engine; raises RequestTooLargeError for a single property."""
        answers = iter(self._described(_accepted(batch), attempt))
        return [next(answers) if loaded.refusal is None else EngineError(loaded.refusal) for loaded in batch]

    def _described(self, batch: Sequence[LoadedProperty], attempt: Attempt) -> list[Answer | EngineError]:
        answers: list[Answer | EngineError] = []
        while len(answers) < len(batch):
            chunk = batch[len(answers) :][: self.largest_batch]
            answered = self._answered_or_none(chunk, attempt)
            if answered is not None:
                answers.extend(answered)
            elif len(chunk) > 1:
                self.largest_batch = len(chunk) // 2
            else:
                images = min(chunk[0].seen, attempt.images or chunk[0].seen)
                raise RequestTooLargeError(
                    "out_of_memory",
                    f"{counted(images, 'images are', 'image is')} more than the memory of"
                    f" {self._device} holds beside the model",
                )
        return answers

    def canary(self) -> CanaryAnswer | None:
        """Answer the canary, without drafts, and sum up the weights. See CanaryEngine."""
        drafting, seconds, largest = self.drafting, dict(self._seconds), self.largest_batch
        self.drafting, self.largest_batch = None, None
        has_room = True
        try:
            answers = self._described(canary_properties(Pixels().load()), ATTEMPT)
            texts = [
                answer.text if isinstance(answer, Answer) else type(answer).__name__ for answer in answers
            ]
            has_room = self.largest_batch is None
        except (EngineLostError, ImpossibleScoresError):
            raise
        except RequestTooLargeError:
            has_room = False
        except Exception as error:
            # Some models take no image like these. Then the checksum of the weights alone is compared.
            texts = [type(error).__name__]
        finally:
            self.drafting, self._seconds, self.largest_batch = drafting, seconds, largest
        if not has_room:
            return None  # Memory that another process has taken makes no device sick.
        made_with = versions("torch", "transformers", "xgrammar", device=self._device)
        # A family may have got its own attention back since its last canary.
        text = self._model.config.get_text_config(decoder=True)
        made_with += f", {getattr(text, '_attn_implementation', None)}"
        return CanaryAnswer(digest_of_answers(texts, weights_checksum(self._model)), made_with)

    def close(self) -> None:
        """Give memory back: the model's, and the host's, pinned for inputs."""
        del self._model, self._grammar, self._further, self._inputs, self._seen
        release_memory(self._device)

    def _answered_or_none(
        self, batch: Sequence[LoadedProperty], attempt: Attempt
    ) -> list[Answer | EngineError] | None:
        """The answers, or None where the device's memory did not hold the batch."""
        try:
            return self._answers(batch, attempt)
        except MemoryError as error:
            raise EngineLostError("this process ran out of memory while describing; end it") from error
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                if _is_lost(error):
                    raise EngineLostError(f"the device is lost: {error}") from error
                raise
        self._seen = None
        # Only here is the exception gone, and with its traceback the tensors that filled the memory.
        release_memory(self._device)
        return None

    def _answers(self, batch: Sequence[LoadedProperty], attempt: Attempt) -> list[Answer | EngineError]:
        """One answer a property. Prompts that are too long for the model are left out of its batch."""
        began = time.monotonic()
        inputs, beginning = self._inputs_and_beginning(batch, attempt)
        self._seconds["processor"] += time.monotonic() - began
        fitting = list(itertools.compress(batch, inputs.fitting))
        answers = iter(self._generated_answers(fitting, attempt, inputs, beginning) if fitting else ())
        return [
            next(answers) if fits else self._too_long(loaded, tokens, attempt)
            for loaded, tokens, fits in zip(batch, inputs.prompt_tokens, inputs.fitting, strict=True)
        ]

    def _inputs_and_beginning(
        self, batch: Sequence[LoadedProperty], attempt: Attempt
    ) -> tuple[ModelInputs, SharedBeginning | None]:
        """The inputs of a batch, and what is computed or kept of its images for several questions."""
        question, endings = attempt.question, self._endings
        if not self.shares_images or endings is None or attempt.number > 1:
            return self._inputs.for_chunk(batch, attempt), None
        seen, self._seen = self._seen, None  # Before the next batch needs its memory.
        is_last = question == len(self._further)
        if seen is not None and (asked := seen.asked(batch, question, endings, self._longest[question])):
            self._seen = None if is_last else seen
            return asked
        del seen
        inputs = self._inputs.for_chunk(batch, attempt)
        if is_last or inputs.tensors is None:
            return inputs, None
        self._seen = SeenBatch.begin(batch, question, inputs, endings)
        return inputs, self._seen.beginning

    def _continues_alike(self) -> bool:
        """Whether this model finds the same for a question after the images of another as in one prompt.

        It does not where images look at the text after them (prefix-LM), or where layers keep what no cache
        has. The canary's properties show it.
        """
        import torch

        if (endings := self._endings) is None or not self._decodes_itself:
            return False
        batch = canary_properties(Pixels().load())
        try:
            asked, alone = (
                self._inputs.for_chunk(batch, Attempt(1, 1, question=number)) for number in (0, 1)
            )
            seen = SeenBatch.begin(batch, 0, asked, endings)
            expected = self._first_scores(alone, None)
            self._first_scores(asked, seen.beginning)
            further = seen.asked(batch, 1, endings, math.inf)
            scores = None if further is None else self._first_scores(*further)
        except Exception as error:  # A model's own code may raise anything.
            of_attention = isinstance(error, AttributeError | KeyError | TypeError)
            if of_attention and attend_as_shipped(self._model):
                return self._continues_alike()
            _log.warning("The model looks at the images anew for each question: %s", error)
            return False
        finally:
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        spread = expected - expected.mean(dim=-1, keepdim=True)
        most = _ALIKE[self._model.dtype == torch.float32] * spread.norm(dim=-1)
        alike = scores is not None and bool(((scores - expected).norm(dim=-1) <= most).all())
        if not alike:
            _log.warning("The model looks at the images anew for each question, because its answers differ.")
        return alike

    def _first_scores(self, inputs: ModelInputs, beginning: SharedBeginning | None) -> torch.Tensor:
        """The scores of the first token of each answer [properties, vocabulary]."""
        import torch
        from transformers import LogitsProcessorList

        scores: list[torch.Tensor] = []

        def keep(_: Any, made: torch.Tensor) -> torch.Tensor:
            scores.append(made.clone())
            return made

        decoding = GreedyDecoding(
            stop_token_ids=self._stop_token_ids,
            pad_token_id=self._pad_token_id,
            limits=[1] * sum(inputs.fitting),
            prompt_inputs=None if beginning is None else beginning.inputs_after,
        )
        with torch.inference_mode():
            self._generate(inputs, LogitsProcessorList([keep]), 1, decoding)
        return scores[0]

    def _generated_answers(
        self,
        batch: Sequence[LoadedProperty],
        attempt: Attempt,
        inputs: ModelInputs,
        beginning: SharedBeginning | None,
    ) -> list[Answer]:
        import torch
        from transformers import LogitsProcessorList

        prompts = list(itertools.compress(inputs.prompt_tokens, inputs.fitting))
        limits = [self._room(tokens, attempt) for tokens in prompts]
        grammar, drafting = (
            self._further[attempt.question - 1] if attempt.question else (self._grammar, self.drafting)
        )
        guide = grammar.for_batch(len(batch))
        # Our own loop checks the scores itself, beside the grammar.
        processors: list[Any] = [guide] if self._decodes_itself else [_refuse_impossible, guide]
        start_steps = None
        # Greedily the guide alone decides about a token: the generation's own settings are empty.
        if drafting is not None and attempt.temperature == 0:
            start_steps = drafting.start_steps(guide)
        if attempt.temperature > 0:
            seeds = [sampling_seed(loaded.property_id, attempt.number) for loaded in batch]
            processors.append(SampledBatch(attempt.temperature, seeds))
        decoding = GreedyDecoding(
            stop_token_ids=self._stop_token_ids,
            pad_token_id=self._pad_token_id,
            limits=limits,
            start_steps=start_steps,
            prompt_inputs=None if beginning is None else beginning.inputs_after,
        )
        try:
            with torch.inference_mode():
                sequences = self._generate(inputs, LogitsProcessorList(processors), max(limits), decoding)
        except (AttributeError, KeyError, TypeError) as error:
            if not attend_as_shipped(self._model):
                raise
            _log.warning("This model keeps its own attention, which is slower: %s", error)
            return self._generated_answers(batch, attempt, inputs, beginning)
        generated = sequences[:, inputs.tensors["input_ids"].shape[1] :].tolist()
        answers = [tokens[:limit] for tokens, limit in zip(generated, limits, strict=True)]
        scored: list[AnswerTokens | None] = [None] * len(answers)
        if isinstance(guide, GuidedBatch):
            scored = guide.scores.of_answers([self._before_stop(tokens) for tokens in answers])
        return list(map(self._answer, answers, prompts, scored))

    def _generate(self, inputs: ModelInputs, processors: Any, most: int, decoding: GreedyDecoding) -> Any:
        """Prompts and answers as tokens [properties, tokens]."""
        began = time.monotonic()
        sequences = self._model.generate(
            **inputs.tensors.to(self._device, non_blocking=True),
            max_new_tokens=most,
            logits_processor=processors,
            custom_generate=decoding if self._decodes_itself else None,
        )
        seconds = time.monotonic() - began
        # ``generate`` looks at the images before it asks for a decoding.
        generation = decoding.generation_seconds if self._decodes_itself else seconds
        self._seconds["prefill"] += seconds - generation
        self._seconds["generation"] += generation
        return sequences

    def _room(self, prompt_tokens: int, attempt: Attempt) -> int:
        """Tokens that this property's answer may have: by itself, not by the longest prompt of the batch."""
        if self._context is None:
            return attempt.max_new_tokens
        return min(attempt.max_new_tokens, self._context - prompt_tokens)

    def _longest_prompt(self, text: int) -> float:
        """Tokens of a prompt with images, at most: the user's budget, or what leaves an answer a token."""
        bounds = [math.inf]
        cost = self.image_tokens
        if cost is not None and cost.budget is not None:
            bounds.append(text + cost.budget)
        if self._context is not None:
            bounds.append(self._context - 1)
        return min(bounds)

    def _too_long(self, loaded: LoadedProperty, prompt_tokens: int, attempt: Attempt) -> RequestTooLargeError:
        """Why a property was left out: its images leave an answer no room, or exceed the budget."""
        cost, shown = self.image_tokens, min(loaded.seen, attempt.images or loaded.seen)
        text = self._text_tokens[attempt.question]
        budget = None if cost is None or cost.budget is None else text + cost.budget
        if budget is not None and prompt_tokens > budget:
            most, reason = budget, "VLM_ASSETS_IMAGE_TOKENS and the prompt allow"
        else:
            assert self._context is not None
            most, reason = self._context, "the model takes"
        # Where the answer would take all that is left, the images have it.
        room = max(most - text - (0 if most == budget else attempt.max_new_tokens), most // 2)
        return RequestTooLargeError(
            "prompt_too_long",
            f"images and prompt are {prompt_tokens} tokens, of {most} that {reason}",
            images=int(room * shown / max(1, prompt_tokens - text)),
        )

    def _answer(
        self, tokens: Sequence[int], prompt_tokens: int, scored: AnswerTokens | None = None
    ) -> Answer:
        answer = self._before_stop(tokens)
        return Answer(
            text=self._tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            finish_reason="stop" if len(answer) < len(tokens) else "length",
            prompt_tokens=prompt_tokens,
            output_tokens=len(answer),
            tokens=scored,
        )

    def _before_stop(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens before the first that ends an answer."""
        ends = (index for index, token in enumerate(tokens) if token in self._stop_token_ids)
        return tokens[: next(ends, None)]


def _accepted(batch: Sequence[LoadedProperty]) -> list[LoadedProperty]:
    """The properties that the processor did not refuse."""
    return [loaded for loaded in batch if loaded.refusal is None]


def _refuse_impossible(input_ids: Any, scores: Any) -> Any:
    """A logits processor that raises ImpossibleScoresError where the model computes no numbers.

    Without it the first token that the grammar allows is chosen again and again, and the answer fits the
    schema.
    """
    if not are_sound(scores):
        raise ImpossibleScoresError
    return scores


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


def _uses_our_decoding(model: Any) -> bool:
    """Whether our own loop decodes the answers: it does not where a model brings its own."""
    from transformers import GenerationMixin

    methods = ("generate", "_sample", "_prefill")
    generic = all(getattr(type(model), method) is getattr(GenerationMixin, method) for method in methods)
    return generic and not model.config.is_encoder_decoder


def _is_out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _is_lost(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.AcceleratorError) or any(sign in str(error) for sign in _LOST)

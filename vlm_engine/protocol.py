"""The small interface between a batch of loaded properties and a vision-language model.

This module holds the request, the answer, the interface and its errors. schema.py says which answers are
valid, and ladder.py what happens to the others. It imports nothing heavy: neither pydantic nor an image
library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from vlm_durable.wording import counted

if TYPE_CHECKING:
    from vlm_engine.images.images import LoadedProperty

FinishReason = Literal["stop", "length"]

_MESSAGE_LIMIT: Final = 300


class EngineError(Exception):
    """An engine could not answer. The engine itself goes on."""


class ModelLoadError(EngineError):
    """The model cannot be loaded; the message says which, why, and what to do."""


class RequestTooLargeError(EngineError):
    """One property alone is more than the model or its device takes; fewer images may do.

    kind: ``out_of_memory`` or ``prompt_too_long``. images: how many of the property's would fit, where known.
    """

    def __init__(
        self, kind: Literal["out_of_memory", "prompt_too_long"], message: str, images: int | None = None
    ) -> None:
        self.kind = kind
        self.images = images
        super().__init__(message)


class ImpossibleScoresError(EngineError):
    """The model computes no numbers (NaN, infinity) for a property: its weights or the device are damaged."""

    def __init__(self) -> None:
        super().__init__(
            "the model computes NaN or infinity for this property: its weights or the device are damaged, or"
            " its numbers overflow in this precision; try another revision or device"
        )


class EngineLostError(EngineError):
    """The device or the process's memory is lost: this engine can answer nothing any more."""


class InvalidDescription(ValueError):  # noqa: N818 - named as people read it in a row
    """An answer is no description of the schema.

    kind: ``invalid_json`` (does not parse as one strict JSON object) or ``schema_mismatch`` (parses, but the
    model refuses it, or Arrow could not hold it).
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        long = len(message) > _MESSAGE_LIMIT
        self.message = message[: _MESSAGE_LIMIT - 1] + "…" if long else message
        super().__init__(f"{kind}: {self.message}")


@dataclass(frozen=True)
class ImageLimits:
    """The user's limits for images.

    pixels: of an image when it reaches the model. images: of a property. answer_tokens: room that an answer
    needs. tokens: of a property's images; None: as many as the context holds. options: of the family's image
    processor, in the place of its own.
    """

    pixels: int
    images: int
    answer_tokens: int
    tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ImageTokens:
    """The size at which images are shown, and their cost.

    each: tokens of an image of the most expensive shape. text: tokens of the prompt without images. images:
    of a property, at most. fitting: how many of them fit. pixels: bound of an image's pixels. context: tokens
    that the model takes; None: not known. options: of the image processor. budget: tokens that the user
    allows for a property's images; None: as many as the context holds.
    """

    each: int
    text: int
    images: int
    fitting: int
    pixels: int
    context: int | None
    options: Mapping[str, Any]
    budget: int | None = None

    @property
    def property_tokens(self) -> int:
        """Tokens of a property with all its images that fit, the prompt's text included."""
        return self.text + self.each * self.fitting

    def sentence(self) -> str:
        """For people."""
        context = "" if self.context is None else f" of {self.context:,} that the model takes"
        return (
            f"{self.each:,} tokens an image (up to {self.pixels:,} pixels), {self.property_tokens:,} a"
            f" property with its prompt{context}; {self.fitting} of {counted(self.images, 'images')} fit"
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """How to ask this time. ``number`` counts from 1.

    max_new_tokens: limit of the answer, in tokens. temperature: 0 is greedy; a property's seed derives from
    its id and ``number``. images: of each property, at most (None: all). question: of those that the engine
    was made for, by its place.
    """

    number: int
    max_new_tokens: int
    temperature: float = 0.0
    images: int | None = None
    question: int = 0


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens of an answer's text: their bytes, and the probability of each in its place.

    Outside a free text it is that among the tokens that the grammar allowed. bounds: where the options of
    each token lie, from one bound to the next: the tokens that the grammar allowed in its place, or the
    likeliest of them, itself among them. There are none where the probability of the token alone counts.
    """

    texts: list[bytes] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    bounds: list[int] = field(default_factory=lambda: [0])
    option_texts: list[bytes] = field(default_factory=list)
    option_probabilities: list[float] = field(default_factory=list)

    def up_to(self, length: int) -> AnswerTokens | None:
        """The tokens of the first so many bytes, so without one that ends the answer; None where none are."""
        count = total = 0
        while total < length and count < len(self.texts):
            total += len(self.texts[count])
            count += 1
        return (
            AnswerTokens(
                self.texts[:count],
                self.probabilities,
                self.bounds,
                self.option_texts,
                self.option_probabilities,
            )
            if count
            else None
        )

    def add(
        self, text: bytes, probability: float, option_texts: Sequence[bytes], probabilities: Sequence[float]
    ) -> None:
        """Add a token with its options and their probabilities."""
        self.texts.append(text)
        self.probabilities.append(probability)
        self.option_texts.extend(option_texts)
        self.option_probabilities.extend(probabilities)
        self.bounds.append(len(self.option_texts))


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for one property. finish_reason: ``stop``, or ``length`` where the limit cut it off.

    tokens: None where the engine does not know their probabilities.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    tokens: AnswerTokens | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """An engine's answer to the canary: a small fixed question whose answer must never change.

    digest: of the answers, and in process of the weights on the device. versions: of the software and
    hardware that computed it; "" where not all of them are known, so that it is compared with no other
    process.
    """

    digest: str
    versions: str


class Engine(Protocol):
    """A vision-language model that answers batches of properties."""

    @property
    def model(self) -> str:
        """The model as the settings name it."""

    @property
    def revision(self) -> str:
        """The exact version that is loaded: a commit, or a digest of the files."""

    @property
    def batches_at_once(self) -> int:
        """How many calls of ``describe`` at a time, each in a thread, keep the engine busy.

        With 1, all calls come from the caller's own thread. It is read before each batch. It may change from
        one number above 1 to another.
        """

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds inside ``describe`` so far, by kind of work, for people; empty where it does not know.

        ``processor``: work that ``prepare`` had not done. ``prefill``: images and prompt, up to the first
        token. ``generation``: all other tokens.
        """

    def prepare(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> None:
        """Do ahead, beside the model, the work of ``describe`` before the model for this batch and attempt.

        Called from another thread than ``describe``; may do nothing. Its errors are dropped, because
        ``describe`` raises them again.
        """

    def describe(
        self, batch: Sequence[LoadedProperty], *, attempt: Attempt
    ) -> Sequence[Answer | EngineError]:
        """One answer a property, in order, or the property's own error.

        Each property has at least one image. Raises EngineLostError where the engine must be given up, and
        any other error where this batch cannot be answered as a whole; the caller then asks for each
        property.
        """

    def close(self) -> None:
        """Give the model's memory back. The engine cannot be used afterwards.

        Calls of ``describe`` under way in other threads end soon, with EngineLostError.
        """


@runtime_checkable
class WaitingEngine(Protocol):
    """An engine that may have to wait, in ``describe``, for as long as a model takes to load.

    ``waiting``: set by the caller; its context is entered around such a wait, in another thread.
    """

    waiting: Callable[[], AbstractContextManager[object]]


@runtime_checkable
class SplittingEngine(Protocol):
    """An engine that splits batches. ``largest_batch``: properties that memory held; None: all so far."""

    largest_batch: int | None


@runtime_checkable
class MeasuringEngine(Protocol):
    """An engine that knows the cost of images. ``image_tokens``: None where its processor does not say."""

    image_tokens: ImageTokens | None


def image_tokens_of(engine: object) -> ImageTokens | None:
    """What images cost in tokens, where the engine knows it."""
    return engine.image_tokens if isinstance(engine, MeasuringEngine) else None


@runtime_checkable
class CanaryEngine(Protocol):
    """An engine, or a text embedder, that can be asked the canary. See ``vlm_engine/canary.py``."""

    def canary(self) -> CanaryAnswer | None:
        """Compute the canary, from the caller's own thread, while no batch is under way.

        None: this engine cannot be asked (such as a server that others may ask too), or has no memory for it.
        Raises EngineLostError, ImpossibleScoresError.
        """


def sampling_seed(property_id: str, attempt: int) -> int:
    """The seed of one property in one attempt: the same in any batch, run or process."""
    digest = hashlib.sha256(f"0\0{attempt}\0{property_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1

"""OpenAI's chat completions: the request for one property, and a server's answers and refusals.

This module makes the body of a request, with the images as data URIs wherever the server runs. It interprets
an error's status and text. It reads an answer as it streams in, and gives up an answer whose tokens stop
coming, even if the connection is open. ``property_requests.py`` sends, and asks again. Terms: server-sent
events; chat.completion.chunk.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from PIL import Image

from vlm_engine.confidence import AnswerField, confidence_of
from vlm_engine.images.images import Made, Maker
from vlm_engine.protocol import (
    Answer,
    AnswerTokens,
    Attempt,
    EngineError,
    EngineLostError,
    FinishReason,
    RequestTooLargeError,
    sampling_seed,
)

if TYPE_CHECKING:
    import httpx2
    import numpy as np
    import numpy.typing as npt

    EncodedImage = npt.NDArray[np.uint8]
    """The bytes of a PNG or JPEG file."""

SCHEMA_NAME: Final = "description"

OPTIONAL_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "response_format": ("response_format", "json_schema", "grammar", "guided", "structured output"),
    "stream_options": ("stream_options", "include_usage"),
    "repetition_penalty": ("repetition_penalty",),
    "top_k": ("top_k",),
    "seed": ("seed",),
    "chat_template_kwargs": ("chat_template", "enable_thinking"),
    "logprobs": ("logprobs",),
    "top_logprobs": ("logprobs",),
}
"""Fields that a server may not support, and the words by which its refusal names each.

Without ``response_format`` answers are validated all the same. The neutral ``repetition_penalty`` and
``top_k`` override a model's own ``generation_config.json``, which servers apply unasked: it breaks JSON, and
it makes the second attempt, at another temperature, equal to the first. Without ``chat_template_kwargs``
Qwen3.5 thinks before it answers.
"""

TOKEN_SCORES: Final = frozenset({"logprobs", "top_logprobs"})
"""Fields that ask for the probabilities of tokens. They are left out until ``are_masked`` holds."""

_OPTIONS: Final = 5
"""Likeliest tokens that are asked for in each place: a server writes each of them into its answer."""

_PROOF: Final = ("zq", "qz")
"""Words that no model would say to ``proof_question``. They part at their first letter."""

_PROVEN: Final = 0.99
_ROUNDED_UP: Final = 1.001
"""A probability is no more than this, however it was rounded."""

_NON_STANDARD: Final = ("repetition_penalty", "top_k", "chat_template_kwargs")
"""Fields that OpenAI does not have: a server that refuses unknown fields may not say which it refuses."""

_UNKNOWN_FIELD: Final = (
    "extra inputs are not permitted",
    "extra_forbidden",
    "additional properties",
    "unknown field",
    "unknown parameter",
    "unrecognized",
)

_TOO_LONG: Final = (
    "maximum context length",  # vLLM, OpenAI
    "maximum model length",  # vLLM, where images are many tokens
    "longer than the model's context length",  # SGLang
    "exceeds the available context size",  # llama.cpp
    "exceed_context_size",
    "context_length_exceeded",
    "context window",
    "image(s) may be provided",  # vLLM's limit on images a prompt
    "images may be provided",
)
_OUT_OF_MEMORY: Final = "out of memory"

MOST_BYTES: Final = 16 << 20
"""Limit of one answer. A longer one is no description."""

JPEG_QUALITY: Final = 92
"""With colour at full resolution: a second compression loses less than a model's resizing."""

_SMALL_PIXELS: Final = 128 * 128
"""A smaller image is sent as PNG: exact, and hardly larger."""

_LONGEST_JPEG_SIDE: Final = 65_500
"""Pixels. Pillow's JPEG has this limit; PNG has none."""

_SHOWN: Final = 200
_THOUGHTS: Final = ("reasoning_content", "reasoning")
_SHOWN_ERROR: Final = 300


@dataclass(frozen=True)
class Question:
    """The part of a request that is the same for all properties. model: its name at the server."""

    model: str
    prompt: str
    json_schema: Mapping[str, Any]


class SilentServerError(EngineError):
    """No new token for too long, or an answer that is too slow as a whole, though the connection is open."""


class BusyServerError(EngineError):
    """The server has too much to do (429, 503). retry_after: its Retry-After header, if there is one."""

    def __init__(self, message: str, retry_after: str | None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class FailingServerError(EngineError):
    """The server failed with this request, is not available, or its response is no answer: cut off, empty, in
    another form. The next try may work."""


class FieldRefusedError(EngineError):
    """The server does not support optional fields of the request."""

    def __init__(self, message: str, fields: Collection[str]) -> None:
        self.fields = tuple(fields)
        super().__init__(message)


# --- the request -----------------------------------------------------------------------------------


def chat_request(
    question: Question,
    urls: Sequence[str],
    property_id: str,
    attempt: Attempt,
    *,
    without: Collection[str] = (),
) -> bytes:
    """The body for one property: its images in order, then the question. without: fields to leave out."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": question.prompt})
    body: dict[str, Any] = {
        "model": question.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": attempt.max_new_tokens,
        "temperature": attempt.temperature,
        "top_p": 1.0,
        "stream": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": SCHEMA_NAME, "schema": question.json_schema, "strict": True},
        },
        "stream_options": {"include_usage": True},
        "repetition_penalty": 1.0,
        "top_k": -1,
        "seed": sampling_seed(property_id, attempt.number),
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "top_logprobs": _OPTIONS,
    }
    if attempt.temperature > 0:  # Whether they are those before the temperature is not known.
        without = TOKEN_SCORES.union(without)
    return json.dumps({name: value for name, value in body.items() if name not in without}).encode()


def proof_request(model: str) -> bytes:
    """The body of the shortest question that takes a token to answer."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    return json.dumps(
        {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0.0, "stream": True}
    ).encode()


def proof_question(model: str) -> Question:
    """The question for ``are_masked``: its schema allows two values, which nobody would say."""
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string", "enum": list(_PROOF)}},
        "required": ["word"],
        "additionalProperties": False,
    }
    return Question(model, 'Answer with {"word":"sun"} and nothing else.', schema)


def are_masked(answer: Answer) -> bool:
    """Whether the probabilities of an answer to ``proof_question`` are those after the grammar's mask.

    The two values that the schema allows share the probability 1 then, and else have hardly any. One value
    would not do: a server may give what the schema forces the probability 1, and choices that of no mask.
    """
    try:
        value = json.loads(answer.text)
    except (ValueError, RecursionError):
        return False
    if answer.tokens is None or value not in [{"word": word} for word in _PROOF]:
        return False
    words = _PROOF if value["word"] == _PROOF[0] else _PROOF[::-1]
    tokens = _with_other_as_own(answer.tokens, answer.text.encode(), answer.text.replace(*words).encode())
    if tokens is None:
        return False
    field = AnswerField("word", "word", is_text=False, nullable=False)
    confidence = confidence_of([field], answer.text, tokens)
    return confidence is not None and confidence["word"] >= _PROVEN


def _with_other_as_own(tokens: AnswerTokens, answer: bytes, other: bytes) -> AnswerTokens | None:
    """The tokens of an answer, with options that go on to the other answer as if they wrote this one.

    None where no option does, or none has a probability.
    """
    texts, start, is_shown = list(tokens.option_texts), 0, False
    for token, text in enumerate(tokens.texts):
        if answer[:start] == other[:start]:
            for option in range(tokens.bounds[token], tokens.bounds[token + 1]):
                if other.startswith(texts[option], start) and not answer.startswith(texts[option], start):
                    is_shown |= tokens.option_probabilities[option] > 0
                    texts[option] = text
        start += len(text)
    return replace(tokens, option_texts=texts) if is_shown else None


@dataclass(frozen=True)
class EncodedImages:
    """The images as files. See ``vlm_engine.images.images.Output``."""

    def load(self) -> Maker:
        """See Output."""
        import numpy as np

        return lambda images: Made([np.frombuffer(encoded(image), np.uint8) for image in images])


def encoded(image: Image.Image) -> bytes:
    """An image as the bytes of a file: JPEG, or PNG where it is small or too long for JPEG."""
    stream = io.BytesIO()
    if image.width * image.height < _SMALL_PIXELS or max(image.size) > _LONGEST_JPEG_SIDE:
        image.save(stream, "PNG", compress_level=1)
    else:
        image.save(stream, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return stream.getvalue()


def data_uris(images: Sequence[EncodedImage]) -> list[str]:
    """A data URI an image, in order."""
    uris = []
    for image in images:
        file = image.tobytes()
        media_type = "image/png" if file.startswith(b"\x89PNG") else "image/jpeg"
        uris.append(f"data:{media_type};base64,{base64.b64encode(file).decode()}")
    return uris


def _named_fields(refusal: str, without: Collection[str]) -> list[str]:
    """The optional fields that were sent and that a refusal's text names, or may mean."""
    text = refusal.lower()
    named: Collection[str] = [
        name for name, words in OPTIONAL_FIELDS.items() if any(word in text for word in words)
    ]
    if not named and any(sign in text for sign in _UNKNOWN_FIELD):
        named = _NON_STANDARD
    return [name for name in named if name not in without]


# --- refusals --------------------------------------------------------------------------------------


def refusal(
    status: int, text: str, *, retry_after: str | None, url: str, model: str, without: Collection[str]
) -> EngineError:
    """Turn a response with this status and body into an error. without: fields that were not sent.

    An EngineLostError where every request of ours would be refused: another key, model or address is needed.
    """
    reason = f"{status}: {_message(text)}"
    lower_text = text.lower()
    if status in (401, 403):
        return EngineLostError(
            f"the model server at {url} refuses our key ({reason}); set VLM_ASSETS_SERVER_KEY to the one that"
            " it was started with"
        )
    if status == 404:
        return EngineLostError(
            f"the model server at {url} does not know what it is asked ({reason}): the address must end in"
            f" /v1, and it must serve the model {model!r}; see VLM_ASSETS_SERVER_URL and"
            " VLM_ASSETS_SERVER_MODEL"
        )
    if _OUT_OF_MEMORY in lower_text:
        return RequestTooLargeError("out_of_memory", f"the model server has too little memory ({reason})")
    if status in (400, 413, 422) and (status == 413 or any(sign in lower_text for sign in _TOO_LONG)):
        return RequestTooLargeError("prompt_too_long", f"too much for the model server ({reason})")
    if status in (400, 422, 501) and (fields := _named_fields(text, without)):
        return FieldRefusedError(f"the model server does not take {', '.join(fields)} ({reason})", fields)
    if status in (429, 503):
        return BusyServerError(f"the model server has too much to do ({reason})", retry_after)
    if status in (400, 413, 415, 422):  # They blame the request, not the server.
        return EngineError(f"the model server refuses the request ({reason})")
    # Redirections and unpaid bills too: the caller finds out whether all requests meet them.
    return FailingServerError(f"the model server failed ({reason})")


def _message(text: str) -> str:
    """Find the sentence in an error's body; servers put it in different places."""
    try:
        part: Any = json.loads(text)
    except (ValueError, RecursionError):
        part = text
    for name in ("error", "message", "detail"):
        if isinstance(part, dict) and part.get(name):
            part = part[name]
    return " ".join(str(part).split())[:_SHOWN_ERROR] or "no reason given"


# --- answers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestLimits:
    """Bounds of the requests to a server.

    most_at_once: requests under way at most; fewer where the server does not keep up. token_seconds: without
    a new token, the first one included, after which an answer is given up. answer_seconds: for a whole
    answer.
    """

    most_at_once: int = 128
    token_seconds: float = 120.0
    answer_seconds: float = 900.0


class TokenWatch:
    """A timeout that each token extends, up to the limit of the whole answer."""

    def __init__(self, limits: RequestLimits, on_token: Callable[[], None]) -> None:
        self.first_token_seconds: float | None = None
        """Seconds until the first token came, or an answer in one piece; None where no token came."""
        self._limits = limits
        self._on_token = on_token
        self._began = asyncio.get_running_loop().time()
        self._timeout = asyncio.timeout_at(self._deadline())

    def token(self) -> None:
        """A token came."""
        if self.first_token_seconds is None:
            self.first_token_seconds = asyncio.get_running_loop().time() - self._began
        if not self._timeout.expired():
            self._timeout.reschedule(self._deadline())
        self._on_token()

    def _deadline(self) -> float:
        now = asyncio.get_running_loop().time()
        return min(now + self._limits.token_seconds, self._began + self._limits.answer_seconds)

    @classmethod
    @asynccontextmanager
    async def over(cls, limits: RequestLimits, *, on_token: Callable[[], None]) -> AsyncIterator[Self]:
        """Watch the work inside. Raises SilentServerError when the time runs out.

        Enter it before the request is sent: a server that never begins to answer is silent too.
        """
        watch = cls(limits, on_token)
        try:
            async with watch._timeout:
                yield watch
        except TimeoutError as expired:
            if not watch._timeout.expired():
                raise
            if asyncio.get_running_loop().time() >= watch._began + limits.answer_seconds:
                raise SilentServerError(f"not finished after {limits.answer_seconds:g} s") from expired
            raise SilentServerError(
                f"no new token for {limits.token_seconds:g} s, though the connection stands"
            ) from expired


def refuse_compressed(response: httpx2.Response) -> None:
    """Raise FailingServerError for a compressed answer: unpacked, it may be a thousand times longer."""
    if encoding := response.headers.get("content-encoding", "").strip().lower().removeprefix("identity"):
        raise FailingServerError(f"the answer is compressed ({encoding[:_SHOWN]!r}), which was not asked for")


async def read_answer(response: httpx2.Response, watch: TokenWatch) -> Answer:
    """The answer in a successful response.

    Raises FailingServerError, RequestTooLargeError, and httpx2.HTTPError where the connection breaks.
    """
    import httpx2

    response.encoding = "utf-8"  # Whatever its headers say: to Python "zlib" is a charset, too.
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    building = _Building()
    if kind != "text/event-stream":
        # This server does not stream: the whole answer comes at once.
        body = await first_bytes(response, MOST_BYTES)
        if len(body) > MOST_BYTES:
            raise FailingServerError(f"the answer has more than {MOST_BYTES} bytes")
        whole = _object(body)
        if not whole.get("choices") and not whole.get("error"):
            raise FailingServerError(f"the answer ({kind or 'of no kind'}) holds no choice: {_shown(whole)}")
        building.add(whole)
        watch.token()
        return building.finished()
    try:
        async for event in httpx2.EventSource(response):
            if event.data.strip() == "[DONE]":
                break
            if building.add(_object(event.data)):
                watch.token()
            if building.size > MOST_BYTES:
                raise FailingServerError(f"the answer has more than {MOST_BYTES} bytes")
    except httpx2.SSEError as error:
        raise FailingServerError(f"no events could be read: {error}") from error
    except UnicodeDecodeError as error:
        raise FailingServerError(f"the answer is no text: {error}") from error
    return building.finished()


async def first_bytes(response: httpx2.Response, most: int) -> bytes:
    """The body of a response, cut off soon after ``most`` bytes where it is longer."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > most:
            break
    return bytes(body)


class _Building:
    """An answer that grows by events."""

    def __init__(self) -> None:
        self.size = 0
        self._texts: list[str] = []
        self._scored: AnswerTokens | None = AnswerTokens()
        self._tokens = 0
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}

    def add(self, event: Mapping[str, Any]) -> bool:
        """Add an event. Returns whether it holds something new from the model."""
        if event.get("error"):
            raise _server_error(event["error"])
        if isinstance(event.get("usage"), Mapping):
            self._usage = event["usage"]
        choices = event.get("choices")
        if not choices:
            return False  # The event with the usage has none.
        choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
        message = choice.get("delta", choice.get("message"))
        if not isinstance(message, Mapping) or not isinstance(message.get("content", ""), str | None):
            raise FailingServerError(f"an event is of another form: {_shown(event)}")
        if choice.get("finish_reason"):
            self._finish = str(choice["finish_reason"])
        text = message.get("content") or ""
        if text or choice.get("logprobs"):
            self._score(choice.get("logprobs"))
        self._texts.append(text)
        self.size += len(text)
        if not text and not any(message.get(name) for name in _THOUGHTS):
            return False
        self._tokens += 1
        return True

    def finished(self) -> Answer:
        """The whole answer. Raises FailingServerError where its end is missing."""
        if self._finish is None:
            text = "".join(self._texts)
            raise FailingServerError(f"the answer broke off after {len(text)} characters: {text[-_SHOWN:]!r}")
        finish: FinishReason = "length" if self._finish == "length" else "stop"
        text = "".join(self._texts)
        return Answer(
            text=text,
            finish_reason=finish,
            prompt_tokens=_count(self._usage.get("prompt_tokens"), 0),
            output_tokens=_count(self._usage.get("completion_tokens"), self._tokens),
            tokens=None if self._scored is None else self._scored.up_to(len(text.encode(errors="replace"))),
        )

    def _score(self, logprobs: Any) -> None:
        """Add the probabilities of an event's tokens; where one of them is missing, none is known."""
        if self._scored is None:
            return
        try:
            for token in logprobs["content"]:
                options = {_bytes_of(other): math.exp(other["logprob"]) for other in token["top_logprobs"]}
                text, probability = _bytes_of(token), math.exp(token["logprob"])
                options[text] = probability
                if not all(0.0 <= option <= _ROUNDED_UP for option in options.values()):
                    raise ValueError(options)
                self._scored.add(text, probability, list(options), list(options.values()))
        except (KeyError, TypeError, ValueError, OverflowError):
            self._scored = None


def _bytes_of(token: Mapping[str, Any]) -> bytes:
    """The bytes of a token in ``logprobs``: its text alone may be part of a character."""
    given = token.get("bytes")
    return token["token"].encode() if given is None else bytes(given)


def _object(text: str | bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise FailingServerError(f"not JSON: {text[:_SHOWN]!r}") from None
    if not isinstance(content, dict):
        raise FailingServerError(f"no JSON object: {text[:_SHOWN]!r}")
    return content


def _server_error(error: object) -> EngineError:
    message = error.get("message", error) if isinstance(error, Mapping) else error
    text = str(message)[:_SHOWN]
    if _OUT_OF_MEMORY in text.lower():
        return RequestTooLargeError("out_of_memory", f"the model server has too little memory: {text}")
    return FailingServerError(f"the server broke off with an error: {text}")


def _count(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else otherwise


def _shown(event: Mapping[str, Any]) -> str:
    return json.dumps(event)[:_SHOWN]

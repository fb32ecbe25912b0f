"""One answer of a model server, read as it is made: a stream of events, or one JSON object.

What lives here: the form of an answer, and the watch over its tokens: one that stops coming is given up,
whatever the connection says. What does not: what is asked (``chat_request.py``), and asking again
(``engine.py``). Terms: server-sent events; OpenAI's chat.completion.chunk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from resources.engine.protocol import Answer, EngineError, FinishReason, RequestTooLargeError

if TYPE_CHECKING:
    import httpx2

MOST_BYTES: Final = 16 << 20
"""Of one answer; more is no description."""

_SHOWN: Final = 200
_THOUGHTS: Final = ("reasoning_content", "reasoning")


class UnusableAnswerError(EngineError):
    """What came is no answer: cut off, empty, of another form than was asked for, or a server's error."""


class SilentServerError(EngineError):
    """No new token for too long, or not all of them in time, though the connection stands."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds: without a new token, the first one included; and for the whole answer."""

    between_tokens: float
    whole: float


@dataclass(frozen=True)
class StreamedAnswer:
    """An answer, and the seconds until its first token came; of one that came in one piece, until it did.

    None: it has no token.
    """

    answer: Answer
    first_token_seconds: float | None


class TokenWatch:
    """A time limit that each token pushes on, at most to the end of the time for the whole answer."""

    def __init__(self, limits: TimeLimits, on_token: Callable[[], None]) -> None:
        self.first_token_seconds: float | None = None
        """Seconds until the first token came."""
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
        return min(now + self._limits.between_tokens, self._began + self._limits.whole)

    @classmethod
    @asynccontextmanager
    async def over(cls, limits: TimeLimits, *, on_token: Callable[[], None]) -> AsyncIterator[Self]:
        """A watch over what is done within. Raises SilentServerError where its time runs out.

        To be entered before the request is sent: a server that never begins to answer is silent too.
        """
        watch = cls(limits, on_token)
        try:
            async with watch._timeout:
                yield watch
        except TimeoutError as expired:
            if not watch._timeout.expired():
                raise
            if asyncio.get_running_loop().time() >= watch._began + limits.whole:
                raise SilentServerError(f"not finished after {limits.whole:g} s") from expired
            raise SilentServerError(
                f"no new token for {limits.between_tokens:g} s, though the connection stands"
            ) from expired


async def read_answer(response: httpx2.Response, watch: TokenWatch) -> StreamedAnswer:
    """The answer that a successful response carries.

    Raises UnusableAnswerError, RequestTooLargeError, and httpx2.HTTPError where the connection breaks.
    """
    import httpx2

    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    building = _Building()
    if kind != "text/event-stream":
        # A server that does not stream: all of it at once.
        _take_whole(building, await _body(response), kind)
        watch.token()
        return building.finished(watch)
    try:
        async for event in httpx2.EventSource(response):
            if event.data.strip() == "[DONE]":
                break
            if building.take(_object(event.data)):
                watch.token()
            if building.size > MOST_BYTES:
                raise UnusableAnswerError(f"the answer has more than {MOST_BYTES} bytes")
    except httpx2.SSEError as error:
        raise UnusableAnswerError(f"no events could be read: {error}") from error
    except UnicodeDecodeError as error:
        raise UnusableAnswerError(f"the answer is no text: {error}") from error
    return building.finished(watch)


async def _body(response: httpx2.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MOST_BYTES:
            raise UnusableAnswerError(f"the answer has more than {MOST_BYTES} bytes")
    return bytes(body)


class _Building:
    """An answer that grows by events."""

    def __init__(self) -> None:
        self.size = 0
        self._texts: list[str] = []
        self._tokens = 0
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> bool:
        """Take in an event; whether it brought something new from the model."""
        if event.get("error"):
            raise _server_error(event["error"])
        if isinstance(event.get("usage"), Mapping):
            self._usage = event["usage"]
        choices = event.get("choices")
        if not choices:
            return False  # the event with the usage has none
        choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
        said = choice.get("delta", choice.get("message"))
        if not isinstance(said, Mapping) or not isinstance(said.get("content", ""), str | None):
            raise UnusableAnswerError(f"an event is of another form: {_shown(event)}")
        if choice.get("finish_reason"):
            self._finish = str(choice["finish_reason"])
        text = said.get("content") or ""
        self._texts.append(text)
        self.size += len(text)
        if not text and not any(said.get(name) for name in _THOUGHTS):
            return False
        self._tokens += 1
        return True

    def finished(self, watch: TokenWatch) -> StreamedAnswer:
        """The whole answer. Raises UnusableAnswerError where its end is missing."""
        if self._finish is None:
            got = "".join(self._texts)
            raise UnusableAnswerError(f"the answer broke off after {len(got)} characters: {got[-_SHOWN:]!r}")
        finish: FinishReason = "length" if self._finish == "length" else "stop"
        answer = Answer(
            text="".join(self._texts),
            finish_reason=finish,
            prompt_tokens=_count(self._usage.get("prompt_tokens"), 0),
            output_tokens=_count(self._usage.get("completion_tokens"), self._tokens),
        )
        return StreamedAnswer(answer, watch.first_token_seconds)


def _take_whole(building: _Building, body: bytes, kind: str) -> None:
    try:
        event = _object(body.decode())
    except UnicodeDecodeError:
        raise UnusableAnswerError(f"the answer is no text: {body[:40]!r}") from None
    if not event.get("choices") and not event.get("error"):
        raise UnusableAnswerError(f"the answer ({kind or 'of no kind'}) holds no choice: {_shown(event)}")
    building.take(event)


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableAnswerError(f"not JSON: {text[:_SHOWN]!r}") from None
    if not isinstance(found, dict):
        raise UnusableAnswerError(f"no JSON object: {text[:_SHOWN]!r}")
    return found


def _server_error(error: object) -> EngineError:
    said = error.get("message", error) if isinstance(error, Mapping) else error
    text = str(said)[:_SHOWN]
    if "out of memory" in text.lower():
        return RequestTooLargeError("out_of_memory", f"the model server has too little memory: {text}")
    return UnusableAnswerError(f"the server broke off with an error: {text}")


def _count(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else otherwise


def _shown(event: Mapping[str, Any]) -> str:
    return json.dumps(event)[:_SHOWN]

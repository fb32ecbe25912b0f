"""The engine behind a model server: properties in, requests out, many at once.

All requests of this process run in one thread; this module has that thread and the engine's interface to it.
``property_requests.py`` decides after each answer, ``owned_server.py`` starts a server, and ``ladder.py``
retries refused content.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from vlm_engine.canary import ATTEMPT, canary_properties, digest_of_answers
from vlm_engine.protocol import Answer, Attempt, CanaryAnswer, EngineError, EngineLostError
from vlm_engine.server.chat_completions import EncodedImages, Question, RequestLimits
from vlm_engine.server.property_requests import PropertyRequests

if TYPE_CHECKING:
    from vlm_engine.images.images import LoadedProperty
    from vlm_engine.prompt import FurtherQuestion, Prompt
    from vlm_engine.protocol import ImageTokens
    from vlm_engine.schema import DescriptionSchema
    from vlm_engine.server.model_server import ModelServer

_CLOSING_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class ServerEngine:
    """A model behind an OpenAI-compatible server. ``describe`` may be called from many threads at once.

    The engine holds the server until ``close``, which releases it. model, revision: for the rows. name: of
    the model at the server. image_tokens: the cost of images there, where it is known. further: questions
    that are asked of the same properties.
    """

    def __init__(
        self,
        server: ModelServer,
        *,
        name: str,
        model: str,
        revision: str,
        schema: DescriptionSchema,
        prompt: Prompt,
        limits: RequestLimits,
        image_tokens: ImageTokens | None = None,
        further: Sequence[FurtherQuestion] = (),
    ) -> None:
        self.model = model
        self.revision = revision
        self.image_tokens = image_tokens
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        self._server = server
        self._largest_batch = 1
        self._lost: EngineLostError | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._requests = PropertyRequests(
            server,
            [
                Question(name, prompt.text, schema.json_schema),
                *(Question(name, more.prompt.text, more.schema.json_schema) for more in further),
            ],
            limits,
            waiting=lambda: self.waiting(),  # The caller may set another context later.
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="model-requests", daemon=True)
        self._thread.start()

    @property
    def batches_at_once(self) -> int:
        """Enough batches to fill the requests that the server takes now, and one that waits; at least two."""
        return max(2, -(-self._requests.limit.requests // self._largest_batch) + 1)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Empty: a server does not say how it spends its time."""
        return {}

    def prepare(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> None:
        """Nothing to do: requests are encoded in parallel anyway."""

    def describe(self, batch: Sequence[LoadedProperty], *, attempt: Attempt) -> list[Answer | EngineError]:
        """An answer or an error a property, in order. Raises EngineLostError."""
        self._largest_batch = max(self._largest_batch, len(batch))
        return self._ask(batch, attempt)

    def canary(self) -> CanaryAnswer | None:
        """Ask our own server the canary, one property after the other, so that batches make no difference.

        None for a server that others may ask too, and where it fails. See CanaryEngine.
        """
        if not self._server.address.of_this_user:
            return None
        texts = []
        for loaded in canary_properties(EncodedImages().load()):
            (answer,) = self._ask([loaded], ATTEMPT)
            if not isinstance(answer, Answer):
                _log.warning("The model server did not answer the canary: %s", answer)
                return None
            texts.append(answer.text)
        # Options, environment and packages of a server change the last digits, and not all of them are known.
        return CanaryAnswer(digest_of_answers(texts), "")

    def _ask(self, batch: Sequence[LoadedProperty], attempt: Attempt) -> list[Answer | EngineError]:
        if self._lost is not None:
            # Of the same class: it shows the caller whether the server was away or a request was at fault.
            raise type(self._lost)(str(self._lost)) from self._lost
        with self._closing:  # close() ends requests that began before it.
            if self._closed:
                raise _closed()
            request = asyncio.run_coroutine_threadsafe(self._describe(batch, attempt), self._loop)
        try:
            return request.result()
        except concurrent.futures.CancelledError as cancelled:
            raise _closed() from cancelled
        except EngineLostError as lost:
            self._lost = lost
            raise
        finally:
            request.cancel()  # The wait may have been interrupted.

    def close(self) -> None:
        """Give up requests under way, and release the server."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result(_CLOSING_SECONDS)
        except TimeoutError:
            _log.warning("Requests to the model server did not end within %.0f s.", _CLOSING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._server.release()

    async def _describe(
        self, batch: Sequence[LoadedProperty], attempt: Attempt
    ) -> list[Answer | EngineError]:
        tasks = [asyncio.create_task(self._requests.answer(loaded, attempt)) for loaded in batch]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._requests.close()


def _closed() -> EngineLostError:
    return EngineLostError("the engine was closed")

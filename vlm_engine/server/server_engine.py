"""The engine behind a model server: properties in, requests out, many at once.

What lives here: the thread in which all requests of this process run, and the engine's interface to it. What
does not: what follows from an answer (``property_requests.py``), starting a server (``owned_server.py``),
retries of content (``ladder.py``).
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
    from vlm_engine.prompt import Prompt
    from vlm_engine.protocol import ImageTokens
    from vlm_engine.schema import DescriptionSchema
    from vlm_engine.server.model_server import ModelServer

_CLOSING_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class ServerEngine:
    """A model behind an OpenAI-compatible server. ``describe`` may be called from many threads at once.

    The server is this engine's until ``close``, which releases it. model, revision: for the rows. name: the
    model's at the server. image_tokens: what images cost there, where that is known.
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
            Question(name, prompt.text, schema.json_schema),
            limits,
            waiting=lambda: self.waiting(),  # what the caller has set by then
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="model-requests", daemon=True)
        self._thread.start()

    @property
    def batches_at_once(self) -> int:
        """Enough to fill the requests that the server takes now, and one that waits; at least two."""
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
        """Ask a server of ours the canary, one property after the other: alone they are computed alike.

        None for a server that others may ask too, and where it fails. See CanaryEngine.
        """
        if not self._server.address.of_this_user:
            return None
        texts = []
        for one in canary_properties(EncodedImages().load()):
            (answer,) = self._ask([one], ATTEMPT)
            if not isinstance(answer, Answer):
                _log.warning("The model server did not answer the canary: %s", answer)
                return None
            texts.append(answer.text)
        # Options, environment and packages of a server move the last digits, and not all of them are told.
        return CanaryAnswer(digest_of_answers(texts), "")

    def _ask(self, batch: Sequence[LoadedProperty], attempt: Attempt) -> list[Answer | EngineError]:
        if self._lost is not None:
            # Of the same kind: by it the caller tells an outage from a fault of what was asked.
            raise type(self._lost)(str(self._lost)) from self._lost
        with self._closing:  # what is begun before close() is ended by it
            if self._closed:
                raise _closed()
            asked = asyncio.run_coroutine_threadsafe(self._describe(batch, attempt), self._loop)
        try:
            return asked.result()
        except concurrent.futures.CancelledError as cancelled:
            raise _closed() from cancelled
        except EngineLostError as lost:
            self._lost = lost
            raise
        finally:
            asked.cancel()  # of an interrupted wait

    def close(self) -> None:
        """Give up what is under way, and let the server go."""
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
        asked = [asyncio.create_task(self._requests.answer(one, attempt)) for one in batch]
        try:
            return await asyncio.gather(*asked)
        finally:
            for one in asked:
                one.cancel()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._requests.close()


def _closed() -> EngineLostError:
    return EngineLostError("the engine was closed")

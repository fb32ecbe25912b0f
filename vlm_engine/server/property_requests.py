"""Requests about a property, until there is an answer or an error that is this property's own.

What lives here: what follows from each way in which a request can end: asking again, waiting, leaving out a
field, giving the property up, giving the server up; and the server's life, which all requests share. What
does not: whether an answer is a description, and other attempts (``ladder.py``); threads
(``server_engine.py``). Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vlm_durable.wording import counted
from vlm_engine.protocol import Answer, Attempt, EngineError, EngineLostError
from vlm_engine.server.chat_completions import (
    BusyServerError,
    FailingServerError,
    FieldRefusedError,
    Question,
    RequestLimits,
    SilentServerError,
    TokenWatch,
    chat_request,
    data_uris,
    first_bytes,
    proof_request,
    read_answer,
    refusal,
    refuse_compressed,
)
from vlm_engine.server.model_server import (
    UNTAKEN_SECONDS,
    ModelServer,
    ServerAddress,
    ServerDownError,
    ServerStartError,
    belongs_to_this_user,
)
from vlm_engine.server.pacing import AdaptiveLimit, Slot, asked_seconds, back_off_seconds

if TYPE_CHECKING:
    from vlm_engine.images.images import LoadedProperty

MOST_TRIES: Final = 3
"""Tries for one property where the server fails, breaks off, answers nonsense or falls silent."""

MOST_BUSY_TRIES: Final = 8
"""Tries where the server has too much to do: about two minutes of waiting."""

MOST_DEATHS: Final = 2
"""Deaths of the server during one property's requests. At the second one it was asked alone."""

_FAILURES_BEFORE_PROOF: Final = 3
"""Failures in a row, without a token for any request, after which the health page is not trusted."""

_CONNECT_SECONDS: Final = 10.0
_IDLE_CONNECTION_SECONDS: Final = 2.0
"""Servers close idle connections after five; a request on one that is being closed would be cut off."""

_ERROR_BYTES: Final = 1 << 16
_ENCODING_THREADS: Final = max(1, min(4, os.cpu_count() or 1))

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Waiting = Callable[[], AbstractContextManager[object]]
"""Makes a context that is entered around a wait as long as a model takes to load."""


@dataclass(frozen=True)
class _Failure:
    """A failed try. suspect: this property may be the cause. busy: the server has too much to do."""

    said: str
    suspect: bool = False
    busy: bool = False
    retry_after: str | None = None


@dataclass
class _SoFar:
    """The tries of one property so far.

    urls: of its images, once they are encoded. life: the server's, at the last request.
    """

    urls: Sequence[str] = ()
    tries: int = 0
    busy: int = 0
    deaths: int = 0
    life: int = 0

    def begin_life(self, suspect: bool, failure: str) -> None:
        """The server was restarted. suspect: this property may be the cause."""
        # What the old life left unanswered says nothing of a property, unless it happens again.
        self.tries = self.busy = 0
        self.deaths += suspect
        if self.deaths >= MOST_DEATHS:
            raise FailingServerError(
                f"the model server died {counted(self.deaths, 'times')} while it was asked about this"
                f" property, the last"
                f" time about nothing else ({failure})"
            )


class PropertyRequests:
    """Asks one server, in one of its lives after the other: a restart begins another.

    Many requests that failed together cause one look at it, and a request that fails is told from a server
    that is sick. waiting: entered around a restart, in which a server may load its model again.
    """

    def __init__(
        self, server: ModelServer, question: Question, limits: RequestLimits, *, waiting: Waiting
    ) -> None:
        import httpx2

        self.limit = AdaptiveLimit(limits.most_at_once, patience=limits.token_seconds)
        self._question = question
        self._limits = limits
        # Request bodies are made beside the loop.
        self._encoding = ThreadPoolExecutor(_ENCODING_THREADS, "images-for-server")
        self._without: set[str] = set()
        self._chance = random.Random()  # noqa: S311 - it spreads waiting, it hides nothing
        self._server = server
        self._address = server.address
        self._life = 1
        self._waiting = waiting
        self._turn = asyncio.Lock()
        self._lost: EngineLostError | None = None
        self._failures = 0
        self._tokens = 0
        self._client = httpx2.AsyncClient(
            # How long an answer may take is the token watch's to say.
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_CONNECTION_SECONDS),
            # Proxies and passwords of the environment are for other servers.
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        """Close all connections."""
        self._encoding.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()

    async def answer(self, one: LoadedProperty, attempt: Attempt) -> Answer | EngineError:
        """The answer about one property, or its error. Raises EngineLostError and nothing else."""
        so_far = _SoFar()
        try:
            return await self._until_answered(one, attempt, so_far)
        except EngineLostError:
            raise
        except EngineError as error:
            return error

    async def _until_answered(self, one: LoadedProperty, attempt: Attempt, so_far: _SoFar) -> Answer:
        while True:
            alone = so_far.deaths > 0
            async with self.limit.slot(alone=alone) as slot:
                got = await self._try(one, attempt, so_far, slot)
                if isinstance(got, Answer):
                    return got
                # A server that a suspect may have killed gets nobody else before it was looked at: all would
                # fail there, and seem to have killed it.
                renewed = alone and await self._renewed(so_far, got)
            if not alone:
                renewed = await self._renewed(so_far, got)
            if not renewed:
                tries = so_far.busy if got.busy else so_far.tries
                asked = asked_seconds(got.retry_after)
                await asyncio.sleep(back_off_seconds(tries, asked, chance=self._chance))
                if so_far.life != self._life:
                    # It ended meanwhile, by what others noticed. Alone, this one was cleared of it before.
                    so_far.begin_life(got.suspect and not alone, got.said)

    async def _renewed(self, so_far: _SoFar, failure: _Failure) -> bool:
        """Check the server after a failed try. Returns whether it was restarted since.

        Raises FailingServerError where this property had all its tries, EngineLostError.
        """
        so_far.busy += failure.busy
        so_far.tries += not failure.busy
        if failure.busy and so_far.busy < MOST_BUSY_TRIES:
            return False
        # A suspect that is alone can be told what it did; and minutes of waiting were failures enough.
        sure = failure.busy or (failure.suspect and so_far.deaths > 0)
        if await self._server_renewed(so_far.life, failure.said, sure=sure):
            so_far.begin_life(failure.suspect, failure.said)
            return True
        if so_far.tries >= MOST_TRIES or so_far.busy >= MOST_BUSY_TRIES:
            raise FailingServerError(f"given up after {max(so_far.tries, so_far.busy)} tries: {failure.said}")
        return False

    async def _try(
        self, one: LoadedProperty, attempt: Attempt, so_far: _SoFar, slot: Slot
    ) -> Answer | _Failure:
        """Ask once, and once more for each field that the server does not take."""
        import httpx2

        while True:
            try:
                return await self._ask(one, attempt, so_far, slot)
            except FieldRefusedError as refused:
                self._leave_out(refused)
            except BusyServerError as error:
                return _Failure(str(error), busy=True, retry_after=error.retry_after)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                return _Failure(_said(error))
            except (FailingServerError, SilentServerError, httpx2.HTTPError) as error:
                return _Failure(_said(error), suspect=True)

    async def _ask(
        self, one: LoadedProperty, attempt: Attempt, so_far: _SoFar, slot: Slot
    ) -> Answer | _Failure:
        """Ask once. A failure where a server that this property may have killed answers nobody."""
        if not so_far.urls:
            # Not before there is leave to ask: encoded images of all that waits would fill the memory.
            so_far.urls = await self._beside(lambda: data_uris(one.images[: attempt.images]))
        urls = so_far.urls
        without = frozenset(self._without)
        body = await self._beside(
            lambda: chat_request(self._question, urls, one.property_id, attempt, without=without)
        )
        so_far.life, address = self._life, self._address
        # What was asked before may be answered from the server's cache: that is no measure for the others.
        first = attempt.number == 1 and not (so_far.tries or so_far.busy or so_far.deaths)
        try:
            if so_far.deaths and (sick := await self._sickness(address)):
                return _Failure(sick)
            answer, first_token_seconds = await self._send(address, body, without, tells=first)
        except (BusyServerError, SilentServerError):
            # What is silent may have more to do than it can: others need not wait as long to show it.
            self.limit.refused(slot)
            raise
        self.limit.answered(
            slot, images=len(urls), first_token_seconds=first_token_seconds if first else None
        )
        return answer

    async def _send(
        self, address: ServerAddress, body: bytes, without: frozenset[str], *, tells: bool = False
    ) -> tuple[Answer, float | None]:
        """The answer, and the seconds until its first token. tells: these tell how fast the server is."""
        headers = {"Content-Type": "application/json"}
        if address.api_key is not None:
            headers["Authorization"] = f"Bearer {address.api_key}"
        url = f"{address.url}/chat/completions"
        extensions = {"trace": _refuse_other_users} if address.of_this_user else {}

        def token() -> None:
            self._token()
            if tells and watch.first_token_seconds is not None:
                self.limit.first_token(watch.first_token_seconds)

        async with (
            TokenWatch.over(self._limits, on_token=token) as watch,
            self._client.stream(
                "POST", url, content=body, headers=headers, extensions=extensions
            ) as response,
        ):
            refuse_compressed(response)
            if response.status_code == 200:
                return await read_answer(response, watch), watch.first_token_seconds
            raise refusal(
                response.status_code,
                (await first_bytes(response, _ERROR_BYTES)).decode(errors="replace"),
                retry_after=response.headers.get("retry-after"),
                url=address.url,
                model=self._question.model,
                without=without,
            )

    def _token(self) -> None:
        """A token came, for whichever request."""
        self._tokens += 1
        self._failures = 0

    async def _server_renewed(self, life: int, why: str, *, sure: bool) -> bool:
        """Look at the server after a request of that life failed. Returns whether it was restarted since.

        Restarts it where it is dead, or where it looks well and makes no token. sure: find that out now, not
        only after several failures. Raises EngineLostError where it does not come back; that is a
        ServerOutageError where no request here can be the cause.
        """
        self._failures += 1
        async with self._turn:
            if self._lost is not None:
                raise self._lost
            if self._life != life:
                return True
            try:
                trouble = await self._trouble(sure)
                if trouble is None:
                    return False
                why = f"{trouble} (a request: {why})"
                _log.warning("The model server at %s is restarted: %s", self._address.url, why)
                self._address = await self._restarted(why)
            except EngineLostError as lost:
                self._lost = lost  # who waits for the lock does not look once more
                raise
            self._life += 1
            self._failures = 0
            self.limit.start_anew()
            return True

    async def _restarted(self, why: str) -> ServerAddress:
        """Restart until a start succeeds. Returns the address. Each start is a wait of its own."""
        while True:
            with self._waiting():
                try:
                    return await _in_thread(partial(self._server.restart, why))
                except ServerStartError as error:
                    why = str(error)

    async def _trouble(self, sure: bool) -> str | None:
        try:
            await _in_thread(self._server.check)
        except ServerDownError as down:
            return str(down)
        if self._failures < _FAILURES_BEFORE_PROOF and not sure:
            return None
        tokens = self._tokens
        try:
            sick = await self._sickness(self._address)
        except BusyServerError as busy:
            sick = str(busy)  # if none of ours came through meanwhile, it works for others, or for nobody
        if not sick or self._tokens > tokens:
            self._failures = 0
            return None
        return "it says that it is well, but no token comes"

    async def _sickness(self, address: ServerAddress) -> str:
        """Why the shortest question got no token; "" where it got one, or a refusal of its content.

        Raises BusyServerError, EngineLostError.
        """
        import httpx2

        try:
            await self._send(address, proof_request(self._question.model), frozenset())
        except (FailingServerError, SilentServerError, httpx2.HTTPError) as error:
            return _said(error)
        except (BusyServerError, EngineLostError):
            raise
        except EngineError:
            return ""
        return ""

    def _leave_out(self, refused: FieldRefusedError) -> None:
        new = [field for field in refused.fields if field not in self._without]
        self._without.update(new)
        for field in new:
            _log.warning(
                "%s: from now on requests go without %s%s.",
                refused,
                field,
                "; answers are held to the schema by validation alone" if field == "response_format" else "",
            )

    async def _beside(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._encoding, work)


async def _refuse_other_users(event: str, info: dict[str, Any]) -> None:
    """Close a new connection to another user's process before anything is sent. Raises httpx2.ConnectError.

    The client calls this at each step of a request (its extension "trace").
    """
    import httpx2

    if event != "connection.connect_tcp.complete":
        return
    stream = info["return_value"]
    try:
        while not belongs_to_this_user(stream.get_extra_info("socket")):
            await asyncio.sleep(UNTAKEN_SECONDS)
    except OSError as error:
        await stream.aclose()
        raise httpx2.ConnectError(str(error)) from error


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Run blocking work in a thread that nothing has to wait for, not even the end of the process."""
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()  # a wait that is given up leaves the work alone

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # whatever it is, it belongs to who waits
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="model-server", daemon=True).start()
    return await asyncio.wrap_future(done)


def _said(error: Exception) -> str:
    """Transport errors often have no text of their own."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"

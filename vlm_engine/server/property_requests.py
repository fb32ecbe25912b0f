"""Requests about a property, until there is an answer or an error of this property's own.

A request can end in many ways. For each, this module decides: ask again, wait, leave out a field, give up the
property, or give up the server. All requests share the server's life. ``ladder.py`` says whether an answer is
a description, and makes other attempts; ``server_engine.py`` has the threads. Everything here belongs to one
event loop.
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
    TOKEN_SCORES,
    BusyServerError,
    FailingServerError,
    FieldRefusedError,
    Question,
    RequestLimits,
    SilentServerError,
    TokenWatch,
    are_masked,
    chat_request,
    data_uris,
    first_bytes,
    proof_question,
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
from vlm_engine.server.pacing import AdaptiveLimit, Slot, back_off_seconds, retry_after_seconds

if TYPE_CHECKING:
    from vlm_engine.images.images import LoadedProperty

MOST_TRIES: Final = 3
"""Tries for one property when the server fails, breaks off, answers nonsense or falls silent."""

MOST_BUSY_TRIES: Final = 8
"""Tries when the server has too much to do: about two minutes of waiting."""

MOST_DEATHS: Final = 2
"""Deaths of the server during one property's requests. At the second death this property was asked alone."""

_FAILURES_BEFORE_PROOF: Final = 3
"""Failures in a row, without a token for any request, after which the health page is not trusted."""

_CONNECT_SECONDS: Final = 10.0
_IDLE_CONNECTION_SECONDS: Final = 2.0
"""Servers close idle connections after five; a request on one that is being closed would be cut off."""

_PROOF_TOKENS: Final = 40
"""Of the answer to ``proof_question``."""

_ERROR_BYTES: Final = 1 << 16
_ENCODING_THREADS: Final = max(1, min(4, os.cpu_count() or 1))

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Waiting = Callable[[], AbstractContextManager[object]]
"""Makes a context that is entered around a wait as long as a model takes to load."""


@dataclass(frozen=True)
class _Failure:
    """A failed try. suspect: this property may be the cause. busy: the server has too much to do."""

    message: str
    suspect: bool = False
    busy: bool = False
    retry_after: str | None = None


@dataclass
class _Tries:
    """The tries of one property so far, by their end.

    urls: of its images, once they are encoded. failed, busy: tries in this life of the server that failed, or
    found it busy. deaths: of the server. life: the server's, at the last request.
    """

    urls: Sequence[str] = ()
    failed: int = 0
    busy: int = 0
    deaths: int = 0
    life: int = 0

    def begin_life(self, suspect: bool, failure: str) -> None:
        """The server was restarted. suspect: this property may be the cause."""
        # Failures of the old life say nothing of a property, unless they happen again.
        self.failed = self.busy = 0
        self.deaths += suspect
        if self.deaths >= MOST_DEATHS:
            raise FailingServerError(
                f"the model server died {counted(self.deaths, 'times')} while it was asked about this"
                f" property, the last"
                f" time about nothing else ({failure})"
            )


class PropertyRequests:
    """Asks one server, through all its lives: each restart begins another.

    questions: all are to the same model; an attempt says which is asked. Many requests that failed together
    cause one check of the server, which says whether the request or the server is at fault. waiting: entered
    around a restart, in which a server may load its model again.
    """

    def __init__(
        self, server: ModelServer, questions: Sequence[Question], limits: RequestLimits, *, waiting: Waiting
    ) -> None:
        import httpx2

        self.limit = AdaptiveLimit(limits.most_at_once, patience=limits.token_seconds)
        self._questions = questions
        self._model = questions[0].model
        self._limits = limits
        # Request bodies are made beside the loop.
        self._encoding = ThreadPoolExecutor(_ENCODING_THREADS, "images-for-server")
        self._without: set[str] = set(TOKEN_SCORES)
        self._proof = asyncio.Lock()
        self._proofs_left = MOST_TRIES
        self._may_prove = True
        self._chance = random.Random()  # noqa: S311 - it only spreads waiting
        self._server = server
        self._address = server.address
        self._life = 1
        self._waiting = waiting
        self._turn = asyncio.Lock()
        self._lost: EngineLostError | None = None
        self._failures = 0
        self._tokens = 0
        self._client = httpx2.AsyncClient(
            # The token watch bounds the time of an answer.
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

    async def answer(self, loaded: LoadedProperty, attempt: Attempt) -> Answer | EngineError:
        """The answer about one property, or its error. Raises EngineLostError and nothing else."""
        try:
            return await self._until_answered(loaded, attempt, _Tries())
        except EngineLostError:
            raise
        except EngineError as error:
            return error

    async def _until_answered(self, loaded: LoadedProperty, attempt: Attempt, tries: _Tries) -> Answer:
        while True:
            alone = tries.deaths > 0
            async with self.limit.slot(alone=alone) as slot:
                outcome = await self._try(loaded, attempt, tries, slot)
                if isinstance(outcome, Answer):
                    return outcome
                # A server that a suspect may have killed is checked before any other request: all would fail
                # there, and seem to have killed it.
                renewed = alone and await self._renewed(tries, outcome)
            if not alone:
                renewed = await self._renewed(tries, outcome)
            if not renewed:
                count = tries.busy if outcome.busy else tries.failed
                retry_after = retry_after_seconds(outcome.retry_after)
                await asyncio.sleep(back_off_seconds(count, retry_after, chance=self._chance))
                if tries.life != self._life:
                    # Another request found the server dead meanwhile. A suspect that was asked alone was
                    # cleared before.
                    tries.begin_life(outcome.suspect and not alone, outcome.message)

    async def _renewed(self, tries: _Tries, failure: _Failure) -> bool:
        """Check the server after a failed try. Returns whether it was restarted since.

        Raises FailingServerError where this property had all its tries, EngineLostError.
        """
        tries.busy += failure.busy
        tries.failed += not failure.busy
        if failure.busy and tries.busy < MOST_BUSY_TRIES:
            return False
        # A suspect that was asked alone must be judged now, and minutes of waiting are failures enough.
        sure = failure.busy or (failure.suspect and tries.deaths > 0)
        if await self._server_renewed(tries.life, failure.message, sure=sure):
            tries.begin_life(failure.suspect, failure.message)
            return True
        if tries.failed >= MOST_TRIES or tries.busy >= MOST_BUSY_TRIES:
            count = max(tries.failed, tries.busy)
            raise FailingServerError(f"given up after {count} tries: {failure.message}")
        return False

    async def _try(
        self, loaded: LoadedProperty, attempt: Attempt, tries: _Tries, slot: Slot
    ) -> Answer | _Failure:
        """Ask once, and once more for each field that the server does not take."""
        import httpx2

        while True:
            try:
                return await self._ask(loaded, attempt, tries, slot)
            except FieldRefusedError as refused:
                self._leave_out(refused)
            except BusyServerError as error:
                return _Failure(str(error), busy=True, retry_after=error.retry_after)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                return _Failure(_message(error))
            except (FailingServerError, SilentServerError, httpx2.HTTPError) as error:
                return _Failure(_message(error), suspect=True)

    async def _ask(
        self, loaded: LoadedProperty, attempt: Attempt, tries: _Tries, slot: Slot
    ) -> Answer | _Failure:
        """Ask once. A failure where a server that this property may have killed answers nobody."""
        if not tries.urls:
            # Only with a slot: the encoded images of all waiting properties would fill the memory.
            tries.urls = await self._in_encoding_thread(lambda: data_uris(loaded.images[: attempt.images]))
        urls = tries.urls
        await self._prove_scores()
        without = frozenset(self._without)
        body = await self._in_encoding_thread(
            lambda: chat_request(
                self._questions[attempt.question], urls, loaded.property_id, attempt, without=without
            )
        )
        tries.life, address = self._life, self._address
        # The server may answer a repeated request from its cache, which is no measure of its speed.
        first = attempt.number == 1 and not (tries.failed or tries.busy or tries.deaths)
        try:
            if tries.deaths and (sickness := await self._sickness(address)):
                return _Failure(sickness)
            answer, first_token_seconds = await self._send(address, body, without, measured=first)
        except (BusyServerError, SilentServerError):
            # A silent server may be overloaded, and the other requests need not wait as long to show it.
            self.limit.refused(slot)
            raise
        self.limit.answered(
            slot, images=len(urls), first_token_seconds=first_token_seconds if first else None
        )
        self._may_prove = True
        return answer

    async def _prove_scores(self) -> None:
        """Find out whether the server's probabilities are those after the grammar's mask; then ask for them.

        Once, and after a failure again when the server has answered a property.
        """
        import httpx2

        async with self._proof:
            if not (self._may_prove and self._proofs_left):
                return
            self._may_prove = False
            self._proofs_left -= 1
            without = frozenset(self._without) - TOKEN_SCORES
            question = proof_question(self._model)
            body = chat_request(question, (), "proof", Attempt(1, _PROOF_TOKENS), without=without)
            try:
                answer, _ = await self._send(self._address, body, without)
            except FieldRefusedError as refused:
                if TOKEN_SCORES.intersection(refused.fields):
                    self._proofs_left = 0
                else:
                    self._leave_out(refused)
                    self._may_prove = True
            except (
                BusyServerError,
                FailingServerError,
                SilentServerError,
                EngineLostError,
                httpx2.HTTPError,
            ):
                return  # The property's own request meets the same, and decides.
            except EngineError:
                self._proofs_left = 0
            else:
                self._proofs_left = 0
                if are_masked(answer):
                    self._without -= TOKEN_SCORES
            if not self._proofs_left and self._without >= TOKEN_SCORES:
                _log.info(
                    "The model server does not say how probable its answers were among those that the schema"
                    " allows: their confidence is null."
                )

    async def _send(
        self, address: ServerAddress, body: bytes, without: frozenset[str], *, measured: bool = False
    ) -> tuple[Answer, float | None]:
        """The answer, and the seconds until its first token. measured: these show how fast the server is."""
        headers = {"Content-Type": "application/json"}
        if address.api_key is not None:
            headers["Authorization"] = f"Bearer {address.api_key}"
        url = f"{address.url}/chat/completions"
        extensions = {"trace": _refuse_other_users} if address.of_this_user else {}

        def token() -> None:
            self._token()
            if measured and watch.first_token_seconds is not None:
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
                model=self._model,
                without=without,
            )

    def _token(self) -> None:
        """Count a token of any request."""
        self._tokens += 1
        self._failures = 0

    async def _server_renewed(self, life: int, why: str, *, sure: bool) -> bool:
        """Check the server after a request of that life failed. Returns whether it was restarted since.

        Restarts it where it is dead, or where it seems well and makes no token. sure: find that out now, and
        not only after several failures. Raises EngineLostError where it does not come back; that is a
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
                self._lost = lost  # Requests that wait for the lock need not check again.
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
            sickness = await self._sickness(self._address)
        except BusyServerError as busy:
            sickness = str(busy)  # Without a token for us meanwhile it works only for others, or for nobody.
        if not sickness or self._tokens > tokens:
            self._failures = 0
            return None
        return "it says that it is well, but no token comes"

    async def _sickness(self, address: ServerAddress) -> str:
        """Why the shortest question got no token; "" where it got one, or a refusal of its content.

        Raises BusyServerError, EngineLostError.
        """
        import httpx2

        try:
            await self._send(address, proof_request(self._model), frozenset())
        except (FailingServerError, SilentServerError, httpx2.HTTPError) as error:
            return _message(error)
        except (BusyServerError, EngineLostError):
            raise
        except EngineError:
            return ""
        return ""

    def _leave_out(self, refused: FieldRefusedError) -> None:
        new = [field for field in refused.fields if field not in self._without]
        self._without.update(new)
        if "response_format" in new:
            self._without |= TOKEN_SCORES  # Without a grammar there are none after its mask.
            self._proofs_left = 0
        for field in new:
            _log.warning(
                "%s: from now on requests go without %s%s.",
                refused,
                field,
                "; answers are held to the schema by validation alone" if field == "response_format" else "",
            )

    async def _in_encoding_thread(self, work: Callable[[], Any]) -> Any:
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
    """Run blocking work in a thread that nobody must wait for, not even the end of the process."""
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()  # A cancelled wait does not cancel the work.

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # The caller who waits gets it, whatever it is.
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="model-server", daemon=True).start()
    return await asyncio.wrap_future(done)


def _message(error: Exception) -> str:
    """The error's text, with its class for transport errors, which often have no text."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"

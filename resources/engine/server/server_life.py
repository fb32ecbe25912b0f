"""What all requests share of a model server: whether it makes tokens, and getting it back when it does not.

What lives here: one look for many requests that failed together, and the difference between a request that
fails and a server that is sick. What does not: starting and ending a server (``model_server.py``), and what
becomes of a request (``asking.py``). Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeVar

from resources.engine.server.model_server import (
    ModelServer,
    ServerAddress,
    ServerDownError,
    ServerStartError,
)

_FAILURES_BEFORE_PROOF: Final = 3
"""Failures in a row, no token from anywhere between, after which a healthy page is not believed any more."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Waiting = Callable[[], AbstractContextManager[object]]
"""Gives what is entered around a wait that may be as long as for a model to load."""


class ServerLife:
    """A server in one of its lives. ``number`` counts them: a restart begins another.

    prove: asks the server at its address for one token; whether it came. What a dead engine behind a living
    worker does not do. begun: called when another life begins. waiting: entered
    around a restart, in which a server may load its model again.
    """

    def __init__(
        self,
        server: ModelServer,
        prove: Callable[[ServerAddress], Awaitable[bool]],
        begun: Callable[[], None],
        waiting: Waiting,
    ) -> None:
        self.number = 1
        self.address = server.address
        self._server = server
        self._prove = prove
        self._begun = begun
        self._waiting = waiting
        self._turn = asyncio.Lock()
        self._failures = 0
        self._tokens = 0

    def token(self) -> None:
        """A token came, for whichever request."""
        self._tokens += 1
        self._failures = 0

    async def renewed(self, life: int, why: str, *, sure: bool = False) -> bool:
        """Look at the server after a request of that life failed: whether another life has begun since.

        Restarts it where it is dead, or where it looks well and yet brings forth nothing. sure: find that out
        now, not only after several failures. Raises EngineLostError where it cannot be had back, which is a
        ServerOutageError where that is nobody's fault here.
        """
        self._failures += 1
        async with self._turn:
            if self.number != life:
                return True
            trouble = await self._trouble(sure)
            if trouble is None:
                return False
            why = f"{trouble} (a request: {why})"
            _log.warning("The model server at %s is restarted: %s", self.address.url, why)
            self.address = await self._restarted(why)
            self.number += 1
            self._failures = 0
            self._begun()
            return True

    async def _restarted(self, why: str) -> ServerAddress:
        """Its address after the first start that succeeds. Each is a wait of its own: it may take as long."""
        while True:
            with self._waiting():
                try:
                    return await in_thread(partial(self._server.restart, why))
                except ServerStartError as error:
                    why = str(error)

    async def _trouble(self, sure: bool) -> str | None:
        try:
            await in_thread(self._server.check)
        except ServerDownError as down:
            return str(down)
        if self._failures < _FAILURES_BEFORE_PROOF and not sure:
            return None
        tokens = self._tokens
        if await self._prove(self.address) or self._tokens > tokens:
            self._failures = 0
            return None
        return "it says that it is well, but no token comes"


async def in_thread(work: Callable[[], _T]) -> _T:
    """Do what blocks in a thread that no one has to wait for, not even the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(outcome: Callable[[], None]) -> None:
        def tell_waiting() -> None:
            if not done.done():
                outcome()

        # The loop may be gone, and then nobody waits.
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell_waiting)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # whatever it is, it belongs to who waits
            failure = error
            tell(lambda: done.set_exception(failure))
        else:
            tell(lambda: done.set_result(result))

    threading.Thread(target=run, name="model-server", daemon=True).start()
    return await done

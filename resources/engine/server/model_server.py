"""A model server as an engine sees it: where it answers, whether it lives, how to get it back.

What lives here: the interface and its errors. What does not: a server that we start (``owned_server.py``:
``start_or_adopt``), one that somebody else runs (``running_server.py``), the requests (``engine.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from resources.engine.protocol import EngineError, EngineLostError, ModelLoadError

MOST_RESTARTS = 3
"""Restarts of a server in one materialization, before it is given up."""


class ServerDownError(EngineError):
    """The server's process is gone, or it no longer answers; ``restart`` may bring it back."""


class ServerOutageError(EngineLostError):
    """Nobody can ask the server anything, for longer than it is waited for: no fault of what is asked."""


class ServerStartError(ModelLoadError):
    """The server did not come up; the message holds why, and the end of its log."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server answers: ``url`` up to and including ``/v1``, as in ``http://127.0.0.1:8000/v1``.

    ``api_key`` goes into the Authorization header (``Bearer KEY``); None: the server asks for none.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)


class ModelServer(Protocol):
    """A server held by one materialization. Called from one thread at a time."""

    @property
    def address(self) -> ServerAddress:
        """Where it answers now; another one after a restart."""

    def check(self) -> None:
        """Return where process and health are well. Raises ServerDownError."""

    def restart(self, why: str) -> ServerAddress:
        """Get it to answer again. ``why`` goes into the log; the address may be another one than before.

        Raises ServerStartError where it did not come up this time, ServerOutageError, and EngineLostError
        after MOST_RESTARTS of this materialization, with the end of the log.
        """

    def release(self) -> None:
        """The materialization is done with it: a resident waits for the next one until it has been idle."""

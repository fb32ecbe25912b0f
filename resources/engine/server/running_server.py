"""A model server that somebody else runs at a URL: looked at and waited for, never started or ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from resources.devices.leases import Clock
from resources.engine.protocol import EngineLostError, ModelLoadError
from resources.engine.server import health
from resources.engine.server.model_server import (
    MOST_RESTARTS,
    ServerAddress,
    ServerDownError,
    ServerOutageError,
)
from resources.engine.server.served_model import ServedModel

PATIENCE_SECONDS = 600.0
"""For which a server that is down is waited for, at a time."""

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0


class RunningServer:
    """A server at an address. ``patience_seconds``: how long ``restart`` waits for it to be well again.

    ``serves``: asks what it serves now, and raises ModelLoadError where it does not say. That must stay what
    it is at first: rows of another model have another meaning.
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        serves: Callable[[], ServedModel],
        log: logging.Logger,
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Clock = time,
    ) -> None:
        self._address = address
        self._log = log
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._waits = 0
        self._serves = serves
        self.served = serves()

    @property
    def address(self) -> ServerAddress:
        """Where it answers."""
        return self._address

    def check(self) -> None:
        """Return where it answers us, for the same model. Raises ServerDownError, EngineLostError."""
        wrong = self._trouble()
        if wrong is not None:
            raise ServerDownError(f"The model server at {self._address.url} is down: {wrong}.")

    def restart(self, why: str) -> ServerAddress:
        """Wait until it is well again, ever longer. Raises ServerOutageError, EngineLostError."""
        self._waits += 1
        if self._waits > MOST_RESTARTS:
            # Well by its own word, it answers nobody: no quota, no money. What dies again and again may die
            # of what it is asked here.
            kind = EngineLostError if self._trouble() is not None else ServerOutageError
            raise kind(
                f"The model server at {self._address.url} was down {MOST_RESTARTS} times in this"
                f" materialization and is down again: {why}"
            )
        deadline = self._clock.monotonic() + self._patience_seconds
        self._log.warning(
            "Waiting up to %.0f s for the model server at %s: %s",
            self._patience_seconds, self._address.url, why,
        )  # fmt: skip
        wait = _FIRST_WAIT_SECONDS
        while (wrong := self._trouble()) is not None:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise ServerOutageError(
                    f"The model server at {self._address.url} was not well again within"
                    f" {self._patience_seconds:.0f} s: {wrong}. Start it, then start this partition again;"
                    " nothing that was finished is lost."
                )
            self._clock.sleep(min(wait, left))
            wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
        return self._address

    def release(self) -> None:
        """Nothing to do: it is not ours."""

    def _trouble(self) -> str | None:
        """Why it cannot be asked; None where it can. Raises EngineLostError where its model is another."""
        wrong = health.trouble(self._address.url, self._address.api_key)
        if wrong is not None:
            return wrong
        try:
            now = self._serves()
        except ModelLoadError as error:
            return str(error)
        if now != self.served:
            raise EngineLostError(
                f"The model server at {self._address.url} serves another model than at first:"
                f" {now.revision(None)}, not {self.served.revision(None)}. What was described is of the first"
                " and is kept; start this partition again for the other one, or put the first one back."
            )
        return None

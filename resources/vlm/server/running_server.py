"""A model server that somebody else runs at a URL: looked at and waited for, never started or ended."""

from __future__ import annotations

import logging
import time

from resources.gpu.leases import Clock
from resources.vlm.engine import EngineLostError
from resources.vlm.server import health
from resources.vlm.server.model_server import MOST_RESTARTS, ServerAddress, ServerDownError

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0


class RunningServer:
    """A server at an address. ``patience_seconds``: how long ``restart`` waits for it to be well again."""

    def __init__(
        self,
        address: ServerAddress,
        *,
        log: logging.Logger,
        patience_seconds: float = 600.0,
        clock: Clock = time,
    ) -> None:
        self._address = address
        self._log = log
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._waits = 0

    @property
    def address(self) -> ServerAddress:
        """Where it answers."""
        return self._address

    def check(self) -> None:
        """Return where it answers us. Raises ServerDownError."""
        wrong = health.trouble(self._address.url, self._address.api_key)
        if wrong is not None:
            raise ServerDownError(f"The model server at {self._address.url} is down: {wrong}.")

    def restart(self, why: str) -> ServerAddress:
        """Wait until it is well again, looking ever more seldom. Raises EngineLostError."""
        self._waits += 1
        if self._waits > MOST_RESTARTS:
            raise EngineLostError(
                f"The model server at {self._address.url} was down {MOST_RESTARTS} times in this"
                f" materialization and is down again: {why}"
            )
        deadline = self._clock.monotonic() + self._patience_seconds
        self._log.warning(
            "Waiting up to %.0f s for the model server at %s: %s",
            self._patience_seconds, self._address.url, why,
        )  # fmt: skip
        wait = _FIRST_WAIT_SECONDS
        while (wrong := health.trouble(self._address.url, self._address.api_key)) is not None:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise EngineLostError(
                    f"The model server at {self._address.url} was not well again within"
                    f" {self._patience_seconds:.0f} s: {wrong}. Start it, then start this partition again;"
                    " nothing that was finished is lost."
                )
            self._clock.sleep(min(wait, left))
            wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
        return self._address

    def release(self) -> None:
        """Nothing to do: it is not ours."""

"""A model server that somebody else runs at a URL: choosing its model, checking it, waiting for it.

This module chooses among the models that the server lists, makes an honest revision of the chosen one, and
waits while the server is down. ``owned_server.py`` starts and ends servers of our own, whose model is known
to the byte.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from vlm_engine.devices.leases import Clock
from vlm_engine.protocol import EngineLostError, ModelLoadError
from vlm_engine.server.model_server import (
    MOST_RESTARTS,
    PageError,
    ServerAddress,
    ServerDownError,
    ServerOutageError,
    read_page,
    trouble,
)

PATIENCE_SECONDS = 600.0
"""Longest wait, at a time, for a server that is down."""

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0

_DOWN: Final = (502, 503, 504)
"""Statuses of a proxy whose server is down, and of a server that still starts."""
_BELIEVED_SECONDS: Final = 15
"""Seconds for which a list of models is cached: sensors ask about many partitions in one tick."""

_SHOWN: Final = 200
_log = logging.getLogger(__name__)


class ServerUnreachableError(ModelLoadError):
    """The server at a URL cannot be reached now. It may be back later."""


@dataclass(frozen=True)
class ServedModel:
    """A model, by its name at the server.

    root: the model that the server says it loaded under this name, where it says so.
    """

    name: str
    root: str | None = None

    def revision(self, configured: str | None) -> str:
        """The revision for rows and fingerprints. configured: the one in the settings, which nobody verifies.

        No server names a commit or a digest, so weights that were exchanged under the same name and root are
        not noticed. vLLM's ``created`` is only the time of the question.
        """
        name, root = _without_folders(self.name), _without_folders(self.root or self.name)
        parts = [f"served:{name}", *([f"root:{root}"] if root != name else [])]
        return " ".join([*parts, *([f"said:{configured}"] if configured else [])])


def _without_folders(name: str) -> str:
    """A hub id unchanged; the last part of a path, because the server's operator may move the folder."""
    return PurePosixPath(name).name if name.startswith("/") else name


def served_model(
    address: ServerAddress, configured: str | None, preferred: str, *, ask_anew: bool = False
) -> ServedModel:
    """The model at an address.

    configured: its name in the settings; without one, ``preferred`` if the server serves it, else the only
    model that it serves. ask_anew: do not use the cached list.

    Raises ModelLoadError, which says what to do, where the server refuses us or serves something else, and
    ServerUnreachableError where it is down.
    """
    listed = _ask(address) if ask_anew else _listed(address, int(time.monotonic()) // _BELIEVED_SECONDS)
    for name in (configured, preferred):
        if name in listed:
            return ServedModel(str(name), listed[str(name)])
    if configured is not None:
        if not listed:
            # transformers' own server lists only models in the hub's cache, and so no model's folder.
            return ServedModel(configured)
        raise ModelLoadError(
            f"the model server at {address.url} does not serve {configured!r} but {_names(listed)}: set"
            " VLM_ASSETS_SERVER_MODEL to one of these, or start the server with the model that you want"
        )
    if len(listed) == 1:
        return ServedModel(*next(iter(listed.items())))
    raise ModelLoadError(
        f"the model server at {address.url} serves {_names(listed) or 'nothing that it would name'}: set"
        " VLM_ASSETS_SERVER_MODEL to the model that is to describe"
    )


@lru_cache(maxsize=8)
def _listed(address: ServerAddress, _moment: int) -> Mapping[str, str | None]:
    return _ask(address)


def _ask(address: ServerAddress) -> Mapping[str, str | None]:
    """The names that a server answers for, each with its root."""
    url = f"{address.url}/models"
    try:
        answer = read_page(address, f"{urlsplit(address.url).path}/models")
    except (OSError, ValueError) as error:
        raise ServerUnreachableError(
            f"the model server at {address.url} does not answer as it should ({type(error).__name__}:"
            f" {error}). Start it, or correct VLM_ASSETS_SERVER_URL; what is committed stays"
        ) from error
    if answer.status in _DOWN:
        raise ServerUnreachableError(
            f"the model server at {address.url} is not well ({answer.status}). Look at it, or at the"
            " proxy before it; what is committed stays"
        )
    if answer.status in (401, 403):
        raise ModelLoadError(
            f"the model server at {address.url} refuses our key ({answer.status}): set"
            " VLM_ASSETS_SERVER_KEY to the one that it was started with"
        )
    try:
        if answer.status != 200:
            raise PageError("it has no such page")
        return {str(model["id"]): _text(model.get("root")) for model in answer.json()["data"]}
    except (PageError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"what answers at {url} is no OpenAI-compatible model server ({answer.status}, {error});"
            " VLM_ASSETS_SERVER_URL must end in /v1"
        ) from error


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _names(listed: Mapping[str, Any]) -> str:
    return ", ".join(repr(name[:_SHOWN]) for name in list(listed)[:10])


class RunningServer:
    """A server at an address. ``patience_seconds``: how long ``restart`` waits for it to be well again.

    ``serves``: asks for the model that it serves now, and raises ModelLoadError where it does not say. The
    model must stay the same: rows of another model have another meaning.
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        serves: Callable[[], ServedModel],
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Clock = time,
    ) -> None:
        self._address = address
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._waits = 0
        self._serves = serves
        self.served = serves()

    @property
    def address(self) -> ServerAddress:
        """The address, which stays the same."""
        return self._address

    def check(self) -> None:
        """Return if it answers us, with the same model. Raises ServerDownError, EngineLostError."""
        wrong = self._trouble()
        if wrong is not None:
            raise ServerDownError(f"The model server at {self._address.url} is down: {wrong}.")

    def restart(self, why: str) -> ServerAddress:
        """Wait until it is well again, ever longer. Raises ServerOutageError, EngineLostError."""
        self._waits += 1
        if self._waits > MOST_RESTARTS:
            # A server that says it is well answers nobody: no quota, no money. One that dies again and again
            # may die of our requests.
            kind = EngineLostError if self._trouble() is not None else ServerOutageError
            raise kind(
                f"The model server at {self._address.url} was down {MOST_RESTARTS} times in this"
                f" materialization and is down again: {why}"
            )
        deadline = self._clock.monotonic() + self._patience_seconds
        _log.warning(
            "Waiting up to %.0f s for the model server at %s: %s",
            self._patience_seconds, self._address.url, why,
        )  # fmt: skip
        wait = _FIRST_WAIT_SECONDS
        while (wrong := self._trouble()) is not None:
            seconds_left = deadline - self._clock.monotonic()
            if seconds_left <= 0:
                raise ServerOutageError(
                    f"The model server at {self._address.url} was not well again within"
                    f" {self._patience_seconds:.0f} s: {wrong}. Start it, then start this partition again;"
                    " nothing that was finished is lost."
                )
            self._clock.sleep(min(wait, seconds_left))
            wait = min(wait * 2, _LONGEST_WAIT_SECONDS)
        return self._address

    def release(self) -> None:
        """Nothing to do: it is not ours."""

    def _trouble(self) -> str | None:
        """Why it cannot be asked; None if it can. Raises EngineLostError if it serves another model."""
        wrong = trouble(self._address)
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

"""What it means when a model server answers with an error: from a status and a text to what is to be done.

What lives here: the meaning of each status, and the ways in which servers say that a request is too long.
What does not: doing it (``engine.py``).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

from resources.engine.protocol import EngineError, EngineLostError, RequestTooLargeError
from resources.engine.server.chat_request import named_fields

_SHOWN: Final = 300

_TOO_LONG: Final = (
    "maximum context length",  # vLLM, OpenAI
    "maximum model length",  # vLLM, where images are many tokens
    "longer than the model's context length",  # SGLang
    "exceeds the available context size",  # llama.cpp
    "exceed_context_size",
    "context_length_exceeded",
    "context window",
    "image(s) may be provided",  # vLLM's limit on images a prompt
    "images may be provided",
)
_OF_THE_REQUEST: Final = frozenset({400, 413, 415, 422})
"""What says that a request is wrong, and not that a server is."""

_OUT_OF_MEMORY: Final = ("out of memory",)


class BusyServerError(EngineError):
    """The server has too much to do (429, 503). retry_after: its Retry-After header, if there is one."""

    def __init__(self, message: str, retry_after: str | None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class FailingServerError(EngineError):
    """The server failed with this request, or does not serve now; it may the next time."""


class FieldRefusedError(EngineError):
    """The server does not take optional fields of the request."""

    def __init__(self, message: str, fields: Collection[str]) -> None:
        self.fields = tuple(fields)
        super().__init__(message)


class RequestRefusedError(EngineError):
    """The server refuses this request, and would again."""


class ServerRefusesError(EngineLostError):
    """The server refuses every request of ours: another key, another model or another address is needed."""


def refusal(
    status: int, text: str, *, retry_after: str | None, url: str, model: str, without: Collection[str]
) -> EngineError:
    """The error that a response with this status and body stands for. without: fields that were not sent."""
    said = f"{status}: {_message(text)}"
    plain = text.lower()
    if status in (401, 403):
        return ServerRefusesError(
            f"the model server at {url} refuses our key ({said}); set VLM_ASSETS_SERVER_KEY to the one that"
            " it was started with"
        )
    if status == 404:
        return ServerRefusesError(
            f"the model server at {url} does not know what it is asked ({said}): the address must end in /v1,"
            f" and it must serve the model {model!r}; see VLM_ASSETS_SERVER_URL and VLM_ASSETS_SERVER_MODEL"
        )
    if any(sign in plain for sign in _OUT_OF_MEMORY):
        return RequestTooLargeError("out_of_memory", f"the model server has too little memory ({said})")
    if status in (400, 413, 422) and (status == 413 or any(sign in plain for sign in _TOO_LONG)):
        return RequestTooLargeError("prompt_too_long", f"too much for the model server ({said})")
    if status in (400, 422, 501) and (fields := named_fields(text, without)):
        return FieldRefusedError(f"the model server does not take {', '.join(fields)} ({said})", fields)
    if status in (429, 503):
        return BusyServerError(f"the model server has too much to do ({said})", retry_after)
    if status in _OF_THE_REQUEST:
        return RequestRefusedError(f"the model server refuses the request ({said})")
    # Redirections too, unpaid bills: whether all requests meet them is for the caller to find out.
    return FailingServerError(f"the model server failed ({said})")


def _message(text: str) -> str:
    """The sentence in an error's body, whichever of the usual places it stands in."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return " ".join(str(found).split())[:_SHOWN] or "no reason given"

"""Whether a model server answers, and answers us: one look. Standard library only: the keeper looks too."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

LOOK_SECONDS = 10.0
"""Longest wait for an answer about health; a server that generates still answers this at once."""


NOT_OUR_KEY = "it does not take our key"
"""The beginning of the trouble that no waiting cures."""


def trouble(url: str, api_key: str | None) -> str | None:
    """None where the server at ``url`` (up to ``/v1``) is well and takes the key, else why not.

    Asked are ``/health`` beside ``/v1``, and ``/v1/models`` with the key: health is shown to anyone. Where
    there is no page of health, the models must be told; else it is enough that the key is taken, for
    transformers' server fails at the list of models on a machine without a cache of them. Proxies of the
    environment are not used.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    path = parts.path.rstrip("/")
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=LOOK_SECONDS)

        def ask(page: str) -> int:
            connection.request("GET", page, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status

        try:
            health = ask(path.removesuffix("/v1") + "/health")
            if health not in (200, 401, 403, 404):
                return f"it says that it is not well ({health})"
            models = ask(path + "/models")
            if refused := {health, models} & {401, 403}:
                return f"{NOT_OUR_KEY} ({max(refused)})"
            if health == 404 and models != 200:
                return f"it tells neither its health nor its models ({models})"
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer ({type(error).__name__}: {error})"
    return None

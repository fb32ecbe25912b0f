"""Whether a model server answers, and answers us: one look. Standard library only: the keeper looks too."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

LOOK_SECONDS = 10.0
"""Longest wait for an answer about health; a server that generates still answers this at once."""


def trouble(url: str, api_key: str | None, *, seconds: float = LOOK_SECONDS) -> str | None:
    """None where the server at ``url`` (up to ``/v1``) is well and takes the key, else why not.

    Asked are ``/health`` beside ``/v1``, where there is such a page, and ``/v1/models`` with the key: some
    servers show their health to anyone. Proxies of the environment are not used.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    path = parts.path.rstrip("/")
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        try:
            for page in (path.removesuffix("/v1") + "/health", path + "/models"):
                connection.request("GET", page, headers=headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status in (401, 403) and page.endswith("/models"):
                    return f"it does not take our key ({answer.status})"
                if answer.status != 200 and (page.endswith("/models") or answer.status >= 500):
                    return f"{page} answers {answer.status} {answer.reason}"
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer ({type(error).__name__}: {error})"
    return None

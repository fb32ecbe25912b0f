"""Dagster's pages behind a guard, which judges who may ask them, from which page, and in which form.

``python -m vlm_assets.webserver.guarded_pages SOCKET WORKSPACE`` is the process that
``make run`` and ``vlm-assets serve`` start. SOCKET: the number of an inherited socket that listens already.

The pages have no login and listen on loopback. A browser on this machine can reach them on behalf of any web
site that it shows. So a request is judged by headers that a foreign site's script can neither set nor omit:

- ``Host`` must be a loopback name or an allowed host. Otherwise a site whose name resolves to 127.0.0.1 (DNS
  rebinding) would count as our own page.
- ``Origin``, on a websocket too, must be our own.
- ``Sec-Fetch-Site``: another site may open a page (a link in a mail), and do nothing else.
- A request that changes something must be ``application/json``. A browser sends that to another origin only
  after a preflight request, which is refused here.
- ``X-Vlm-Assets-Home``, which our own commands send, must be the id of the home whose pages these are. Each
  answer has it too, so that no command asks another home's Dagster on a port that has changed hands.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from sensors.dagster_internals.pages import GRAPHQL, REPORTS, pages
from vlm_assets.config.settings import current_settings
from vlm_assets.webserver.home import HOME_HEADER, home_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-vlm-assets"
"""A request for one of the ``with_header`` paths must have this header, with any value."""

_READS = frozenset({"GET", "HEAD"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_POLICY_VIOLATION = 1008

_FIRST_PAGE = "/assets/dataset_progress"
"""How far everything is, and what to do next. Dagster's own first page is an empty timeline on a new home."""


class WebGuard:
    """ASGI middleware that answers 403, 405 or 415 with a sentence, or passes the request on.

    allowed_hosts: names under which the pages may be asked, beside the loopback names. posted: paths that
    answer POST only, whatever the application itself would do with a GET. with_header: beginnings of paths
    that need the header ``X-Vlm-Assets``. home_id: of the home whose pages these are (``home.home_id``).
    first_page: the path to which ``/`` redirects; None: no redirect.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Collection[str] = (),
        posted: Collection[str] = (),
        with_header: Collection[str] = (),
        home_id: str | None = None,
        first_page: str | None = None,
    ) -> None:
        self._app = app
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._posted = frozenset(posted)
        self._with_header = tuple(with_header)
        self._home_id = home_id
        self._first_page = first_page
        self._answer_headers = [(b"x-frame-options", b"SAMEORIGIN")]
        if home_id is not None:
            self._answer_headers.append((HOME_HEADER.encode(), home_id.encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request or websocket."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None and self._first_page is not None and scope.get("path") == "/":
            answer: Response = RedirectResponse(self._first_page, 302)
            await answer(scope, receive, self._with_answer_headers(send))
        elif refusal is None:
            await self._app(scope, receive, self._with_answer_headers(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal[1][:120]})
        else:
            answer = PlainTextResponse(f"{refusal[1]}\n", refusal[0], {"cache-control": "no-store"})
            await answer(scope, receive, self._with_answer_headers(send))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the sentence of a refusal; None for a request that may pass."""
        headers = Headers(scope=scope)
        asked_home = _only(headers, HOME_HEADER)
        if asked_home is not None and asked_home != self._home_id:
            return 421, "These are the pages of another home. Nothing was done."
        host = _only(headers, "host")
        if host is None or not self._is_allowed(host):
            return 403, (
                f"These pages do not answer to the host {host or '(none)'}. Open them as localhost, or add"
                " the name to VLM_ASSETS_ALLOWED_HOSTS."
            )
        origin = _only(headers, "origin", missing=f"http://{host}")
        if origin not in (f"http://{host}", f"https://{host}"):
            return 403, "A page of another origin asked for this, so it was refused."
        if _only(headers, "sec-fetch-site", missing="none") not in ("same-origin", "none") and not (
            scope["type"] == "http"
            and scope["method"] in _READS
            and _only(headers, "sec-fetch-mode") == "navigate"
            and _only(headers, "sec-fetch-dest") == "document"
        ):
            return 403, "A page of another site asked for this, so it was refused. It may only link here."
        return None if scope["type"] == "websocket" else self._refused_form(scope, headers)

    def _refused_form(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        path, reads = scope["path"].rstrip("/"), scope["method"] in _READS
        if path in self._posted and scope["method"] != "POST":
            return 405, f"{path} answers POST requests only."
        if path.startswith(self._with_header) and _only(headers, HEADER) is None:
            return 403, f"{path} needs the header 'X-Vlm-Assets: 1', which no other site's page can send."
        media_type = (_only(headers, "content-type") or "").partition(";")[0].strip()
        if not reads and media_type != "application/json":
            return 415, "A request that changes something must be of the content type application/json."
        return None

    def _with_answer_headers(self, send: Send) -> Send:
        """Name the home of these pages, and let no other site show one of them in a frame.

        In a frame, a person would click on our page without knowing it.
        """

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._answer_headers]
            await send(message)

        return with_headers

    def _is_allowed(self, host: str) -> bool:
        matched = _HOST.fullmatch(host)
        if matched is None:
            return False
        name = matched[1].strip("[]").removesuffix(".")
        if name == "localhost" or name in self._allowed_hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _only(headers: Headers, name: str, missing: str | None = None) -> str | None:
    """A header's value in lower case. A header that is sent twice gives a value that is never valid."""
    values = [value.strip().lower() for value in headers.getlist(name)]
    return missing if not values else ", ".join(values)


def main(arguments: Sequence[str]) -> None:
    """Serve the pages until SIGTERM."""
    import uvicorn

    descriptor, workspace = arguments
    with socket.socket(fileno=int(descriptor)) as listening, pages(Path(workspace)) as app:
        listening.set_inheritable(False)
        guarded = WebGuard(
            app,
            allowed_hosts=current_settings().hosts,
            posted=[GRAPHQL],
            with_header=[REPORTS],
            home_id=home_id(Path(os.environ["DAGSTER_HOME"])),
            first_page=_FIRST_PAGE,
        )
        uvicorn.Server(uvicorn.Config(guarded, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main(sys.argv[1:])

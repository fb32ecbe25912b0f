"""HTTP servers on loopback that do with each request what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

R = TypeVar("R", bound="Request")

_METHODS = ("do_GET", "do_HEAD", "do_POST", "do_PUT", "do_DELETE")


class Request(BaseHTTPRequestHandler):
    """One request at such a server, whatever its method is, which stands in ``command``."""

    def content(self) -> bytes:
        """The body."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def respond(
        self, status: int, body: bytes = b"", *, kind: str = "application/json", **headers: str
    ) -> None:
        """Answer. headers: with underscores where their names have hyphens."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def serving(react: Callable[[R], object], *, kind: type[R] = Request, port: int = 0) -> Iterator[int]:  # type: ignore[assignment]
    """A server that hands each request to ``react``, in a thread of its own. Gives its port.

    kind: of the requests, with more ways to respond. port: 0 takes a free one.
    """
    handler = type("Handler", (kind,), dict.fromkeys(_METHODS, lambda request: react(request)))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()

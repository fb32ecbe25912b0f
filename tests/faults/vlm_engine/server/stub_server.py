"""A model server that starts at once and has children, for the fault tests: real ones do not fail on demand.

Usage: stub_server.py PORT FOLDER HOW. It writes FOLDER/pids.json (itself, a child, a child that left the
session) and then, by HOW: ``serves`` /health and /v1/models (that with the environment's key alone);
``hangs`` without ever listening; ``deaf``: serves, and ignores SIGTERM; ``keyed``: serves, with another key.
Where FOLDER/broken is, it exits with code 3 instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Pages(BaseHTTPRequestHandler):
    """The two pages that tell whether a server is well."""

    def do_GET(self) -> None:
        key = self.headers["Authorization"]
        known = how != "keyed" and key == f"Bearer {os.environ['VLLM_API_KEY']}"
        self.send_response(200 if known or self.path == "/health" else 401)
        self.end_headers()


def write(path: Path, what: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    port, folder, how = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = HTTPServer(("127.0.0.1", port), Pages) if how != "hangs" else None
    child = [sys.executable, "-I", "-S", "-c", "import signal\nwhile True: signal.pause()"]
    children = [subprocess.Popen(child, start_new_session=leaves).pid for leaves in (False, True)]
    write(folder / "pids.json", [os.getpid(), *children])
    write(folder / "environment.json", dict(os.environ))
    print("its first words", os.environ["VLLM_API_KEY"], flush=True)
    if (folder / "broken").exists():
        os._exit(3)
    if server is None:
        signal.pause()
    else:
        server.serve_forever()

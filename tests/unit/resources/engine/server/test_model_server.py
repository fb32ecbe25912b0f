"""Whose process answers at a server's port: what is another user's gets no byte."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from resources.engine.server.model_server import ANOTHER_USER, ServerAddress, belongs_to_this_user, trouble


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

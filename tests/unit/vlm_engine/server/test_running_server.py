"""A server that somebody else runs: looked at over real HTTP, waited for, never ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.http_stub import Request, serving
from vlm_engine.devices.leases import Clock
from vlm_engine.protocol import EngineLostError, ModelLoadError
from vlm_engine.server.model_server import (
    MOST_RESTARTS,
    ServerAddress,
    ServerDownError,
    ServerOutageError,
    trouble,
)
from vlm_engine.server.running_server import RunningServer, ServedModel

LOG = logging.getLogger("test_running_server")
WELL = {"/health": 200, "/v1/models": 200}

HOUSE = ServedModel("house", "/models/house")

Serve = Callable[[dict[str, int]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server whose pages answer with these codes, to those who know the key; gives its URL."""
    with ExitStack() as servers:

        def start(codes: dict[str, int]) -> str:
            def answer(request: Request) -> None:
                known = request.path == "/health" or request.headers["Authorization"] == "Bearer the-key"
                request.respond(codes.get(request.path, 404) if known else 401)

            return f"http://127.0.0.1:{servers.enter_context(serving(answer))}/v1"

        yield start


def running(
    url: str, clock: Clock, serves: Callable[[], ServedModel] = lambda: HOUSE, patience: float = 600.0
) -> RunningServer:
    address = ServerAddress(url, "the-key")
    return RunningServer(address, serves=serves, patience_seconds=patience, clock=clock)


class WaitingClock:
    """Time that passes only by sleeping; ``at`` calls something when it has."""

    def __init__(self, at: float = float("inf"), then: Callable[[], object] = lambda: None) -> None:
        self.now = 0.0
        self._at = at
        self._then = then

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds
        if self.now >= self._at:
            self._then()


@pytest.mark.parametrize(
    ("codes", "key", "said"),
    [
        (WELL, "the-key", None),
        ({"/v1/models": 200}, "the-key", None),
        (WELL, "another", "it does not take our key (401)"),
        ({"/health": 503, "/v1/models": 200}, "the-key", "it says that it is not well (503)"),
        ({"/health": 200, "/v1/models": 500}, "the-key", None),
        ({"/v1/models": 500}, "the-key", "it tells neither its health nor its models (500)"),
    ],
    ids=["well", "no health page", "wrong key", "engine dead", "no cache of models", "no such server"],
)
def test_a_server_is_well_if_it_says_so_and_takes_our_key(
    serve: Serve, codes: dict[str, int], key: str, said: str | None
) -> None:
    """Health is asked of the server itself, with the key, and why not is a sentence."""
    assert trouble(ServerAddress(serve(codes), key)) == said


def test_a_server_that_is_back_is_used_again(serve: Serve) -> None:
    """A restart waits, ever longer, until the server is well, and does not count the wait as an error."""
    codes = {"/health": 503}
    url = serve(codes)
    clock = WaitingClock(20.0, lambda: codes.update(WELL))
    server = running(url, clock)
    with pytest.raises(ServerDownError, match="503"):
        server.check()
    assert server.restart("503").url == url
    assert 20.0 <= clock.now < 60.0
    server.check()


def test_waiting_for_somebody_elses_server_is_bounded(serve: Serve) -> None:
    """It stays down: the wait ends at its limit, as an outage."""
    clock = WaitingClock()
    down = running("http://127.0.0.1:9/v1", clock, patience=100.0)
    with pytest.raises(ServerOutageError, match=r"not well again within 100 s: it does not answer"):
        down.restart("gone")
    assert clock.now == 100.0


@pytest.mark.parametrize("well", [True, False])
def test_a_server_that_goes_down_again_and_again_is_given_up(serve: Serve, well: bool) -> None:
    """Well and without an answer for anybody, it is away; one that dies may die of what it is asked here."""
    codes = dict(WELL)
    flapping = running(serve(codes), WaitingClock())
    for _ in range(MOST_RESTARTS):
        flapping.restart("down for a moment")
    codes["/health"] = 200 if well else 503
    with pytest.raises(EngineLostError, match="down again: once more") as given_up:
        flapping.restart("once more")
    assert isinstance(given_up.value, ServerOutageError) == well


@pytest.mark.parametrize("other", [ServedModel("house", "/models/other"), ServedModel("barn")])
def test_a_server_that_comes_back_with_another_model_is_another(serve: Serve, other: ServedModel) -> None:
    """Rows of two models never stand under one fingerprint: neither after a wait nor without one."""
    codes = {"/health": 503}
    served = [HOUSE]
    clock = WaitingClock(20.0, lambda: (codes.update(WELL), served.append(other)))
    server = running(serve(codes), clock, lambda: served[-1])
    with pytest.raises(EngineLostError, match="serves another model than at first: served:"):
        server.restart("503")
    with pytest.raises(EngineLostError, match="serves another model"):
        server.check()


def test_a_server_that_does_not_say_what_it_serves_yet_is_waited_for(serve: Serve) -> None:
    """Well before its models are loaded, as behind a proxy: no lost engine, and nothing asked of it."""
    said: list[ServedModel] = [HOUSE]

    def serves() -> ServedModel:
        if not said:
            raise ModelLoadError("it serves nothing that it would name")
        return said[0]

    clock = WaitingClock(20.0, lambda: said.append(HOUSE))
    server = running(serve(WELL), clock, serves)
    said.clear()
    with pytest.raises(ServerDownError, match="nothing that it would name"):
        server.check()
    server.restart("its models are gone")
    assert clock.now >= 20.0

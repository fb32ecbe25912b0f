"""A model server that fails on command: real HTTP, answers by script. And an engine that asks it."""

import contextlib
import json
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable

import pydantic
import pytest
from PIL import Image

from tests.support.http_stub import Request, serving
from vlm_engine.images.images import LoadedProperty
from vlm_engine.prompt import Prompt
from vlm_engine.schema import DescriptionSchema
from vlm_engine.server.chat_completions import EncodedImages, RequestLimits
from vlm_engine.server.model_server import ServerAddress, ServerDownError
from vlm_engine.server.running_server import RunningServer, served_model
from vlm_engine.server.server_engine import ServerEngine

GOOD = '{"storeys":2}'
LIMITS = RequestLimits(most_at_once=16, token_seconds=10.0, answer_seconds=20.0)
HASTY = RequestLimits(most_at_once=16, token_seconds=0.5, answer_seconds=1.2)
"""For servers that hang. A loaded machine may exceed them without a fault: only what follows is certain."""


class House(pydantic.BaseModel):
    """One field is enough."""

    storeys: int


class Failing:
    """Ways to react to a request: each a function of the connection's handler."""

    @staticmethod
    def answer(text: str = GOOD, finish: str = "stop"):
        def react(handler):
            handler.begin_stream()
            for piece in (text[:5], text[5:]):
                handler.event(delta(piece))
            handler.event(delta(finish=finish))
            handler.event({"choices": [], "usage": {"prompt_tokens": 70, "completion_tokens": 9}})
            handler.write(b"data: [DONE]\n\n")

        return react

    @staticmethod
    def status(code: int, body: str = "", **headers: str):
        def react(handler):
            handler.respond(code, body.encode(), **headers)

        return react

    @staticmethod
    def body(content: bytes, kind: str = "application/json"):
        def react(handler):
            handler.respond(200, content, kind=kind)

        return react

    @staticmethod
    def compressed(handler):
        """An answer that would have to be unpacked, to whatever size."""
        choice = {"message": {"content": GOOD}, "finish_reason": "stop"}
        packed = zlib.compress(json.dumps({"choices": [choice]}).encode())
        handler.respond(200, packed, **{"Content-Encoding": "deflate"})

    @staticmethod
    def hang(handler):
        """Takes the request and never says a word."""
        handler.stub.ended.wait(30)

    @staticmethod
    def fall_silent(handler):
        """A token, and then only comments that keep the connection alive."""
        handler.begin_stream()
        handler.event(delta("{"))
        while not handler.stub.ended.wait(0.05):
            handler.write(b": keep-alive\n\n")

    @staticmethod
    def drip(handler):
        """Tokens for ever."""
        handler.begin_stream()
        while not handler.stub.ended.wait(0.05):
            handler.event(delta(" "))

    @staticmethod
    def cut(handler):
        """Half an answer, and then the connection breaks."""
        handler.begin_stream()
        handler.event(delta('{"sto'))
        # SO_LINGER of 0 sends a reset instead of an orderly end.
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True
        handler.connection.close()

    @staticmethod
    def die(handler):
        """The whole server goes away, this request with it."""
        handler.stub.die()
        Failing.cut(handler)


def delta(content=None, *, finish=None):
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}


class Streaming(Request):
    """A request that can be answered piece by piece."""

    protocol_version = "HTTP/1.1"
    stub: "Stub"

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, content):
        self.write(f"data: {json.dumps(content)}\n\n".encode())

    def write(self, data):
        self.wfile.write(data)


class Stub:
    """The server. ``script``: reactions to the next requests; after them ``otherwise``.

    ``by_images``: reactions to requests with so many images, before all others, whoever comes first.
    ``looks``: how often it was asked which models it serves. ``proof``: the reaction to the question whether
    its probabilities are those after a mask; nothing else sees or counts that.
    """

    def __init__(self) -> None:
        self.script: deque[Callable] = deque()
        self.by_images: dict[int, Callable] = {}
        self.otherwise = Failing.answer()
        self.proof = Failing.status(400, "logprobs are not supported")
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.models: list[dict] = [{"id": "house", "root": "/models/house"}]
        self.dead = False
        self.looks = 0
        self.under_way = self.most_under_way = 0
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self.url = ""

    def react(self, request: Streaming) -> None:
        """Meet a request with what the script says, or tell the models."""
        request.stub = self
        if request.command == "POST":
            body = json.loads(request.content())
            with contextlib.suppress(OSError):
                self.reaction(body, request.headers)(request)
            return
        self.looks += 1
        if self.dead:
            request.respond(503, b"dead")
        else:
            request.respond(200, json.dumps({"object": "list", "data": self.models}).encode())

    def reaction(self, body, headers):
        """What this request is met with; counts how many are under way at once."""
        if is_proof(body):
            return Failing.status(500, "dead") if self.dead else self.proof
        with self._lock:
            self.asked.append(body)
            self.keys.append(headers.get("Authorization"))
            self.times.append(time.monotonic())
            if self.dead:
                return Failing.status(500, "dead")
            react = self.by_images.get(images_of(body))
            if react is None:
                react = self.script.popleft() if self.script else self.otherwise

        def counted(handler):
            with self._lock:
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                react(handler)
            finally:
                with self._lock:
                    self.under_way -= 1

        return counted

    def die(self) -> None:
        """From now on it is not well, until it is revived."""
        self.dead = True


def is_proof(body) -> bool:
    return "zq" in json.dumps(body.get("response_format"))


def images_of(body) -> int:
    content = body["messages"][0]["content"]
    return sum(part["type"] == "image_url" for part in content)


class RevivingServer:
    """A server of ours whose start takes no time: the stub, revived."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.restarts: list[str] = []
        self.released = False

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(self.stub.url, f"key-{len(self.restarts)}", of_this_user=True)

    def check(self) -> None:
        if self.stub.dead:
            raise ServerDownError("its process is gone")

    def restart(self, why: str) -> ServerAddress:
        self.restarts.append(why)
        self.stub.dead = False
        return self.address

    def release(self) -> None:
        self.released = True


@pytest.fixture
def failing():
    """Ways to fail."""
    return Failing


@pytest.fixture
def stub():
    """The server that fails."""
    server = Stub()
    with serving(server.react, kind=Streaming) as port:
        server.url = f"http://127.0.0.1:{port}/v1"
        yield server
        server.ended.set()


@pytest.fixture
def reviving(stub):
    """The same server as one of ours."""
    return RevivingServer(stub)


@pytest.fixture
def schema():
    return DescriptionSchema(House)


@pytest.fixture
def start_engine(stub, schema):
    """Engines that ask the stub; closed at the end."""
    engines = []

    def start(server=None, limits=LIMITS, **options):
        address = ServerAddress(stub.url, "secret")
        server = server or RunningServer(
            address,
            serves=lambda: served_model(address, None, "house", ask_anew=True),
            patience_seconds=0.5,
        )
        prompt = Prompt("How many storeys?")
        names = {"name": "house", "model": "house", "revision": "served:house"}
        engine = ServerEngine(server, **names, schema=schema, prompt=prompt, limits=limits, **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(start_engine):
    return start_engine()


@pytest.fixture
def hasty():
    """Time limits that a hanging server reaches soon."""
    return HASTY


@pytest.fixture
def load():
    """A property with so many small images."""

    def load(property_id="a", images=1):
        black = Image.new("RGB", (8, 8))
        files = EncodedImages().load()([black] * images).images
        return LoadedProperty(property_id, 0, files, images, (), 0.0)

    return load

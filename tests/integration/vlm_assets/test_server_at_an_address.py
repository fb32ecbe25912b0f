"""Describing through a model server of somebody else: what is its own, and what a run does without it."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from resources.dagster_names import NO_ATTEMPT, is_tagged
from resources.vision_language_model import VisionLanguageModel
from tests.support.http_stub import serving
from tests.support.waiting import wait_until
from vlm_assets.assets.partition_state import committed_rows
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model, control_state
from vlm_durable.state.database import open_state
from vlm_durable.state.pause import pause, resume
from vlm_durable.state.workers import Phase, Workers
from vlm_engine.protocol import EngineLostError
from vlm_engine.server.running_server import RunningServer

KEY = "000000000-000000007"
DESCRIPTION = {
    "building_type": "detached_house",
    "facade_material": "brick",
    "roof": "gable",
    "floors": 2,
    "garage": "none",
    "has_solar_panels": False,
    "garden": "lawn",
    "has_pool": False,
    "kitchen": "white",
    "living_floor": "tile",
    "has_fireplace": False,
    "bathroom": "bath",
    "summary": "A house.",
}


class ModelServer:
    """A server that can be down, with the same answer to every question. dies_once: with the next one.

    at_request: called at each look at its pages and at each question, before the answer.
    """

    well = True
    looks = 0
    at_request = staticmethod(lambda: None)
    dies_once = False
    url = ""

    def __init__(self):
        self.models = [{"id": "house", "root": "/models/house"}]

    def react(self, request):
        """Answer a look at its pages, or a question."""
        if request.command == "GET":
            self.looks += 1
            self.at_request()
            request.respond(200 if self.well else 503, json.dumps({"data": self.models}).encode())
        elif "zq" in json.dumps(json.loads(request.content()).get("response_format")):
            request.respond(400, b"logprobs are not supported")  # Nothing here knows probabilities.
        elif self.dies_once:
            self.dies_once = self.well = False
            request.respond(500, b"the engine is dead")
        else:
            self.at_request()
            choice = {"message": {"content": json.dumps(DESCRIPTION)}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 7, "completion_tokens": 9}
            request.respond(200, json.dumps({"choices": [choice], "usage": usage}).encode())


@pytest.fixture
def model_server():
    """Runs already, as somebody else's does."""
    server = ModelServer()
    with serving(server.react) as port:
        server.url = f"http://127.0.0.1:{port}/v1"
        yield server


@pytest.fixture
def served_desk(desk, model_server):
    """The same home, described by a server at an address."""
    return desk.changed(engine="server", server_url=model_server.url)


def model_of(desk, kind):
    """The model of these settings, with something of its own."""
    return kind(**vars(build_vision_language_model(desk.settings)))


beats = []
"""The heartbeats of a home while a model was loaded."""


class LostModel(VisionLanguageModel):
    """Its device fails."""

    def load(self, device, **how):
        beats.extend(Workers(open_state(Path(self.records_directory).parent)).living())
        raise EngineLostError("The engine is lost: CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_failing_device_of_another_machine_is_not_held_against_ours(desk, served_desk, elsewhere):
    """A CUDA error of somebody else's server leaves out no device here, and no worker is named on one."""
    on = served_desk if elsewhere else desk
    beats.clear()
    done = on.materialize(vision_language_model=model_of(on, LostModel))
    assert "illegal memory access" in done.failure
    assert [beat.device for beat in beats] == ([None] if elsewhere else ["cpu-0"])
    assert list(build_gpu(on.settings).left_out_devices().records()) == ([] if elsewhere else ["cpu-0"])


class ExchangedModel(VisionLanguageModel):
    """Somebody starts the server with another model between the first look at it and the loading."""

    def load(self, device, **how):
        exchange.pop()()
        return super().load(device, **how)


exchange = []


@pytest.mark.parametrize("becomes", [{"id": "house", "root": "/models/other"}, {"id": "barn"}])
def test_a_model_exchanged_at_the_start_describes_nothing(served_desk, model_server, becomes):
    """No row of one model stands under the fingerprint of another; the next run takes what is there."""
    exchange.append(lambda: model_server.models.__setitem__(0, becomes))
    done = served_desk.materialize(vision_language_model=model_of(served_desk, ExchangedModel))
    assert "model was exchanged while this materialization began" in done.failure
    assert committed_rows(served_desk.settings.descriptions, KEY) == 0


def test_a_server_that_is_down_at_the_start_is_waited_for(served_desk, model_server):
    """As a device is, told in the log: a run that starts before its server describes all the same."""
    model_server.well = False
    model_server.at_request = lambda: setattr(model_server, "well", model_server.looks > 1)
    done = served_desk.materialize()
    assert done.success, done.failure
    said = [entry.message for entry in served_desk.instance.all_logs(done.result.run_id)]
    assert any("Waiting, without a device" in one and model_server.url in one for one in said)
    assert {row["device"] for row in pq.read_table(served_desk.file).to_pylist()} == {
        f"server {model_server.url.removeprefix('http://').removesuffix('/v1')}"
    }


@pytest.mark.parametrize("complete", [False, True])
def test_a_server_that_stays_down_is_no_attempt(served_desk, model_server, complete):
    """The wait ends by name and counts nothing against the partition, also where it is to be verified."""
    if complete:
        done = served_desk.materialize()
        assert done.success, done.failure
    model_server.well = False
    leases = served_desk.settings.state_directory / "leases"
    before = list(leases.glob("*"))
    # By another name: a process believes for some seconds what an address said.
    url = model_server.url.replace("127.0.0.1", "localhost")
    ended = served_desk.changed(device_wait_seconds=0.01, server_url=url).materialize()
    assert "No model to work with: waited 0 s" in ended.failure
    assert "is not well (503)" in ended.failure
    run_id = ended.result.run_id
    tags = served_desk.instance.get_run_by_id(run_id).tags
    assert is_tagged(tags[NO_ATTEMPT], run_id, ["property_descriptions"])
    assert list(leases.glob("*")) == before
    model_server.well = True
    done = served_desk.materialize()
    assert done.success, done.failure


def test_a_server_that_goes_away_is_no_attempt(served_desk, model_server, monkeypatch):
    """Down for longer than it is waited for, in the middle of a run: an outage, and no fault of the rows."""
    monkeypatch.setitem(RunningServer.__init__.__kwdefaults__, "patience_seconds", 0.1)
    model_server.dies_once = True
    ended = served_desk.materialize()
    assert "was not well again within 0 s" in ended.failure
    run_id = ended.result.run_id
    tags = served_desk.instance.get_run_by_id(run_id).tags
    assert is_tagged(tags[NO_ATTEMPT], run_id, ["property_descriptions"])
    model_server.well = True
    done = served_desk.materialize()
    assert done.success, done.failure


def test_nothing_asks_the_server_while_paused(shared_desk, model_server):
    """A pause comes first: somebody may have paused because of the server."""
    on = shared_desk.changed(engine="server", server_url=model_server.url)
    state = control_state(on.settings)
    pause(state, "the server moves", now=time.time())
    model_server.well = False
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(on.materialize)
        try:
            wait_until(lambda: waiting.done() or on.waits_without_device(), "the wait")
            assert not waiting.done(), waiting.result().failure
            assert model_server.looks == 0
            model_server.well = True
        finally:
            resume(state)
        done = waiting.result(timeout=120)
    assert done.success, done.failure


def test_a_worker_that_waits_for_its_server_is_not_taken_for_stuck(served_desk, model_server):
    """Weeks of work meet restarts of a server: their worker has the time of a load, and works on after it."""
    workers = Workers(open_state(served_desk.settings.state_directory))
    phases = []

    def look():
        phases.extend(worker.phase for worker in workers.living())
        if not model_server.well:
            model_server.well = phases[-1] is Phase.LOADING

    model_server.dies_once = True
    model_server.at_request = look
    done = served_desk.materialize()
    assert done.success, done.failure
    restart = [Phase.LOADING, Phase.WORKING]
    assert [phase for phase, _ in groupby(phases)] == restart * 2

"""Describing through vLLM, which decodes by the schema: `make test-vllm` installs it and runs this."""

import logging
from pathlib import Path
from typing import Literal

import psutil
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import BaseModel, Field

from tests.support.processes import command_line, descendants, has_ended, kill
from vlm_assets.config.engine_choice import vllm_command
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_engine.devices.find import find_devices
from vlm_engine.devices.loaded_servers import LoadedServers, end_loaded_servers
from vlm_engine.images.images import LoadedProperty
from vlm_engine.prompt import Prompt
from vlm_engine.protocol import Answer, Attempt
from vlm_engine.schema import DescriptionSchema
from vlm_engine.server.chat_completions import EncodedImages

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

CPU = find_devices("cpu:1", {})[0]
TILES = '{"do_image_splitting": true, "size": {"longest_edge": 128}}'
"""The example model's processor shows an image as one tile; so told, it cuts it into several."""


class Roof(BaseModel):
    """What the example model was never trained to say."""

    tiles: int = Field(ge=1, le=9)
    colour: Literal["red", "slate"]


@pytest.fixture
def vllm_desk(desk, monkeypatch):
    """The same home, described by vLLM on the CPU."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = f"{vllm_command()} --dtype float32 --enforce-eager --max-num-seqs 8"
    yield desk.changed(
        engine="server",
        server_command=command,
        server_requests=8,
    )
    assert end_loaded_servers(desk.settings.state_directory, logging.getLogger("test")) == []


def rows(file: Path) -> dict[str, dict]:
    return {row["property_id"]: row for row in pq.read_table(file).to_pylist()}


def black(images: int) -> LoadedProperty:
    """A property with so many images of 4:3, of a megapixel."""
    picture = Image.new("RGB", (1182, 886))
    return LoadedProperty("p", 0, EncodedImages().load()([picture] * images).images, images, (), 0.0)


def ask(model, images: int):
    """What vLLM answers about so many images, and the engine, closed."""
    engine = model.load(CPU, schema=DescriptionSchema(Roof), prompt=Prompt("Describe."))
    try:
        return engine.describe([black(images)], attempt=Attempt(1, max_new_tokens=40))[0], engine
    finally:
        engine.close()


def test_vllm_describes_by_the_schema(desk, vllm_desk):
    """The documented command works, one server does for all, says nothing that the schema forbids, and is as
    sure as the same model in a process of ours."""
    assert vllm_desk.materialize().success
    served = rows(desk.file)
    first = next(LoadedServers(desk.settings.state_directory).living()).server
    assert vllm_desk.materialize(key="000000008-000000015").success
    assert next(LoadedServers(desk.settings.state_directory).living()).server == first

    assert desk.materialize(config={"recompute": True}).success
    own = rows(desk.file)
    assert [row["status"] for row in served.values()] == [row["status"] for row in own.values()]
    described = [row for row in served.values() if row["status"] == "ok"]
    assert {row["attempts"] for row in described} == {1}
    pairs = [
        (value, own[row["property_id"]]["description"][field])
        for row in described
        for field, value in row["description"].items()
    ]
    assert len(pairs) > 50
    assert sum(one == other for one, other in pairs) / len(pairs) > 0.9
    # Its probabilities are proven to be those after the mask: without the proof all of these are null.
    apart = [
        abs(confidence - own[row["property_id"]]["confidence"][field])
        for row in described
        for field, confidence in row["confidence"].items()
        if row["description"][field] == own[row["property_id"]]["description"][field]
    ]
    assert max(apart) < 0.02


def test_vllm_shows_images_as_large_as_the_budget_allows(vllm_desk):
    """Options and budget reach it: each image costs what was reckoned, and the schema guides what it says."""
    tiles = vllm_desk.changed(processor_options=TILES).settings
    answer, engine = ask(build_vision_language_model(tiles), images=12)
    known = engine.image_tokens
    assert (known.fitting, answer.prompt_tokens) == (12, known.property_tokens)
    assert DescriptionSchema(Roof).parse(answer.text).keys() == {"tiles", "colour"}

    few = vllm_desk.changed(processor_options=TILES, image_tokens=12 * known.each - 1).settings
    answer, engine = ask(build_vision_language_model(few), images=3)
    smaller = engine.image_tokens
    assert smaller.fitting == 12
    assert smaller.each < known.each
    assert answer.prompt_tokens == smaller.text + 3 * smaller.each


def test_vllm_comes_back_whichever_of_its_processes_is_killed(vllm_desk):
    """kill -9 of each process in turn: the question is answered all the same, and nothing of it is left."""
    model = build_vision_language_model(vllm_desk.settings)
    servers = LoadedServers(vllm_desk.settings.state_directory)
    killed = []
    while True:
        # Restarts are counted for each materialization.
        engine = model.load(CPU, schema=DescriptionSchema(Roof), prompt=Prompt("Describe."))
        record = servers.living_on(CPU.id)
        ours = [record.reaper.pid, record.supervisor.pid, record.server.pid]
        processes = [*map(psutil.Process, ours), *descendants(record.server.pid)]
        if len(killed) >= len(processes):
            break
        victim = processes[len(killed)]
        killed.append(" ".join(command_line(victim)))
        kill([victim])
        (answer,) = engine.describe([black(1)], attempt=Attempt(1, max_new_tokens=40))
        assert isinstance(answer, Answer), f"{killed[-1]}: {answer}"
        # Python's resource tracker, which only tidies up, may go alone.
        if victim.pid in ours or "VLLM" in killed[-1]:
            assert servers.living_on(CPU.id).server != record.server, killed[-1]
            assert all(map(has_ended, processes)), killed[-1]
        engine.close()
    engine.close()
    assert len({line for line in killed if "VLLM" in line}) > 1, killed  # engine core and worker

"""Describing through vLLM, which decodes by the schema: `make test-vllm` installs it and runs this."""

import logging
import shlex
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import BaseModel, Field

from resources.devices.find import find_devices
from resources.devices.loaded_servers import LoadedServers, end_loaded_servers
from resources.engine.prompt import Prompt
from resources.engine.protocol import Attempt
from resources.engine.schema import DescriptionSchema
from resources.engine.server.image_transport import EncodedImages
from resources.engine.server.server_plan import VLLM_COMMAND
from resources.images.images import LoadedProperty
from vlm_assets.resource_settings import build_vision_language_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VLLM = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "vllm"
COMMAND = (
    VLLM_COMMAND.replace("vllm", shlex.quote(str(VLLM)), 1)
    + " --dtype float32 --enforce-eager --max-model-len 2048 --max-num-seqs 8"
)


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
    yield desk.changed(engine="server", server_command=COMMAND, server_requests=8)
    assert end_loaded_servers(desk.settings.state_directory, logging.getLogger("test")) == []


def rows(file: Path) -> dict[str, dict]:
    return {row["property_id"]: row for row in pq.read_table(file).to_pylist()}


def test_vllm_describes_by_the_schema(desk, vllm_desk):
    """The documented command works, one server does for all, and it says nothing that the schema forbids."""
    assert vllm_desk.materialize().success
    served = rows(desk.file)
    first = next(LoadedServers(desk.settings.state_directory).living()).server
    assert vllm_desk.materialize(key="000000008-000000015").success

    model = build_vision_language_model(vllm_desk.settings)
    black = Image.new("RGB", (64, 64))
    property_ = LoadedProperty("p", 0, EncodedImages().load()([black, black]).images, 2, (), 0.0)
    schema = DescriptionSchema(Roof)
    engine = model.load(find_devices("cpu:1", {})[0], schema=schema, prompt=Prompt("Describe."))
    (answer,) = engine.describe([property_], attempt=Attempt(1, max_new_tokens=40))
    engine.close()
    assert schema.parse(answer.text).keys() == {"tiles", "colour"}
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

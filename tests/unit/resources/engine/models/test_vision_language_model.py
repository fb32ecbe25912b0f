"""The models' settings as Dagster hands them on."""

import pydantic
import pytest

from resources.devices.find import Device
from resources.engine.models.vision_language_model import ServerSettings, VisionLanguageModel
from resources.engine.prompt import Prompt
from resources.engine.protocol import ModelLoadError
from resources.engine.schema import DescriptionSchema
from resources.engine.server.image_transport import EncodedImages
from resources.engine.transformers.collation import Tensors
from resources.images.outputs import Pixels


class House(pydantic.BaseModel):
    """The shortest of descriptions."""

    storeys: int


CPU = Device("cpu-0", "cpu", "CPU", None, "")


def test_the_guesses_that_are_set_are_the_engine_s(model_folder):
    """How many tokens are guessed reaches the engine, and is not left at its default on the way."""
    model = VisionLanguageModel(model=str(model_folder), speculative_tokens=3)
    engine = model.load(CPU, schema=DescriptionSchema(House), prompt=Prompt("Describe."))
    assert engine._drafts.most == 3
    engine.close()


def test_several_devices_need_a_server():
    """In the run's own process a model computes on one device: a second one would be leased for nothing."""
    pair = Device("GPU-a+GPU-b", "cuda", "2 x H100", None, "GPU-a,GPU-b")
    with pytest.raises(ModelLoadError, match="DEVICES_PER_MODEL is 2"):
        VisionLanguageModel(model="owner/name").load(
            pair, schema=DescriptionSchema(House), prompt=Prompt("Describe.")
        )


def test_workers_make_what_the_engine_takes():
    """Workers run the processor where there is enough to do, and a server gets files."""
    model = VisionLanguageModel(model="owner/name")
    prompt = Prompt("Describe.")
    assert model.output(CPU, prompt, images=20) == Pixels()
    assert model.output(CPU, prompt, images=9000) == Tensors(model.source, "Describe.", "float32")
    server = ServerSettings(state_directory="state")
    served = VisionLanguageModel(model="owner/name", server=server)
    assert served.output(CPU, prompt, images=9000) == EncodedImages()

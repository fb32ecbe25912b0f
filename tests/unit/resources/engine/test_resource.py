"""The models' settings as Dagster hands them on."""

import pydantic
import pytest

from resources.devices.find import Device
from resources.engine.prompt import Prompt
from resources.engine.resource import VisionLanguageModel
from resources.engine.schema import DescriptionSchema


class House(pydantic.BaseModel):
    """The shortest of descriptions."""

    storeys: int


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
def test_the_decoding_that_is_set_is_the_engine_s(model_folder, decoding):
    """How answers are decoded reaches the engine, and is not left at its default on the way."""
    schema = DescriptionSchema(House)
    model = VisionLanguageModel(model=str(model_folder), decoding=decoding)
    engine = model.load(Device("cpu-0", "cpu", "CPU", None, ""), schema=schema, prompt=Prompt("Describe."))
    assert engine.decoding == decoding
    engine.close()

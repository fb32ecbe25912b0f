"""The models' settings as Dagster hands them on."""

import json
import logging
import shutil
import sys
from pathlib import Path

import pydantic
import pytest

from resources.vision_language_model import ServerSettings, VisionLanguageModel
from vlm_engine.devices.find import Device
from vlm_engine.devices.loaded_servers import LoadedServers, end_loaded_servers
from vlm_engine.images.images import Pixels
from vlm_engine.prompt import Prompt
from vlm_engine.protocol import ImageLimits, ImageTokens, MeasuringEngine, ModelLoadError
from vlm_engine.schema import DescriptionSchema
from vlm_engine.server.chat_completions import EncodedImages
from vlm_engine.transformers.collation import Tensors


class House(pydantic.BaseModel):
    """The shortest of descriptions."""

    storeys: int


CPU = Device("cpu-0", "cpu", "CPU", None, "")


def test_the_guesses_that_are_set_are_the_engine_s(model_folder):
    """How many tokens are guessed reaches the engine, and is not left at its default on the way."""
    model = VisionLanguageModel(model=str(model_folder), speculative_tokens=3)
    engine = model.load(CPU, schema=DescriptionSchema(House), prompt=Prompt("Describe."))
    assert engine.drafting.drafts.most_tokens == 3
    engine.close()


def test_several_devices_need_a_server():
    """In the run's own process a model computes on one device: a second one would be leased for nothing."""
    pair = Device("GPU-a+GPU-b", "cuda", "2 x H100", None, "GPU-a,GPU-b")
    with pytest.raises(ModelLoadError, match="DEVICES_PER_MODEL is 2"):
        VisionLanguageModel(model="owner/name").load(
            pair, schema=DescriptionSchema(House), prompt=Prompt("Describe.")
        )


def test_weights_that_vllm_does_not_load_start_no_server(model_folder, tmp_path):
    """vLLM would say so minutes after its start, at the end of a long log."""
    copied = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((copied / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (copied / "config.json").write_text(json.dumps(quantized))
    server = ServerSettings(state_directory=str(tmp_path / "state"), command="/no/vllm serve {model} {port}")
    model = VisionLanguageModel(model=str(copied), server=server)
    with pytest.raises(ModelLoadError, match=r"quantized \(bitsandbytes\), and vLLM does not load"):
        model.load(CPU, schema=DescriptionSchema(House), prompt=Prompt("Describe."))


STUB = Path(__file__).parents[2] / "faults/vlm_engine/server/stub_server.py"


def test_a_server_of_ours_is_told_what_images_may_cost(model_folder, tmp_path):
    """Budget and options reach its command, and the engine says what images cost."""
    told = " {processor_options} {context} {images}"
    command = f"{sys.executable} -I -S {STUB} {{port}} {tmp_path} serves"
    limits = ImageLimits(pixels=1 << 20, images=3, answer_tokens=8, options={"do_image_splitting": False})

    def started(command: str) -> tuple[ImageTokens | None, list[str]]:
        server = ServerSettings(state_directory=str(tmp_path / "state"), command=command)
        model = VisionLanguageModel(model=str(model_folder), limits=limits, server=server)
        engine = model.load(CPU, schema=DescriptionSchema(House), prompt=Prompt("Describe."))
        engine.close()
        record = LoadedServers(tmp_path / "state").living_on(CPU.id)
        assert isinstance(engine, MeasuringEngine)
        return engine.image_tokens, list(record.command)

    try:
        known, words = started(command + told)
        assert known.fitting == known.images == 3
        options, context, images = words[-3:]
        assert json.loads(options)["do_image_splitting"] is False
        assert int(context) >= known.property_tokens + 16
        assert images == "3"
        assert started(command)[0] is None
    finally:
        assert end_loaded_servers(tmp_path / "state", logging.getLogger("test")) == []


def test_grids_that_a_server_would_not_read_are_refused(model_folder, tmp_path):
    """vLLM counts LLaVA's tokens by the grids of the model's own files, whatever it is told."""
    limits = ImageLimits(1 << 20, images=3, answer_tokens=8, options={"image_grid_pinpoints": [[384, 384]]})
    server = ServerSettings(state_directory=str(tmp_path))
    model = VisionLanguageModel(model=str(model_folder), limits=limits, server=server)
    with pytest.raises(ModelLoadError, match=r"image_grid_pinpoints from the model's own config\.json"):
        model.load(CPU, schema=DescriptionSchema(House), prompt=Prompt("Describe."))


def test_workers_make_what_the_engine_takes():
    """Workers run the processor for a GPU, and for a CPU where there is enough to do; a server gets files."""
    model = VisionLanguageModel(model="owner/name")
    prompt = Prompt("Describe.")
    assert model.output(CPU, prompt, images=20) == Pixels()
    assert model.output(CPU, prompt, images=9000) == Tensors(model.source, "Describe.", "float32")
    gpu = Device("GPU-a", "cuda", "H100", None, "GPU-a")
    assert model.output(gpu, prompt, images=20) == Tensors(model.source, "Describe.", "bfloat16")
    server = ServerSettings(state_directory="state")
    served = VisionLanguageModel(model="owner/name", server=server)
    assert served.output(CPU, prompt, images=9000) == EncodedImages()

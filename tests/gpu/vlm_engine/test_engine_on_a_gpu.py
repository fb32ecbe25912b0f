"""The in-process engine, its benchmark and the embedder on a real GPU, the riskiest first.

`make test` does not collect them: run `make test-gpu` on a machine that has a GPU. Without one they fail, and
are never skipped. `make test-bare` runs them on a CPU, by the same code: those marked `needs_gpu` name a test
that does there what they do here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.scenes import draw_property, render
from examples.truth import FIELDS, draw_truth
from resources.text_embedding import TextEmbedder
from vlm_engine.devices.find import Device, DeviceError, DriverNvml
from vlm_engine.devices.leases import refuse_another_gpu
from vlm_engine.images.images import LoadedProperty
from vlm_engine.ladder import describe_batch
from vlm_engine.model_source import ModelSource
from vlm_engine.prompt import build_prompt
from vlm_engine.schema import description_text, load_schema
from vlm_engine.transformers.guided import SampledBatch
from vlm_engine.transformers.model_loading import empty_host_cache, load_model
from vlm_engine.transformers.transformers_engine import TransformersEngine

ROOT = Path(__file__).parents[3]
DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
EXAMPLE_MODEL = ROOT / "examples" / "model"
SEED = 11
COUNT = 24
SETTINGS = 256


@pytest.fixture(scope="module")
def schema():
    return load_schema("vlm_assets.config.property_description:PropertyDescription")


@pytest.fixture(scope="module")
def properties() -> list[LoadedProperty]:
    """Rendered properties with their images as the decode workers hand them over."""
    found = []
    for index in range(COUNT):
        home = draw_property("example", SEED, index)
        images = [np.asarray(render(home, view).convert("RGB")) for view in home.views]
        found.append(LoadedProperty(f"p{index}", index, images, len(images), (), 0.0))
    return found


def loaded(schema, speculative_tokens=0):
    return TransformersEngine(
        ModelSource(str(EXAMPLE_MODEL)),
        schema=schema,
        prompt=build_prompt(schema),
        device=DEVICE,
        speculative_tokens=speculative_tokens,
    )


@pytest.fixture
def load(schema):
    """Load an engine that guesses so many tokens; it is closed after the test."""
    engines = []

    def load(speculative_tokens=0):
        engines.append(loaded(schema, speculative_tokens))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture(params=[0, 5])
def engine(request, load):
    return load(speculative_tokens=request.param)


def test_answers_are_valid_and_right_in_bfloat16(engine, schema, properties):
    """On a GPU the model runs in bfloat16, every answer fits the schema, and nearly all fields are right."""
    described = describe_batch(engine, schema, properties, SETTINGS)
    assert [one.status for one in described] == ["ok"] * COUNT
    right = [
        one.description[name] == getattr(draw_truth("example", SEED, one.ordinal), name)
        for one in described
        for name in FIELDS
    ]
    assert np.mean(right) >= 0.95


def test_nan_on_the_device_is_no_answer(engine, schema, properties):
    """With and without guesses, a GPU that computes no numbers fails the property: no row is ok."""
    import torch

    head = engine._model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.full_like(head.weight[:, 0], float("nan")))
    try:
        described = describe_batch(engine, schema, properties[:2], SETTINGS)
    finally:
        head.bias = None
    assert [one.error_kind for one in described] == ["impossible_scores"] * 2


def test_a_sound_device_answers_the_canary_alike(engine, properties):
    """Between other batches too, so none is left out; one flipped bit of a weight is another answer."""
    first = engine.canary()
    for _ in range(3):
        engine.describe(properties, attempt=_first())
        assert engine.canary() == first
    weight = next(engine._model.parameters()).data.view(-1)
    sound = weight[0].clone()
    weight[0] = -sound
    flipped = engine.canary()
    weight[0] = sound
    assert (flipped.digest != first.digest, engine.canary()) == (True, first)


@pytest.mark.needs_gpu("tests/unit/vlm_engine/devices/test_leases.py::test_torch_computes_on_what_is_leased")
def test_torch_names_the_gpu_as_the_driver_does(engine):
    """What is compared with the lease after loading: the UUID of the GPU that torch has, by NVML."""
    import torch

    uuid = f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}"
    (gpu,) = (one for one in DriverNvml().readings() if one.uuid == uuid)
    refuse_another_gpu(Device(gpu.uuid, "cuda", gpu.name, gpu.memory_bytes, gpu.uuid))
    with pytest.raises(DeviceError, match="Nothing was described"):
        refuse_another_gpu(Device("GPU-other", "cuda", "another", None, "GPU-other"))


@pytest.mark.needs_gpu(
    "tests/unit/vlm_engine/transformers/test_transformers_engine.py::test_out_of_memory_halves_and_remembers"
)
def test_a_batch_that_does_not_fit_is_split_and_the_size_remembered(load, schema, properties):
    """Real out-of-memory on the device halves the batch; every property is still described."""
    import torch

    engine = load()
    engine.describe(properties[:1], attempt=_first())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine.describe(properties[:4], attempt=_first())
    four = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(four * 1.1 / total)
    try:
        many = [
            LoadedProperty(f"q{n}", n, one.images, one.seen, (), 0.0) for n, one in enumerate(properties * 8)
        ]
        described = describe_batch(engine, schema, many, SETTINGS)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.largest_batch is not None
    assert engine.largest_batch < len(many)
    assert [one.status for one in described] == ["ok"] * len(many)


@pytest.mark.needs_gpu(
    "tests/unit/vlm_engine/transformers/test_attention.py::test_a_model_for_a_gpu_is_computed_without_plans"
)
def test_weights_go_straight_to_the_device(monkeypatch):
    """Each from its file: no model that lies whole in the host's memory is moved from there."""
    import torch
    from transformers import AutoModelForImageTextToText

    def refuse(*_, **__):
        raise AssertionError("a whole module is moved")

    for name in ("to", "cuda"):
        monkeypatch.setattr(torch.nn.Module, name, refuse)
    model = load_model(ModelSource(str(EXAMPLE_MODEL)), AutoModelForImageTextToText, device="cuda")
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"cuda"}


@pytest.mark.needs_gpu(
    "tests/unit/vlm_engine/transformers/test_model_loading.py::test_an_older_torch_gives_pinned_memory_back_too"
)
def test_pinned_memory_is_returned(schema, properties):
    """What waits for the device is pinned, and after the engine is closed the system has it again."""
    import torch

    def pinned():
        return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)

    engine = loaded(schema)
    empty_host_cache()
    before = pinned()
    engine.prepare(properties, attempt=_first())
    assert pinned() > before
    engine.describe(properties, attempt=_first())
    engine.close()
    assert pinned() <= before


def test_random_draws_are_made_on_the_device():
    """Sampling neither waits for the device nor copies to it, and its draws are those of the seed."""
    import torch

    ids, scores = torch.zeros(3, 1, dtype=torch.long, device=DEVICE), torch.zeros(3, 1000, device=DEVICE)
    sampled = SampledBatch(1.0, [7, 8, 9])
    first = sampled(ids, scores)
    with refused_synchronization() if DEVICE == "cuda" else contextlib.nullcontext():
        second = sampled(ids, scores)
    assert second.device.type == DEVICE
    assert not torch.equal(first, second)
    assert torch.equal(SampledBatch(1.0, [8])(ids[:1], scores[:1])[0], first[1])


@contextlib.contextmanager
def refused_synchronization():
    """Torch raises meanwhile where the host would wait for the GPU."""
    import torch

    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_embeddings_on_a_gpu_agree_with_those_of_a_cpu():
    """bfloat16 on a GPU gives nearly the directions that float32 on a CPU gives."""
    texts = [
        description_text(draw_truth("example", SEED, index).model_dump(mode="json")) for index in range(64)
    ]
    source = ModelSource(str(ROOT / "examples" / "embedder"))
    vectors = {}
    for device in ("cpu", DEVICE):
        embedder = TextEmbedder(source, device=device)
        vectors[device] = embedder.embed(texts)
        embedder.close()
    assert np.allclose(np.linalg.norm(vectors[DEVICE], axis=1), 1.0, atol=1e-3)
    assert (vectors[DEVICE] * vectors["cpu"]).sum(axis=1).min() > 0.99


def test_the_benchmark_measures_every_case(tmp_path):
    """What `make bench-gpu` does in minutes it does here with tiny models: no case fails."""
    output = tmp_path / "gpu.json"
    options = [
        "--device",
        DEVICE,
        "--tiny",
        "--seconds",
        "0.5",
        "--workers",
        "2",
        "--partitions",
        "0",
        "--output",
        str(output),
    ]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, check=True)
    for case in json.loads(output.read_text())["cases"]:
        assert not [name for name in case if "error" in name or "failed" in name]
        assert case["engine"]["decode_steps"] > 0


def _first():
    from vlm_engine.protocol import Attempt

    return Attempt(number=1, max_new_tokens=256)

"""The in-process engine, its decodings, its benchmark and the embedder on a real GPU. Not collected by `make
test`; run with `make test-gpu` on a machine that has one, and a C compiler (without these they fail, they are
never skipped).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from resources.engine.embedder import TextEmbedder, description_text
from resources.engine.feeding import Feeding
from resources.engine.ladder import LadderSettings, describe_batch
from resources.engine.prompt import build_prompt
from resources.engine.schema import load_schema
from resources.engine.transformers import static_decoding
from resources.engine.transformers.guided import Grammar
from resources.engine.transformers.model_loading import ModelSource, load_model, load_processor
from resources.engine.transformers.step_recording import RecordingError, StepRecorder
from resources.engine.transformers.transformers_engine import TransformersEngine
from resources.images.images import LoadedProperty
from vlm_assets.demo.scenes import draw_property, render
from vlm_assets.demo.truth import FIELDS, draw_truth

ROOT = Path(__file__).parents[4]
EXAMPLE_MODEL = ROOT / "vlm_assets" / "demo" / "model"
SEED = 11
COUNT = 24
SETTINGS = LadderSettings(max_new_tokens=256)


@pytest.fixture(scope="module")
def schema():
    return load_schema("vlm_assets.property_description:PropertyDescription")


@pytest.fixture(scope="module")
def properties() -> list[LoadedProperty]:
    """Rendered properties with their images as the decode workers hand them over."""
    found = []
    for index in range(COUNT):
        home = draw_property("example", SEED, index)
        images = [np.asarray(render(home, view).convert("RGB")) for view in home.views]
        found.append(LoadedProperty(f"p{index}", index, images, len(images), (), 0.0))
    return found


@pytest.fixture
def load(schema, monkeypatch):
    """Load an engine that decodes in some way; what it warns of fails the test."""
    engines = []

    def load(decoding, *, speculative_tokens=0, is_closed_elsewhere=False):
        monkeypatch.setattr(static_decoding._log, "warning", lambda text, *said: pytest.fail(text % said))
        source = ModelSource(str(EXAMPLE_MODEL))
        prompt = build_prompt(schema)
        engine = TransformersEngine(
            source,
            schema=schema,
            prompt=prompt,
            device="cuda",
            decoding=decoding,
            speculative_tokens=speculative_tokens,
        )
        if not is_closed_elsewhere:
            engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture(params=["dynamic", "guessing", "static", "compiled"])
def engine(request, load):
    if request.param == "guessing":
        return load("dynamic", speculative_tokens=5)
    return load(request.param)


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


def test_recorded_steps_say_what_launched_ones_say(schema, properties):
    """Recordings, also those that are used again, give the tokens of a growing cache; in float32."""
    from transformers import AutoModelForImageTextToText

    source = ModelSource(str(EXAMPLE_MODEL))
    model = load_model(source, AutoModelForImageTextToText, device="cuda").float()
    processor = load_processor(source)
    grammar = Grammar(
        schema.json_schema,
        processor.tokenizer,
        logits_width=model.get_output_embeddings().weight.shape[0],
        stop_token_ids=[processor.tokenizer.eos_token_id],
    )
    launched, recorded = (
        TransformersEngine.around(
            model, processor, grammar=grammar, prompt=build_prompt(schema), device="cuda", decoding=decoding
        )
        for decoding in ("dynamic", "static")
    )
    for batch in (properties, properties[:5], properties):
        answers, expected = (
            [one.text for one in engine.describe(batch, attempt=_first())] for engine in (recorded, launched)
        )
        assert np.mean([one == other for one, other in zip(answers, expected, strict=True)]) >= 0.95
    steps = recorded.static._steps.values()
    assert len(steps) > 1
    assert all(step.launch != step.run for step in steps)


def test_recording_while_other_threads_pin_memory(load, schema, properties):
    """A run records steps while threads prepare the next batches, and no recording fails by it."""
    sizes = (1, 2, 3, 5, 9, 13, 24)
    batches = [properties[:size] for size in (*sizes, *reversed(sizes))]
    engine = load("static", is_closed_elsewhere=True)
    with Feeding(engine, schema, SETTINGS, end_batches=lambda: None) as feeding:
        described = [one for batch in feeding.described(batches) for one in batch.described]
    assert [one.status for one in described] == ["ok"] * sum(map(len, batches))


def test_a_recording_that_fails_leaves_nothing_under_way():
    """After a step that cannot be recorded, memory is given back and other steps are recorded."""
    import torch

    recorder = StepRecorder()
    counts = torch.zeros(4, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RecordingError):
            recorder.recorded(lambda: counts * counts.sum().item())
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
    counted = recorder.recorded(lambda: counts.add_(1).clone())
    before = counts[0].item()
    assert counted().tolist() == [before + 1] * 4
    assert counted().tolist() == [before + 2] * 4


def test_recorded_steps_are_faster(load, properties):
    """A small model's steps are mostly launches: recorded, they take less time."""
    seconds = {}
    for decoding in ("dynamic", "static"):
        engine = load(decoding)
        for _ in range(2):
            before = engine.seconds["generation"]
            engine.describe(properties, attempt=_first())
            seconds[decoding] = engine.seconds["generation"] - before
    assert seconds["static"] < seconds["dynamic"]


def test_the_benchmark_measures_every_case(tmp_path):
    """What `make bench-gpu` does in minutes it does here with tiny models: no case fails."""
    output = tmp_path / "gpu.json"
    options = ["--tiny", "--seconds", "0.5", "--workers", "2", "--output", str(output)]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, check=True)
    for case in json.loads(output.read_text())["cases"]:
        assert not [name for name in case if "error" in name or "failed" in name]
        assert case["static"]["decode_steps"] > 0


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
def test_a_batch_that_does_not_fit_is_split_and_the_size_remembered(load, schema, properties, decoding):
    """Real out-of-memory on the device halves the batch; every property is still described."""
    import torch

    engine = load(decoding)
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


def test_embeddings_on_a_gpu_agree_with_those_of_a_cpu():
    """bfloat16 on a GPU gives nearly the directions that float32 on a CPU gives."""
    texts = [
        description_text(draw_truth("example", SEED, index).model_dump(mode="json")) for index in range(64)
    ]
    source = ModelSource(str(EXAMPLE_MODEL))
    vectors = {}
    for device in ("cpu", "cuda"):
        embedder = TextEmbedder(source, device=device)
        vectors[device] = embedder.embed(texts)
        embedder.close()
    assert np.allclose(np.linalg.norm(vectors["cuda"], axis=1), 1.0, atol=1e-3)
    assert (vectors["cuda"] * vectors["cpu"]).sum(axis=1).min() > 0.99


def _first():
    from resources.engine.protocol import Attempt

    return Attempt(number=1, max_new_tokens=256)

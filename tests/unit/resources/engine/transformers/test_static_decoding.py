"""Decoding with memory of a fixed size, on a tiny model and a CPU: sizes, recordings, and what goes wrong."""

from functools import partial
from typing import Literal

import pydantic
import pytest

from resources.engine.prompt import Prompt
from resources.engine.protocol import Attempt
from resources.engine.schema import DescriptionSchema
from resources.engine.transformers import static_decoding
from resources.engine.transformers.model_loading import ModelSource
from resources.engine.transformers.static_cache import rung_of_length, rung_of_rows
from resources.engine.transformers.static_decoding import StaticDecoding
from resources.engine.transformers.step_recording import RecordingError
from resources.engine.transformers.transformers_engine import TransformersEngine

GREEDY = Attempt(number=1, max_new_tokens=60)


class House(pydantic.BaseModel):
    """An answer whose length a random model draws."""

    roof: Literal["flat", "hip"]
    name: str = pydantic.Field(max_length=30)


class Recorder:
    """Does to a step what a recording of it does: rehearses, and overwrites what it returned before."""

    def __init__(self):
        self.recordings = 0

    def recorded(self, step):
        self.recordings += 1
        step()
        result = step()

        def replayed():
            result.fill_(float("nan"))
            return result.copy_(step())

        return replayed

    def restart(self):
        pass


@pytest.fixture(scope="module")
def engine(model_folder):
    engine = TransformersEngine(
        ModelSource(str(model_folder)),
        schema=DescriptionSchema(House),
        prompt=Prompt("Describe the property."),
        device="cpu",
        decoding="static",
    )
    yield engine
    engine.close()


@pytest.fixture
def decoding(engine, monkeypatch):
    """Have the engine decode in this way; None: with a cache that grows."""

    def use(decoding):
        monkeypatch.setattr(engine, "static", decoding)
        return decoding

    yield use
    engine.largest_batch = None


@pytest.fixture(scope="module")
def batch(load_property):
    return [load_property(f"property {at}", 1 + at % 4) for at in range(9)]


@pytest.fixture
def expected(engine, batch, decoding):
    """What the engine answers with a cache that grows."""
    decoding(None)
    return engine.describe(batch, attempt=GREEDY)


@pytest.fixture
def warnings(monkeypatch):
    """What was warned of."""
    said = []
    monkeypatch.setattr(static_decoding._log, "warning", lambda text, *values: said.append(text % values))
    return said


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of the steps that were run."""
    run = []
    launch = StaticDecoding.launch

    def launched(self, step):
        run.append(next(reversed(self._steps)))
        return launch(self, step)

    monkeypatch.setattr(StaticDecoding, "launch", launched)
    return run


@pytest.mark.parametrize("rung", [rung_of_rows, rung_of_length])
def test_a_rung_is_no_smaller_and_not_much_larger(rung):
    """Every batch and every prompt has its rung, few rungs serve all, and little of one is left empty."""
    rungs = [rung(number) for number in range(1, 1025)]
    assert rungs == sorted(rungs)
    assert all(number <= size for number, size in enumerate(rungs, 1))
    assert all(size <= 2 * number for number, size in enumerate(rungs, 1) if number >= 128)
    assert len(set(rungs)) <= 26


def test_answers_grow_out_of_their_size(engine, load_property, decoding, sizes):
    """Prompts beyond the first rung, and answers that outgrow the rung of their prompt, are decoded alike."""
    long = [load_property(f"property {at}", images) for at, images in enumerate((25, 28, 30))]
    longer = [load_property("a", 60), load_property("b", 35)]
    decoding(None)
    answers = [engine.describe(one, attempt=GREEDY) for one in (long, longer)]
    decoding(StaticDecoding(engine._model, recorder=Recorder()))
    assert [engine.describe(one, attempt=GREEDY) for one in (long, longer)] == answers
    lengths = [size.length for size in sizes]
    assert lengths[0] > 256
    assert len(set(lengths)) > 1


def test_the_answer_outgrows_its_size_more_than_once(engine, batch, expected, decoding, sizes, monkeypatch):
    """Each move to a larger size takes along what was said, and makes room for what was not."""
    monkeypatch.setattr(static_decoding, "rung_of_length", lambda tokens: -(-tokens // 8) * 8)
    monkeypatch.setattr(static_decoding, "_TOKENS_AHEAD", 1)
    decoding(StaticDecoding(engine._model, recorder=Recorder()))
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert len({size.length for size in sizes}) > 3


def test_one_answer_alone(engine, batch, expected, decoding):
    """A batch of one property is decoded alike, though no size has one row."""
    decoding(StaticDecoding(engine._model, recorder=Recorder()))
    assert engine.describe(batch[:1], attempt=GREEDY) == expected[:1]


def test_what_was_recorded_serves_the_next_batch(engine, batch, expected, decoding):
    """A second batch of the same sizes records nothing, whatever was between them."""
    recorder = Recorder()
    decoding(StaticDecoding(engine._model, recorder=recorder))
    assert engine.describe(batch, attempt=GREEDY) == expected
    recordings = recorder.recordings
    assert engine.describe(batch[::-1], attempt=GREEDY) == expected[::-1]
    assert engine.describe(batch[:3], attempt=GREEDY) == expected[:3]
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert recorder.recordings == recordings > 1


def test_few_recordings_are_kept(engine, batch, expected, decoding, monkeypatch):
    """Recordings take memory of the device: the oldest are let go, and made again."""
    monkeypatch.setattr(static_decoding, "_MOST_STEPS", 1)
    static = decoding(StaticDecoding(engine._model, recorder=Recorder()))
    for _ in range(2):
        assert engine.describe(batch, attempt=GREEDY) == expected
        assert len(static._steps) == 1


def test_out_of_memory_while_answers_grow(engine, batch, expected, decoding, monkeypatch):
    """Memory that runs out between two tokens halves the batch, once all of ours was given back."""
    import torch

    static = decoding(StaticDecoding(engine._model, recorder=Recorder()))
    launch, take_over, blocks = static.launch, static_decoding.StaticMemory.take_over, []

    def run_out(step):
        if len(static.memory.layers()[0][0]) > 4 and step._at > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return launch(step)

    def taken_over(memory, *arguments):
        blocks.append(len(memory._blocks))
        take_over(memory, *arguments)

    monkeypatch.setattr(static, "launch", run_out)
    monkeypatch.setattr(static_decoding.StaticMemory, "take_over", taken_over)
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert engine.largest_batch == 4
    assert blocks == [0, 0, 2, 2]


def test_a_step_is_compiled_once(engine, batch, expected, decoding, monkeypatch, sizes, warnings):
    """The compiler sees one step whose sizes are open, not one for each size of a batch."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    decoding(static_decoding.static_decoding(engine._model, "compiled", device="cpu"))
    assert engine.describe(batch[:8], attempt=GREEDY) == expected[:8]
    assert len(set(sizes)) > 2
    assert counter.frame_count == 1
    assert not warnings
    torch._dynamo.reset()


def test_a_compiler_that_is_missing(engine, batch, expected, decoding, warnings):
    """Where the step cannot be compiled, it is run as it is, and one warning says why."""

    def no_compiler(forward):
        def fail(**inputs):
            raise RuntimeError("Failed to find C compiler.")

        return fail

    decoding(StaticDecoding(engine._model, recorder=None, compiler=no_compiler))
    for _ in range(2):
        assert engine.describe(batch, attempt=GREEDY) == expected
    assert len(warnings) == 1
    assert "not compiled: RuntimeError: Failed to find C compiler." in warnings[0]


def test_a_step_that_cannot_be_recorded(engine, batch, expected, decoding, warnings):
    """Where the step cannot be recorded, it is launched kernel by kernel, and one warning says why."""

    class NoRecorder(Recorder):
        def recorded(self, step):
            raise RecordingError("operation not permitted when stream is capturing")

    decoding(StaticDecoding(engine._model, recorder=NoRecorder()))
    for _ in range(2):
        assert engine.describe(batch, attempt=GREEDY) == expected
    assert len(warnings) == 1
    assert "not permitted when stream is capturing" in warnings[0]


@pytest.mark.parametrize("blind_to", ["what is asked", "what was asked before"])
def test_a_recording_that_says_something_else(engine, batch, expected, decoding, warnings, blind_to):
    """A recording is believed after it was compared: garbage that is valid JSON would be found by nobody."""

    class Blind(Recorder):
        def recorded(self, step):
            self.recordings += 1
            if blind_to == "what is asked":
                return lambda: step() * float("nan")
            first = step().clone()
            return first.clone

    static = decoding(StaticDecoding(engine._model, recorder=Blind()))
    for _ in range(2):
        assert engine.describe(batch, attempt=GREEDY) == expected
    assert static._recorder is None
    assert len(warnings) == 1
    assert "they said something else" in warnings[0]


def test_a_recording_is_compared_though_nothing_more_is_recorded(engine, batch, expected, decoding, warnings):
    """Where another size cannot be recorded, those recorded before are no more believed unseen than else."""
    static = decoding(StaticDecoding(engine._model, recorder=Recorder()))
    assert engine.describe(batch, attempt=GREEDY) == expected
    static._recorder = None  # as a RecordingError of another size leaves it
    for step in static._steps.values():
        step.compared, step.launch = 1, lambda step=step: step.run() * float("nan")
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert len(warnings) == 1
    assert "they said something else" in warnings[0]


@pytest.mark.parametrize(
    ("name", "value"), [("layer_types", ["chunked_attention"]), ("_attn_implementation", "flash_attention_2")]
)
def test_a_model_that_cannot(engine, batch, expected, decoding, warnings, monkeypatch, sizes, name, value):
    """A model that takes no memory of fixed size is decoded with one that grows, and one warning says why."""
    with monkeypatch.context() as another:
        another.setattr(engine._model.config.text_config, name, value, raising=False)
        static = StaticDecoding(engine._model, recorder=Recorder())
    decoding(static)
    for _ in range(2):
        assert engine.describe(batch, attempt=GREEDY) == expected
    assert not sizes
    assert len(warnings) == 1
    assert str(value).strip("[']") in warnings[0]


def test_a_larger_batch_between_smaller_ones(engine, batch, expected, decoding):
    """Once memory was replaced by more of it, nothing is read from where it was."""
    decoding(StaticDecoding(engine._model, recorder=Recorder()))
    assert engine.describe(batch[:3], attempt=GREEDY) == expected[:3]
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert engine.describe(batch[3:6], attempt=GREEDY) == expected[3:6]

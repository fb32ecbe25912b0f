"""The in-process engine on a tiny model with random weights, loaded as any model folder is."""

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pydantic
import pytest
from PIL import Image

from vlm_engine.batches import BatchSizes
from vlm_engine.confidence import confidence_of
from vlm_engine.describing import Describing
from vlm_engine.ladder import describe_batch
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.prompt import FurtherQuestion, Prompt
from vlm_engine.protocol import (
    Attempt,
    EngineError,
    EngineLostError,
    ImageLimits,
    ImpossibleScoresError,
    RequestTooLargeError,
)
from vlm_engine.schema import DescriptionSchema
from vlm_engine.transformers import model_inputs
from vlm_engine.transformers.collation import Tensors, learn_endings
from vlm_engine.transformers.drafting import Drafting, Drafts
from vlm_engine.transformers.model_loading import load_processor
from vlm_engine.transformers.transformers_engine import TransformersEngine

GREEDY = Attempt(number=1, max_new_tokens=60)


class House(pydantic.BaseModel):
    """A short answer with a free string, in which a random model says anything."""

    roof: Literal["flat", "hip"]
    storeys: int = pydantic.Field(ge=1, le=9)
    name: str = pydantic.Field(max_length=6)


SCHEMA = DescriptionSchema(House)


@pytest.fixture(scope="module")
def engine(model_folder):
    engine = TransformersEngine(
        ModelSource(str(model_folder)), schema=SCHEMA, prompt=Prompt("Describe the property."), device="cpu"
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def batch(load_property):
    return [load_property(f"property {at}", 1 + at % 4) for at in range(6)]


@pytest.fixture
def memory_for(engine, monkeypatch):
    """Let the device run out of memory where a call has more than so many sequences."""
    import torch

    generate = engine._model.generate
    sizes = []

    def limit(most):
        def generate_or_run_out(**inputs):
            sizes.append(len(inputs["input_ids"]))
            if sizes[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return generate(**inputs)

        monkeypatch.setattr(engine._model, "generate", generate_or_run_out)
        return sizes

    yield limit
    engine.largest_batch = None


def test_answers_follow_the_schema(engine, batch):
    """Every finished answer of a guided batch is valid, and says how it ended and what it cost."""
    answers = engine.describe(batch, attempt=GREEDY)
    assert len(answers) == len(batch)
    for answer in answers:
        assert answer.finish_reason == "stop"
        assert list(SCHEMA.parse(answer.text)) == ["roof", "storeys", "name"]
        assert 0 < answer.output_tokens <= 60


def test_prompt_tokens_count_images(engine, batch):
    """Each image adds its seven tokens to the prompt; padding is not counted."""
    tokens = [answer.prompt_tokens for answer in engine.describe(batch[:4], attempt=GREEDY)]
    assert [later - earlier for earlier, later in itertools.pairwise(tokens)] == [7, 7, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_batch(engine, batch, temperature):
    """A property's answer is the same alone, in a batch, and in another order: greedy or sampled."""
    attempt = Attempt(number=2, max_new_tokens=60, temperature=temperature)
    together = engine.describe(batch, attempt=attempt)
    alone = [engine.describe([one], attempt=attempt)[0] for one in batch]
    backwards = engine.describe(batch[::-1], attempt=attempt)[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_does_not_depend_on_the_way_of_decoding(engine, batch, monkeypatch, temperature):
    """Alone, in a batch that is halved, with drafts, and by transformers' own loop it is the same."""
    attempt = Attempt(number=2, max_new_tokens=60, temperature=temperature)

    def confidences(batch):
        answers = engine.describe(batch, attempt=attempt)
        return [confidence_of(SCHEMA.fields, answer.text, answer.tokens) for answer in answers]

    expected = confidences(batch)
    assert all(0 < value < 1 for confidence in expected for value in confidence.values())
    ways = [[confidences([one])[0] for one in batch], confidences(batch[:3]) + confidences(batch[3:])]
    for name, value in (("drafting", Drafting(engine._model, 5)), ("_decodes_itself", False)):
        with monkeypatch.context() as patched:
            patched.setattr(engine, name, value)
            ways += [confidences(batch), confidences(batch)]  # The second time drafts are known.
    for way in ways:
        for confidence, other in zip(expected, way, strict=True):
            assert other == pytest.approx(confidence, abs=1e-5)


def test_images_matter(engine, load_property):
    """Different images of equal number give different answers: the pixels reach the model."""
    answers = engine.describe([load_property(name, 3) for name in "abcde"], attempt=GREEDY)
    assert len({answer.text for answer in answers}) > 1


def test_sampling_derives_from_property_and_attempt(engine, load_property):
    """Another attempt draws another answer; the same draws the same again."""
    batch = [load_property(f"property {at}", 2) for at in range(2)]

    def texts(number):
        attempt = Attempt(number=number, max_new_tokens=60, temperature=2.0)
        return [answer.text for answer in engine.describe(batch, attempt=attempt)]

    assert texts(2) == texts(2)
    assert texts(2) != texts(3)


def test_truncated(engine, batch):
    """An answer at the limit of tokens is said to be cut off, and is as long as the limit."""
    for answer in engine.describe(batch, attempt=Attempt(number=1, max_new_tokens=8)):
        assert (answer.finish_reason, answer.output_tokens) == ("length", 8)


def test_fewer_images(engine, load_property):
    """An attempt with fewer images shows the first ones and no more."""
    many, few = load_property("a", 5), load_property("a", 5)
    few.images = few.images[:2]
    limited = engine.describe([many], attempt=Attempt(number=1, max_new_tokens=60, images=2))
    assert limited == engine.describe([few], attempt=GREEDY)


def test_out_of_memory_halves_and_remembers(engine, batch, memory_for):
    """A batch too large for the device is halved until it fits, answers alike, and the size is kept."""
    expected = engine.describe(batch, attempt=GREEDY)
    sizes = memory_for(3)
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert sizes == [6, 3, 3]
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert sizes[3:] == [3, 3]


def test_one_property_too_large(engine, batch, memory_for):
    """A single property that does not fit is an error of its own, which fewer images may cure."""
    memory_for(0)
    with pytest.raises(RequestTooLargeError, match="4 images are more") as caught:
        engine.describe(batch[3:4], attempt=GREEDY)
    assert caught.value.kind == "out_of_memory"


def test_prompt_longer_than_the_model_takes(engine, load_property):
    """More images than the model's context holds are refused by name, not answered from a cut prompt."""
    [error] = engine.describe([load_property("a", 150)], attempt=GREEDY)
    assert isinstance(error, RequestTooLargeError)
    assert "of 1024 that the model takes" in str(error)
    assert error.kind == "prompt_too_long"


def test_an_overlong_property_costs_its_batch_nothing(engine, load_property, memory_for):
    """One of a batch is too long: the others are asked together, once, and it alone again with what fits."""
    calls = memory_for(32)
    batch = [load_property("long", 150), *(load_property(f"property {at}", 1) for at in range(31))]
    settings = 60
    described = describe_batch(engine, SCHEMA, batch, settings)
    assert {one.status for one in described} == {"ok"}
    retried = [size for size in calls if size == 1]
    assert calls[0] == 31
    assert len(retried) <= 2
    assert 100 < described[0].images_seen < 150
    assert described[0].fewer_images.startswith("prompt_too_long: images and prompt are ")
    assert all(one.fewer_images is None for one in described[1:])


def test_what_is_beyond_the_budget_is_shown_with_fewer_images(model_folder, load_property):
    """Where the smallest images exceed VLM_ASSETS_IMAGE_TOKENS, fewer are shown, and the row says why."""
    allowed = ImageLimits(pixels=1 << 20, images=12, answer_tokens=60, tokens=30)
    source = ModelSource(str(model_folder))
    engine = TransformersEngine(
        source, schema=SCHEMA, prompt=Prompt("Describe."), device="cpu", limits=allowed
    )
    known = engine.image_tokens
    assert known.each * known.fitting <= 30 < known.each * (known.fitting + 1)
    [one] = describe_batch(engine, SCHEMA, [load_property("a", 12)], 60)
    assert (one.status, one.images_seen) == ("ok", known.fitting)
    assert "VLM_ASSETS_IMAGE_TOKENS and the prompt allow" in one.fewer_images


def test_context_bounds_each_answer_by_itself(engine, load_property):
    """A long prompt leaves its own answer less room, and takes none from its neighbours."""
    long, short = load_property("a", 144), load_property("b", 1)
    generous = Attempt(number=1, max_new_tokens=40)
    answers = engine.describe([long, short], attempt=generous)
    assert answers[0].prompt_tokens + answers[0].output_tokens <= 1024
    assert answers[0].finish_reason == "length"
    assert answers[1] == engine.describe([short], attempt=generous)[0]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access was encountered"), MemoryError()],
)
def test_lost_device(engine, batch, monkeypatch, error):
    """A lost device or exhausted memory says so, once, instead of failing property after property."""

    def generate(**inputs):
        raise error

    monkeypatch.setattr(engine._model, "generate", generate)
    with pytest.raises(EngineLostError):
        engine.describe(batch, attempt=GREEDY)


@pytest.fixture
def processed(engine, monkeypatch):
    """The number of properties in each call of the processor."""
    sizes = []

    def counted(processor, prompt, images):
        sizes.append(len(images))
        return made(processor, prompt, images)

    made = model_inputs.processed
    monkeypatch.setattr(model_inputs, "processed", counted)
    return sizes


def test_what_is_prepared_ahead_is_not_made_again(engine, batch, processed):
    """A batch prepared in another thread is answered alike, and its processor runs once."""
    expected = engine.describe(batch, attempt=GREEDY)
    processed.clear()
    ahead = threading.Thread(target=engine.prepare, args=(batch,), kwargs={"attempt": GREEDY})
    ahead.start()
    ahead.join()
    assert engine.describe(batch, attempt=GREEDY) == expected
    assert processed == [6]


def test_what_was_prepared_for_another_question_is_not_used(engine, batch, processed):
    """Another attempt, or other properties, are prepared for themselves."""
    fewer = Attempt(number=2, max_new_tokens=60, images=1)
    expected = engine.describe(batch, attempt=fewer)
    engine.prepare(batch, attempt=GREEDY)
    processed.clear()
    assert engine.describe(batch, attempt=fewer) == expected
    assert engine.describe(batch[:3], attempt=fewer) == expected[:3]
    assert processed == [6, 3]


def test_out_of_memory_splits_what_was_prepared(engine, batch, memory_for, processed):
    """A prepared batch that does not fit is prepared again in parts; the next one is prepared in parts."""
    expected = engine.describe(batch, attempt=GREEDY)
    memory_for(3)
    processed.clear()
    for _ in range(2):
        engine.prepare(batch, attempt=GREEDY)
        assert engine.describe(batch, attempt=GREEDY) == expected
    assert processed == [6, 3, 3, 3, 3]


def test_where_the_time_went(engine, batch):
    """Time inside the engine is told apart: what was not prepared, prompt, answers."""
    before = dict(engine.seconds)
    engine.describe(batch, attempt=GREEDY)
    spent = {name: seconds - before[name] for name, seconds in engine.seconds.items()}
    assert set(spent) == {"processor", "prefill", "generation"}
    assert all(seconds > 0 for seconds in spent.values())


def test_provenance(engine, model_folder):
    """The engine names the model as the settings do, and what exactly was loaded."""
    assert engine.model == model_folder.name
    assert engine.revision == exact_revision(ModelSource(str(model_folder)))


def test_a_property_that_the_processor_refuses_costs_itself_alone(engine, batch):
    """What a worker was told by the processor is that property's error; the others are answered together."""
    expected = engine.describe([batch[0], batch[2]], attempt=GREEDY)
    refused = replace(batch[1], images=[], refusal="ValueError: too wide")
    first, error, last = engine.describe([batch[0], refused, batch[2]], attempt=GREEDY)
    assert [first, last] == expected
    assert (type(error), str(error)) == (EngineError, "ValueError: too wide")


WAYS = {
    "greedily": {},
    "with guesses": {"drafts": 5},
    "by transformers' own loop": {"_decodes_itself": False},
}
"""Ways of decoding, as what an engine is told for them."""


@pytest.fixture(params=WAYS)
def decoding(request, engine, monkeypatch):
    """The engine, which decodes in one of its ways."""
    for name, value in WAYS[request.param].items():
        if name == "drafts":
            monkeypatch.setattr(engine.drafting, "drafts", Drafts(value))
        else:
            monkeypatch.setattr(engine, name, value)
    return engine


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_no_numbers_give_no_answer(decoding, batch, value, temperature):
    """However an answer is decoded: the grammar would make one of NaN that fits the schema."""
    import torch

    attempt = Attempt(number=1, max_new_tokens=60, temperature=temperature)
    bias = torch.nn.Parameter(torch.full((352,), float(value)))
    head = decoding._model.get_output_embeddings()
    head.bias = bias
    try:
        with pytest.raises(ImpossibleScoresError, match="the model computes NaN or infinity"):
            decoding.describe(batch[:2], attempt=attempt)
        described = describe_batch(decoding, SCHEMA, batch[:2], 60)
    finally:
        head.bias = None
    assert [(one.error_kind, one.attempts) for one in described] == [("impossible_scores", 1)] * 2


@pytest.mark.parametrize(("in_prompt", "guesses", "first"), [(1, 0, -1), (0, 0, -1), (0, 5, 0), (0, 5, 1)])
def test_a_property_without_numbers_costs_its_batch_nothing(
    engine, load_property, monkeypatch, in_prompt, guesses, first
):
    """NaN in one row, in its prompt, from a later step on or only after a guess: it alone fails.

    first: of the places of a step, the first with NaN.
    """
    monkeypatch.setattr(engine.drafting, "drafts", Drafts(guesses))
    batch = [load_property("a", 1), load_property("sick", 20), load_property("b", 2)]
    expected = describe_batch(engine, SCHEMA, batch, 60)
    assert {one.status for one in expected} == {"ok"}
    beyond = (expected[0].prompt_tokens + expected[1].prompt_tokens) // 2
    spoilt = []

    def spoil(model, arguments, named, outputs):
        """Only the second property has come so far, whatever the batch and its order."""
        positions, width = named["position_ids"], named["input_ids"].shape[1]
        sick = (positions.amax(dim=-1) > beyond).expand(len(outputs.logits))
        if in_prompt == (width > 6) and (in_prompt or positions.max() > beyond + 10):
            outputs.logits[sick, first:] = float("nan")
            spoilt.append(bool(outputs.logits.isnan().any()))

    hook = engine._model.register_forward_hook(spoil, with_kwargs=True)
    try:
        described = describe_batch(engine, SCHEMA, batch, 60)
    finally:
        hook.remove()
    assert any(spoilt)
    assert [one.error_kind for one in described] == [None, "impossible_scores", None]
    assert [described[at].description for at in (0, 2)] == [expected[at].description for at in (0, 2)]


def test_an_engine_around_a_model_is_closed(engine, batch):
    """What the benchmarks do with a model in memory: describe and close, with nothing left behind."""
    with engine._inputs._a_processor() as processor:
        around = TransformersEngine.around(
            engine._model, processor, grammar=engine._grammar, prompt=Prompt("Describe."), device="cpu"
        )
    assert len(around.describe(batch[:1], attempt=GREEDY)) == 1
    around.close()
    assert not hasattr(around, "_model")


def test_closing_after_a_device_error_keeps_that_error(engine, batch, monkeypatch):
    """A lost device fails at giving memory back as well; what is told is how it was lost."""
    import torch

    def lost(**_):
        around._device = "cuda"  # from here on: no CUDA build of torch is needed to get so far
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with engine._inputs._a_processor() as processor:
        around = TransformersEngine.around(
            engine._model, processor, grammar=engine._grammar, prompt=Prompt("Describe."), device="cpu"
        )
    monkeypatch.setattr(engine._model, "generate", lost)
    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    workers = SimpleNamespace(max_images=9, feed=lambda jobs: iter([batch]), close=lambda: None)
    with (
        pytest.raises(EngineLostError, match="illegal memory access"),
        Describing(around, workers, SCHEMA, 60, BatchSizes(8)) as describing,
    ):
        list(describing.describe(()))
    assert not hasattr(around, "_model")


class Garden(pydantic.BaseModel):
    """Another question about the same images."""

    trees: int = pydantic.Field(ge=0, le=9)
    fence: Literal["none", "wood"]


SECOND = FurtherQuestion(Prompt("Which garden has it, and how is it fenced?"), DescriptionSchema(Garden), 60)
FURTHER = replace(GREEDY, question=1)


@pytest.fixture(scope="module")
def both(model_folder):
    """An engine of two questions."""
    engine = TransformersEngine(
        ModelSource(str(model_folder)),
        schema=SCHEMA,
        prompt=Prompt("Describe the property."),
        device="cpu",
        further=[SECOND],
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def second(model_folder):
    """An engine of the second question alone."""
    engine = TransformersEngine(
        ModelSource(str(model_folder)), schema=SECOND.schema, prompt=SECOND.prompt, device="cpu"
    )
    yield engine
    engine.close()


def steps_of(engine, *asked):
    """The answers to some calls, how often images were looked at, and the tokens of a row in each step."""
    widths, looks = [], []
    hooks = [
        engine._model.register_forward_pre_hook(
            lambda model, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        ),
        engine._model.model.vision_model.register_forward_pre_hook(lambda *_: looks.append(1)),
    ]
    try:
        answers = [answer for batch, attempt in asked for answer in engine.describe(batch, attempt=attempt)]
    finally:
        for hook in hooks:
            hook.remove()
    return answers, len(looks), widths


def test_an_engine_of_one_question_computes_prompts_in_one_part(engine, batch):
    """Guards: who asks one question pays nothing for those who ask several."""
    answers, _, widths = steps_of(engine, (batch, GREEDY))
    assert widths[:2] == [max(answer.prompt_tokens for answer in answers), 1]
    assert engine._seen is None
    assert not engine.shares_images


def test_nothing_is_kept_after_the_last_question(both, second, batch):
    """Guards: the memory of a batch's images is free before the next; asked alone, prompts are one part."""
    expected = second.describe(batch, attempt=GREEDY)
    _, looks, widths = steps_of(both, (batch, GREEDY))
    assert (looks, widths[1] > 1) == (1, True)
    assert both._seen is not None
    answers, looks, _ = steps_of(both, (batch, FURTHER))
    assert (answers, looks) == (expected, 0)
    assert both._seen is None
    answers, looks, widths = steps_of(both, (batch, FURTHER))
    assert (answers, looks, widths[1]) == (expected, 1, 1)


def test_other_properties_are_looked_at_anew(both, second, batch, load_property):
    """Guards: what was computed of some images answers for no others, though ids and sizes be the same."""
    both.describe(batch, attempt=GREEDY)
    again = [load_property(one.property_id, len(one.images)) for one in batch]
    for asked in (again, [*batch, load_property("new", 2)]):
        both.describe(batch, attempt=GREEDY)
        answers, looks, _ = steps_of(both, (asked, FURTHER))
        assert (answers, looks) == (second.describe(asked, attempt=GREEDY), 1)


def test_a_retry_between_two_questions_costs_the_second_nothing(both, second, batch):
    """Guards: a first answer that is asked for again, at another temperature, leaves the images known."""
    both.describe(batch, attempt=GREEDY)
    both.describe(batch[2:4], attempt=Attempt(number=2, max_new_tokens=60, temperature=0.7))
    answers, looks, _ = steps_of(both, (batch, FURTHER))
    assert (answers, looks) == (second.describe(batch, attempt=GREEDY), 0)


def test_a_property_that_is_too_long_for_both_questions_costs_the_others_nothing(both, second, load_property):
    """Guards: it is refused for each question by its own tokens, and the others share their images."""
    batch = [load_property("long", 150), load_property("a", 2), load_property("b", 1)]
    both.describe(batch, attempt=GREEDY)
    (refused, *answers), looks, _ = steps_of(both, (batch, FURTHER))
    assert looks == 0
    expected, *others = second.describe(batch, attempt=GREEDY)
    assert (str(refused), refused.images) == (str(expected), expected.images)
    assert answers == others


def test_out_of_memory_gives_up_what_is_kept(both, second, batch, monkeypatch):
    """Guards: images that are kept take memory from the next question; it is answered all the same."""
    import torch

    both.describe(batch, attempt=GREEDY)
    generate, kept = both._model.generate, []

    def run_out_once(**inputs):
        kept.append(both._seen)
        if len(kept) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate(**inputs)

    monkeypatch.setattr(both._model, "generate", run_out_once)
    try:
        assert both.describe(batch, attempt=FURTHER) == second.describe(batch, attempt=GREEDY)
        assert (kept, both.largest_batch) == ([None] * 3, 3)
    finally:
        both.largest_batch = None


def test_images_that_look_at_the_text_after_them_are_not_shared(
    both, engine, second, batch, monkeypatch, caplog
):
    """Guards: where a prompt in two parts is not the prompt (prefix-LM), each question looks by itself."""

    def depend_on_what_follows(model, args, kwargs, outputs):
        outputs.logits += 0.1 * kwargs["input_ids"].shape[1] * outputs.logits.roll(1, dims=-1)

    hook = both._model.register_forward_hook(depend_on_what_follows, with_kwargs=True)
    try:
        assert not both._continues_alike()
    finally:
        hook.remove()
    assert "looks at the images anew for each question" in caplog.text
    monkeypatch.setattr(both, "shares_images", False)
    answers, looks, _ = steps_of(both, (batch, GREEDY), (batch, FURTHER))
    assert looks == 2
    assert answers == engine.describe(batch, attempt=GREEDY) + second.describe(batch, attempt=GREEDY)


def test_a_template_that_puts_text_first_shares_nothing(model_folder, batch):
    """Guards: images that come after a question's text depend on it; each question is asked by itself."""
    processor = load_processor(ModelSource(str(model_folder)))
    assert learn_endings(processor, ["Describe the property.", "Which garden?"]).tokens(1) > 1
    processor.chat_template = (
        "{% for message in messages %}{{ message['content'][-1]['text'] }}"
        "{% for part in message['content'][:-1] %}<image>{% endfor %}{% endfor %}<|answer|>"
    )
    assert learn_endings(processor, ["Describe the property.", "Which garden?"]) is None


def test_workers_tensors_serve_all_questions(both, second, batch, model_folder):
    """Guards: workers make the first question's prompt, and no image is processed for the others."""
    output = Tensors(
        ModelSource(str(model_folder)), "Describe the property.", "float32", further=(SECOND.prompt.text,)
    )
    make = output.load()
    made = [
        replace(one, tensors=make([Image.fromarray(image) for image in one.images]).tensors) for one in batch
    ]
    expected = second.describe(batch, attempt=GREEDY)
    assert both.describe(made, attempt=FURTHER) == expected
    both.describe(made, attempt=GREEDY)
    assert both.describe(made, attempt=FURTHER) == expected

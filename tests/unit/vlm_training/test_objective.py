"""Which images of a sample are shown, and how much each token of its answer is learned."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from pydantic import BaseModel

from vlm_assets.config.settings import EXAMPLE_MODEL
from vlm_engine.schema import load_schema
from vlm_training.objective import DescribeObjective, _Features, answer, load_images
from vlm_training.training_plan import Sample, TrainingPlan

LIMITS = {"pixels": 65_536, "images": 3, "answer_tokens": 256}
NAMES = {
    "variant": "tiny",
    "prompt": "Describe.",
    "schema": "tests.support.sure_answers:House",
    **dict.fromkeys(("base", "samples"), "a:b"),
}
PLAN = TrainingPlan(**NAMES, learning_rate=0.1, seed=1, batch=1, microbatches=1, limits=LIMITS)


def test_a_bad_address_is_an_image_that_cannot_be_read():
    """It costs this image, not the rank."""
    assert load_images(Sample("a", ("s3://No_Bucket/a.jpg", "s3://bucket/../a.jpg"), {}), PLAN) == []


class Room(BaseModel):
    """A nested object whose field has the name of another one."""

    name: str
    floors: int


class Flat(BaseModel):
    """Two fields of one name, at two depths."""

    room: Room
    name: str
    floors: int
    tags: list[str]


SCHEMA = load_schema(f"{__name__}:Flat")
TARGET = {"room": {"name": 'a "b" é', "floors": 7}, "floors": 12, "tags": ["x", "y"]}


def test_parts_of_an_answer_are_its_own_values():
    """The value of an unknown field is not learned, and each known one weighs as much as it is sure.

    Fields of nested objects may have the same names.
    """
    sure = {"room": {"floors": 0.5, "name": None}, "floors": 0.25, "tags": 0.75, "name": 0.1}
    text, hidden, weighed = answer(TARGET, SCHEMA, sure)
    assert text == '{"room":{"name":"a \\"b\\" é","floors":7},"name":"","floors":12,"tags":["x","y"]}'
    ((start, stop),) = hidden
    assert text[start - 8 : stop] == '"name":""'
    assert [(text[start:stop], weight) for start, stop, weight in weighed] == [
        ("7", 0.5), ('""', 0.1), ("12", 0.25), ('["x","y"]', 0.75),
    ]  # fmt: skip
    assert answer(TARGET, SCHEMA, {}) == (text, hidden, [])


@pytest.fixture
def model():
    """A model with the same scores, whatever it reads."""
    torch.manual_seed(0)
    scores = torch.randn(2, 9, 11)

    class Scores:
        device = "cpu"

        def __call__(self, **tensors):
            rows = len(tensors["input_ids"])
            return SimpleNamespace(logits=scores[:rows, : tensors["input_ids"].shape[1]])

    return Scores()


def features(labels, weights=None):
    labels = torch.tensor([labels])
    return _Features(
        {"input_ids": labels.clamp(0)}, labels, None if weights is None else torch.tensor([weights])
    )


def test_tokens_weigh_as_their_confidences_say_and_the_same_without_any(model):
    """Without confidences the loss is to the bit what it was; a weight of 0 learns nothing of a token."""
    objective = DescribeObjective(PLAN)
    labels = [-100, 3, 4, 5, 6]
    plain, count = objective.loss(model, None, [features(labels)], step=0)
    scores = model(input_ids=torch.zeros(1, 5)).logits[:, :-1][0]
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor(labels[1:]), reduction="sum")
    assert (float(plain), count) == (float(expected), 4.0)
    each = torch.nn.functional.cross_entropy(scores, torch.tensor(labels[1:]), reduction="none")
    weighed, count = objective.loss(model, None, [features(labels, [0.0, 1.0, 0.5, 0.0, 1.0])], step=0)
    assert (float(weighed), count) == (pytest.approx(float(each[0] + each[1] / 2 + each[3])), 2.5)


def test_a_batch_may_mix_samples_with_and_without_confidences(model):
    """Rows of an earlier version have none: their tokens weigh 1."""
    objective = DescribeObjective(PLAN)
    objective._processor = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
    objective._joins = {"input_ids": "padded with 0"}
    samples = [features([-100, 3, 4]), features([-100, 5, 6, 7], [0.0, 0.5, 0.5, 1.0])]
    (batch,) = objective.collate(samples)
    assert batch.weights.tolist() == [[1.0, 1.0, 1.0, 0.0], [0.0, 0.5, 0.5, 1.0]]
    _, count = objective.loss(model, None, [batch], step=0)
    assert count == 4.0
    (plain,) = objective.collate([samples[0], samples[0]])
    assert plain.weights is None


def test_a_sample_of_an_unsure_teacher_has_the_weight_of_each_token(tmp_path):
    """The weights stand at the tokens of the values, as the model's tokenizer writes them."""
    Image.new("RGB", (64, 48), "red").save(tmp_path / "1.jpg")
    plan = TrainingPlan(
        **NAMES | {"base": str(EXAMPLE_MODEL)},
        learning_rate=0.1, seed=1, batch=1, microbatches=1, limits=LIMITS,
    )  # fmt: skip
    objective = DescribeObjective(plan)
    images, target = (str(tmp_path / "1.jpg"),), {"floors": 12, "has_pool": False}
    plain = objective.features(Sample("p", images, target), 0)
    made = objective.features(Sample("p", images, target, {"floors": 0.5}), 0)
    assert plain.weights is None
    assert torch.equal(plain.labels, made.labels)
    ids, weights = made.tensors["input_ids"][0], made.weights[0]
    assert weights.shape == ids.shape
    decoded = objective._processor.tokenizer.decode
    assert "12" in decoded(ids[weights == 0.5])
    rest = decoded(ids[weights == 1.0])
    assert "floors" in rest
    assert "false" in rest
    assert "12" not in rest

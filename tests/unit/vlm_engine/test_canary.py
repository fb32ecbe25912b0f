"""The canary: any flipped bit is found, sound devices agree, and a device that differs is left out."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from examples.rendered_properties import list_properties, write_example
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.config.settings import load_settings
from vlm_durable.state.database import ControlState
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.state.tables import good_canaries
from vlm_engine.canary import (
    Canary,
    WrongAnswersError,
    canary_properties,
    read_failed,
    weights_checksum,
)
from vlm_engine.devices.find import Device
from vlm_engine.devices.left_out import LeftOutDevices
from vlm_engine.images.images import LoadedProperty, Pixels, load_image
from vlm_engine.prompt import build_prompt
from vlm_engine.protocol import Attempt, CanaryAnswer, ImpossibleScoresError, RequestTooLargeError
from vlm_engine.schema import load_schema
from vlm_engine.transformers.drafting import Drafts

QUICK, LONG, ENGINES = 20, 1000, 4


def slot(number: int) -> Device:
    return Device(f"cpu-{number}", "cpu", f"CPU slot {number} of 9", None, "", threads=1)


@dataclass
class Answering:
    """An engine that answers the canary by a list; the last answer for ever. "NaN": no numbers."""

    answers: list[str | None] = field(default_factory=lambda: ["right"])
    versions: str = "torch 1"

    def canary(self) -> CanaryAnswer | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "NaN":
            raise ImpossibleScoresError
        return None if answer is None else CanaryAnswer(answer, self.versions)


@pytest.fixture
def state(tmp_path):
    return ControlState(tmp_path / ".state")


@pytest.fixture
def work(state):
    """Works on a partition on a slot whose engine gives these answers."""
    seconds = iter(range(1000, 9000))

    def do(number: int, *answers: str | None, meaning: str = "m", versions: str = "torch 1") -> None:
        engine = Answering(list(answers), versions)
        canary = Canary(state, slot(number), f"a/{number}", meaning, clock=lambda: float(next(seconds)))
        canary.begin(engine)
        canary.end(engine)

    return do


def left_out(state) -> set[str]:
    return set(LeftOutDevices(state).left_out())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float64", "bool"])
def test_the_checksum_finds_each_flipped_bit(dtype):
    """Of any type and size, a whole number of words or not, and wherever in its storage it begins."""
    import torch

    model = torch.nn.Module()
    base = torch.arange(23).to(getattr(torch, dtype))
    for name, part in {"whole": base[:16], "odd": base[:11], "offset": base[3:14], "one": base[7]}.items():
        model.register_buffer(name, part.clone() if name != "offset" else part)
    before = weights_checksum(model)
    for tensor in model.buffers():
        bits = tensor.view(torch.uint8).view(-1) if tensor.dim() else tensor.view(1).view(torch.uint8)
        for at in range(len(bits)):
            for bit in range(1 if dtype == "bool" else 8):
                bits[at] ^= 1 << bit
                assert weights_checksum(model) != before, (dtype, at, bit)
                bits[at] ^= 1 << bit
    assert weights_checksum(model) == before


def test_the_pixels_of_the_canary_never_change():
    """Known answers are for these: other pixels would refuse every device."""
    import hashlib

    properties = canary_properties(Pixels().load())
    assert [[image.shape for image in one.images] for one in properties] == [
        [(96, 128, 3)],
        [(128, 128, 3), (160, 96, 3)],
    ]
    pixels = b"".join(np.ascontiguousarray(image).tobytes() for one in properties for image in one.images)
    assert hashlib.sha256(pixels).hexdigest()[:16] == "8b5d5410e733c1c3"


def test_an_answer_is_known_once_begin_and_end_agree(work, state):
    """A device that differs from two others is refused before it has begun."""
    work(0, "right")
    work(1, "right")
    with pytest.raises(
        WrongAnswersError, match=r"those which two devices have given.*Nothing was begun"
    ) as refused:
        work(2, "wrong")
    assert not refused.value.rows_in_doubt
    assert left_out(state) == {"cpu-2"}
    work(0, "right")


def test_what_changes_between_begin_and_end_is_not_known(work, state):
    """The answer of a device that changed its mind is no answer: the next device is not measured by it."""
    with pytest.raises(WrongAnswersError, match="changed between begin and end") as found:
        work(0, "one", "another")
    assert found.value.rows_in_doubt
    assert left_out(state) == {"cpu-0"}
    work(1, "another")
    assert [one.device for one in read_failed(state)] == ["cpu-0"]


def test_other_models_and_versions_have_answers_of_their_own(work):
    """A change of the model is no sick device."""
    work(0, "right")
    work(0, "else", meaning="another model")


def test_of_two_that_differ_neither_is_left_out(work, state, caplog):
    """One sick device that answers first stops no sound one; two that agree then refuse it."""
    work(0, "wrong")
    work(1, "right")
    assert "One of the two may be sick" in caplog.text
    work(0, "wrong")
    assert not left_out(state)
    work(1, "right")
    work(2, "right")
    with pytest.raises(WrongAnswersError):
        work(0, "wrong")
    assert left_out(state) == {"cpu-0"}


def test_what_two_have_given_meanwhile_refuses_at_the_end(work, state):
    """Nothing was known when it began; what two devices have given does not make way for it."""
    canary, engine = Canary(state, slot(5), "a/5", "m"), Answering(["wrong"])
    canary.begin(engine)
    work(0, "right")
    work(1, "right")
    with pytest.raises(WrongAnswersError) as found:
        canary.end(engine)
    assert found.value.rows_in_doubt
    work(2, "right")
    with pytest.raises(WrongAnswersError):
        work(3, "wrong")


def test_what_is_not_known_as_a_whole_is_compared_with_itself_alone(work, state):
    """A server's options move the last digits: another process of it may answer otherwise."""
    work(0, "one", versions="")
    work(1, "one", versions="")
    work(2, "another", versions="")
    assert not left_out(state)
    with pytest.raises(WrongAnswersError):
        work(2, "another", "changed", versions="")


def test_no_numbers_are_no_answer_that_can_be_right(work, state):
    """At the begin the first batch tells; at the end nothing is published."""
    work(0, "NaN")
    assert not left_out(state)
    with pytest.raises(WrongAnswersError, match="no numbers") as found:
        work(0, "right", "NaN")
    assert found.value.rows_in_doubt


def test_a_clock_that_was_ahead_hides_no_rows(work, state):
    """A last good canary of the future vouches for nothing that is known."""
    work(0, "right")
    state.write(lambda connection: connection.execute(good_canaries.update().values(at=1e9)))
    with pytest.raises(WrongAnswersError):
        work(0, "right", "wrong")
    (failed,) = read_failed(state)
    assert failed.good_at is None


def test_rows_since_the_last_good_end_are_in_doubt(work, state):
    """An answer at a begin vouches for nothing: its weights were loaded anew."""
    work(0, "right")
    with pytest.raises(WrongAnswersError):
        work(0, "right", "wrong")
    (failed,) = read_failed(state)
    good, found = failed.good_at, failed.at
    assert failed.covers("cpu-0", found, found)
    assert failed.covers("cpu-0", good - 1, good + 0.5)
    assert not failed.covers("cpu-0", good - 1, good)
    assert not failed.covers("cpu-0", found + 1, found + 2)
    assert not failed.covers("cpu-1", found, found)


def test_what_two_devices_have_given_is_forgotten_with_a_word_of_a_person(work, state):
    """An update that changes all answers locks nobody out, not even the only device that is left."""
    work(0, "before")
    work(1, "before")
    with pytest.raises(WrongAnswersError):
        work(0, "after")
    LeftOutDevices(state).take_back("cpu-0")
    work(0, "after")
    work(1, "after")
    with pytest.raises(WrongAnswersError):
        work(2, "before")


def test_an_engine_that_cannot_be_asked_works_all_the_same(work, state):
    """A server that others may ask too, one that fails at the end, and engines of other people."""
    work(0, None)
    work(0, "right", None)
    Canary(state, slot(0), "a/0", "m").begin(object())
    assert not left_out(state)


def test_without_the_control_state_begin_and_end_are_compared(state, monkeypatch):
    """Rows are committed without it, and wrong ones are not published without it either."""

    def away(*_, **__):
        raise ControlStateError("it is away")

    monkeypatch.setattr(state, "read", away)
    monkeypatch.setattr(state, "write", away)
    canary = Canary(state, slot(0), "a/0", "m")
    engine = Answering(["right"])
    canary.begin(engine)
    canary.end(engine)
    engine.answers = ["wrong"]
    with pytest.raises(WrongAnswersError, match="could not be left out"):
        canary.end(engine)


@pytest.fixture(scope="module")
def example():
    """Loads the example model, on one CPU slot."""
    settings = load_settings(model="example", devices="cpu:1")
    schema = load_schema(settings.description_schema)
    prompt = build_prompt(schema, settings.prompt)
    model = build_vision_language_model(settings)
    return lambda: model.load(slot(0), schema=schema, prompt=prompt)


@pytest.fixture(scope="module")
def batch(tmp_path_factory) -> list[LoadedProperty]:
    """Properties that are described in between."""
    folder: Path = tmp_path_factory.mktemp("example")
    listing = write_example(folder, properties=12, seed=7)
    loaded = []
    for at, one in enumerate(list_properties(properties=12, seed=7)):
        if one.hard is None:
            names = [listing.parent / name for name in one.images[:4]]
            images = [np.array(load_image(name, max_pixels=1 << 20)) for name in names]
            loaded.append(LoadedProperty(f"p{at}", at, images, len(images), (), 0.0))
    return loaded


def test_the_canary_leaves_no_trace(example, batch, monkeypatch):
    """Drafts, seconds and answers are what they would be without it."""
    plain, asked = example(), example()
    asked.canary()
    assert asked.seconds == {"processor": 0.0, "prefill": 0.0, "generation": 0.0}
    first = plain.describe(batch, attempt=Attempt(1, 60))
    assert asked.describe(batch, attempt=Attempt(1, 60)) == first
    learned = []
    monkeypatch.setattr(Drafts, "learn", lambda *arguments: learned.append(arguments))
    asked.canary()
    assert not learned
    asked.describe(batch, attempt=Attempt(1, 60))
    assert learned
    for engine in (plain, asked):
        engine.close()


def test_memory_that_another_has_taken_makes_no_device_sick(example, batch, monkeypatch):
    """Where two properties do not fit any more it is not asked, and later batches are as large as before."""
    engine = example()
    answered = engine._answered_or_none
    monkeypatch.setattr(
        engine, "_answered_or_none", lambda some, how: None if len(some) > 1 else answered(some, how)
    )
    assert engine.canary() is None
    assert engine.largest_batch is None

    def full(*_, **__):
        raise RequestTooLargeError("out_of_memory", "full")

    monkeypatch.setattr(engine, "_described", full)
    assert engine.canary() is None
    engine.close()


@pytest.mark.parametrize(
    "canaries", [QUICK, pytest.param(LONG, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_no_canary_of_a_sound_device_is_a_false_alarm(example, batch, canaries):
    """Engine after engine, with batches in between: the same digest each time."""
    digests = set()
    for at in range(canaries):
        if at % (canaries // ENGINES) == 0:
            engine = example()
        if at % 5 == 1:
            engine.describe(batch[at % 7 :][:4], attempt=Attempt(1, 40))
        digests.add(engine.canary())
    assert len(digests) == 1

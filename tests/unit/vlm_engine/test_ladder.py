"""The retry ladder, against an engine that answers by a script."""

import json
from dataclasses import replace
from typing import get_args

import pydantic
import pytest

from vlm_engine.images.images import ImageErrorKind, ImageFailure
from vlm_engine.ladder import (
    RAW_TEXT_LIMIT,
    TRANSIENT_KINDS,
    describe_batch,
    next_attempt,
    repeated_tail,
)
from vlm_engine.protocol import (
    Answer,
    AnswerTokens,
    Attempt,
    EngineError,
    EngineLostError,
    ImpossibleScoresError,
    RequestTooLargeError,
)
from vlm_engine.schema import DescriptionSchema


class House(pydantic.BaseModel):
    """One field is enough."""

    storeys: int


GOOD = Answer('{"storeys":2}', "stop", 10, 5)
BAD = Answer('{"storeys":"two"}', "stop", 10, 5)
GARBAGE = Answer("no idea", "stop", 10, 5)
CUT = Answer('{"storeys":', "length", 10, 8)
REPEATING = Answer('{"storeys":' + "12" * 100, "length", 10, 8)
SETTINGS = 100


class ScriptedEngine:
    """Answers each property by its list of answers or errors; an error spoils the whole call."""

    model = "scripted"
    revision = "1"

    def __init__(self, **scripts):
        self.scripts = {name: list(script) for name, script in scripts.items()}
        self.calls = []

    def describe(self, batch, *, attempt):
        """Each property's next answer, or its error."""
        self.calls.append(([one.property_id for one in batch], attempt))
        for one in batch:
            if isinstance(self.scripts[one.property_id][0], BaseException):
                raise self.scripts[one.property_id][0]
        return [self.scripts[one.property_id].pop(0) for one in batch]

    def attempts(self, property_id):
        """The attempts in which this property was asked."""
        return [attempt for ids, attempt in self.calls if property_id in ids]


@pytest.fixture
def describe(load_property):
    schema = DescriptionSchema(House)

    def run(engine, *, images=4):
        batch = [load_property(name, images) for name in engine.scripts]
        return describe_batch(engine, schema, batch, SETTINGS)

    return run


def test_good_answers_take_one_call(describe):
    """Sound answers cost one call for the batch, in order, with what was asked at first."""
    engine = ScriptedEngine(a=[GOOD], b=[GOOD])
    first, second = describe(engine)
    assert engine.calls == [(["a", "b"], Attempt(1, 100))]
    assert (first.property_id, second.property_id) == ("a", "b")
    assert (first.status, first.description, first.attempts) == ("ok", {"storeys": 2}, 1)
    assert (first.raw_text, first.error_kind, first.finish_reason) == (None, None, "stop")
    assert (first.images_seen, first.prompt_tokens, first.output_tokens) == (4, 10, 5)


def test_only_the_culprit_is_asked_again(describe):
    """A refused answer is asked again alone; its neighbours keep their first answer."""
    engine = ScriptedEngine(a=[GOOD], b=[BAD, GOOD], c=[GOOD])
    results = describe(engine)
    assert [ids for ids, _ in engine.calls] == [["a", "b", "c"], ["b"]]
    assert [result.attempts for result in results] == [1, 2, 1]
    assert all(result.status == "ok" for result in results)
    assert results[1].prompt_tokens == 20


def test_the_confidence_is_that_of_the_answer_which_counts(describe):
    """An answer that was refused leaves nothing of it, and a failed row has none."""

    def scored(answer, *tokens):
        known = AnswerTokens()
        for text, probability in tokens:
            known.add(text, probability, (), ())
        return replace(answer, tokens=known)

    bad = scored(BAD, (b'{"storeys":', 1.0), (b'"two"}', 0.25))
    good = scored(GOOD, (b'{"storeys":', 1.0), (b"2", 0.75), (b"}", 0.5))
    first, second = describe(ScriptedEngine(a=[bad, good], b=[bad] * 4))
    assert (first.attempts, first.confidence) == (2, {"storeys": 0.375})
    assert (second.status, second.confidence) == ("failed", None)


def test_properties_on_the_same_rung_share_a_call(describe):
    """Retries are batched too, so that many bad answers do not run one by one."""
    engine = ScriptedEngine(a=[BAD, GOOD], b=[GARBAGE, GOOD], c=[CUT, GOOD])
    describe(engine)
    assert [ids for ids, _ in engine.calls] == [["a", "b", "c"], ["a", "b"], ["c"]]


def test_rungs_of_a_truncated_answer(describe):
    """More tokens, then another temperature, then fewer images, then a failed row with all that was said."""
    engine = ScriptedEngine(a=[CUT] * 4)
    (result,) = describe(engine)
    assert engine.attempts("a") == [
        Attempt(1, 100),
        Attempt(2, 200),
        Attempt(3, 200, temperature=0.7),
        Attempt(4, 200, images=2),
    ]
    assert (result.status, result.error_kind, result.attempts) == ("failed", "truncated", 4)
    assert (result.raw_text, result.description, result.finish_reason) == (CUT.text, None, "length")
    assert (result.images_seen, result.output_tokens) == (2, 32)


@pytest.mark.parametrize(
    ("answer", "kind"), [(BAD, "schema_mismatch"), (GARBAGE, "invalid_json"), (REPEATING, "repetition")]
)
def test_more_tokens_only_where_tokens_ran_out(describe, answer, kind):
    """What more tokens cannot change goes to another temperature at once."""
    engine = ScriptedEngine(a=[answer] * 3)
    (result,) = describe(engine)
    assert [attempt.max_new_tokens for attempt in engine.attempts("a")] == [100] * 3
    assert [attempt.temperature for attempt in engine.attempts("a")] == [0, 0.7, 0]
    assert result.error_kind == kind
    assert result.error


def test_single_image_has_no_fewer(describe):
    """A property of one image is given up without asking for none."""
    engine = ScriptedEngine(a=[BAD] * 2)
    (result,) = describe(engine, images=1)
    assert (result.status, result.attempts, result.images_seen) == ("failed", 2, 1)


def test_complete_answer_at_the_limit_counts(describe):
    """An answer that is whole is taken, even where the limit and its end fell together."""
    (result,) = describe(ScriptedEngine(a=[Answer(GOOD.text, "length", 10, 100)]))
    assert (result.status, result.finish_reason) == ("ok", "length")


def test_raw_text_is_bounded(describe):
    """However long a bad answer is, its row stays small."""
    (result,) = describe(ScriptedEngine(a=[Answer("x" * 100_000, "stop", 1, 1)] * 3))
    assert len(result.raw_text) == RAW_TEXT_LIMIT


def test_engine_error_of_one_property(describe):
    """A property that makes the engine raise fails alone; the others of its batch are described."""
    engine = ScriptedEngine(a=[GOOD], b=[ValueError("odd image")], c=[GOOD])
    results = describe(engine)
    assert [result.status for result in results] == ["ok", "failed", "ok"]
    assert (results[1].error_kind, results[1].error) == ("engine_error", "ValueError: odd image")
    assert [ids for ids, _ in engine.calls] == [["a", "b", "c"], ["a"], ["b"], ["c"]]


def test_errors_beside_answers_cost_no_second_call(describe):
    """An engine that tells each property's own error is not asked again for the others."""

    class TellingEngine(ScriptedEngine):
        def describe(self, batch, *, attempt):
            self.calls.append(([one.property_id for one in batch], attempt))
            return [self.scripts[one.property_id].pop(0) for one in batch]

    too_long = RequestTooLargeError("prompt_too_long", "9 of 8 tokens")
    engine = TellingEngine(a=[GOOD], b=[EngineError("refused")], c=[too_long, GOOD])
    first, second, third = describe(engine)
    assert [ids for ids, _ in engine.calls] == [["a", "b", "c"], ["c"]]
    assert (first.status, third.status, third.images_seen) == ("ok", "ok", 2)
    assert (second.error_kind, second.error) == ("engine_error", "refused")


def test_too_large_property_gets_fewer_images(describe):
    """What does not fit goes down by halves to one image before it is given up."""
    error = RequestTooLargeError("out_of_memory", "9 images are too many")
    engine = ScriptedEngine(a=[error])
    (result,) = describe(engine, images=9)
    assert [attempt.images for attempt in engine.attempts("a")] == [None, 5, 3, 2, 1]
    assert (result.error_kind, result.error, result.attempts) == ("out_of_memory", "9 images are too many", 5)


def test_what_fits_is_asked_next_where_it_is_known(describe):
    """No halves are tried where the engine says how many images fit; the row says why there are fewer."""
    engine = ScriptedEngine(a=[RequestTooLargeError("prompt_too_long", "9 are too many", images=7)])
    answer = engine.describe

    def describe_fewer(batch, *, attempt):
        if attempt.images == 7:
            engine.scripts["a"] = [GOOD]
        return answer(batch, attempt=attempt)

    engine.describe = describe_fewer
    (result,) = describe(engine, images=9)
    assert [attempt.images for attempt in engine.attempts("a")] == [None, 7]
    assert (result.status, result.images_seen) == ("ok", 7)
    assert result.fewer_images == "prompt_too_long: 9 are too many"


@pytest.mark.parametrize("error", [EngineLostError("CUDA error"), MemoryError()])
def test_lost_engine_ends_the_batch(describe, error):
    """A lost device or memory is no property's fault: nothing is marked failed, the error goes up."""
    engine = ScriptedEngine(a=[GOOD], b=[error])
    with pytest.raises(EngineLostError):
        describe(engine)
    assert len(engine.calls) == 1


def test_interrupt_goes_up(describe):
    """An interrupt is not swallowed as one property's error."""
    with pytest.raises(KeyboardInterrupt):
        describe(ScriptedEngine(a=[KeyboardInterrupt()]))


def test_missing_answers_are_noticed(load_property):
    """An engine that drops a property costs that property, and shifts nobody's answer to another."""

    class Dropping(ScriptedEngine):
        def describe(self, batch, *, attempt):
            return super().describe(batch, attempt=attempt)[1:] if len(batch) > 1 else [GOOD]

    batch = [load_property(name, 1) for name in "ab"]
    results = describe_batch(Dropping(a=[GOOD], b=[GOOD]), DescriptionSchema(House), batch, SETTINGS)
    assert [result.status for result in results] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        ([], "no_images"),
        (["missing", "unreadable", "unreadable"], "unreadable"),
        (["missing"], "missing"),
    ],
)
def test_no_readable_image(load_property, kinds, kind):
    """Without an image the model is not asked, and the row says what was commonest among the failures."""
    failed = [ImageFailure(f"{at}.jpg", one, f"{one} indeed") for at, one in enumerate(kinds)]
    engine = ScriptedEngine(b=[GOOD])
    batch = [load_property("a", 0, failed=failed), load_property("b", 2)]
    result, other = describe_batch(engine, DescriptionSchema(House), batch, SETTINGS)
    assert [ids for ids, _ in engine.calls] == [["b"]]
    assert (result.status, result.error_kind, result.attempts, result.images_seen) == ("failed", kind, 0, 0)
    assert result.images_failed == tuple(failed)
    assert other.status == "ok"
    if kinds:
        assert f"{kind} indeed" in result.error


def test_ladder_ends():
    """Whatever happens on each rung, the ladder ends within a few attempts."""
    for kind in ("truncated", "invalid_json", "prompt_too_long", "out_of_memory", "engine_error"):
        attempt, rungs = Attempt(1, 100), 1
        while (following := next_attempt(kind, attempt, 12, SETTINGS)) is not None:
            assert following.number == attempt.number + 1
            attempt, rungs = following, rungs + 1
        assert rungs <= 5


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("a" * 48, "a"),
        (json.dumps({"a": "x"}) + "the end, " * 6, "the end, "),
        ("a" * 47, None),
        ("the quick brown fox jumps over the lazy dog and goes home again", None),
        ("", None),
    ],
)
def test_repeated_tail(text, unit):
    """Repetition is seen at the end of a text, and not in ordinary ones."""
    assert repeated_tail(text) == unit


def test_failures_of_the_moment_are_tried_again(describe):
    """A kind that is renamed where it arises must not silently become permanent."""
    errors = ValueError("odd"), ImpossibleScoresError(), RequestTooLargeError("out_of_memory", "too many")
    kinds = {describe(ScriptedEngine(a=[error]), images=1)[0].error_kind for error in errors}
    assert kinds <= TRANSIENT_KINDS <= kinds | set(get_args(ImageErrorKind))


def test_what_a_person_must_put_right_is_not_tried_again():
    """Missing, damaged or forbidden images, and answers that come out the same."""
    permanent = {"missing", "denied", "unreadable", "too_large", "truncated", "schema_mismatch", "no_images"}
    assert not permanent & TRANSIENT_KINDS
    assert {"io_error", "timed_out", "engine_error", "out_of_memory"} <= TRANSIENT_KINDS

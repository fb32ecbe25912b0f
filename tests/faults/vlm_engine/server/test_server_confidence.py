"""The confidence of a server's answers: only where its probabilities are those after the grammar's mask."""

import math

import pytest

from vlm_engine.confidence import confidence_of
from vlm_engine.protocol import Attempt

FIRST = Attempt(number=1, max_new_tokens=50)
PROVEN = [
    ("{", 1.0, {}),
    ('"word":"', 0.5, {'"': 0.5}),
    ("z", 0.5, {"zq": 0.2, "q": 0.25, "qz": 0.049}),
    ('q"}', 0.6, {"q": 0.4}),
]
"""The mask leaves two values: ways to write them share all of the probability."""

MIRRORED = [
    ('{"word":', 0.9, {'{ "': 0.1}),
    ('"q', 0.7, {'"z': 0.25, '"': 0.05}),
    ("z", 1.0, {}),
    ('"}', 1.0, {}),
]
"""The same where the model takes the second value, with its mark in one token."""

UNMASKED = [("{", 1.0, {}), ('"word":"', 1.0, {}), ("z", 0.001, {"sun": 0.9, "q": 0.001}), ('q"}', 1.0, {})]
"""What the grammar forces is skipped and has the probability 1; a choice has its own without the mask."""

ONE_SHOWN = [("{", 1.0, {}), ('"word":"', 1.0, {}), ("z", 1.0, {"q": 0.0}), ('q"}', 1.0, {})]
"""Each token that was taken has the probability 1, whatever the model found probable."""

NOT_ALL = [("{", 1.0, {}), ('"word":"', 1.0, {}), ("q", 0.6, {"z": 0.3}), ('z"}', 1.0, {})]
"""One in ten for what the schema does not allow."""

THIRD = [("{", 1.0, {}), ('"word":"', 1.0, {}), ("q", 0.6, {"z": 0.4}), ('z"}', 0.5, {"q": 0.5})]
"""A third word after the first letter of the second."""

STOREYS = [('{"storeys":', 1.0, {}), ("2", 0.6, {"1": 0.3, "3": 0.05}), ("}", 0.9, {"0": 0.1})]


def entry(text, probability):
    logarithm = math.log(probability) if probability else -9999.0
    return {"token": text, "logprob": logarithm, "bytes": list(text.encode())}


def scored(tokens, *, end="<|end|>"):
    """An answer in events of one token each, as vLLM gives it: the token that ends it is among the scores."""

    def react(handler):
        handler.begin_stream()
        for text, probability, others in [*tokens, (end, 1.0, {})]:
            likeliest = [entry(*option) for option in {text: probability, **others, "no": 0.0}.items()]
            logprobs = {"content": [{**entry(text, probability), "top_logprobs": likeliest}]}
            shown = "" if text == end else text
            finish = "stop" if text == end else None
            choice = {"index": 0, "delta": {"content": shown}, "logprobs": logprobs, "finish_reason": finish}
            handler.event({"choices": [choice]})
        handler.write(b"data: [DONE]\n\n")

    return react


def confidences(engine, schema, *properties, attempt=FIRST):
    answers = engine.describe(properties, attempt=attempt)
    return [confidence_of(schema.fields, answer.text, answer.tokens) for answer in answers]


@pytest.mark.parametrize("proven", [PROVEN, MIRRORED], ids=["first", "second"])
def test_a_server_whose_probabilities_are_masked_is_asked_for_them(engine, stub, schema, load, proven):
    """One question proves it, before the first property is asked; then each answer has its confidence."""
    stub.proof, stub.otherwise = scored(proven), scored(STOREYS)
    found = confidences(engine, schema, *(load(str(at)) for at in range(4)))
    assert found == [{"storeys": pytest.approx(0.6 * 0.9)}] * 4
    assert all(body["logprobs"] and body["top_logprobs"] == 5 for body in stub.asked)


@pytest.mark.parametrize(
    "proof",
    [
        scored(UNMASKED),
        scored(ONE_SHOWN),
        scored(NOT_ALL),
        scored(THIRD),
        scored([("sun", 1.0, {})]),
        scored([('{"word":"zq"', 1.0, {}), ("}}", 1.0, {})], end="}"),
        None,
    ],
)
def test_probabilities_that_are_not_proven_are_not_asked_for(engine, stub, schema, load, failing, proof):
    """A server that ignores the schema, says what it wanted without it, or knows no probabilities.

    The two values must share all of the probability, and both must be shown.
    """
    stub.proof = proof or failing.answer('{"word":"zq"}')
    stub.otherwise = scored(STOREYS)
    engine.describe([load("a"), load("b")], attempt=FIRST)
    assert not any("logprobs" in body or "top_logprobs" in body for body in stub.asked)


def test_a_proof_that_fails_is_tried_again_after_an_answer(engine, stub, schema, load, failing):
    """A server that is busy at first costs the first answers their confidence, and no property its answer."""
    stub.proof = failing.status(503)
    assert [answer.text for answer in engine.describe([load("a")], attempt=FIRST)] == ['{"storeys":2}']
    stub.proof, stub.otherwise = scored(PROVEN), scored(STOREYS)
    assert confidences(engine, schema, load("b")) == [{"storeys": pytest.approx(0.54)}]


def test_nothing_is_asked_of_a_temperature_or_without_a_grammar(engine, stub, schema, load, failing):
    """Probabilities may be those at the temperature, and without a grammar there is no mask."""
    stub.proof, stub.otherwise = scored(PROVEN), scored(STOREYS)
    sampled = Attempt(number=3, max_new_tokens=50, temperature=0.7)
    engine.describe([load("a")], attempt=sampled)
    stub.script.append(failing.status(400, "Grammar error: unimplemented keys"))
    engine.describe([load("b")], attempt=FIRST)
    engine.describe([load("c")], attempt=FIRST)
    assert ["logprobs" in body for body in stub.asked] == [False, True, False, False]


@pytest.mark.parametrize(
    "scores",
    [
        {"content": [{"token": 7}]},
        {"content": [{**entry('{"storeys":', 1.0), "logprob": 3.0, "top_logprobs": []}]},
    ],
)
def test_scores_in_another_form_cost_the_confidence_alone(engine, stub, schema, load, scores):
    """Whatever a server writes beside its text, the text counts."""

    def react(handler):
        handler.begin_stream()
        for text, logprobs in (('{"storeys":', scores), ("2}", None)):
            choice = {"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
            handler.event({"choices": [choice]})
        handler.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})

    stub.proof, stub.otherwise = scored(PROVEN), react
    (answer,) = engine.describe([load("a")], attempt=FIRST)
    assert (answer.text, answer.tokens) == ('{"storeys":2}', None)

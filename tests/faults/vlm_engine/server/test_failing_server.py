"""The engine against a server that fails in every way that one can: a property pays, never the batch."""

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pydantic
import pytest

from tests.support.waiting import wait_until
from vlm_engine.ladder import describe_batch
from vlm_engine.prompt import FurtherQuestion, Prompt
from vlm_engine.protocol import Answer, Attempt, EngineError, EngineLostError, RequestTooLargeError
from vlm_engine.schema import DescriptionSchema
from vlm_engine.server.chat_completions import RequestLimits
from vlm_engine.server.model_server import (
    MOST_RESTARTS,
    ServerDownError,
    ServerOutageError,
    ServerStartError,
)
from vlm_engine.server.pacing import AdaptiveLimit
from vlm_engine.server.property_requests import MOST_BUSY_TRIES, MOST_TRIES

FIRST = Attempt(number=1, max_new_tokens=50)
GOOD = Answer('{"storeys":2}', "stop", 70, 9)


def describe(engine, *properties):
    return list(engine.describe(properties, attempt=FIRST))


def test_answers_come_in_the_order_of_the_batch(engine, stub, failing, load):
    """Requests go together; whoever answers first, each property gets its own answer."""
    two = threading.Barrier(2, timeout=10)

    def answer_together(images):
        def react(handler):
            two.wait()
            failing.answer(f'{{"storeys":{images}}}')(handler)

        return react

    for images in range(1, 7):
        stub.by_images[images] = answer_together(images)
    answers = describe(engine, *(load(f"p{images}", images) for images in range(1, 7)))
    assert [answer.text for answer in answers] == [f'{{"storeys":{images}}}' for images in range(1, 7)]
    assert set(stub.keys) == {"Bearer secret"}


def test_each_question_has_its_own_prompt_and_schema(start_engine, stub, load):
    """Guards: a further question is asked of the same images, after which its own text and schema come."""

    class Garden(pydantic.BaseModel):
        trees: int

    engine = start_engine(further=[FurtherQuestion(Prompt("Which garden?"), DescriptionSchema(Garden), 9)])
    for question in (0, 1):
        engine.describe([load()], attempt=replace(FIRST, question=question))
    first, second = (body for body in stub.asked if "response_format" in body)
    *images, text = second["messages"][0]["content"]
    assert images == first["messages"][0]["content"][:-1]
    assert text["text"] == "Which garden?"
    assert list(second["response_format"]["json_schema"]["schema"]["properties"]) == ["trees"]


@pytest.mark.parametrize(
    "fault",
    [
        "cut",
        ("status", 500, "Internal Server Error"),
        ("status", 502, "<html>Bad Gateway</html>"),
        ("body", b"<html>It works!</html>", "text/html"),
        ("body", b'{"choices":[]}'),
        ("body", b"{}"),
        ("body", b"\x00\xff", "text/event-stream"),
        ("body", b"data: {}", "text/event-stream; charset=zlib"),
        "compressed",
    ],
    ids=str,
)
def test_fault_is_asked_again(engine, stub, failing, load, fault):
    """A cut, an error, garbage: the next try brings the answer."""
    name, *arguments = fault if isinstance(fault, tuple) else (fault,)
    reaction = getattr(failing, name)
    stub.script.append(reaction(*arguments) if arguments else reaction)
    assert describe(engine, load()) == [GOOD]
    assert len(stub.asked) == 2


@pytest.mark.parametrize("fault", ["hang", "fall_silent", "drip"])
def test_silence_is_asked_again(start_engine, hasty, stub, failing, load, fault):
    """Nothing at all, comments that keep a connection alive, tokens without end: given up, asked again."""
    engine = start_engine(limits=hasty)
    stub.script.append(getattr(failing, fault))
    assert describe(engine, load()) == [GOOD]
    assert len(stub.asked) >= 2


def test_fault_that_stays_costs_one_property(engine, stub, failing, load, schema):
    """One property whose request always fails ends as engine_error; its neighbours are described once."""
    stub.by_images[3] = failing.status(500, "Internal Server Error")
    batch = [load("a"), load("bad", 3), load("c", 2)]
    results = describe_batch(engine, schema, batch, 50)
    assert [one.status for one in results] == ["ok", "failed", "ok"]
    assert (results[1].error_kind, results[1].attempts) == ("engine_error", 1)
    assert "given up after 3 tries" in results[1].error
    described = [body for body in stub.asked if "response_format" in body]
    assert len(described) == 2 + MOST_TRIES


def test_silence_is_asked_for_less_at_once(start_engine, hasty, stub, failing, load):
    """A server that falls silent may have too much to do: it gets fewer requests, as after a 429."""
    engine = start_engine(limits=hasty)
    before = engine.batches_at_once
    stub.script.append(failing.hang)
    assert describe(engine, load()) == [GOOD]
    assert engine.batches_at_once < before


def test_only_first_questions_tell_how_fast_the_server_is(engine, stub, failing, load, monkeypatch):
    """What is asked again, or by the ladder, finds its images in a cache: no measure for others."""
    told = []
    answered = AdaptiveLimit.answered

    def watched(limit, slot, **measured):
        told.append(measured["first_token_seconds"])
        answered(limit, slot, **measured)

    monkeypatch.setattr(AdaptiveLimit, "answered", watched)
    assert describe(engine, load("a")) == [GOOD]
    stub.script.append(failing.status(500))
    assert describe(engine, load("b")) == [GOOD]
    assert engine.describe([load("a")], attempt=replace(FIRST, number=2)) == [GOOD]
    assert [seconds is not None for seconds in told] == [True, False, False]


def test_hung_requests_do_not_hold_others(start_engine, hasty, stub, failing, load):
    """While one property hangs, the others of its batch and of other batches are answered."""
    engine = start_engine(limits=hasty)
    stub.by_images[5] = failing.hang
    done = threading.Event()
    outcome = []

    def hung():
        outcome.extend(describe(engine, load("hung", 5), load("beside")))
        done.set()

    thread = threading.Thread(target=hung)
    thread.start()
    assert describe(engine, load("other")) == [GOOD]
    assert not done.is_set()
    thread.join(10)
    assert isinstance(outcome[0], EngineError)
    assert outcome[1] == GOOD


def test_busy_server_is_asked_later(engine, stub, failing, load):
    """429 and 503 cost no try: the server gets the seconds that it asks for."""
    stub.script.extend([failing.status(status, "slow down", Retry_After="0.6") for status in (429, 503)] * 2)
    assert describe(engine, load()) == [GOOD]
    waits = [after - before for before, after in itertools.pairwise(stub.times)]
    assert len(waits) == 4
    assert min(waits) >= 0.6


@pytest.mark.parametrize("status", [429, 503, 402, 302])
def test_outage_is_no_propertys_fault(engine, stub, failing, load, monkeypatch, status):
    """No quota, no money, a page of maintenance: the run ends, and a single property is not written down."""
    monkeypatch.setattr("vlm_engine.server.property_requests.back_off_seconds", lambda *_, **__: 0.0)
    stub.otherwise = failing.status(status, "quota exceeded")
    with pytest.raises(ServerOutageError, match=r"is down again: .*quota exceeded"):
        describe(engine, load())


def test_busy_for_one_property_alone_costs_that_one(engine, stub, failing, load, monkeypatch):
    """A server that has time for others, and never for this one, is not asked for ever."""
    monkeypatch.setattr("vlm_engine.server.property_requests.back_off_seconds", lambda *_, **__: 0.0)
    stub.by_images[3] = failing.status(429, "too many tokens a minute")
    error, answer = describe(engine, load("much", 3), load("little"))
    assert isinstance(error, EngineError)
    assert f"after {MOST_BUSY_TRIES} tries" in str(error)
    assert "too many tokens" in str(error)
    assert answer == GOOD


def test_server_without_guided_decoding(engine, stub, failing, load, caplog):
    """What a server does not take is left out from then on, said once, and costs no property."""
    stub.script.append(failing.status(400, '{"error":{"message":"response_format is not supported"}}'))
    stub.script.append(failing.status(422, '{"detail":"Unexpected fields in the request: {\'top_k\'}"}'))
    assert describe(engine, load("a")) == [GOOD]
    assert describe(engine, load("b")) == [GOOD]
    fields = [{"response_format", "top_k"} & set(body) for body in stub.asked]
    assert fields == [{"response_format", "top_k"}, {"top_k"}, set(), set()]
    told = [record.message for record in caplog.records if "without" in record.message]
    assert len(told) == 2
    assert "validation alone" in told[0]


def test_too_long_a_prompt_goes_down_the_ladder(engine, stub, failing, load, schema):
    """A context that is too short for six images is tried with fewer, and nobody else notices."""
    too_long = "This model's maximum context length is 4096 tokens. However, you requested 4600"
    stub.by_images[6] = failing.status(400, f'{{"error":{{"message":"{too_long}"}}}}')
    (answer,) = describe(engine, load("a", 6))
    assert isinstance(answer, RequestTooLargeError)
    batch = [load("long", 6), load("short")]
    results = describe_batch(engine, schema, batch, 50)
    assert [(one.status, one.images_seen) for one in results] == [("ok", 3), ("ok", 1)]


def test_wrong_key_ends_the_run_with_a_sentence(engine, stub, failing, load):
    """Nothing is written down as failed because of a wrong key."""
    stub.otherwise = failing.status(401, '{"error":"invalid key"}')
    with pytest.raises(EngineLostError, match="VLM_ASSETS_SERVER_KEY"):
        describe(engine, load("a"), load("b"))
    with pytest.raises(EngineLostError):
        describe(engine, load("a"))


def test_dead_server_is_restarted_and_asked_again(start_engine, reviving, stub, failing, load):
    """A server that dies with eight requests under way is restarted once; all eight are answered."""
    engine = start_engine(reviving)
    stub.script.append(failing.die)
    answers = describe(engine, *(load(f"p{number}") for number in range(8)))
    assert answers == [GOOD] * 8
    assert len(reviving.restarts) == 1
    assert "its process is gone" in reviving.restarts[0]
    assert stub.keys[-1] == "Bearer key-1"


def test_port_taken_by_another_user_gets_neither_key_nor_images(
    start_engine, reviving, stub, load, monkeypatch
):
    """A server dies and another user takes its port: nothing is sent there, and a new server is started."""
    real = os.geteuid
    monkeypatch.setattr(os, "geteuid", lambda: real() + (not reviving.restarts))
    stub.dead = True
    assert describe(start_engine(reviving), load()) == [GOOD]
    assert stub.keys == ["Bearer key-1"]


def test_property_that_kills_the_server_is_found(start_engine, reviving, stub, failing, load):
    """What was under way when the server died is asked alone: the culprit pays, and only it."""
    engine = start_engine(reviving)
    stub.by_images[7] = failing.die
    batch = [load("a"), load("b"), load("killer", 7), load("c"), load("d")]
    answers = describe(engine, *batch)
    assert [isinstance(answer, Answer) for answer in answers] == [True, True, False, True, True]
    assert "died 2 times" in str(answers[2])
    assert len(reviving.restarts) == 2


@pytest.mark.parametrize("healthy", [False, True], ids=["down", "seems well"])
def test_property_that_kills_the_server_is_alone_in_it_to_the_end(
    start_engine, reviving, stub, failing, load, healthy
):
    """Sixteen under way with one culprit, and a server slow to go: one failed row, whatever health says."""
    engine = start_engine(reviving)
    broken, asked = threading.Event(), threading.Event()
    restart = reviving.restart

    def fail(handler):
        asked.set()
        failing.status(500, "EngineDeadError")(handler)

    def kill(handler):
        broken.set()
        stub.otherwise = fail
        fail(handler)

    def check():
        if broken.is_set() and not healthy:
            raise ServerDownError("its engine is dead")

    def revive(why):
        asked.clear()
        asked.wait(0.3)  # as long as a start takes, others would find the dying server
        broken.clear()
        stub.otherwise = failing.answer()
        return restart(why)

    stub.by_images[7] = kill
    reviving.check, reviving.restart = check, revive
    batch = [load(f"p{number}", 7 if number == 3 else 1) for number in range(16)]
    answers = describe(engine, *batch)
    assert [number for number, answer in enumerate(answers) if answer != GOOD] == [3]
    assert "died 2 times" in str(answers[3])
    assert len(reviving.restarts) == 2


def test_server_that_answers_nothing_any_more_fails_no_property(start_engine, reviving, stub, failing, load):
    """Health is well and every request fails, after a restart too: the run ends, no row is written."""
    engine = start_engine(reviving)
    restart = reviving.restart
    asked = threading.Event()

    def fail(handler):
        asked.set()
        failing.status(500, "Internal Server Error")(handler)

    def revive(why):
        asked.clear()
        asked.wait(0.3)
        if len(reviving.restarts) == MOST_RESTARTS:
            raise EngineLostError("started anew too often")
        return restart(why)

    def lost(number):
        with pytest.raises(EngineLostError, match="too often"):
            describe(engine, load(f"p{number}"))
        return True

    reviving.restart = revive
    stub.otherwise = fail
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(lost, range(6)))


def test_living_worker_with_a_dead_engine_is_restarted(start_engine, hasty, reviving, stub, failing, load):
    """A server whose health page is well and which makes no token is restarted: tokens are what counts."""
    engine = start_engine(reviving, hasty)
    stub.otherwise = failing.hang
    revive = reviving.restart

    def restart(why):
        stub.otherwise = failing.answer()
        return revive(why)

    reviving.restart = restart
    answers = describe(engine, *(load(f"p{number}") for number in range(4)))
    assert answers == [GOOD] * 4
    assert len(reviving.restarts) == 1
    assert "no token comes" in reviving.restarts[0]


def test_server_that_answers_others_is_not_restarted(start_engine, reviving, stub, failing, load):
    """Properties that fail in a row are their own fault where the server answers a short question."""
    engine = start_engine(reviving)
    stub.by_images[2] = failing.status(500, "cannot decode")
    errors = describe(engine, *(load(f"p{number}", 2) for number in range(3)))
    assert all(isinstance(error, EngineError) for error in errors)
    assert any(body["max_tokens"] == 1 for body in stub.asked)
    assert reviving.restarts == []


def test_each_start_of_a_server_is_a_wait_of_its_own(start_engine, reviving, stub, load):
    """Two starts that fail and one that succeeds, each as long as a load: no worker is stuck meanwhile."""
    engine = start_engine(reviving)
    revive, waits, waited = reviving.restart, [], []

    @contextmanager
    def waiting():
        waits.append(None)
        yield
        waited.append(None)

    def restart(why):
        assert (len(waits), len(waited)) == (len(reviving.restarts) + 1, len(reviving.restarts))
        revive(why)
        if len(waits) < 3:
            raise ServerStartError("out of memory")
        return reviving.address

    engine.waiting, reviving.restart = waiting, restart
    stub.die()
    assert describe(engine, load()) == [GOOD]
    assert len(waits) == len(waited) == 3
    assert reviving.restarts[1:] == ["out of memory"] * 2


def test_server_that_stays_dead_ends_the_run(engine, stub, load):
    """A server at a URL that goes away for good ends the run as an outage; then nobody asks it again."""
    stub.die()
    with pytest.raises(ServerOutageError, match="not well again within"):
        describe(engine, load("a"), load("b"))
    asked, looks = len(stub.asked), stub.looks
    assert asked
    assert looks
    with pytest.raises(ServerOutageError):
        describe(engine, load("c"))
    assert (len(stub.asked), stub.looks) == (asked, looks)


def test_closing_ends_what_is_under_way(start_engine, reviving, stub, failing, load):
    """An interrupted run does not wait for answers that hang, and lets the server go."""
    engine = start_engine(reviving, RequestLimits(token_seconds=60, answer_seconds=60))
    stub.otherwise = failing.hang
    outcome = []

    def hung():
        with pytest.raises(EngineLostError, match="closed") as error:
            describe(engine, load())
        outcome.append(error)

    thread = threading.Thread(target=hung)
    thread.start()
    wait_until(lambda: stub.asked, "the request", every=0.01)
    engine.close()
    thread.join(5)
    assert outcome
    assert reviving.released
    with pytest.raises(EngineLostError):
        describe(engine, load())
    engine.close()


def test_the_canary_is_asked_one_after_the_other_of_a_server_of_ours(start_engine, reviving, stub, failing):
    """Alone each is computed alike, whatever the batches were; text alone counts."""
    engine = start_engine(server=reviving)
    stub.by_images = {1: failing.answer('{"storeys":1}'), 2: failing.answer('{"storeys":2}')}
    first, second = engine.canary(), engine.canary()
    assert first == second
    assert (stub.most_under_way, len(stub.asked)) == (1, 4)
    assert {body["temperature"] for body in stub.asked} == {0.0}
    assert engine.batches_at_once == start_engine(server=reviving).batches_at_once
    stub.by_images[2] = failing.answer('{"storeys":3}')
    assert engine.canary().digest != first.digest
    stub.by_images[2] = failing.status(400, "no")
    assert engine.canary() is None, "a failure is no wrong answer"


def test_a_server_of_others_is_not_asked_the_canary(engine, stub):
    """What others ask it at the same moment would change its answers."""
    assert engine.canary() is None
    assert not stub.asked

"""What a server is asked, what each of its errors means, what counts as an answer, and what does not."""

import asyncio
import json

import httpx2
import pytest

from vlm_engine.protocol import Answer, Attempt, EngineError, EngineLostError, RequestTooLargeError
from vlm_engine.server.chat_completions import (
    OPTIONAL_FIELDS,
    BusyServerError,
    FailingServerError,
    FieldRefusedError,
    Question,
    RequestLimits,
    SilentServerError,
    TokenWatch,
    chat_request,
    read_answer,
    refusal,
)

SCHEMA = {"type": "object", "properties": {"storeys": {"type": "integer"}}, "required": ["storeys"]}


@pytest.fixture
def body():
    def build(property_id="a", *, without=(), **attempt):
        question = Question("house", "What is it?", SCHEMA)
        asked_for = Attempt(**{"number": 1, "max_new_tokens": 99, **attempt})
        urls = ["data:one", "data:two"]
        return json.loads(chat_request(question, urls, property_id, asked_for, without=without))

    return build


def test_images_come_in_order_before_the_question(body):
    """The server is asked as the engine in this process asks: images first, then the text, greedily."""
    asked = body()
    content = asked["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in content[:2]] == ["data:one", "data:two"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("house", 99, 0.0)
    assert asked["response_format"]["json_schema"]["schema"] == SCHEMA
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}


def test_property_samples_alike_in_any_run(body):
    """Seeds derive from the property and the attempt, and fit the 63 bits that servers take."""
    seeds = {body(name, number=number)["seed"] for name in "abc" for number in (1, 2)}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert body("a")["seed"] == body("a")["seed"]


def test_sampling_that_a_model_ships_with_is_kept_away(body):
    """Penalties and cuts of generation_config.json, which servers apply unasked, would break JSON."""
    asked = body(temperature=0.7)
    assert (asked["temperature"], asked["top_p"]) == (0.7, 1.0)
    assert (asked["top_k"], asked["repetition_penalty"]) == (-1, 1.0)


def test_no_thought_is_asked_for(body):
    """Guards: Qwen3.5 thinks by default, and its tokens run out before an answer begins."""
    assert body()["chat_template_kwargs"] == {"enable_thinking": False}


def test_every_optional_field_can_go(body):
    """What a server need not know can be left out, and the rest stays."""
    asked = body(without=set(OPTIONAL_FIELDS))
    assert not set(asked) & set(OPTIONAL_FIELDS)
    assert {"model", "messages", "max_tokens", "temperature", "stream"} <= set(asked)


VLLM_TOO_LONG = (
    '{"error":{"message":"This model\'s maximum context length is 4096 tokens. However, you requested 4600'
    " tokens (4088 in the messages, 512 in the completion). Please reduce the length of the messages or"
    ' completion.","type":"BadRequestError","param":null,"code":400}}'
)
VLLM_TOO_MANY_TOKENS = (
    '{"error":{"message":"The decoder prompt (length 9183) is longer than the maximum model length of 8192.'
    ' Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens."}}'
)
VLLM_TOO_MANY_IMAGES = '{"object":"error","message":"At most 1 image(s) may be provided in one prompt."}'


def refused(status, text, *, retry_after=None, without=frozenset()):
    url = "http://127.0.0.1:1/v1"
    return refusal(status, text, retry_after=retry_after, url=url, model="house", without=without)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, VLLM_TOO_LONG, "prompt_too_long"),
        (400, VLLM_TOO_MANY_TOKENS, "prompt_too_long"),
        (400, VLLM_TOO_MANY_IMAGES, "prompt_too_long"),
        (400, "the request exceeds the available context size", "prompt_too_long"),
        (413, "<html>Request Entity Too Large</html>", "prompt_too_long"),
        (500, '{"error":"CUDA out of memory. Tried to allocate 2 GiB"}', "out_of_memory"),
    ],
)
def test_too_much_is_asked_again_with_fewer_images(status, text, kind):
    """What servers say of too long a prompt leads to the ladder's rung with fewer images."""
    error = refused(status, text)
    assert isinstance(error, RequestTooLargeError)
    assert error.kind == kind


def test_refused_field_is_named():
    """A server without guided decoding is asked without it; without what it names, and nothing else."""
    fastapi = json.dumps({"detail": "Unexpected fields in the request: {'top_k', 'repetition_penalty'}"})
    error = refused(422, fastapi)
    assert isinstance(error, FieldRefusedError)
    assert set(error.fields) == {"top_k", "repetition_penalty"}
    schema = refused(400, '{"error":{"message":"Grammar error: Unimplemented keys: [\\"multipleOf\\"]"}}')
    assert isinstance(schema, FieldRefusedError)
    assert schema.fields == ("response_format",)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Unknown parameter: 'chat_template_kwargs'.", {"chat_template_kwargs"}),
        ("chat_template is not supported for Mistral tokenizers.", {"chat_template_kwargs"}),
        ("Extra inputs are not permitted", {"chat_template_kwargs", "repetition_penalty", "top_k"}),
        ("3 unknown fields were given", {"chat_template_kwargs", "repetition_penalty", "top_k"}),
    ],
)
def test_a_server_that_refuses_what_it_does_not_know_is_asked_without(text, fields):
    """By name, or, where it does not name the field, without all that OpenAI does not have: once."""
    error = refused(400, json.dumps({"error": {"message": text}}))
    assert isinstance(error, FieldRefusedError)
    assert set(error.fields) == fields
    again = refused(400, text, without=fields)
    assert not isinstance(again, FieldRefusedError)


def test_field_that_was_not_sent_is_not_dropped_again():
    """The same refusal without the field is final, so that asking comes to an end."""
    error = refused(400, "no json_schema here", without={"response_format"})
    assert type(error) is EngineError
    assert "no json_schema here" in str(error)


@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_says_how_long(status):
    """The wait that the server asks for is carried on."""
    error = refused(status, "slow down", retry_after="7")
    assert isinstance(error, BusyServerError)
    assert error.retry_after == "7"


@pytest.mark.parametrize("status", [500, 502, 504, 408, 302, 402, 405, 451])
def test_failing_server_may_answer_the_next_time(status):
    """A server's own failure is worth another try, and so is whatever is not about the request."""
    assert isinstance(refused(status, "Internal Server Error"), FailingServerError)


@pytest.mark.parametrize(
    ("status", "setting"), [(401, "SERVER_KEY"), (403, "SERVER_KEY"), (404, "SERVER_MODEL")]
)
def test_what_every_request_would_meet_ends_the_run(status, setting):
    """A wrong key or model is one clear sentence, not a thousand failed rows."""
    error = refused(status, '{"error":{"message":"nope"}}')
    assert isinstance(error, EngineLostError)
    assert isinstance(error, EngineLostError)
    assert f"VLM_ASSETS_{setting}" in str(error)
    assert "nope" in str(error)


def test_other_refusals_are_final():
    """What is refused for what it is would be refused again."""
    assert type(refused(400, "bad image")) is EngineError
    assert type(refused(415, "no image")) is EngineError


LIMITS = RequestLimits(token_seconds=5.0, answer_seconds=10.0)
USAGE = {"prompt_tokens": 70, "completion_tokens": 9, "total_tokens": 79}


def chunk(content=None, *, finish=None, **delta):
    return {"choices": [{"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}]}


def stream(*events, done=True):
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx2.Response(
        200,
        headers={"content-type": "text/event-stream; charset=utf-8"},
        content="".join([*lines, "data: [DONE]\n\n" if done else ""]).encode(),
    )


def whole(content, *, kind="application/json"):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx2.Response(200, headers={"content-type": kind}, content=body)


def read_timed(response):
    tokens = []

    async def reading():
        async with TokenWatch.over(LIMITS, on_token=lambda: tokens.append(1)) as watch:
            return await read_answer(response, watch), watch.first_token_seconds

    response.request = httpx2.Request("POST", "http://test")
    return asyncio.run(reading()), len(tokens)


def read(response):
    (answer, _), tokens = read_timed(response)
    return answer, tokens


def test_streamed_answer_with_usage():
    """Text, why it ended, and the server's own count of tokens; the role at the beginning is no token."""
    answer, tokens = read(
        stream(
            chunk(role="assistant"),
            chunk('{"storeys":'),
            chunk("2}"),
            chunk(finish="stop"),
            {"choices": [], "usage": USAGE},
        )
    )
    assert answer == Answer('{"storeys":2}', "stop", 70, 9)
    assert tokens == 2


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "length"), ("stop", "stop"), ("content_filter", "stop")]
)
def test_finish_reasons(finish, reason):
    """Only a limit that cut the answer is called so; what else a server says is judged by the text."""
    answer, _ = read(stream(chunk("{}"), chunk(finish=finish)))
    assert answer.finish_reason == reason


def test_empty_answer_came_in_no_time_at_all():
    """Where no token came there is none whose seconds could be compared with others'."""
    (answer, first_token_seconds), _ = read_timed(stream(chunk(finish="stop")))
    assert (answer.text, first_token_seconds) == ("", None)


def test_end_without_done_and_without_usage():
    """transformers' server sends no [DONE]; without usage the tokens that came are counted."""
    answer, _ = read(stream(chunk("{"), chunk("}", finish="stop"), done=False))
    assert answer == Answer("{}", "stop", 0, 2)


def test_thoughts_are_progress_and_no_text():
    """A model that thinks aloud is not silent, and its thoughts are not the description."""
    answer, tokens = read(
        stream(chunk(reasoning_content="hm"), chunk(reasoning="so"), chunk("{}"), chunk(finish="stop"))
    )
    assert (answer.text, tokens) == ("{}", 3)


def test_server_that_does_not_stream():
    """An answer in one piece is an answer."""
    message = {"choices": [{"message": {"content": "{}"}, "finish_reason": "length"}], "usage": USAGE}
    assert read(whole(message))[0] == Answer("{}", "length", 70, 9)


@pytest.mark.parametrize(
    "response",
    [
        stream(chunk('{"storeys":')),
        stream(chunk('{"storeys":'), done=False),
        stream(),
        stream({"choices": [{"delta": "text"}]}),
        stream({"choices": [{"delta": {"content": 7}}]}),
        stream({"choices": ["text"]}),
        stream({"choices": {"delta": {}}}),
        stream(["no object"]),
        stream({"error": {"message": "engine died"}}),
        httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=b"data: {oops\n\n"),
        httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=b"data: " + b"x" * 2_000_000
        ),
        whole({"choices": []}),
        whole({"hello": "world"}),
        whole({"choices": [{"message": {"content": "{}"}}]}),
        whole(b"<html>It works!</html>", kind="text/html"),
        whole(b"\xff\xfe\x00", kind="application/octet-stream"),
        whole(b"[" * 100_000),
        whole(b""),
    ],
)
def test_what_is_no_answer_is_said_to_be_none(response):
    """Cut off, empty, of another form, no JSON, an error in the stream: never half a description."""
    with pytest.raises(FailingServerError):
        read(response)


def test_too_little_memory_in_the_stream():
    """A server that runs out of memory while it answers is asked again with fewer images."""
    with pytest.raises(RequestTooLargeError):
        read(stream({"error": "CUDA out of memory. Tried to allocate 2 GiB"}))


def test_watch_ends_what_makes_no_tokens():
    """Tokens push the limit on, at most to the limit of the whole; silence ends the wait."""

    async def never(limits, tokens):
        async with TokenWatch.over(limits, on_token=lambda: None) as watch:
            for _ in range(tokens):
                await asyncio.sleep(0.02)
                watch.token()
            await asyncio.Event().wait()

    with pytest.raises(SilentServerError, match=r"no new token for 0.05 s"):
        asyncio.run(never(RequestLimits(1, 0.05, 9.0), 4))
    with pytest.raises(SilentServerError, match=r"not finished after 0.1 s"):
        asyncio.run(never(RequestLimits(1, 5.0, 0.1), 100))


def test_timeouts_of_others_are_not_the_watch_s():
    """A TimeoutError from within that the watch did not cause is not hidden."""

    async def other():
        async with TokenWatch.over(LIMITS, on_token=lambda: None):
            raise TimeoutError("the disk")

    with pytest.raises(TimeoutError, match="the disk"):
        asyncio.run(other())

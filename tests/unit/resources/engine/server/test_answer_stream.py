"""Reading an answer: what counts as one, and what does not."""

import asyncio
import json

import httpx2
import pytest

from resources.engine.protocol import Answer, RequestTooLargeError
from resources.engine.server.answer_stream import (
    SilentServerError,
    TimeLimits,
    TokenWatch,
    UnusableAnswerError,
    read_answer,
)

LIMITS = TimeLimits(between_tokens=5.0, whole=10.0)
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
            return await read_answer(response, watch)

    response.request = httpx2.Request("POST", "http://test")
    return asyncio.run(reading()), len(tokens)


def read(response):
    streamed, tokens = read_timed(response)
    return streamed.answer, tokens


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
    streamed, _ = read_timed(stream(chunk(finish="stop")))
    assert (streamed.answer.text, streamed.first_token_seconds) == ("", None)


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
    with pytest.raises(UnusableAnswerError):
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
        asyncio.run(never(TimeLimits(0.05, 9.0), 4))
    with pytest.raises(SilentServerError, match=r"not finished after 0.1 s"):
        asyncio.run(never(TimeLimits(5.0, 0.1), 100))


def test_timeouts_of_others_are_not_the_watch_s():
    """A TimeoutError from within that the watch did not cause is not hidden."""

    async def other():
        async with TokenWatch.over(LIMITS, on_token=lambda: None):
            raise TimeoutError("the disk")

    with pytest.raises(TimeoutError, match="the disk"):
        asyncio.run(other())
